"""Rules about context parallelism: what a method can cut, and what can be cut at all."""

import math
from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import divisors, listed, multiples_near, nearest_numbers
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.builtins import ARCHITECTURES
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.machine.devices import device_type
from titan_exp.rules.rule import rules

MERGING = ("auto", "flash", "efficient")
"""Kernels whose log-sum-exp ring and allgather can merge by, where the device has them."""

HEAD_DIM_MULTIPLE = 8
"""What `model.head_dim` is a multiple of on CUDA: these kernels are called without the padding that others get."""


def blocks_can_share(experiment: Experiment) -> Iterator[Violation]:
    """Only of the built-in model is it known that nothing but its attention cores mixes tokens."""
    architecture, degree = experiment.model.architecture, experiment.parallelism.cp
    if architecture not in ARCHITECTURES:
        yield Violation(
            "parallelism.cp",
            degree,
            f"ranks that share sequences exchange them in the attention of the built-in blocks, which {architecture} "
            "is not known to be made of",
            f"parallelism.cp=1, spread over ranks with parallelism.dp_shard={degree}; or model.architecture=decoder",
        )


def sequence_divides(experiment: Experiment) -> Iterator[Violation]:
    """Every rank has the same number of tokens, and the same amount of causal work."""
    parallelism, seq_len = experiment.parallelism, experiment.training.seq_len
    parts = chunks_of_a_sequence(experiment)
    if seq_len % parts:
        contiguous = parallelism.cp_method == "ulysses"
        what = f"{parts} equal parts" if contiguous else f"{parts} equal chunks, two for each of {parallelism.cp} ranks"
        yield Violation(
            "training.seq_len",
            seq_len,
            f"parallelism.cp={parallelism.cp} by {parallelism.cp_method} cuts a sequence into {what}",
            f"nearest: training.seq_len={listed(multiples_near(seq_len, parts))}",
        )


def groups_divide(experiment: Experiment) -> Iterator[Violation]:
    """Ranks that share a sequence are in equal groups that exchange heads; by ulysses all of them are one group."""
    parallelism, field = experiment.parallelism, "parallelism.cp_ulysses"
    if parallelism.cp_ulysses > 1 and parallelism.cp_method == "ulysses":
        reason = "parallelism.cp_method=ulysses lets all ranks exchange heads"
        yield Violation(field, parallelism.cp_ulysses, reason, "cp_ulysses=1, or cp_method=ring or allgather")
    elif parallelism.cp % parallelism.cp_ulysses:
        works = nearest_numbers(parallelism.cp_ulysses, divisors(parallelism.cp))
        yield Violation(
            field,
            parallelism.cp_ulysses,
            f"parallelism.cp={parallelism.cp} ranks are not divided into equal groups by it",
            f"parallelism.cp_ulysses={listed(works)}",
        )


def heads_divide(experiment: Experiment) -> Iterator[Violation]:
    """Ranks that exchange heads have whole groups of them, of those that tensor parallelism leaves."""
    model, parallelism = experiment.model, experiment.parallelism
    degree = parallelism.ulysses_degree
    if degree == 1 or model.heads % parallelism.tp:
        return
    heads, kv_heads = model.heads // parallelism.tp, kv_heads_of_a_rank(experiment)
    if heads % degree == 0 and kv_heads % degree == 0:
        return
    works = listed(nearest_numbers(degree, divisors(math.gcd(heads, kv_heads))))
    of_a_rank = f", those of a rank with parallelism.tp={parallelism.tp}," if parallelism.tp > 1 else ""
    by_all = parallelism.cp_method == "ulysses"
    yield Violation(
        "parallelism.cp" if by_all else "parallelism.cp_ulysses",
        degree,
        f"ulysses divides heads among ranks, and {heads} query heads with {kv_heads} key and value heads{of_a_rank} "
        f"cannot be divided by {degree}",
        f"parallelism.cp={works}; or parallelism.cp_method=ring or allgather, which divide no heads"
        if by_all
        else f"parallelism.cp_ulysses={works}",
    )


def kv_heads_of_a_rank(experiment: Experiment) -> int:
    """Key and value heads that a tensor-parallel rank computes; one where several ranks share it."""
    return max(1, experiment.model.kv_heads // experiment.parallelism.tp)


def chunks_of_a_sequence(experiment: Experiment) -> int:
    """Equal chunks that context parallelism cuts a sequence into; 1 where nobody shares it."""
    parallelism = experiment.parallelism
    return parallelism.cp * (1 if parallelism.cp == 1 or parallelism.cp_method == "ulysses" else 2)


def kernel_merges(experiment: Experiment) -> Iterator[Violation]:
    """Ring and allgather attend to parts of the keys, and merge by what the kernel tells of its softmax."""
    backend, method = experiment.model.attention_backend, experiment.parallelism.cp_method
    if method == "ulysses":
        return
    cuda = device_type(experiment.cluster) == "cuda"
    # What a CPU does not have at all is told by the rules about kernels.
    if backend not in MERGING and (cuda or backend == "math"):
        yield Violation(
            "model.attention_backend",
            backend,
            f"parallelism.cp_method={method} merges parts of the softmax, which is written for other kernels",
            f"model.attention_backend={'auto, flash or efficient' if cuda else 'auto or flash'}; "
            "or parallelism.cp_method=ulysses, which takes every kernel",
        )
    if cuda and experiment.model.head_dim % HEAD_DIM_MULTIPLE:
        yield Violation(
            "model.head_dim",
            experiment.model.head_dim,
            f"on CUDA parallelism.cp_method={method} takes multiples of {HEAD_DIM_MULTIPLE}",
            f"nearest: model.head_dim={listed(multiples_near(experiment.model.head_dim, HEAD_DIM_MULTIPLE))}; "
            "or parallelism.cp_method=ulysses",
        )


def shared_sequences(experiment: Experiment) -> Iterator[Violation]:
    """The rules of this file, where sequences are shared."""
    yield from groups_divide(experiment)
    if experiment.parallelism.cp == 1 or experiment.parallelism.cp % experiment.parallelism.cp_ulysses:
        return
    for rule in (blocks_can_share, sequence_divides, heads_divide, kernel_merges):
        yield from rule(experiment)


RULES = rules(
    shared_sequences,
)
