"""Packages for a GPU machine without a network: wheels gathered on another machine travel with the checkout."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import ROOT, Output, environment, option, tool

WHEELS = ROOT / ".wheels"
"""Gathered wheels."""
PACKAGES = ROOT / ".gpu-packages"
"""Packages installed from them."""
LISTS = (ROOT / "benchmarks" / "gpu_wheels.txt", ROOT / "benchmarks" / "versus" / "requirements.txt")
"""Requirements."""
SOURCE_ONLY = "antlr4-python3-runtime==4.9.3"
"""Requirement of omegaconf that is published without a wheel."""
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
"""Minor versions of glibc 2 whose wheels are accepted; pip matches them exactly."""


@dataclass(frozen=True)
class WheelOptions:
    python: str = option("3.12", "version of Python on the GPU machine")


@tool
def gpu_wheels(options: WheelOptions, out: Output) -> int:
    """Gather in `.wheels` what a GPU machine without a network lacks; `make gpu` installs it there. Needs only pip."""
    return gather(options.python)


def gather(python: str, target: Path = WHEELS) -> int:
    """Download wheels for Linux on x86-64 and a version of Python; returns pip's exit code."""
    target.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    words = [*pip, "download", "--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    words += [word for platform in platforms for word in ("--platform", platform)]
    words += [word for path in LISTS for word in ("--requirement", str(path))]
    for command in (
        [*words, "--dest", str(target)],
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(target), SOURCE_ONLY],
    ):
        if code := subprocess.run(command, check=False).returncode:
            return code
    wheels = sorted(target.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(
        f"{len(wheels)} wheels, {size:.0f} MiB, in {target}. Copy the checkout with this folder; there, run make gpu."
    )
    return 0


def install(wheels: Path = WHEELS, target: Path = PACKAGES) -> Path | None:
    """Install the wheels that this Python cannot import already; returns their folder, or None without wheels.

    Raises RuntimeError with pip's message.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        return None
    stamp = target / ".installed"
    names = hashlib.sha256("\n".join([sys.version, *(wheel.name for wheel in found)]).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == names:
        return target
    shutil.rmtree(target, ignore_errors=True)
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    words += ["--disable-pip-version-check", "--no-cache-dir", "--target", str(target), *map(str, found)]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the wheels of {wheels} cannot be installed:\n{done.stderr.strip()[-2000:]}")
    stamp.write_text(names)
    return target


def gpu_environment(needed: Sequence[str]) -> dict[str, str]:
    """Environment of the report's processes: this checkout, torchtitan, and the wheels if a needed package is missing.

    Raises RuntimeError if the wheels cannot be installed.
    """
    folder = install() if any(importlib.util.find_spec(name) is None for name in needed) else None
    quiet = {"TITAN_EXP_LOCAL": "none", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
    peer = ROOT / ".peer"
    path = [*([] if folder is None else [folder]), *([peer] if (peer / "torchtitan").is_dir() else [])]
    return environment(*path, PYTHONUNBUFFERED="1", **quiet)


IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        print(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
"""


def missing(names: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Packages that a process with these environment variables cannot import, and why: they may need others."""
    words = [sys.executable, "-c", IMPORTS, *names]
    done = subprocess.run(words, env=dict(variables), check=False, capture_output=True, text=True)
    ended = [f"{', '.join(names)}: exit code {done.returncode}"] if done.returncode else []
    return [line for line in done.stdout.splitlines() if line.startswith(tuple(f"{name}: " for name in names))] + ended
