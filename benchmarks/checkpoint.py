"""Checkpoint benchmark: training pause, write, verify and load time, and resume time by position in the data.

    python benchmarks/checkpoint.py [--parameters 20e6] [--saves 5] [--folder DIR] [--only state|data]

The state is weights and AdamW's two moments in fp32. `pause` is the time a training step waits, `write` the time from
there until the checkpoint is durable (fsync included). The first save of a mode is reported apart: it allocates memory
and a process that later ones reuse. `verify` reads all checksums and `load` fills model and optimizer, both from the
page cache unless the state exceeds the machine's memory. One process on the CPU, without training: a thread that writes
during training shares the GIL and the cores with it.
"""

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from titan_exp.checkpoint.checkpointer import Checkpointer
from titan_exp.checkpoint.dcp.storage_writer import find_damage
from titan_exp.cli.tokenize import TokenizeOptions, make_store
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.data.train_loader import TrainLoader
from titan_exp.trainer.distributed import joined_process_group

MODES = ("sync", "async", "async_process")
WIDTH = 1024
POSITIONS = {"bytes source": (0, 100, 1000), "token store": (0, 100, 10**6, 10**12)}
"""Batches of 16 sequences of 256 tokens before the resume."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parameters", type=float, default=20e6, help="of the model; its state takes 12 bytes for each"
    )
    parser.add_argument("--saves", type=int, default=5, help="of each mode")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder otherwise")
    parser.add_argument("--only", choices=("state", "data"), default=None, help="one of the two tables")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()},")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        print(f"{scratch}: {file_system(Path(scratch))}, {shutil.disk_usage(scratch).free / 1e9:.0f} GB free\n")
        if arguments.only != "data":
            with joined_process_group(torch.device("cpu")):
                measure_saves(Path(scratch), int(arguments.parameters), arguments.saves)
        if arguments.only != "state":
            measure_resumes(Path(scratch))


def measure_saves(scratch: Path, parameters: int, saves: int) -> None:
    model, optimizer = trained(parameters)
    size = 12 * sum(parameter.numel() for parameter in model.parameters())
    print(f"state of {size / 1e9:.2f} GB, {saves} saves of each mode, seconds (median of all but the first)")
    print(f"{'mode':14} {'first pause':>12} {'pause':>8} {'write':>8} {'GB/s':>6} {'verify':>8} {'load':>8}")
    for mode in MODES:
        config = replace(to_experiment(compose([f"checkpoint.mode={mode}"])).checkpoint, keep=1)
        saver = Checkpointer(config, scratch / mode)
        times = []
        for step in range(1, saves + 1):
            saver.save(step, [model], optimizer, {}, {"step": step})
            saver.wait()
            times.append(saver.pop_timings())
        saver.close()
        path = saver.folder.path_of(saves)
        verify, load = took(lambda at=path: find_damage(at)), took(lambda s=saver: s.load(saves, [model], optimizer))
        pause, write = (statistics.median(one[f"checkpoint_{key}"] for one in times[1:]) for key in ("pause", "write"))
        numbers = f"{times[0]['checkpoint_pause']:12.3f} {pause:8.3f} {write:8.3f} {size / 1e9 / write:6.2f}"
        print(f"{mode:14} {numbers} {verify:8.3f} {load:8.3f}", flush=True)
        shutil.rmtree(scratch / mode)


def trained(parameters: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Square matrices with a given number of parameters, and their optimizer after one step."""
    layers = max(1, round(parameters / WIDTH**2))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def measure_resumes(scratch: Path) -> None:
    base = to_experiment(compose(["training.global_batch_size=16", "training.seq_len=256"]))
    make_store(TokenizeOptions(str(scratch / "store"), workers=1), base)
    store: dict[str, Any] = {
        "source": "tokens",
        "tokenizer": "store",
        "validation_fraction": 0.0,
        "paths": (str(scratch / "store"),),
    }
    sources: dict[str, dict[str, Any]] = {"bytes source": {}, "token store": store}
    print(f"\n{'data':14} {'batches before':>18} {'tokens before':>18} {'to the next batch, s':>22}")
    for name, data in sources.items():
        run = replace(base, data=replace(base.data, **data))
        resume(run, 0)  # imports
        for batches in POSITIONS[name]:
            print(f"{name:14} {batches:18,} {batches * 16 * 256:18,} {resume(run, batches):22.4f}", flush=True)


def resume(run: Experiment, batches: int) -> float:
    """Seconds from building a loader to its next batch."""
    loader = loader_of(run)
    if batches <= 1000 and run.data.source != "tokens":
        for _ in range(batches):
            next(loader)
    else:
        loader.skip(16 * batches)
    state = loader.state_dict()
    loader.close()

    def go_on() -> None:
        again = loader_of(run)
        again.load_state_dict(state)
        next(again)
        again.close()

    return took(go_on)


def loader_of(run: Experiment) -> TrainLoader:
    return TrainLoader(
        run.data, run.training, run.experiment.seed, dp_rank=0, dp_degree=1, micro_batch_size=16, pin_memory=False
    )


def took(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def file_system(path: Path) -> str:
    """File system type of the mount point above a path."""
    mounts = [part for part in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown file system"


if __name__ == "__main__":
    main()
