"""Rules about context parallelism: what a method can cut, and what can be cut at all."""

import math
from collections.abc import Iterator

from titan_exp.config.builtins import ARCHITECTURES
from titan_exp.config.errors import Violation
from titan_exp.config.experiment import Experiment
from titan_exp.config.layout import device_type
from titan_exp.config.suggest import divisors, listed, multiples_near, nearest_numbers

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
    contiguous = parallelism.cp_method == "ulysses"
    parts = parallelism.cp if contiguous else 2 * parallelism.cp
    if seq_len % parts:
        what = f"{parts} equal parts" if contiguous else f"{parts} equal chunks, two for each of {parallelism.cp} ranks"
        yield Violation(
            "training.seq_len",
            seq_len,
            f"parallelism.cp={parallelism.cp} by {parallelism.cp_method} cuts a sequence into {what}",
            f"nearest: training.seq_len={listed(multiples_near(seq_len, parts))}",
        )


def heads_divide(experiment: Experiment) -> Iterator[Violation]:
    """Ulysses gives every rank whole groups of heads."""
    model, parallelism = experiment.model, experiment.parallelism
    if parallelism.cp_method != "ulysses" or not (model.heads % parallelism.cp or model.kv_heads % parallelism.cp):
        return
    works = nearest_numbers(parallelism.cp, divisors(math.gcd(model.heads, model.kv_heads)))
    yield Violation(
        "parallelism.cp",
        parallelism.cp,
        f"ulysses divides heads among ranks, and {model.heads} query heads with {model.kv_heads} key and value heads "
        f"cannot be divided by {parallelism.cp}",
        f"parallelism.cp={listed(works)}; or parallelism.cp_method=ring or allgather, which divide no heads",
    )


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


def messages_are_not_captured(experiment: Experiment) -> Iterator[Violation]:
    """A CUDA graph would replay the messages between ranks, which nobody has shown to work here."""
    if experiment.compile.compiles("blocks") and experiment.compile.backend == "cudagraphs":
        yield Violation(
            "compile.backend",
            experiment.compile.backend,
            f"with parallelism.cp={experiment.parallelism.cp}, blocks hold messages between ranks, "
            "which CUDA graphs do not take",
            "compile.backend=inductor or aot_eager",
        )


def shared_sequences(experiment: Experiment) -> Iterator[Violation]:
    """The rules of this file, where sequences are shared."""
    if experiment.parallelism.cp == 1:
        return
    for rule in (blocks_can_share, sequence_divides, heads_divide, kernel_merges, messages_are_not_captured):
        yield from rule(experiment)


RULES = (shared_sequences,)
