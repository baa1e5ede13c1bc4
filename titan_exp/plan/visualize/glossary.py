"""Page text: headline numbers and a glossary."""

import json
from collections.abc import Iterator
from pathlib import Path

from titan_exp.config.layout import axes
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.gate.gate import MemoryCheck
from titan_exp.plan.predict import Plan
from titan_exp.tracking.number_format import format_bytes, format_seconds


def _explanation(degree: str) -> str:
    of_degree = [axis for axis in (*axes.AXES, *axes.EXPERT_AXES) if axis.key == degree and axis.name != "efsdp"]
    return f"{of_degree[0].meaning} Communication: {'; '.join(axis.collectives for axis in of_degree)}."


MEANINGS = {degree: _explanation(degree) for degree in (*reversed(axes.DEGREES), "ep", "etp")}
"""Degrees, from the innermost mesh axis (adjacent ranks) outwards, then those of experts."""

WORDS = {"axes": MEANINGS} | json.loads((Path(__file__).parent / "page" / "glossary.json").read_text(encoding="utf-8"))
"""Explanations that the page's scripts show: of axes, kinds of communication, parts of a step's time, and categories of
memory."""


def facts(plan: Plan, memory_check: MemoryCheck) -> Iterator[tuple[str, str, str]]:
    """Quantities, values and notes of a plan's headline numbers: first whether it fits."""
    largest = plan.largest
    on = f" of pipeline rank {largest.pipeline_rank}" if plan.experiment.parallelism.pp > 1 else ""
    memory, needed = memory_check.device_memory, format_bytes(memory_check.needed or 0)
    if largest.allocator is None:
        note = f"{format_bytes(largest.bytes)} of tensors{on}, and the processes"
    else:
        note = f"{format_bytes(largest.bytes)} reserved{on}, CUDA's context and NCCL's buffers"
    if memory is None or memory.capacity is None:
        yield "memory", needed, note
    else:
        name = "does not fit" if memory_check.fits is False else "fits"
        yield name, f"{needed} of {format_bytes(memory.capacity)}", note
    if plan.step_seconds is not None:
        yield "step", format_seconds(plan.step_seconds), "estimated from the device's rates"
        yield "speed", f"{plan.tokens_per_second:,.0f} tokens/s", "of one device"
        if plan.mfu is not None:
            yield "MFU", f"{plan.mfu:.0%}", "of the device's bf16 peak"
    if plan.experiment.parallelism.pp > 1:
        yield "bubble", f"{plan.bubble:.1%}", "of the step, with equally slow stages"
    yield "checkpoint", format_bytes(plan.checkpoint_bytes), "weights and the optimizer's state"


def device_noun(layout: ResolvedLayout) -> str:
    """Noun for the device of a rank."""
    return "GPU" if layout.device_type == "cuda" else "process"
