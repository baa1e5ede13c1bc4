"""Rates between the devices of one machine: all-reduce and all-gather over NCCL, or over gloo between processes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.doctor.timing import LEAST_CALLS, MOST_CALLS, Measurement, synchronize
from titan_exp.trainer.rank_call import RunOnRanks, answer

SIZES = {"cuda": (2**20, 2**24, 2**28), "cpu": (2**16, 2**20, 2**24)}
"""Bytes that a rank sends to an all-reduce, and receives from an all-gather."""


def link_rates(spread: RunOnRanks, *, ranks: int, device: str, limit: float) -> list[Measurement]:
    """Start ranks on this machine, one for each device, and measure.

    Args:
        spread: starts ranks.
        ranks: how many, at least 2.
        device: `cuda` or `cpu`.
        limit: seconds that measuring may take; starting the ranks takes some more.
    """
    layout = [f"parallelism.dp_shard={ranks}", f"training.global_batch_size={ranks}", f"cluster.device={device}"]
    # Nothing here takes a step: what hangs is ended after three times as long.
    layout += ["cluster.hang_warn_minutes=null", "cluster.hang_kill_minutes=1"]
    experiment = resolve_layout(to_experiment(compose([*layout, "model=llama_debug"])), ranks)
    try:
        return [Measurement(**each) for each in spread(f"{__name__}.rank_main", experiment, {"limit": limit})]
    except (RuntimeError, UserError) as error:
        last = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return [Measurement("link", f"between {ranks} {device} devices", None, "GB/s", note=f"failed: {last[:200]}")]


def rank_main(run_folder: str) -> None:
    """What each of the ranks runs."""
    answer(run_folder, _measure)


def _measure(experiment: Experiment, question: Any, device: torch.device) -> list[dict[str, Any]]:
    """The rates, the same numbers on every rank."""
    ranks, found = dist.get_world_size(), []
    backend = "NCCL" if device.type == "cuda" else "gloo"
    each = float(question["limit"]) / len(SIZES[device.type]) / 2
    for size in SIZES[device.type]:
        part = torch.ones(size // 4 // ranks, device=device)
        whole = torch.ones(part.numel() * ranks, device=device)
        # What a ring must send from every rank, whatever the algorithm: bus bandwidth, as nccl-tests call it.
        moved = (ranks - 1) / ranks * whole.numel() * 4 / 1e9
        for name, call, times in (
            ("all-reduce", lambda whole=whole: dist.all_reduce(whole), 2),
            ("all-gather", lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part), 1),
        ):
            seconds = _seconds(call, device, each)
            full = f"{name} of {size / 2**20:g} MiB, {ranks} ranks, {backend}, bus bandwidth"
            found.append(asdict(Measurement("link", full, times * moved / seconds, "GB/s", seconds)))
    return found


def _seconds(call: Callable[[], object], device: torch.device, limit: float) -> float:
    """Median seconds; all ranks call it equally often, as rank 0's first call says."""
    call()
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    calls = torch.tensor([limit / max(time.perf_counter() - begin, 1e-6)])
    dist.broadcast(calls, 0)
    seconds = []
    for _ in range(min(MOST_CALLS, max(LEAST_CALLS, int(calls)))):
        begin = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
