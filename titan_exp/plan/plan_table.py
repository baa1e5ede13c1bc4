"""A plan in print: a table of pipeline ranks and the lines below it, or JSON."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.plan.cuda.caching_allocator import STEPS, reservations
from titan_exp.plan.cuda.cpu_offload import HostUsage
from titan_exp.plan.predict import Plan, RankPlan
from titan_exp.plan.time.roofline import RankTime
from titan_exp.plan.trace.inductor import uses_inductor
from titan_exp.plan.trace.memory_tracker import CATEGORIES
from titan_exp.quantization.hardware_support import LEAST

GIB, MIB = 2**30, 2**20
COMPILED = " Compiled parts hold what inductor has them hold on a CPU, which has not been compared with a GPU."
AT_MOST = " Of attention's backward pass the kernel with the largest workspace is counted: tensors take at most that."
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_SHORT = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "gathered parameters": "gathrd",
    "communication": "messg",
}


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan for people."""
    console = console or Console()
    experiment, largest = plan.experiment, max(plan.ranks, key=lambda rank: rank.bytes)
    layout = ResolvedLayout.of(experiment)
    sequences = f"{layout.micro_batch_size} x {experiment.training.seq_len} tokens a micro-batch"
    console.print(
        f"{experiment.model.name} on {layout.world_size} x {plan.device.name if plan.device else 'CPU process'}: "
        f"{sequences}, {layout.gradient_accumulation} of them a step",
        highlight=False,
    )
    print_unwrapped(console, _memory(plan))
    console.print(_verdict(plan, largest), highlight=False, soft_wrap=True)
    for line in (*_sent(plan, largest), *_on_host(plan, largest)):
        console.print(line, highlight=False, soft_wrap=True)
    print_unwrapped(console, _messages(plan, largest))
    for line in (*_emulated(plan), *_speed(plan)):
        console.print(line, highlight=False, soft_wrap=True)
    whole = f", every layer and micro-batch traced, because {plan.why_full}" if plan.why_full else ""
    console.print(f"planned in {plan.planning_seconds:.1f} s{whole}", style="dim", highlight=False, soft_wrap=True)


def print_unwrapped(console: Console, table: Table) -> None:
    """Print a table with every digit: where it is wider than the terminal or the pipe, its lines are longer."""
    endless = console.options.update(width=10_000)
    console.width = max(console.width, Measurement.get(console, endless, table).maximum)
    console.print(table)


def as_json(plan: Plan) -> dict[str, Any]:
    """A plan for programs: bytes, seconds, operations."""
    return {
        "device": None if plan.device is None else asdict(plan.device),
        "world_size": ResolvedLayout.of(plan.experiment).world_size,
        "ranks": [_rank_json(rank) for rank in plan.ranks],
        "at_most": plan.at_most,
        "bubble": plan.bubble,
        "step_seconds": plan.step_seconds,
        "tokens_per_second_per_device": plan.tokens_per_second,
        "mfu": plan.mfu,
        "gpu_hours": plan.gpu_hours,
        "tokens": plan.tokens_per_step * plan.experiment.training.steps,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoint_bytes_per_node": plan.checkpoint_bytes_per_node,
        "host_bytes_per_node": plan.host_bytes_per_node,
        "planning_seconds": plan.planning_seconds,
        "traced_in_full_because": plan.why_full or None,
    }


def _rank_json(rank: RankPlan) -> dict[str, Any]:
    trace = rank.trace
    messages = [
        {"axis": axis, "kind": kind, "bytes": size, "calls": trace.costs.calls[axis, kind]}
        for (axis, kind), size in sorted(trace.costs.messages.items())
    ]
    return {
        "pipeline_rank": rank.pipeline_rank,
        "peak_allocated_bytes": trace.peak.bytes,
        "peak_by_category": trace.peak.by_category,
        "peak_during": trace.peak.where,
        "peak_reserved_bytes": None if rank.reserved is None else rank.bytes,
        "reserved": None if rank.reserved is None else asdict(rank.reserved),
        "allocator_bytes": rank.bytes - trace.peak.bytes,
        "gradient_bytes": trace.gradients,
        "sent_bytes": rank.sent,
        "host": None if trace.host is None else _host_json(trace.host),
        "flops": trace.costs.flops,
        "operators": trace.costs.operators,
        "messages": messages,
        "seconds": None if rank.time is None else asdict(rank.time),
    }


