"""Checkpoint benchmarks: saves and loads of a state in each mode, and conversion of a published checkpoint."""

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.bench import GIB, Output, Table, benchmark, composed, environment, option, seconds_of, trained
from benchmarks.bench import titan_exp as command
from titan_exp.checkpoint.checkpointer import Checkpointer
from titan_exp.checkpoint.formats.safetensors import BLOCKS, GROUP, SCALES
from titan_exp.checkpoint.storage_writer import find_damage
from titan_exp.models.convert.hf_config import to_huggingface
from titan_exp.models.convert.state_dict_map import state_dict_map
from titan_exp.models.gpt_oss import Config
from titan_exp.trainer.distributed import joined_process_group

MODES = ("sync", "async", "async_process")
WIDTH = 1024
DIRECTIONS = ("import", "export", "trained")


@dataclass(frozen=True)
class CheckpointOptions:
    parameters: float = option(20e6, "parameters of the model; its state takes 12 bytes for each", smallest=2e6)
    saves: int = option(5, "saves of each mode, at least 2", smallest=2)
    folder: Path | None = option(None, "where to write; a temporary folder without")


@benchmark
def checkpoint(options: CheckpointOptions, out: Output) -> None:
    """Training pause, write, verify and load time of checkpoints by mode.

    The state is weights and AdamW's two moments in fp32. `pause` is the time a training step waits, `write` the time
    from there until the checkpoint is durable (fsync included); medians of all saves but the first of a mode, which is
    reported apart: it allocates memory and a process that later ones reuse. `verify` reads all checksums and `load`
    fills model and optimizer, both from the page cache unless the state exceeds the machine's memory. One process on
    the CPU, without training: a thread that writes during training shares the GIL and the cores with it. The times to
    resume by the position in the data are those of `data-loader`.
    """
    model, optimizer = stepped(int(options.parameters))
    size = 12 * sum(parameter.numel() for parameter in model.parameters())
    numbers = dict.fromkeys(("first pause, s", "pause, s", "write, s"), ".3f") | {"GB/s": ".2f"}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, joined_process_group(torch.device("cpu")):
        scratch, title = Path(folder), f"State of {size / 1e9:.2f} GB, {options.saves} saves of each mode"
        form = {"mode": "", **numbers, "verify, s": ".3f", "load, s": ".3f"}
        table = out.table(form, f"{title}; {disk(scratch)}")
        for mode in MODES:
            config = replace(composed(f"checkpoint.mode={mode}").checkpoint, keep=1)
            saver = Checkpointer(config, scratch / mode)
            times = []
            for step in range(1, options.saves + 1):
                saver.save(step, [model], optimizer, {}, {"step": step})
                saver.wait()
                times.append(saver.pop_timings())
            saver.close()
            path = saver.folder.path_of(options.saves)
            verify = seconds_of(lambda at=path: find_damage(at))
            load = seconds_of(lambda saver=saver: saver.load(options.saves, [model], optimizer))
            pause, write = (
                statistics.median(it[f"checkpoint_{key}"] for it in times[1:]) for key in ("pause", "write")
            )
            table.add(mode, times[0]["checkpoint_pause"], pause, write, size / 1e9 / write, verify, load)
            shutil.rmtree(scratch / mode)


def stepped(parameters: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Square matrices with a given number of parameters, and their optimizer after one step."""
    layers = max(1, round(parameters / WIDTH**2))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def disk(path: Path) -> str:
    """File system and free space of the mount point above a path."""
    mounts = [part for part in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(part.mountpoint)]
    kind = max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown file system"
    return f"{kind}, {shutil.disk_usage(path).free / 1e9:.0f} GB free"


@dataclass(frozen=True)
class ConvertOptions:
    model: str = option("gpt_oss_20b", "model of the GPT-OSS family", smallest="gpt_oss_debug")
    layers: int = option(24, "layers of the model; each has the published shape", smallest=1)
    folder: Path | None = option(None, "where to write; a temporary folder without")
    directions: tuple[str, ...] = option(
        DIRECTIONS[:2],
        "of the published folder, of the run it becomes, of a trained run",
        choices=DIRECTIONS,
        smallest=DIRECTIONS,
    )


@benchmark
def convert(options: ConvertOptions, out: Output) -> None:
    """Time and memory of `titan-exp convert` for a checkpoint of GPT-OSS 20B's shape.

    The source is a folder as published, of random MXFP4 blocks, written shard by shard. `import` converts it to our
    format, in bf16; `export` converts that to a Hugging Face folder. `trained` exports what training saved on one rank,
    in fp32: embedding and head as published, 2.2 GiB each, and one layer of 4 experts.

    Memory is of the converting process: `anonymous` is its own, sampled every 10 ms; `resident` is the operating
    system's peak, pages of mapped files included, which it takes back when it wants to. Disk: 0.5 GB for each layer and
    2 GB, and 3 times that again for each converted folder; both exist at once.
    """
    form = {"GB read": ".1f", "written": ".1f", "seconds": ".0f", "anonymous GiB": ".2f", "resident GiB": ".2f"}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        scratch = Path(folder)
        table = out.table({"direction": ""} | form, f"{options.model}, {options.layers} layers; {disk(scratch)}")
        if {"import", "export"} & {*options.directions}:
            write_published(scratch / "published", options.model, options.layers)
            measure(table, "import", scratch / "published", scratch / "ours")
            shutil.rmtree(scratch / "published")
        if "export" in options.directions:
            measure(table, "export", scratch / "ours", scratch / "export")
        if "trained" in options.directions:
            words = f"model={options.model} model.layers=1 model.moe.experts=4 training.steps=0 training.seq_len=128"
            words += " checkpoint=sync cluster.device=cpu plan.gate=off"
            # A seed checkpoint on one rank, each tensor whole.
            measure(table, "trained", trained(scratch, *words.split()), scratch / "exported")


def write_published(folder: Path, published: str, layers: int) -> None:
    """Write a folder of random MXFP4 blocks, other weights in bf16, one file for each layer and one for the rest."""
    model = composed(f"model={published}").model
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


def measure(table: Table, direction: str, source: Path, target: Path) -> None:
    """Convert in a process of its own, and add a row to the table."""
    words = command("convert", str(source), str(target))
    begin, anonymous, resident = time.perf_counter(), 0, 0
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environment())
    while process.poll() is None:
        lines = status(process.pid)
        anonymous, resident = max(anonymous, lines.get("RssAnon", 0)), max(resident, lines.get("VmHWM", 0))
        time.sleep(0.01)
    seconds = time.perf_counter() - begin
    assert process.returncode == 0, words
    sizes = size_of(source) / 1e9, size_of(target) / 1e9
    table.add(direction, *sizes, seconds, anonymous / GIB, resident / GIB)


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
