"""Planner's table of the rows: planned memory and estimated speed against torchtitan's measured values."""

import dataclasses
import time
from collections.abc import Sequence

from benchmarks.versus.cases import MEMORY_GOAL, Case, case_of
from benchmarks.versus.job import Job
from titan_exp.config.machine.devices import command_lines, gpu_names
from titan_exp.plan.cuda.devices import DEVICES, Device, device_reported_as
from titan_exp.plan.predict import predict
from titan_exp.plan.roofline import ClassTime

GIB = 2**30
CLUSTER = ("cluster=slurm", "cluster.device=cuda", "cluster.nodes=1", "cluster.gpus_per_node=1")
"""One GPU that need not be here."""
H200 = DEVICES["h200"]
"""Device of torchtitan's measured values."""


@dataclasses.dataclass(frozen=True)
class PlannedRow:
    """Prediction of one row."""

    row: str
    """Row, as in `case_of`."""
    allocated: float
    """Peak of allocated GiB."""
    reserved: float
    """Peak of reserved GiB."""
    speed: float
    """Estimated tokens/s."""
    seconds: float
    """Duration of the prediction."""
    kernels: Sequence[ClassTime] = ()
    """Kernels of the step by class."""
    device: Device = H200
    """Device that it is planned for."""

    @property
    def case(self) -> Case:
        """Case of the row."""
        return case_of(self.row)

    @property
    def memory_ratio(self) -> float | None:
        """Reserved memory over torchtitan's measured."""
        return None if self.case.peer_memory is None else self.reserved / self.case.peer_memory

    @property
    def speed_ratio(self) -> float | None:
        """Estimated tokens/s over torchtitan's measured; None on another device."""
        if self.case.peer_speed is None or self.device is not H200:
            return None
        return self.speed / self.case.peer_speed

    @property
    def misses(self) -> list[str]:
        """Goals that the prediction misses, and by how much."""
        found = []
        if self.memory_ratio is not None and self.memory_ratio > MEMORY_GOAL:
            above = self.reserved - MEMORY_GOAL * (self.case.peer_memory or 0.0)
            found.append(f"memory by {above:.1f} GiB")
        if self.speed_ratio is not None and self.case.goal is not None and self.speed_ratio < self.case.goal:
            found.append(f"speed by {100 * (self.case.goal / self.speed_ratio - 1):.1f} %")
        return found


def present_device() -> Device:
    """This machine's GPU in the planner's table; an H200 where there is none, or an unknown one."""
    names = gpu_names() or command_lines("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return DEVICES[(device_reported_as(names[0]) if names else None) or "h200"]


def plan_row(row: str, device: Device = H200) -> PlannedRow:
    """Plan our side of a row; the initial weights do not matter."""
    began = time.monotonic()
    plan = predict(Job(row, 10, 15).experiment(*CLUSTER), device)
    (rank,) = plan.ranks
    assert rank.allocator is not None, "it is planned for CUDA"
    assert plan.tokens_per_second is not None, "the device's rates are known"
    took = time.monotonic() - began
    sizes = rank.allocator.allocated / GIB, rank.allocator.reserved / GIB
    return PlannedRow(row, *sizes, plan.tokens_per_second, took, rank.kernels, device)


def plan_table(rows: Sequence[PlannedRow]) -> str:
    """Markdown table of planned rows, with the goals and by what they are missed."""
    head = [
        "case",
        "allocated GiB, planned",
        "reserved, planned",
        "torchtitan's, measured",
        f"ratio (goal ≤ {MEMORY_GOAL})",
    ]
    head += ["tokens/s, estimated", "torchtitan's, measured", "ratio", "goal", "misses"]
    lines = [f"| {' | '.join(head)} |", "|---" + "|--:" * (len(head) - 2) + "|---|"]
    for row in rows:
        case = row.case
        cells = [case.title, f"{row.allocated:.1f}", f"{row.reserved:.1f}", _number(case.peer_memory, ".1f")]
        cells += [_number(row.memory_ratio, ".2f"), f"{row.speed:,.0f}", _number(case.peer_speed, ",.0f")]
        cells += [_number(row.speed_ratio, ".2f"), _number(case.goal, ".2f"), " and ".join(row.misses) or "–"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *{note(row.device): None for row in rows}]) + "\n"


def note(device: Device) -> str:
    """Assumptions of the estimates for a device."""
    forward, backward = (rate / 1e12 for rate in device.attention_rates)
    share = device.elementwise_tbs / device.copy_tbs
    return (
        f"Planned for one {device.name}. The roofline uses its rates (bf16 matmuls {device.gemm['bf16']:.0f} TFLOP/s, "
        f"fp8 {device.fp8_rate / 1e12:,.0f}, attention {forward:.0f} forward and {backward:.0f} backward, copies "
        f"{device.copy_tbs:.2f} TB/s) and assumes that norm, optimizer and casts of weights run at the copies' rate "
        f"and other elementwise kernels at {share:.0%} of it. It counts no gaps and no gain from GEMMs chosen by "
        "autotuning. torchtitan 0.2.2: measured on one H200."
    )


def class_table(rows: Sequence[PlannedRow]) -> str:
    """Markdown table of planned kernels by class: launches, TFLOP, GB and milliseconds of a step."""
    lines = []
    for row in rows:
        lines += [f"### {row.case.title}", "", "| class | launches | TFLOP | GB | ms |", "|---|--:|--:|--:|--:|"]
        total = ClassTime(
            "**step**",
            sum(part.launches for part in row.kernels),
            sum(part.flops for part in row.kernels),
            sum(part.bytes for part in row.kernels),
            sum(part.seconds or 0.0 for part in row.kernels),
        )
        for part in (*row.kernels, total):
            tera, giga = part.flops / 1e12 or None, part.bytes / 1e9 or None
            milli = None if part.seconds is None else part.seconds * 1e3
            cells = [part.name, str(part.launches), *(_number(number, ".1f") for number in (tera, giga, milli))]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"
