"""Page text: headline numbers, a description of the layout, and a glossary."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_exp.config.layout import axes
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.gate.gate import MemoryCheck
from titan_exp.plan.predict import Plan
from titan_exp.tracking.number_format import format_bytes, format_items, format_seconds


def _explanation(degree: str) -> str:
    of_degree = [axis for axis in (*axes.AXES, *axes.EXPERT_AXES) if axis.key == degree and axis.name != "efsdp"]
    return f"{of_degree[0].meaning} Communication: {'; '.join(axis.collectives for axis in of_degree)}."


AXES = {degree: _explanation(degree) for degree in (*reversed(axes.DEGREES), "ep", "etp")}
"""Degrees, from the innermost mesh axis (adjacent ranks) outwards, then those of experts."""

WORDS = {"axes": AXES} | json.loads(
    Path(__file__).with_name("page").joinpath("glossary.json").read_text(encoding="utf-8")
)
"""Explanations that the page's scripts show: of axes, kinds of communication, parts of a step's time, and categories of
memory."""


@dataclass(frozen=True)
class Fact:
    """Headline number."""

    name: str
    """Quantity."""
    value: str
    """Value with its unit."""
    note: str = ""
    """Note."""
    bad: bool = False
    """True if the run would fail."""


def facts(plan: Plan, memory_check: MemoryCheck) -> Iterator[Fact]:
    """Headline numbers of a plan: first whether it fits."""
    largest = plan.largest
    on = f" of pipeline rank {largest.pipeline_rank}" if plan.experiment.parallelism.pp > 1 else ""
    memory, needed = memory_check.device_memory, format_bytes(memory_check.needed or 0)
    if largest.allocator is None:
        note = f"{format_bytes(largest.bytes)} of tensors{on}, and the processes"
    else:
        note = f"{format_bytes(largest.bytes)} reserved{on}, CUDA's context and NCCL's buffers"
    if memory is None or memory.capacity is None:
        yield Fact("memory", needed, note)
    else:
        name = "does not fit" if memory_check.fits is False else "fits"
        yield Fact(name, f"{needed} of {format_bytes(memory.capacity)}", note, bad=memory_check.fits is False)
    if plan.step_seconds is not None:
        yield Fact("step", format_seconds(plan.step_seconds), "estimated from the device's rates")
        yield Fact("speed", f"{plan.tokens_per_second:,.0f} tokens/s", "of one device")
        if plan.mfu is not None:
            yield Fact("MFU", f"{plan.mfu:.0%}", "of the device's bf16 peak")
    if plan.experiment.parallelism.pp > 1:
        yield Fact("bubble", f"{plan.bubble:.1%}", "of the step, with equally slow stages")
    yield Fact("checkpoint", format_bytes(plan.checkpoint_bytes), "weights and the optimizer's state")


def settings(plan: Plan) -> str:
    """Sentence about what a rank computes with: precision, recipe, recomputation and compiler."""
    experiment, compiled = plan.experiment, plan.experiment.compile
    recipe, recomputation = experiment.quantization.recipe, experiment.activation_checkpoint.mode
    parts = [
        f"It computes in {experiment.training.mixed_precision}",
        "without a low-precision recipe" if recipe == "none" else f"with the recipe {recipe}",
        "recomputes nothing" if recomputation == "none" else f"recomputes activations ({recomputation})",
        f"and compiles with {compiled.backend}" if compiled.enabled else "and runs without a compiler",
    ]
    return ", ".join(parts) + "."


def layout_sentences(plan: Plan) -> Iterator[str]:
    """Sentences that describe the layout, from the outermost axis to the innermost."""
    layout, parallelism, training = plan.layout, plan.layout.parallelism, plan.layout.training
    processes, nodes = format_items(layout.world_size, device_noun(layout)), format_items(layout.nodes, "node")
    yield f"{plan.experiment.model.name} trains on {processes} in {nodes}."
    if parallelism.pp > 1:
        yield _stages(layout)
    if parallelism.tp > 1:
        yield f"Every weight matrix of a layer is sharded over {parallelism.tp} neighbouring ranks (tp)."
    if parallelism.cp > 1:
        tokens = training.seq_len // parallelism.cp
        yield (
            f"Every sequence of {training.seq_len:,} tokens is sharded over {parallelism.cp} ranks (cp), "
            f"{tokens:,} tokens on each."
        )
    if parallelism.dp_shard * parallelism.cp > 1:
        with_cp = " and cp" if parallelism.cp > 1 else ""
        shards = parallelism.dp_shard * parallelism.cp
        yield f"Weights, gradients and optimizer state are sharded over {shards} ranks (dp_shard{with_cp})."
    if parallelism.ep * parallelism.etp > 1:
        channels = f", and their channels over {parallelism.etp} (etp)" if parallelism.etp > 1 else ""
        yield f"Experts are distributed over {parallelism.ep} ranks (ep){channels}."
    if parallelism.dp_replicate > 1:
        yield f"The model has {parallelism.dp_replicate} replicas (dp_replicate)."
    yield _batch(layout)


def device_noun(layout: ResolvedLayout) -> str:
    """Noun for the device of a rank."""
    return "GPU" if layout.device_type == "cuda" else "process"


def _stages(layout: ResolvedLayout) -> str:
    counts, pp = layout.layer_counts, layout.parallelism.pp
    least, layers = min(counts), format_items(max(counts), "layer")
    of_stage = layers if least == max(counts) else f"{least} to {layers}"
    of_rank = len(layout.stage_placement) // pp
    many = f", {of_rank} of them on each of {pp} pipeline ranks" if of_rank > 1 else ""
    return (
        f"Its {layout.layers} layers are split into {len(counts)} stages of {of_stage}{many}; "
        f"{format_items(layout.world_size // pp, 'rank')} work on every stage (pp)."
    )


def _batch(layout: ResolvedLayout) -> str:
    sequences, degree = layout.training.global_batch_size, layout.dp_degree
    step = "A step after the batch ramp" if layout.training.batch_ramp else "A step"
    start = f"{step} has {format_items(sequences, 'sequence')} of {layout.training.seq_len:,} tokens"
    share = f", {layout.sequences_per_dp_rank} on each of {degree} data-parallel ranks" if degree > 1 else ""
    micro_batches = format_items(layout.gradient_accumulation, "micro-batch")
    return f"{start}{share}, in {micro_batches} of {format_items(layout.micro_batch_size, 'sequence')}."