def _host_json(host: HostUsage) -> dict[str, Any]:
    return {
        "peak_bytes": host.peak.bytes,
        "peak_by_category": host.peak.by_category,
        "update_bytes_moved": host.costs.bytes_moved,
    }


def _memory(plan: Plan) -> Table:
    largest = max(rank.bytes for rank in plan.ranks)
    unit, word = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    title = f"Peak of memory, {word}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    shown = [name for name in CATEGORIES if any(rank.trace.peak.by_category[name] for rank in plan.ranks)]
    table.add_column("pp")
    reserving = any(rank.reserved is not None for rank in plan.ranks)
    for name in (*shown, "in all", *(("reserved",) if reserving else ())):
        table.add_column(_SHORT.get(name, name), justify="right", no_wrap=True)
    table.add_column("during")
    for rank in plan.ranks:
        peak = rank.trace.peak
        sizes = [*(peak.by_category[name] for name in shown), peak.bytes, *([rank.bytes] if reserving else [])]
        table.add_row(str(rank.pipeline_rank), *(f"{size / unit:.2f}" for size in sizes), peak.where)
    return table


def _verdict(plan: Plan, largest: RankPlan) -> str:
    if plan.device is None or device_type(plan.experiment.cluster) == "cpu":
        return "Storages of tensors, as a CPU run holds them; what the process holds besides is not among them."
    room, tensors = plan.device.memory_gb * 1e9, largest.trace.peak.bytes
    if largest.reserved is None or tensors > room:
        fits = "Does not fit: " if tensors > room else ""
        return f"{fits}{_gib(tensors)} GiB of tensors, and the device has {_gib(room)}."
    segments, expandable = largest.reserved.segments.reserved, largest.reserved.expandable.reserved
    if segments > room:
        return (
            f"Does not fit: torch's allocator reserves {_gib(segments)} GiB for {_gib(tensors)} of tensors, and the "
            f"device has {_gib(room)}. {_otherwise(largest, expandable, room)}"
        )
    unknown = "" if plan.device.matmul_workspace else ", workspaces of its matmul library"
    return (
        f"{_gib(tensors)} GiB of tensors, for which torch's allocator reserves {_gib(segments)} of the device's "
        f"{_gib(room)} GiB ({segments / room:.0%}; {_gib(expandable)} with {EXPANDABLE}). The other "
        f"{_gib(room - segments)} must hold what is not predicted: CUDA's context and code, NCCL's buffers{unknown}."
        f"{COMPILED if uses_inductor(plan.experiment.compile) else ''}{AT_MOST if plan.at_most else ''}"
    )


def _sent(plan: Plan, largest: RankPlan) -> Iterator[str]:
    """How far a pipeline on GPUs may stay below its peak."""
    layout = ResolvedLayout.of(plan.experiment)
    if largest.sent and device_type(plan.experiment.cluster) == "cuda":
        passes = layout.gradient_accumulation // layout.pipeline_microbatches
        yield (
            f"Of these up to {_size(largest.sent / passes)} are hidden states that were sent: each is counted until "
            "its pass ends, and is free earlier where the GPU keeps up with its host."
        )


def _on_host(plan: Plan, largest: RankPlan) -> Iterator[str]:
    """What is offloaded, where something is."""
    host, node = largest.trace.host, plan.host_bytes_per_node
    if host is None:
        return
    parts = ", ".join(f"{name} {_size(size)}" for name, size in host.peak.by_category.items() if size >= MIB)
    together = "" if node is None else f", {_size(node)} for the ranks of a node"
    given = plan.experiment.cluster.memory_gb or 0
    fits = "does not fit" if node is not None and given and node > given * GIB else "must hold the processes too"
    room = f"; cluster.memory_gb={given} {fits}" if given else ""
    yield (
        f"On the host: {_size(host.peak.bytes)} of tensors{f' ({parts})' if parts else ''}{together}{room}. "
        "Parameters and gradients lie in pinned memory, whose blocks are powers of two."
    )
    if plan.step_seconds is not None:
        yield (
            f"The host clips and updates, for which it reads {_metric(host.costs.bytes_moved)}B for a rank while the "
            "GPU waits; that is in no estimate below, since nothing is known of the host's speed."
        )


