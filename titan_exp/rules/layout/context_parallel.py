"""Context parallelism rules: divisible sequences and heads, and attention kernels that return the log-sum-exp."""

import math
from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.machine.torch_features import ATTENTION_BACKEND, FLASH_WITH_LSE, MERGING
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.rules.rule import Refuse, check_multiple, check_number, rules


def groups_divide(parallelism: ParallelismConfig) -> Iterator[Violation]:
    """Ranks that share a sequence form equal Ulysses groups; with cp_method=ulysses there is one group."""
    cp, degree, field = parallelism.cp, parallelism.cp_ulysses, "parallelism.cp_ulysses"
    if degree > 1 and parallelism.cp_method == "ulysses":
        reason = "with parallelism.cp_method=ulysses all ranks exchange heads"
        yield Violation(field, degree, reason, f"{field}=1, or parallelism.cp_method=ring or allgather")
        return
    reason = f"parallelism.cp={cp} ranks are not divided into equal groups by it"
    yield from check_number(field, degree, lambda size: cp % size == 0, reason, largest=cp)


def sequence_divides(spec: ModelSpec, parallelism: ParallelismConfig, training: TrainingConfig) -> Iterator[Violation]:
    """Every rank has the same number of tokens and the same amount of causal attention."""
    if spec.inputs is not None:  # whose streams are divided each, by a rule of theirs
        return
    chunks, cp = parallelism.sequence_chunks, parallelism.cp
    per_rank = "" if chunks == cp else f", two for each of {cp} ranks"
    reason = f"parallelism.cp={cp} by {parallelism.cp_method} cuts a sequence into {chunks} equal chunks{per_rank}"
    yield from check_multiple("training.seq_len", training.seq_len, chunks, reason)


def heads_divide(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """The Ulysses degree divides the heads of a tensor-parallel rank in every layer."""
    degree, tp = parallelism.ulysses_degree, parallelism.tp
    if spec.attention is None or degree == 1:
        return
    of_a_rank = [
        (attention.heads // tp, max(1, attention.kv_heads // tp))
        for attention in spec.attentions
        if attention.heads % tp == 0
    ]
    common = math.gcd(*(size for sizes in of_a_rank for size in sizes))
    indivisible = [sizes for sizes in of_a_rank if math.gcd(*sizes) % degree]
    if not indivisible:
        return
    heads, kv_heads = indivisible[0]
    in_layers = "" if len(of_a_rank) == 1 else " of some layers"
    with_tp = f", those of a rank with parallelism.tp={tp}," if tp > 1 else ""
    reason = (
        f"ulysses divides heads among ranks, and {heads} query heads with {kv_heads} key and value heads{in_layers}"
        f"{with_tp} cannot be divided by {degree}"
    )
    if parallelism.cp_method == "ulysses":
        field, more = "parallelism.cp", "; or parallelism.cp_method=ring or allgather, which divide no heads"
    else:
        field, more = "parallelism.cp_ulysses", ""
    yield from check_number(field, degree, lambda size: common % size == 0, reason, largest=common, more=more)


def kernel_merges(spec: ModelSpec, parallelism: ParallelismConfig, device: str) -> Iterator[Violation]:
    """With ring and all-gather, the attention kernel returns the log-sum-exp for merging partial results."""
    backend, method = spec.attention_backend, parallelism.cp_method
    if method == "ulysses":
        return
    # Kernels unavailable on CPUs violate the attention rules.
    if backend not in MERGING and (device == "cuda" or backend == "math"):
        yield Violation(
            ATTENTION_BACKEND,
            backend,
            f"parallelism.cp_method={method} merges parts of the softmax, which is written for other kernels",
            f"{ATTENTION_BACKEND}={'auto, flash or efficient' if device == 'cuda' else 'auto or flash'}; "
            "or parallelism.cp_method=ulysses, which takes every kernel",
        )
    multiple, more = FLASH_WITH_LSE.multiple, "; or parallelism.cp_method=ulysses"
    reason = f"on CUDA parallelism.cp_method={method} takes multiples of {multiple}"
    for key, head_dim in spec.head_dims if device == "cuda" else ():
        yield from check_multiple(key, head_dim, multiple, reason, more)


def _is_used(parallelism: ParallelismConfig) -> bool:
    return parallelism.cp > 1 and parallelism.cp % parallelism.cp_ulysses == 0


CONTEXT_RULES = (
    *rules(groups_divide),
    *rules(
        Refuse(
            "parallelism.cp",
            lambda model: (spec := model_spec(model)) is None or spec.attention is None,
            "context parallelism exchanges keys and values in the attention of the built-in blocks, which "
            "{model.architecture} does not describe",
            "parallelism.cp=1 parallelism.dp_shard={parallelism.cp}; or model.architecture=llama",
        ),
        sequence_divides,
        heads_divide,
        kernel_merges,
        when=_is_used,
    ),
)
