"""Expert parallelism rules: degrees that regroup the ranks, experts and channels that they divide."""

import math
from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation, listed, multiples_near
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.models.spec.lookup import has_experts, model_spec
from titan_exp.models.spec.model_spec import LinearSpec, ModelSpec
from titan_exp.models.spec.tp_plan import Colwise
from titan_exp.rules.rule import Refuse, check_multiple, check_number, rules

SYMMETRIC_RANKS = SYMMETRIC_EXPERTS = 16
"""Ranks, and experts of a rank, that torch 2.13's exchange over NVSHMEM has warps for: 512 threads of a block."""
EP, ETP, TP = "parallelism.ep", "parallelism.etp", "parallelism.tp"


def degree_divides(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """Expert-parallel ranks are taken from those of tp, cp and dp_shard, and each has as many experts."""
    ep, etp, ranks = parallelism.ep, _etp(parallelism), _ranks(parallelism)
    if not _regroups(ep, parallelism):
        needed = f"{ETP} · ep = {etp * ep}" if etp > 1 else f"{ep}"
        reason = (
            f"experts are divided among the ranks of parallelism.dp_shard · cp · tp = {ranks}, and {needed} does "
            "not divide that"
        )
        step = ep * etp // math.gcd(ep * etp, parallelism.cp * parallelism.tp)
        shards = "" if _rest(spec, ep) else f", or use parallelism.dp_shard={-(-parallelism.dp_shard // step) * step}"
        yield from _refused(spec, parallelism, reason, shards)
    elif rest := _rest(spec, ep):
        yield from _refused(spec, parallelism, f"{ep} ranks cannot share {rest[0]} experts evenly")


def channels_are_whole_or_tensor_parallel(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """Experts' channels are whole, or divided among all tensor-parallel ranks."""
    tp, etp = parallelism.tp, parallelism.etp
    if etp not in (1, tp):
        reason = f"either a rank holds whole experts ({ETP}=1) or the {tp} ranks of {TP} divide each of them"
        yield Violation(ETP, etp, reason, f"use {ETP}={listed(sorted({1, tp}))}, or {TP}={etp}")
        return
    for style in dict.fromkeys(linear.tp for linear in spec.expert_linears):
        if isinstance(style, Colwise) and not style.divides(etp):
            more = f", or use {style.key}={listed(multiples_near(style.units * style.width, style.width * etp))}"
            reason = f"{etp} ranks cannot share {style.described} evenly, in groups of {style.width}"
            yield Violation(ETP, etp, reason, f"nearest: {ETP}=1{more}")
    biased = [linear.outputs for linear in spec.expert_linears if linear.bias and linear.outputs % etp]
    if biased:
        reason = f"{etp} ranks cannot share the {biased[0]} outputs of the experts' biases evenly"
        yield Violation(ETP, etp, reason, f"use {ETP}=1")


def expert_shards_divide(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """FSDP can shard the experts' weights evenly by a dim, if expert parallelism shards them too."""
    if uneven := _uneven(spec, parallelism, parallelism.ep):
        shards = _ranks(parallelism) // (parallelism.ep * _etp(parallelism))
        reason = (
            f"FSDP cuts the experts of a rank into {shards} shards, which divide neither their number nor the "
            f"channels of {listed(uneven, 'and')}"
        )
        yield from _refused(spec, parallelism, reason, ", or choose another parallelism.dp_shard")


def tokens_of_experts_divide(
    spec: ModelSpec, parallelism: ParallelismConfig, training: TrainingConfig
) -> Iterator[Violation]:
    """Tensor-parallel ranks route as many tokens of each sequence, with or without sequence parallelism."""
    degree = math.lcm(parallelism.sequence_chunks, parallelism.cp * parallelism.tp)
    if not parallelism.sequence_parallel and training.seq_len % parallelism.sequence_chunks == 0:
        reason = f"each of the {parallelism.tp} ranks of parallelism.tp routes the same number of its tokens to experts"
        yield from check_multiple("training.seq_len", training.seq_len, degree, reason)


def symmetric_memory_is_supported(spec: ModelSpec, parallelism: ParallelismConfig, device: str) -> Iterator[Violation]:
    """Symmetric memory is that of GPUs, and its kernels have a thread or a warp for each rank and expert."""
    field, ep = "parallelism.token_exchange", parallelism.ep
    if parallelism.token_exchange == "all_to_all" or _rest(spec, ep):
        return
    local, remedy = max(linear.experts for linear in spec.expert_linears) // ep, ""
    if ep == 1:
        reason = "with parallelism.ep=1 the ranks exchange no tokens"
    elif device == "cpu":
        reason = "it needs symmetric memory, which a CPU lacks"
    elif parallelism.async_tp:
        reason = "parallelism.async_tp uses another kind of symmetric memory, and a run can have only one"
        remedy = "parallelism.async_tp=false, or "
    elif ep > SYMMETRIC_RANKS or local > SYMMETRIC_EXPERTS:
        reason = (
            f"torch's kernel takes at most {SYMMETRIC_RANKS} ranks with {SYMMETRIC_EXPERTS} experts each, "
            f"and {EP}={ep} gives each rank {local}"
        )
    else:
        return
    yield Violation(field, parallelism.token_exchange, reason, f"use {remedy}{field}=all_to_all")


def _is_named(key: str, model: ModelConfig) -> bool:
    """True if the spec itself says why the model cannot be divided along an axis."""
    spec = model_spec(model)
    return spec is not None and any(unsupported.key == key for unsupported in spec.unsupported)


def _etp(parallelism: ParallelismConfig) -> int:
    """Degree of the experts' channels; 1 if refused."""
    return parallelism.etp if parallelism.etp == parallelism.tp else 1


def _ranks(parallelism: ParallelismConfig) -> int:
    """Ranks that experts are divided among."""
    return parallelism.dp_shard * parallelism.cp * parallelism.tp


def _regroups(ep: int, parallelism: ParallelismConfig) -> bool:
    """True if the degree divides these ranks."""
    return _ranks(parallelism) % (ep * _etp(parallelism)) == 0


def _rest(spec: ModelSpec, ep: int) -> list[int]:
    """Numbers of experts that the degree does not divide."""
    return [linear.experts for linear in spec.expert_linears if linear.experts % ep]


def _uneven(spec: ModelSpec, parallelism: ParallelismConfig, ep: int) -> list[str]:
    """Experts' linears of which no dim is divided evenly by FSDP; others than DTensors need not be."""
    etp = _etp(parallelism)
    if ep * etp == 1 or not _regroups(ep, parallelism) or _rest(spec, ep):
        return []
    shards = _ranks(parallelism) // (ep * etp)
    return [
        linear.name
        for linear in spec.expert_linears
        if any(all(size % shards for size in sizes) for sizes in _local_sizes(linear, ep, etp))
    ]


def _refused(spec: ModelSpec, parallelism: ParallelismConfig, reason: str, more: str = "") -> Iterator[Violation]:
    """Violation of the degree, with the nearest that work."""

    def works(ep: int) -> bool:
        return _regroups(ep, parallelism) and not _rest(spec, ep) and not _uneven(spec, parallelism, ep)

    largest, alone = _ranks(parallelism), f"use {ETP}=1"
    yield from check_number(EP, parallelism.ep, works, reason, largest=largest, more=more, otherwise=alone)


def _local_sizes(linear: LinearSpec, ep: int, etp: int) -> list[tuple[int, ...]]:
    """Shapes of a rank's part of a stacked weight and of its bias, before FSDP."""
    by_rows = linear.divided == "outputs"
    outputs, inputs = linear.outputs // (etp if by_rows else 1), linear.inputs // (1 if by_rows else etp)
    experts = linear.experts // ep
    return [(experts, outputs, inputs), *([(experts, linear.outputs // etp)] if linear.bias else [])]


EXPERT_RULES = (
    *rules(
        Refuse(
            EP,
            lambda model, parallelism: parallelism.ep > 1 and not has_experts(model) and not _is_named(EP, model),
            "{model.name} has no experts",
            "use parallelism.ep=1 parallelism.dp_shard={parallelism.ep}, or a model with experts",
        ),
        Refuse(
            ETP,
            lambda model, parallelism: parallelism.etp > 1 and not has_experts(model),
            "{model.name} has no experts",
            "use parallelism.etp=1 (parallelism.tp divides the channels of other feed-forward layers)",
        ),
    ),
    *rules(
        channels_are_whole_or_tensor_parallel,
        tokens_of_experts_divide,
        symmetric_memory_is_supported,
        when=lambda spec: spec is not None and spec.has_experts,
    ),
)

EXPERT_LAYOUT_RULES = rules(
    degree_divides, expert_shards_divide, when=lambda spec: spec is not None and spec.has_experts
)
