"""Planner cost: seconds by layers, plans and layouts, and peak memory of the planner.

    python benchmarks/planning.py [--gpus 512] [--cores 2]

Every line is a fresh process: CPU seconds with those of its children, wall-clock seconds, and the peak memory of one
process. Prints the ratio of extrapolation to the full trace at the same layers, in one run. Needs no GPU.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from typing import Any

import torch

SMALL = [
    "model=llama3_8b",
    "cluster=slurm_h100",
    "compile=none",
    "training.seq_len=8192",
    "training.mixed_precision=bf16",
]
LARGE = ["model=llama3_405b", *SMALL[1:], "training.global_batch_size=512"]
PIPELINE = [*LARGE, "parallelism.tp=8", "parallelism.pp=8", "parallelism.dp_shard=8", "activation_checkpoint=full"]
COMPILED = [*PIPELINE, "compile=blocks", "quantization=float8_rowwise"]


def traced(layers: int, shortcut: bool) -> None:
    """Plan one of 64 ranks, with or without extrapolation."""
    from titan_exp.config.hydra.compose import compose
    from titan_exp.config.schema.typed_config import to_experiment
    from titan_exp.plan.extrapolate.extrapolated_trace import TraceExtrapolator
    from titan_exp.plan.predict import as_traced
    from titan_exp.plan.trace.fake_world import fake_rank
    from titan_exp.plan.trace.trace_step import trace_step

    words = [*SMALL, f"model.layers={layers}", "parallelism.dp_shard=64", "activation_checkpoint=full"]
    words += ["training.global_batch_size=256", "training.micro_batch_size=1"]
    experiment = as_traced(to_experiment(compose(words)), None)
    began = time.process_time()
    if shortcut:
        TraceExtrapolator(experiment, cuda=True).trace(0)
    else:
        with fake_rank(experiment, 0) as it:
            trace_step(it.state, it.step, warmup_step=it.warmup_step, cuda=True)
    print(json.dumps({"seconds of the trace alone": time.process_time() - began}))


def measured(words: list[str], cores: int) -> dict[str, Any]:
    """Run a command on `cores` cores; returns times, memory and its JSON output."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, chosen),
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Maximum over all children so far: lines are in ascending order of expected memory.
    most = after.ru_maxrss / 2**20
    return {"processor s": used, "wall s": time.perf_counter() - began, "GiB": most, **json.loads(done.stdout)}


def main() -> None:
    """Print every line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=512)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--trace", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--shortcut", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trace:
        traced(given.trace, given.shortcut)
        return
    print(f"{platform.processor() or platform.machine()}, {given.cores} cores, torch {torch.__version__}")
    print(
        "\nOne rank of 8B shapes, full recomputation, 4 micro-batches: seconds of the trace, whole and by the shortcut"
    )
    for layers in (8, 32, 126):
        whole, short = (
            measured([__file__, "--trace", str(layers), *more], 1)["seconds of the trace alone"]
            for more in ([], ["--shortcut"])
        )
        print(f"{layers:>6} layers: {whole:6.1f} and {short:6.1f}, {whole / short:.1f} times")
    print("\nPlans of all 8 pipeline ranks of 405B on 512 GPUs")
    for name, words in (("eager", [*PIPELINE, "compile=none"]), ("compiled, float8_rowwise", COMPILED)):
        found = measured(["-m", "titan_exp", "plan", *words, "--json"], given.cores)
        print(f"{name}: {found['wall s']:.0f} s, {found['processor s']:.0f} s of processors, {found['GiB']:.2f} GiB")
    print("\nSearches")
    for name, words, gpus in (
        ("8B, tensor parallelism fixed", [*SMALL, "parallelism.tp=1", "training.global_batch_size=64"], 16),
        ("8B", [*SMALL, "training.global_batch_size=64"], 16),
        ("405B", LARGE, given.gpus),
    ):
        found = measured(["-m", "titan_exp", "plan", "search", *words, "--gpus", str(gpus), "--json"], given.cores)
        print(
            f"{name} on {gpus}: {found['tried']:,} layouts, {found['planned']} planned; {found['wall s']:.0f} s, "
            f"{found['processor s']:.0f} s of processors, {found['GiB']:.2f} GiB the largest process"
        )


if __name__ == "__main__":
    main()
