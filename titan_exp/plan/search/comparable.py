"""Conditions under which costs of a sampled layout bound those of another one, and the safety factors between them."""

from titan_exp.plan.search.layouts import Candidate

SAFETY_FACTOR, SAFETY_FACTOR_VIEWS = 0.95, 0.85
"""Safety factors for per-token bytes and operators scaled from traces of other degrees; the second if copies become
views: the trace has several kv heads per rank and the layout one."""


def safety_factor(candidate: Candidate, sampled: Candidate) -> float:
    """Minimum share of bytes scaled from a sampled layout that another layout needs."""
    views = sampled.parallelism.tp < candidate.kv_heads <= candidate.parallelism.tp
    return SAFETY_FACTOR_VIEWS if views else SAFETY_FACTOR


def has_more_experts(sampled: Candidate, candidate: Candidate) -> bool:
    """True if a rank of a layout has at least the experts' weights of a sampled one, and copies as many rows of theirs.

    An exchange copies them more often, and ranks that share channels copy those of each other.
    """
    if sampled.experts is None or candidate.experts is None or sampled.experts == candidate.experts:
        return True
    (other, other_etp, *_), (own, own_etp, *_) = sampled.experts, candidate.experts
    fewer_weights = other * other_etp >= own * own_etp
    return fewer_weights and shards_experts(sampled, candidate) and copies_as_many_rows(sampled, candidate)


def copies_as_many_rows(sampled: Candidate, candidate: Candidate) -> bool:
    """True if a rank of a layout copies at least the experts' rows of a sampled one."""
    if sampled.experts is None or candidate.experts is None:
        return True
    (other, other_etp, *_), (own, own_etp, *_) = sampled.experts, candidate.experts
    return other_etp in (1, own_etp) and (own > 1 or other == 1)


def shards_experts(sampled: Candidate, candidate: Candidate) -> bool:
    """True if both layouts shard experts, or none does."""
    return (sampled.experts or (True,))[-1] == (candidate.experts or (True,))[-1]


def same_lifetime(sampled: Candidate, candidate: Candidate) -> bool:
    """True if gathered weights have the same lifetime in two layouts; unsharded weights are never gathered, and one
    data rank reduces no gradients."""
    same_pipeline = (candidate.parallelism.pp > 1) == (sampled.parallelism.pp > 1)
    same_ranks = candidate.has_one_data_rank == sampled.has_one_data_rank
    return same_pipeline and same_ranks and (candidate.shards == 1) == (sampled.shards == 1)


def sequence_factor(sequences: int, sampled: int) -> float:
    """Lower bound of the ratio of a micro-batch's bytes to a sampled one's.

    One sequence needs fewer copies than several, whose memory layouts differ.
    """
    if sequences == sampled:
        return 1.0
    if sequences == 1:
        return 0.0
    return 1.0 if sampled == 1 else min(1.0, sequences / sampled)


def has_fewer_operators(sampled: Candidate, candidate: Candidate) -> bool:
    """True if a sampled layout runs no operator that the other lacks; pipelines gather and reduce least, but sum
    gradients of several micro-batches."""
    if sampled.parallelism.pp > 1:
        return candidate.parallelism.pp > 1 or candidate.layout.gradient_accumulation > 1
    micro_batches = [min(layout.gradient_accumulation, 3) for layout in (sampled.layout, candidate.layout)]
    return candidate.parallelism.pp == 1 and micro_batches[0] >= micro_batches[1]


def operators_factor(sampled: Candidate, candidate: Candidate) -> float:
    """Lower bound of the ratio of a block's operators to a sampled one's; 0 if they are not comparable."""
    own, other = candidate.parallelism, sampled.parallelism
    if other.tp > own.tp or other.cp > own.cp or not has_fewer_operators(sampled, candidate):
        return 0.0
    gathers = sampled.shards > 1 == candidate.shards or candidate.has_one_data_rank > sampled.has_one_data_rank
    gathers_experts = (sampled.experts or (False,))[-1] > (candidate.experts or (False,))[-1]
    if gathers or gathers_experts or not copies_as_many_rows(sampled, candidate):
        return 0.0
    if candidate.layout.micro_batch_size == 1 < sampled.layout.micro_batch_size:
        return SAFETY_FACTOR_VIEWS
    same = (own.tp, own.cp, candidate.experts) == (other.tp, other.cp, sampled.experts)
    return 1.0 if same else safety_factor(candidate, sampled)
