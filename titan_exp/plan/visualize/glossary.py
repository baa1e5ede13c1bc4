"""What the page says: the layout in sentences, and each term in one."""

from collections.abc import Iterator
from dataclasses import dataclass

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.plan.predict import Plan

UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (1024, "KiB"))
"""Of bytes."""

AXES = {
    "tp": "Tensor parallelism: every matrix is cut into parts. Each rank of the group multiplies with its part, and "
    "they put their results together twice in every layer, so they want the fastest links.",
    "cp": "Context parallelism: every sequence is cut into parts of its tokens. Each rank of the group computes its "
    "tokens, and they exchange keys and values, so that a token attends to all before it.",
    "dp_shard": "Sharded data parallelism (FSDP): each rank of the group computes other sequences and keeps a share of "
    "every weight, its gradient and its optimizer state. Whole weights are gathered when a layer computes.",
    "dp_replicate": "Replicated data parallelism: each rank of the group stands in another copy of the model, which "
    "computes other sequences; the copies add up their gradients once a step.",
    "pp": "Pipeline parallelism: the layers are cut into stages, one behind the other. Micro-batches pass through them "
    "like cars through an assembly line, forward and then back.",
}
"""The axes of the mesh, from the one whose ranks are neighbours."""

TERMS = {
    "rank": "one process with one device; ranks are numbered from 0, and neighbours in number sit in the same node.",
    "node": "a machine; between its devices links are about ten times as fast as to other nodes.",
    "stage": "consecutive layers that one pipeline rank holds.",
    "micro-batch": "the sequences that pass through the model together; a step adds up the gradients of several.",
    "bubble": "the time in which a pipeline rank has nothing to do, because its micro-batches are still with others.",
    "MFU": "model FLOPs utilization: operations that the model needs, over what the devices could do in the time.",
}
"""Words that are used without being explained where they stand."""

CATEGORIES = {
    "parameters": "the weights, or this rank's share of them.",
    "gradients": "how the loss changes with each weight; there from the backward pass to the optimizer.",
    "optimizer": "what it remembers of every weight (for AdamW two averages), and what an update needs for a moment.",
    "activations": "results of the forward pass that the backward pass will need, and what is being computed.",
    "gathered parameters": "whole weights of layers that compute, put together from the shares of all ranks.",
    "communication": "buffers of messages.",
    "loss": "what the head and the loss keep, logits (a number for every word of the vocabulary) among it.",
    "workspaces": "what libraries of kernels take once and keep, as that of matmuls does.",
    "other": "the batch, tables of positions, constants.",
}
"""What memory is for."""

KINDS = {
    "all-gather": "every rank of the group gets the parts of all",
    "reduce-scatter": "the ranks' tensors are added up, and each gets its part of the sum",
    "all-reduce": "the ranks' tensors are added up, and each gets the whole sum",
    "all-to-all": "every rank sends each other one a part",
    "broadcast": "one rank's tensor goes to all",
    "send": "one tensor to one other rank",
    "receive": "one tensor from one other rank",
}
"""What messages do."""

COSTS = {
    "matmuls": "products of matrices, and attention",
    "elementwise": "everything that reads and writes more than it computes: norms, activations, the optimizer",
    "exposed": "messages that compute waits for: tensor, context and pipeline parallelism's",
    "behind": "messages of sharding and replication, which travel while something is computed",
    "bubble": "waiting for other pipeline ranks",
}
"""What a step's time goes to."""


@dataclass(frozen=True)
class Fact:
    """A number at the head of the page."""

    name: str
    """What it is."""
    value: str
    """It, with its unit."""
    note: str = ""
    """What to know about it."""
    bad: bool = False
    """Whether it must not be so."""


def facts(plan: Plan) -> Iterator[Fact]:
    """The numbers by which a layout is judged."""
    peak = max(plan.ranks, key=lambda rank: rank.trace.peak.bytes)
    needed, room = peak.trace.peak.bytes, None if plan.device is None else plan.device.memory_gb * 1e9
    on = f" of pipeline rank {peak.pipeline_rank}" if plan.experiment.parallelism.pp > 1 else ""
    note = f"peak of tensors{on}"
    if room is not None:
        note += f"; the device has {size(room)}"
    yield Fact("memory", size(needed), note, bad=room is not None and needed > room)
    if plan.step_seconds is not None:
        yield Fact("step", duration(plan.step_seconds), "estimated from the device's rates")
        yield Fact("speed", f"{plan.tokens_per_second:,.0f} tokens/s", "of one device")
        if plan.mfu is not None:
            yield Fact("MFU", f"{plan.mfu:.0%}", "of the device's bf16 peak")
    if plan.experiment.parallelism.pp > 1:
        yield Fact("bubble", f"{plan.bubble:.1%}", "of the time, if stages took equally long")
    yield Fact("checkpoint", size(plan.checkpoint_bytes), "weights and the optimizer's state")


