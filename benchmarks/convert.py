"""Time and memory of `titan-exp convert` for a checkpoint of GPT-OSS 20B's shape.

    python benchmarks/convert.py [--layers 24] [--folder DIR] [--directions both|import|export|trained]

The source is a folder as published, of random MXFP4 blocks, written shard by shard. `import` converts it to our format,
in bf16; `export` converts that to a Hugging Face folder. `trained` exports what training saved on one rank, in fp32:
embedding and head as published, 2.2 GiB each, and one layer of 4 experts.

Memory is of the converting process: `anonymous` is its own, sampled every 10 ms; `resident` is the operating system's
peak, pages of mapped files included, which it takes back when it wants to. Disk: 0.5 GB for each layer and 2 GB, and 3
times that again for each converted folder; both exist at once.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from titan_exp.checkpoint.formats.block_scaled import BLOCKS, GROUP, SCALES
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.models.convert.hf_config import to_huggingface
from titan_exp.models.convert.state_dict_map import state_dict_map
from titan_exp.models.gpt_oss import Config

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="of the model; each layer has the published shape")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder otherwise")
    parser.add_argument("--directions", choices=("both", "import", "export", "trained"), default="both")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; torch {torch.__version__}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        scratch = Path(folder)
        print(f"{scratch}: {shutil.disk_usage(scratch).free / 1e9:.0f} GB free; load {os.getloadavg()[0]:.1f}")
        if arguments.directions == "trained":
            print_header()
            measure("trained", train(scratch), scratch / "export")
            return
        begin = time.perf_counter()
        write_published(scratch / "published", arguments.layers)
        print(f"published: {size_of(scratch / 'published') / 1e9:.1f} GB, {time.perf_counter() - begin:.0f} s\n")
        print_header()
        measure("import", scratch / "published", scratch / "ours")
        shutil.rmtree(scratch / "published")
        if arguments.directions != "import":
            measure("export", scratch / "ours", scratch / "export")


def print_header() -> None:
    print(f"{'direction':10} {'GB read':>8} {'written':>8} {'seconds':>8} {'anonymous GiB':>14} {'resident GiB':>13}")


def train(runs: Path) -> Path:
    """Save a seed checkpoint on one rank, each tensor whole; returns the run folder."""
    words = "model=gpt_oss_20b model.layers=1 model.moe.experts=4 training.steps=0 training.seq_len=128 checkpoint=sync"
    words += " cluster.device=cpu plan.gate=off"
    command = [sys.executable, "-m", "titan_exp", "train", f"paths.runs={runs}", *words.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (run,) = runs.glob("first/*/")
    return run


def write_published(folder: Path, layers: int) -> None:
    """Write a folder of random MXFP4 blocks, other weights in bf16, one file for each layer and one for the rest."""
    model = to_experiment(compose(["model=gpt_oss_20b"])).model
    assert isinstance(model, Config)
    model = replace(model, layers=layers)
    folder.mkdir()
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in state_dict_map(model, "huggingface").stored_shapes.items():
        words = name.split(".")
        files.setdefault(words[2] if words[1] == "layers" else "rest", {})[name] = shape
    index = {}
    for number, shapes in files.items():
        tensors = {key: tensor for name, shape in shapes.items() for key, tensor in drawn(name, shape).items()}
        save_file(tensors, folder / f"model-{number}.safetensors")
        index |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    values = to_huggingface(model, dtype="bfloat16", special_tokens={})
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": {"quant_method": "mxfp4"}}))


def drawn(name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Random tensors in files for one weight; experts' weights [experts, in, out] are blocks and scales."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: torch.randn(shape, dtype=torch.bfloat16)}
    experts, inputs, outputs = shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // GROUP, GROUP // 2), dtype=torch.uint8)
    return {name + BLOCKS: blocks, name + SCALES: torch.randint(118, 124, blocks.shape[:3], dtype=torch.uint8)}


def measure(direction: str, source: Path, target: Path) -> None:
    """Convert in a process of its own, and print a row of the table."""
    command = [sys.executable, "-m", "titan_exp", "convert", str(source), str(target)]
    begin, anonymous, resident = time.perf_counter(), 0, 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        lines = status(process.pid)
        anonymous, resident = max(anonymous, lines.get("RssAnon", 0)), max(resident, lines.get("VmHWM", 0))
        time.sleep(0.01)
    seconds = time.perf_counter() - begin
    assert process.returncode == 0, command
    sizes = f"{size_of(source) / 1e9:8.1f} {size_of(target) / 1e9:8.1f}"
    print(f"{direction:10} {sizes} {seconds:8.0f} {anonymous / GIB:14.2f} {resident / GIB:13.2f}", flush=True)


def status(process: int) -> dict[str, int]:
    """Bytes by key of a process's `/proc/PID/status`; empty when it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    return {
        key: int(value.split()[0]) * 1024 for key, _, value in (line.partition(":") for line in lines) if "kB" in value
    }


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
