"""Terms of lower bounds: costs of a layout's block and ends, scaled from the profile of another layout."""

from collections.abc import Sequence

from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.search.comparable import (
    SAFETY_FACTOR,
    copies_as_many_rows,
    has_fewer_operators,
    has_more_experts,
    operators_factor,
    safety_factor,
    same_lifetime,
    sequence_factor,
    shards_experts,
)
from titan_exp.plan.search.layouts import MODES, Candidate
from titan_exp.plan.search.profile import Profile
from titan_exp.plan.search.rank_load import RankLoad
from titan_exp.plan.time.roofline import axis_ranks, compute_seconds, expert_weights_seconds, message_seconds
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.kernel_classes import EXPERT_MATMULS, MEASURES

CONTEXT_AXES = {"cp_across", "cp_within"}
"""Mesh axes of context parallelism."""
WEIGHT_BYTES = 16
"""Upper bound of bytes that a micro-batch moves per weight of a block, for example to cast its gradient."""
WEIGHTS_MARGIN = 0.97
"""Margin of bytes scaled by the parameters of a block's linears, which leave out norms and replicated heads."""


class BoundTerms:
    """Terms of lower bounds on a device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._replicated: dict[int, frozenset[str]] = {}
        self._rates: dict[tuple[object, ...], tuple[float, float]] = {}
        self._affine: dict[int, tuple[float, float]] = {}
        """By number of a traced layout, bytes that a block moves per sequence and per weight."""
        self._sizes: dict[tuple[int, int, int], tuple[float, float]] = {}

    def compare(self, profile: Profile, others: Sequence[Profile]) -> None:
        """Compare a profile with those that differ in the size of micro-batches only."""
        own = profile.candidate
        for other in others:
            more = own.layout.micro_batch_size - other.candidate.layout.micro_batch_size
            if more and _shape(other.candidate) == _shape(own):
                per_sequence = (profile.token_bytes - other.token_bytes) / more
                of_weights = profile.token_bytes - per_sequence * own.layout.micro_batch_size
                per_weight = max(0.0, of_weights) / max(1.0, sum(self._parameters(own)))
                self._affine[own.number] = max(0.0, per_sequence), per_weight

    def terms(self, profile: Profile, candidate: Candidate, load: RankLoad, sampled: RankLoad) -> dict[str, float]:
        """Terms from one profile, as `unit: kind`, per micro-batch and block: seconds, bytes, operators, and messages
        in bytes and calls."""
        own, other = candidate.parallelism, profile.candidate.parallelism
        # Replicated weights are not divided by the degree.
        if own.tp < other.tp > candidate.kv_heads or not self._replicates(profile.candidate, candidate):
            return {}
        comparable_experts = has_more_experts(profile.candidate, candidate)
        terms = _parameter_bytes(profile, candidate, load, comparable_experts)
        mode = profile.candidate.mode
        terms |= self._saved_bytes(profile, candidate, load, sampled)
        # Recomputation adds to the costs of a profile.
        if mode not in ("none", candidate.mode):
            return terms
        tokens = load.tokens / sampled.tokens
        # Layouts choose the saved operators of selective recomputation.
        alike = 1.0 if mode == "none" or candidate.experts == profile.candidate.experts else SAFETY_FACTOR
        terms["block: compute"] = compute_seconds(profile.block, self._device) * tokens * other.tp / own.tp * alike
        terms["ends: compute"] = compute_seconds(profile.ends, self._device) * tokens * other.tp / own.tp
        terms |= self._messages(candidate, profile, tokens)
        terms |= self._moved(candidate, profile, load, sampled)
        terms |= _operators(profile, candidate)
        if not comparable_experts:
            return terms
        if own.pp == 1 and (candidate.shards > 1 or profile.candidate.shards == 1):
            terms |= _sharding_messages(profile, min(1.0, other.tp / own.tp))
        if (own.tp, own.cp, load.sequences) == (other.tp, other.cp, sampled.sequences):
            seconds = expert_weights_seconds(profile.block, self._device)
            terms["block: weights"] = max(seconds, terms.get("block: weights", 0.0))
        if other.cp > own.cp:
            return terms
        scale = other.cp / own.cp * (other.tp / own.tp if other.tp <= own.tp else 0.5)
        scale *= safety_factor(candidate, profile.candidate)
        # A pipeline gathers sharded weights before its first micro-batch, so `left` contains no weights.
        only_tokens = other.pp > 1 and profile.candidate.shards > 1
        comparable = mode == candidate.mode and (only_tokens or same_lifetime(profile.candidate, candidate))
        if comparable and (only_tokens or load.sequences <= sampled.sequences):
            copied = self.copied_expert_bytes(profile.candidate)
            left = max(0.0, profile.left - copied) * scale * load.sequences / sampled.sequences
            terms["left"] = max(left, terms.get("left", 0.0))
        if factor := sequence_factor(load.sequences, sampled.sequences):
            if comparable:
                terms["passing"] = profile.passing * scale * factor
            if has_fewer_operators(profile.candidate, candidate):
                bandwidth = max(self._device.bandwidth, self._device.copy_bandwidth)
                terms["ends: bytes"] = profile.ends.bytes_moved * scale * factor / bandwidth
        return terms

    def _moved(self, candidate: Candidate, profile: Profile, load: RankLoad, sampled: RankLoad) -> dict[str, float]:
        """Seconds of a block's operators that are bound by memory bandwidth, from one profile.

        Bytes of tokens, bytes of weights that do not depend on tokens, and operands of experts' matmuls.
        """
        own, other, terms = candidate.parallelism, profile.candidate.parallelism, dict[str, float]()
        bandwidth = self._device.bandwidth
        (dense, experts), (own_dense, own_experts) = self._parameters(profile.candidate), self._parameters(candidate)
        copied = self.copied_expert_bytes(profile.candidate)
        if not has_fewer_operators(profile.candidate, candidate):
            return terms
        per_tp = other.tp / own.tp if other.tp <= own.tp else 0.5
        rows = copies_as_many_rows(profile.candidate, candidate)
        lifetime = same_lifetime(profile.candidate, candidate) and shards_experts(profile.candidate, candidate)
        if rows and other.cp <= own.cp:
            factor = sequence_factor(load.sequences, sampled.sequences)
            moved = profile.token_bytes * factor * has_more_experts(profile.candidate, candidate)
            if not copied and factor:
                of_tokens = profile.token_bytes - WEIGHT_BYTES * (dense + experts)
                moved = max(moved, of_tokens * load.sequences / sampled.sequences)
            scale = other.cp / own.cp * per_tp * safety_factor(candidate, profile.candidate)
            moved *= scale
            if not copied and profile.candidate.number in self._affine:
                per_sequence, per_weight = self._affine[profile.candidate.number]
                if not lifetime:
                    per_weight = 0.0
                of_weights = per_weight * (own_dense + own_experts) * SAFETY_FACTOR * min(1.0, per_tp)
                moved = max(moved, WEIGHTS_MARGIN * scale * per_sequence * load.sequences + of_weights)
            terms["block: tokens"] = moved / bandwidth
        if lifetime:
            weights = WEIGHTS_MARGIN * min(1.0, per_tp if own.tp != other.tp else 1.0)
            weights *= (own_dense + own_experts) / (dense + experts) if experts else 1.0
            terms["block: gathered"] = profile.gathered_bytes * weights / self._device.copy_bandwidth
            if load.micro_batches > 1:
                summed = profile.summed_bytes * weights * (1 - 1 / load.micro_batches)
                terms["block: summed"] = summed / bandwidth
        flops, fp8, size, _ = (profile.block.kernels.get((EXPERT_MATMULS, measure), 0) for measure in MEASURES)
        if rows and size and not fp8 and other.tp <= own.tp:
            # Each pass reads or writes bf16 weights: forward, backward twice, and recomputation.
            passes = 3 if profile.candidate.mode == "none" else 4
            tokens = load.tokens / sampled.tokens * other.tp / own.tp
            least = 3 * 2 * own_experts + max(0.0, size - passes * 2 * experts) * tokens
            seconds = WEIGHTS_MARGIN * least / bandwidth - flops * tokens / self._device.matmul_rate
            terms["block: weights"] = max(0.0, seconds)
        return terms

    def _parameters(self, candidate: Candidate) -> tuple[float, float]:
        """Parameters of a block's linears on a rank before they are sharded: dense ones and those of experts."""
        key = candidate.parallelism.tp, candidate.parallelism.ep, candidate.parallelism.etp
        if key not in self._sizes:
            spec = candidate.spec
            layers = () if spec is None else spec.layers[-spec.period :]
            linears = [linear for layer in layers for linear in layer.linears]
            experts = sum(linear.parameters for linear in linears if linear.experts > 1)
            dense = sum(linear.parameters for linear in linears) - experts
            tp, ep, etp = key
            self._sizes[key] = dense / tp, experts / (ep * etp)
        return self._sizes[key]

    def copied_expert_bytes(self, candidate: Candidate, *, surely: bool = False) -> float:
        """Bytes of the bf16 weights that every forward pass of experts on a single shard copies and saves.

        A pipeline copies them once. True for `surely` leaves out layouts that may not copy them.
        """
        if candidate.experts is None or candidate.experts[-1] or candidate.parallelism.pp > 1:
            return 0.0
        if surely and (candidate.shards == 1 or candidate.parallelism.dp_replicate > 1):
            return 0.0
        return 2 * self._parameters(candidate)[1] * (0.999 if surely else 1)

    def expert_messages(self, candidate: Candidate, micro_batches: int) -> float:
        """Seconds of FSDP's messages of a block's experts: bf16 weights gathered, fp32 gradients reduced once."""
        if candidate.experts is None or not candidate.experts[-1]:
            return 0.0
        axis, size = "efsdp" if candidate.experts[2] else "fsdp", 0.999 * self._parameters(candidate)[1]
        # Freed weights are gathered again for backward.
        gathers = 1 if candidate.layout.reshard_policy == "never" else 2 * micro_batches
        gathered = gathers * self.message(candidate, axis, "all-gather", 2 * size, 1)
        return gathered + self.message(candidate, axis, "reduce-scatter", 4 * size, 1)

    def gathered_experts(self, candidate: Candidate) -> float:
        """Lower bound of a layer's experts' parameters that a rank without a pipeline gathers at once."""
        if candidate.spec is None or candidate.experts is None or candidate.parallelism.pp > 1:
            return 0.0
        layers = candidate.spec.layers[-candidate.spec.period :]
        return 0.999 * self._parameters(candidate)[1] / max(1, sum(layer.router is not None for layer in layers))

    def expert_bytes(self, candidate: Candidate) -> tuple[float, float]:
        """Bytes of a block's experts in several micro-batches: bf16 weights that a pipeline gathers, and gradients,
        which sharding sums in fp32."""
        if candidate.experts is None:
            return 0.0, 0.0
        size = 0.999 * self._parameters(candidate)[1]
        return 2 * size * (candidate.parallelism.pp > 1), (4 if candidate.experts[-1] else 2) * size

    def _saved_bytes(
        self, profile: Profile, candidate: Candidate, load: RankLoad, sampled: RankLoad
    ) -> dict[str, float]:
        """Bytes that a block's forward pass saves, from a profile of the same or more recomputation."""
        own, other, modes = (
            candidate.parallelism,
            profile.candidate.parallelism,
            (candidate.mode, profile.candidate.mode),
        )
        saves_less = modes[0] == modes[1] or (
            set(modes) <= set(MODES) and MODES.index(modes[0]) < MODES.index(modes[1])
        )
        if not saves_less or other.cp > own.cp or not copies_as_many_rows(profile.candidate, candidate):
            return {}
        scale = other.cp / own.cp * (other.tp / own.tp if other.tp <= own.tp else 0.5)
        scale *= safety_factor(candidate, profile.candidate)
        saved = max(0.0, profile.saved - self.copied_expert_bytes(profile.candidate))
        return {"left": saved * scale * load.sequences / sampled.sequences}

    def _replicates(self, sampled: Candidate, candidate: Candidate) -> bool:
        """True if a layout replicates every linear that a sampled one does."""
        for each in (sampled, candidate):
            if each.parallelism.tp not in self._replicated:
                self._replicated[each.parallelism.tp] = each.replicated
        return self._replicated[sampled.parallelism.tp] <= self._replicated[candidate.parallelism.tp]

    def _messages(self, candidate: Candidate, profile: Profile, tokens: float) -> dict[str, float]:
        """Seconds of messages of a block and of the ends from one profile, and those between stages in bytes."""
        own, other, terms = candidate.parallelism, profile.candidate.parallelism, dict[str, float]()
        smaller, same_tp = min(1.0, other.tp / own.tp), own.tp == other.tp
        for (axis, kind), size in profile.block.messages.items():
            factor, calls, among, names = 0.0, 1.0, axis, set(axis.split("="))
            if "ep" in names and kind == "all-to-all":
                # Ranks that share channels receive rows of each other's tokens.
                if own.ep > 1 and own.etp == other.etp and (same_tp or own.etp == 1) and not names & CONTEXT_AXES:
                    factor, among = tokens * other.tp / own.tp, "ep"
            elif "etp" in names:
                factor, among = tokens * (same_tp and own.etp == other.etp), "tp" if "tp" in names else axis
            elif axis == "tp" and own.tp > 1:
                # Ranks that share channels of experts exchange rows on this axis too. Where experts are sharded over
                # just these ranks, no message on them differs from FSDP's.
                of_fsdp = candidate.shards == 1 and candidate.experts is not None and own.ep * own.etp == 1
                factor = tokens * (not of_fsdp and (other.etp == 1 or own.etp > 1))
            elif names <= CONTEXT_AXES and 1 < other.cp <= own.cp:
                factor = tokens * smaller
                if axis == "cp_across":
                    # For two ranks, at least half of a ring's hops exist.
                    calls = (own.cp // own.ulysses_degree) / (other.cp // other.ulysses_degree)
                    factor *= calls
            if factor:
                calls *= profile.block.calls[axis, kind]
                terms[f"sent: {among} {kind}"] = self.message(candidate, among, kind, size * factor, calls)
        if other.tp > 1 < own.tp and has_fewer_operators(profile.candidate, candidate):
            for (axis, kind), size in profile.ends.messages.items():
                if axis == "tp":
                    calls = profile.ends.calls[axis, kind]
                    terms[f"ends sent: {kind}"] = self.message(candidate, "tp", kind, size * tokens * smaller, calls)
        if own.pp > 1 < other.pp:
            terms["handed over"] = profile.message.messages.get(("pp", "send"), 0) * tokens * smaller
        return terms

    def message(self, candidate: Candidate, axis: str, kind: str, size: float, calls: float) -> float:
        """Seconds of `calls` messages of `size` bytes together."""
        parallelism = candidate.parallelism
        among = (parallelism.tp, parallelism.cp, parallelism.ep, parallelism.etp)
        degrees = {"pp": (parallelism.pp,), "tp": (parallelism.tp,)}.get(axis, among)
        key = axis, kind, degrees, parallelism.dp_shard if "fsdp" in axis else 0
        if key not in self._rates:
            costs = OpCosts()
            costs.messages[axis, kind] = 1
            ranks, node = axis_ranks(parallelism, 0, costs)[axis], candidate.layout.node_size
            per_byte = message_seconds(kind, 2**40, ranks, self._device, node) / 2**40
            self._rates[key] = per_byte, message_seconds(kind, 0, ranks, self._device, node, calls=1)
        per_byte, latency = self._rates[key]
        return size * per_byte + calls * latency


def _parameter_bytes(
    profile: Profile, candidate: Candidate, load: RankLoad, comparable_experts: bool
) -> dict[str, float]:
    """Bytes of a block that are constant over micro-batches; kept ones of all shards."""
    smaller = min(1.0, profile.candidate.parallelism.tp / candidate.parallelism.tp) * 0.999
    shards = profile.candidate.shards
    if profile.candidate.spec is not None and profile.candidate.experts and not profile.candidate.experts[2]:
        # Whole experts are sharded, of which the first ranks have more than the mean.
        shards = min(shards, *(linear.experts for linear in profile.candidate.spec.expert_linears))
    terms = {"kept": profile.kept * smaller * shards}
    if same_lifetime(profile.candidate, candidate):
        # Gradients of a single micro-batch may be in bf16, two of some twenty bytes per weight.
        terms["updated"] = 0.88 * profile.updated * smaller * shards
    if same_lifetime(profile.candidate, candidate) and comparable_experts and load.micro_batches > 1:
        terms["gathered"] = profile.gathered * smaller
        terms["gradients"] = profile.gradients * smaller
        terms["first"] = profile.first_gathered * smaller
        terms["first kept"] = profile.first_kept * smaller * profile.candidate.shards
    return terms


def _operators(profile: Profile, candidate: Candidate) -> dict[str, float]:
    """Operators of a block and of the ends, by micro-batch, and of a block's optimizer step."""
    own, other = candidate.parallelism, profile.candidate.parallelism
    terms: dict[str, float] = {"updated operators": profile.updated_operators * (other.tp <= own.tp)}
    if factor := operators_factor(profile.candidate, candidate):
        terms["operators"] = profile.block.operators * factor
        if profile.candidate.shards == 1 or candidate.shards > 1:
            terms["end operators"] = profile.ends.operators * factor
    return terms


def _sharding_messages(profile: Profile, smaller: float) -> dict[str, float]:
    """Bytes and calls of FSDP's messages of a block, without all-gathers on cp's axes, maybe of keys."""
    gathers = [
        (profile.block.messages[axis, kind], profile.block.calls[axis, kind])
        for axis, kind in profile.block.messages
        if kind == "all-gather" and "fsdp" in (names := set(axis.split("="))) and not names & CONTEXT_AXES
    ]
    terms = {"all-gather bytes": smaller * sum(size for size, _ in gathers)}
    terms["all-gather calls"] = sum(calls for _, calls in gathers)
    for (axis, kind), size in profile.reduced.messages.items():
        if axis == "fsdp":
            terms |= {f"{kind} bytes": size * smaller, f"{kind} calls": profile.reduced.calls[axis, kind]}
    return terms


def _shape(candidate: Candidate) -> tuple[object, ...]:
    """Everything that a block's costs depend on, but the micro-batch's size."""
    own = candidate.parallelism
    sharding = candidate.shards == 1, candidate.has_one_data_rank
    return own.tp, own.cp, candidate.experts, candidate.mode, own.pp > 1, *sharding
