"""Profiles of layouts: costs of a block and of the model's ends in samples, from which others' are estimated."""

from collections.abc import Iterator
from dataclasses import dataclass

from titan_exp.plan.extrapolate.sample import Sample, Samples
from titan_exp.plan.extrapolate.stages import FIRST, LAST, MIDDLE, SAMPLED_STAGES, WHOLE
from titan_exp.plan.search.layouts import Candidate
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.kernel_classes import OPTIMIZER, STREAMS
from titan_exp.plan.trace.segments import CategoryBytes, Totals, join_segments, sum_costs
from titan_exp.plan.trace.step_position import SUM


@dataclass(frozen=True)
class Profile:
    """Costs of a block and of the model's ends in a steady-state micro-batch (not the first or last, if possible).

    Where kinds of blocks alternate, a period of them counts as one block.
    """

    candidate: Candidate
    """Traced layout."""
    block: OpCosts
    """Costs of a middle block, forward and backward."""
    token_bytes: int
    """Bytes moved by a middle block, without gathers and sums of weights' gradients."""
    gathered_bytes: int
    """Bytes moved by copies of gathered weights and reduced gradients."""
    summed_bytes: int
    """Bytes moved by the sum of a block's gradients with those of earlier micro-batches."""
    ends: OpCosts
    """Costs of head, modules of multi-token prediction and loss on the last rank, and of an embedding there."""
    left: CategoryBytes
    """Bytes saved by a block's forward pass for backward."""
    passing: CategoryBytes
    """Temporary bytes of a block's backward pass."""
    ending: CategoryBytes
    """Temporary bytes of head and loss."""
    state: float
    """Bytes of parameters and optimizer state per byte of parameters."""
    updated: float
    """Bytes moved by the optimizer's kernels per byte of parameters."""
    updated_operators: float
    """Operators of the optimizer per block."""
    gathered: int
    """Bytes of a block allocated from the first forward pass on: parameters gathered by a pipeline."""
    gradients: int
    """Bytes of a block allocated from the first micro-batch's end on: unreduced gradients."""
    first_gathered: int
    """`gathered` and `gradients` of the embedding on the first pipeline rank."""
    message: OpCosts
    """One send and one receive between stages."""


def profile_of(candidate: Candidate, samples: Samples) -> Profile | None:
    """Profile of a sampled layout; None without a representative block."""
    found = [of_key[0] for key, of_key in samples.items() if key.size is None]
    if not found:
        return None
    sample, kept = found[0], found[0].persistent
    whole = WHOLE in sample.layers
    steady = min(1, sample.micro_batches - 1)
    forward, backward = (_middle_block(sample, way, steady) for way in sample.ways(steady))
    head = WHOLE if whole else LAST
    in_forward, in_backward = (int(_middle_block(sample, way, 0).net.sum()) for way in sample.ways(0))
    if whole:
        in_forward, in_backward = 0, in_forward + in_backward if sample.micro_batches > 1 else 0
    else:
        in_forward, in_backward = in_forward - int(forward.net.sum()), in_backward - int(backward.net.sum())
    # Some micro-batches gather or reduce.
    by_micro = [
        [_middle_block(sample, way, micro).costs for way in sample.ways(micro)] for micro in range(sample.micro_batches)
    ]
    least = min(map(sum_costs, by_micro), key=lambda costs: costs.bytes_moved)
    outside_streams = [[costs.bytes_moved - _streamed_bytes(costs) for costs in pair] for pair in by_micro]
    least_forward, least_backward = map(min, zip(*outside_streams, strict=True))
    return Profile(
        candidate,
        block=least,
        token_bytes=least_forward + least_backward,
        gathered_bytes=min(sum(map(_streamed_bytes, pair)) for pair in by_micro),
        summed_bytes=outside_streams[steady][1] - least_backward,
        ends=_ends(sample, head, steady),
        left=forward.net,
        passing=backward.peak,
        ending=sample.joined(head, steady, "F after", f"{sample.ways(steady)[1][0]} before").peak,
        state=(kept["parameters"] + kept["optimizer"]) / kept["parameters"],
        updated=sample.update.kernels.get((OPTIMIZER, "bytes"), 0) / kept["parameters"],
        updated_operators=sample.update.operators / sum(sample.blocks[stage] for stage in sample.stages),
        gathered=max(0, in_forward),
        gradients=max(0, in_backward),
        # After the first block's backward pass, its own gradients are cast too.
        first_gathered=0 if whole else max(0, _grown_outside_blocks(sample) - max(0, in_backward)),
        message=sample.message,
    )


def _streamed_bytes(costs: OpCosts) -> int:
    return sum(costs.kernels.get((name, "bytes"), 0) for name in STREAMS)


def _middle_block(sample: Sample, way: str, micro: int) -> Totals:
    stage = WHOLE if WHOLE in sample.layers else MIDDLE
    first = sample.edge + (sample.distinct if stage == WHOLE else 0)
    blocks = range(first, first + sample.period)
    passed = [(kind, block) for kind in way for block in (blocks if kind == "F" else reversed(blocks))]
    return join_segments([sample.joined(stage, micro, f"{kind} block", kind + SUM, block=at) for kind, at in passed])


def _outside(sample: Sample, micro: int) -> Iterator[str]:
    return (f"{kind} {part}" for way in sample.ways(micro) for kind in way for part in ("before", "after"))


def _ends(sample: Sample, stage: str, micro: int) -> OpCosts:
    """Costs of a stage outside of its layers, with modules of multi-token prediction."""
    blocks = sample.layers[stage]
    modules = range(blocks - sample.last_of(SAMPLED_STAGES[stage]), blocks)
    parts = [sample.joined(stage, micro, *_outside(sample, micro))]
    kinds = "".join(sample.ways(micro))
    parts += [sample.joined(stage, micro, f"{kind} block", block=block) for kind in kinds for block in modules]
    return sum_costs(part.costs for part in parts)


def _grown_outside_blocks(sample: Sample) -> int:
    """Bytes outside the first stage's blocks that only the first micro-batch leaves allocated."""
    first, later = (int(sample.joined(FIRST, micro, *_outside(sample, micro)).net.sum()) for micro in (0, 1))
    return first - later