def layout_sentences(plan: Plan) -> Iterator[str]:
    """The layout told from the outside in, for somebody who has never seen one."""
    experiment = plan.experiment
    parallelism, training = experiment.parallelism, experiment.training
    layout = ResolvedLayout.of(experiment)
    nodes, processes = layout.nodes, _count(layout.world_size, device_noun(experiment))
    yield f"{experiment.model.name} trains on {processes} in {_count(nodes, 'node')}."
    if parallelism.pp > 1:
        yield _stages(plan)
    if parallelism.tp > 1:
        yield f"Every matrix of a layer is cut into {parallelism.tp} parts, on as many neighbouring ranks (tp)."
    if parallelism.cp > 1:
        tokens = training.seq_len // parallelism.cp
        yield (
            f"Every sequence of {training.seq_len:,} tokens is cut among {parallelism.cp} ranks (cp), "
            f"{tokens:,} tokens on each."
        )
    if parallelism.dp_shard * parallelism.cp > 1:
        with_cp = " and cp, whose ranks shard alike" if parallelism.cp > 1 else ""
        shares = parallelism.dp_shard * parallelism.cp
        yield (
            f"What remains of every weight, with its gradient and optimizer state, is shared out among {shares} ranks, "
            f"each of which keeps 1/{shares} (dp_shard{with_cp})."
        )
    if parallelism.dp_replicate > 1:
        yield f"Of all this there are {parallelism.dp_replicate} copies (dp_replicate)."
    yield _batch(plan)


def device_noun(experiment: Experiment) -> str:
    """What a rank computes on, or is."""
    return "GPU" if device_type(experiment.cluster) == "cuda" else "process"


def size(number: float) -> str:
    """Bytes in words."""
    for unit, word in UNITS:
        if number >= unit:
            return f"{number / unit:.3g} {word}" if number < 1000 * unit else f"{number / unit:,.0f} {word}"
    return f"{number:.0f} B"


def duration(seconds: float) -> str:
    """Seconds in words."""
    scale, word = (1, "s") if seconds >= 0.9995 else (1e3, "ms") if seconds >= 0.9995e-3 else (1e6, "µs")
    return f"{seconds * scale:.3g} {word}"


def _stages(plan: Plan) -> str:
    layout = ResolvedLayout.of(plan.experiment)
    counts, placement = layout.layer_counts, layout.stage_placement
    parallelism = plan.experiment.parallelism
    least, most = min(counts), max(counts)
    each = _count(most, "layer") if least == most else f"{least} to {_count(most, 'layer')}"
    of_rank = len(placement) // parallelism.pp
    many = f", {of_rank} of them on each of {parallelism.pp} pipeline ranks" if of_rank > 1 else ""
    ranks = layout.world_size // parallelism.pp
    return (
        f"Its {plan.experiment.model.layers} layers are cut into {len(counts)} stages of {each}{many}; "
        f"{_count(ranks, 'rank')} work on every stage (pp)."
    )


def _batch(plan: Plan) -> str:
    layout, training = ResolvedLayout.of(plan.experiment), plan.experiment.training
    together, degree = training.global_batch_size, layout.dp_degree
    begin = f"A step is {_count(together, 'sequence')} of {training.seq_len:,} tokens"
    share = f", {together // degree} for each of {degree} data-parallel shares" if degree > 1 else ""
    number = layout.gradient_accumulation
    return f"{begin}{share}, in {_count(number, 'micro-batch')} of {_count(layout.micro_batch_size, 'sequence')}."


def _count(number: int, word: str) -> str:
    plural = {"process": "processes", "micro-batch": "micro-batches"}.get(word, f"{word}s")
    return f"{number:,} {word if number == 1 else plural}"
