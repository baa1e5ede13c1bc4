"""Work per pipeline rank of a layout: layers, micro-batches and blocks in flight."""

from dataclasses import dataclass
from functools import cache

from titan_exp.plan.extrapolate.layer_kinds import repetition
from titan_exp.plan.search.layouts import Candidate


@dataclass(frozen=True)
class RankLoad:
    """Work per rank of a layout. A period of layers counts as one layer."""

    tokens: float
    """Tokens of a micro-batch."""
    loss_tokens: float
    """Tokens whose logits are in memory at once."""
    sequences: int
    """Sequences of a micro-batch."""
    micro_batches: int
    layers: tuple[int, ...]
    """Like layers of every pipeline rank; first layers that differ from the rest are left out."""
    sends: tuple[int, ...]
    """Hidden states and their gradients that every pipeline rank sends per micro-batch."""
    in_flight: tuple[int, ...]
    """Blocks with simultaneous activations, of every pipeline rank."""
    stages: int
    """Pipeline stages of all ranks."""
    gathers: int
    """Gathers of a block's weights in a step: freed ones are gathered again for backward."""


@cache
def in_flight(schedule: str, ranks: int, rank: int, own: tuple[int, ...], micro_batches: int) -> int:
    """Forward blocks of a rank before its first backward. `own` are the layers of its stages."""
    if schedule == "1F1B":
        return own[0] * min(ranks - rank, micro_batches)
    if schedule == "Interleaved1F1B" and micro_batches % ranks == 0:
        # One micro-batch per rank through every stage but the last, and further ones until the first returns.
        turns = min((len(own) + 1) * ranks - 1 - 2 * rank, micro_batches * len(own))
        return sum(own[(turn // ranks) % len(own)] for turn in range(turns))
    return sum(own) * micro_batches


def rank_load(candidate: Candidate) -> RankLoad:
    """Work of a layout's ranks."""
    layout, parallelism = candidate.layout, candidate.parallelism
    micro_batches, ranks = layout.gradient_accumulation, parallelism.pp
    # The first layers may be smaller than the rest.
    distinct, period = repetition(candidate.experiment)
    layers = (layout.layers - distinct) // period
    by_rank, sends, held = [layers], [0], [layers]
    if ranks > 1:
        counts = [count // period for count in (layout.layer_counts[0] - distinct, *layout.layer_counts[1:])]
        placed = list(zip(layout.stage_placement, counts, strict=True))
        by_rank, sends = [0] * ranks, [0] * ranks
        for stage, (rank, count) in enumerate(placed):
            by_rank[rank] += count
            sends[rank] += (stage > 0) + (stage < len(placed) - 1)
        own = [tuple(count for at, count in placed if at == rank) for rank in range(ranks)]
        held = [in_flight(parallelism.pp_schedule, ranks, rank, own[rank], micro_batches) for rank in range(ranks)]
    tokens = layout.micro_batch_size * candidate.experiment.training.seq_len / parallelism.cp
    return RankLoad(
        tokens=tokens,
        loss_tokens=min(tokens, layout.loss_chunk_tokens or tokens),
        sequences=layout.micro_batch_size,
        micro_batches=micro_batches,
        layers=tuple(by_rank),
        sends=tuple(sends),
        in_flight=tuple(held),
        stages=layout.stage_count,
        gathers=1 if layout.reshard_policy == "never" else 2 * micro_batches,
    )
