"""Collectives between the devices of one machine: bandwidth and latency by size, and memory of a process group."""

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.doctor.measurement import Measurement, median_seconds
from titan_exp.trainer.rank_call import RunOnRanks, serve

SIZES = {"cuda": (2**12, 2**20, 2**24, 2**28), "cpu": (2**10, 2**16, 2**20, 2**24)}
"""Message sizes in bytes: all-reduce input, all-gather output. The smallest shows the latency."""


def link_rates(run_on_ranks: RunOnRanks, *, ranks: int, device: str, limit: float) -> list[Measurement]:
    """Measure collectives between all devices, one rank each, for `limit` seconds without start-up."""
    layout = [f"parallelism.dp_shard={ranks}", f"training.global_batch_size={ranks}", f"cluster.device={device}"]
    # No training step runs, so a hang is killed after three times hang_kill_minutes.
    layout += ["cluster.hang_warn_minutes=null", "cluster.hang_kill_minutes=1"]
    experiment = resolve_layout(to_experiment(compose([*layout, "model=llama_debug"])), ranks)
    try:
        return [Measurement(**row) for row in run_on_ranks(f"{__name__}.rank_main", experiment, {"limit": limit})]
    except (RuntimeError, UserError) as error:
        last = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return [Measurement("link", f"between {ranks} {device} devices", None, "GB/s", note=f"failed: {last[:200]}")]


def rank_main(run_folder: str) -> None:
    """Entry point of one rank."""
    serve(run_folder, _measure)


def _measure(_: object, request: Any, device: torch.device) -> list[dict[str, Any]]:
    """Measure bus bandwidths and latencies on all ranks."""
    ranks, found = dist.get_world_size(), []
    backend = "NCCL" if device.type == "cuda" else "gloo"
    limit = float(request["limit"]) / len(SIZES[device.type]) / 2
    if device.type == "cuda":
        found.append(asdict(_communicator_memory(device)))
    for size in SIZES[device.type]:
        part = torch.ones(size // 4 // ranks, device=device)
        whole = torch.ones(part.numel() * ranks, device=device)
        # Bus bandwidth as in nccl-tests: the bytes that a ring algorithm sends from every rank.
        moved = (ranks - 1) / ranks * whole.numel() * 4 / 1e9
        for name, call, times in (
            ("all-reduce", lambda whole=whole: dist.all_reduce(whole), 2),
            ("all-gather", lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part), 1),
        ):
            seconds = median_seconds(call, device, limit, _of_rank_0)
            full = f"{name} of {size / 2**10:g} KiB, {ranks} ranks, {backend}, bus bandwidth"
            found.append(asdict(Measurement("link", full, times * moved / seconds, "GB/s", seconds)))
    return found


def _communicator_memory(device: torch.device) -> Measurement:
    """Memory that a new process group takes on this rank's device with its first collective."""
    group, part = dist.new_group(), torch.ones(1, device=device)
    torch.cuda.synchronize(device)
    before, _ = torch.cuda.mem_get_info(device)
    dist.all_reduce(part, group=group)
    torch.cuda.synchronize(device)
    after, _ = torch.cuda.mem_get_info(device)
    dist.destroy_process_group(group)  # type: ignore[arg-type]  # every rank is a member
    return Measurement("memory", "buffers of one process group", max(0, before - after) / 2**30, "GiB")


def _of_rank_0(calls: int) -> int:
    shared = torch.tensor(calls)
    dist.broadcast(shared, 0)
    return int(shared)
