"""Stub of a CUDA device that computes nothing, for builds of torch for CUDA on machines without a GPU."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import ROOT, CannotRun, Output, environment, option, tool

SOURCES = [ROOT / "benchmarks" / name for name in ("stub_device.c", "stub_libraries.c")]
WORK = ROOT / ".stub-gpu"
"""Folder of the built library, by version of torch."""
LIBRARIES = ("__cuda", "cuda", "cu[A-Z]", "cublas", "cudnn", "cufft", "curand", "cusolver", "cusparse", "nccl", "nvrtc")
"""Beginnings of the names that torch calls."""
NOT_STUBBED = ("cuFile",)
NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Names by which torch and Triton load the driver's libraries."""
NAMESPACE = """
set -e
mount -t tmpfs tmpfs "$0/dev"; mount -t tmpfs tmpfs "$0/proc"
for file in null zero full random urandom tty; do touch "$0/dev/$file"; mount --bind "/dev/$file" "$0/dev/$file"; done
for folder in shm pts; do mkdir "$0/dev/$folder"; mount --rbind "/dev/$folder" "$0/dev/$folder"; done
ln -s pts/ptmx "$0/dev/ptmx"; ln -s /proc/self/fd "$0/dev/fd"
for ((gpu = 0; gpu < ${STUB_GPUS:-1}; gpu++)); do
  touch "$0/dev/nvidia$gpu"; mkdir -p "$0/proc/nvidia/gpus/$gpu"
  printf 'Model: \\t\\t NVIDIA H100 80GB HBM3\\n' > "$0/proc/nvidia/gpus/$gpu/information"
done
mount --bind "$0/proc" /proc/driver; mount --rbind "$0/dev" /dev
export LD_PRELOAD="$(ls "$0"/lib*.so.* | tr '\\n' ' ')" LD_LIBRARY_PATH="$0" TRITON_LIBCUDA_PATH="$0"
exec "$@"
"""
"""Shell commands in a mount namespace: $0 is the folder of the library."""


@dataclass(frozen=True)
class StubOptions:
    command: tuple[str, ...] = option((), "command and its arguments", positional="rest")


@tool
def stub_gpu(options: StubOptions, out: Output) -> None:
    """Run a command on a CUDA device that computes nothing, with a build of torch for CUDA and no GPU.

    It has `STUB_GPUS` GPUs (1) of `STUB_GPU_BYTES` bytes (those of an H100), on Linux, with gcc. Libraries of CUDA are
    those of the stub there, by LD_PRELOAD; in a namespace of its own the command finds GPUs in /dev and the driver's
    list of them.
    """
    command = words(build(), *options.command)
    os.execvpe(command[0], command, environment())


def build() -> Path:
    """Compile the stub for this Python's torch, unless it is there; returns its folder.

    Raises CannotRun without a build of torch for CUDA or without gcc.
    """
    packages = _packages()
    version = re.search(r"__version__ = '(.+?)'", (packages / "torch/version.py").read_text(encoding="utf-8"))
    assert version is not None, "torch says its version"
    folder = WORK / version[1]
    library = folder / NAMES[0]
    newest = max(path.stat().st_mtime for path in (*SOURCES, Path(__file__)))
    if library.is_file() and library.stat().st_mtime > newest:
        return folder
    if shutil.which("gcc") is None:
        raise CannotRun("no gcc is here, which compiles the stub: apt install gcc")
    for name in ("dev", "proc"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    headers = [*packages.glob("nvidia/*/include"), packages / "triton/backends/nvidia/include"]
    objects = [folder / f"{source.stem}.o" for source in SOURCES]
    compiler = ["gcc", "-O1", "-w", "-fPIC", "-fno-builtin", "-fvisibility=hidden", *(f"-I{path}" for path in headers)]
    for source, made in zip(SOURCES, objects, strict=True):
        _run(*compiler, "-c", str(source), "-o", str(made))
    written = set(_symbols(objects, "--defined-only"))
    rest = sorted({*_called(packages), *_declared(headers)} - written)
    empty = folder / "empty.c"
    empty.write_text(
        "".join(f'__attribute__((visibility("default"))) long {name}(void) {{ return 0; }}\n' for name in rest)
    )
    # Torch loads this one by name, too: it finds the one that is loaded.
    compilers = {path.name for path in packages.glob("nvidia/*/lib/libnvrtc.so.*") if "builtins" not in path.name}
    for name in (*NAMES[1:], *sorted(compilers), NAMES[0]):
        made = folder / "made.so"
        linked = [f"-Wl,-soname,{name}", str(empty), *map(str, objects), "-o", str(made), "-ldl", "-lpthread"]
        _run(*compiler, "-shared", *linked)
        made.replace(folder / name)
    return folder


def words(folder: Path, *command: str) -> list[str]:
    """Words of a command that runs another one on the stub device."""
    unshare = ["unshare", "--mount", "--propagation", "private"]
    unshare += [] if os.geteuid() == 0 else ["--map-root-user"]
    return [*unshare, "bash", "-c", NAMESPACE, str(folder), *command]


def _packages() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or not list(Path(spec.origin).parent.glob("lib/libtorch_cuda.so")):
        raise CannotRun(
            "the stub device is for a build of torch for CUDA, which this Python has not: make stub-gpu installs one"
        )
    return Path(spec.origin).parents[1]


def _called(packages: Path) -> Iterator[str]:
    """Functions of CUDA's libraries that torch calls, and those of NVML, which it loads by name."""
    libraries = sorted(packages.glob("torch/lib/lib*.so"))
    called = re.compile(f"({'|'.join(LIBRARIES)})")
    for name in _symbols(libraries, "--dynamic", "--undefined-only"):
        if called.match(name) and not name.startswith(NOT_STUBBED):
            yield name
    for library in libraries:
        yield from (found.decode() for found in re.findall(rb"\x00(nvml[A-Z]\w+)(?=\x00)", library.read_bytes()))


def _declared(headers: list[Path]) -> Iterator[str]:
    """Functions of the driver and the runtime, of which Triton calls some."""
    for folder in headers:
        for name in ("cuda.h", "cuda_runtime_api.h"):
            text = (folder / name).read_text(encoding="utf-8") if (folder / name).is_file() else ""
            yield from re.findall(r"\b(?:CUDAAPI|CUDARTAPI) +(\w+) *\(", text)
            yield from re.findall(r"# *define +cu\w+ +(cu\w+_v\d)\b", text)


def _symbols(files: list[Path], *options: str) -> list[str]:
    lines = subprocess.run(["nm", *options, *map(str, files)], check=True, capture_output=True, text=True).stdout
    return [line.split()[-1].partition("@")[0] for line in lines.splitlines() if len(line.split()) > 1]


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr}")