def _otherwise(largest: RankPlan, expandable: int, room: float) -> str:
    if expandable <= room:
        return f"With {EXPANDABLE} it reserves {_gib(expandable)}."
    tried = reservations(largest.trace.setup_events, largest.trace.step_events, int(room)).expandable
    if not tried.fits:
        return f"Neither does it with {EXPANDABLE}."
    return (
        f"With {EXPANDABLE} it just runs, giving memory back and taking it anew {tried.retries} times in {STEPS} "
        "steps, which stops everything each time."
    )


def _messages(plan: Plan, largest: RankPlan) -> Table:
    which = f" of pipeline rank {largest.pipeline_rank}" if len(plan.ranks) > 1 else ""
    title = f"Messages{which} in a step"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for name in ("axis", "message"):
        table.add_column(name)
    for name in ("calls", "MiB"):
        table.add_column(name, justify="right")
    work = largest.trace.costs
    for (axis, kind), size in sorted(work.messages.items(), key=lambda item: -item[1]):
        table.add_row(axis, kind, str(work.calls[axis, kind]), f"{size / MIB:,.2f}")
    return table


def _emulated(plan: Plan) -> Iterator[str]:
    """Whether a recipe runs by plain operators, where it would not have to on another GPU."""
    config, device = plan.experiment.quantization, plan.device
    if device_type(plan.experiment.cluster) == "cpu" or config.recipe == "none" or device is None:
        return
    least = LEAST[config.recipe]
    if device.capability is None or device.capability < least:
        yield (
            f"{config.recipe} is emulated, as the trainer does it on {device.name}: the instructions are those of CUDA "
            f"capability {least[0]}.{least[1]}."
        )


def _speed(plan: Plan) -> list[str]:
    training, flops = plan.experiment.training, sum(rank.trace.costs.flops for rank in plan.ranks) / len(plan.ranks)
    lines = [
        f"{_metric(flops)}FLOP a rank and step",
        f"a checkpoint is {_metric(plan.checkpoint_bytes)}B: "
        f"{plan.checkpoint_bytes_per_node / 1e9:.2g} s where each node writes 1 GB/s",
    ]
    slowest = max((rank.time for rank in plan.ranks if rank.time is not None), key=lambda it: it.total, default=None)
    if slowest is None or plan.step_seconds is None:
        return lines
    lines.append(
        f"{plan.step_seconds:.3g} s a step, estimated: matmuls {slowest.matmuls:.3g}, elementwise "
        f"{slowest.elementwise:.3g}, {_by_number(slowest)}messages {slowest.exposed:.3g} waited for and "
        f"{slowest.behind:.3g} behind compute; bubble {plan.bubble:.0%}"
    )
    lines.append(
        f"{plan.tokens_per_second:,.0f} tokens/s a device{'' if plan.mfu is None else f', MFU {plan.mfu:.0%}'}; "
        f"{training.steps} steps: {plan.tokens_per_step * training.steps:,} tokens, {_hours(plan.gpu_hours)} "
        f"{'device-hours' if plan.mfu is None else 'GPU-hours'}"
    )
    return lines


def _by_number(seconds: RankTime) -> str:
    """What operators take by their number, where that is known."""
    return f"operators by their number {seconds.operators:.3g}, " if seconds.operators else ""


def _hours(hours: float | None) -> str:
    return "?" if hours is None else f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


def _metric(number: float) -> str:
    """Three digits and a prefix: `8.77 M`."""
    power = max(0, min(5, int(math.log10(max(number, 1)) // 3)))
    return f"{number / 1000**power:.3g} {' kMGTP'[power].strip()}"


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / MIB:.2f} MiB"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
