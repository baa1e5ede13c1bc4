"""What a layout takes at least, from traces of others: which of them have to be traced at all.

Nothing is divided by more than a degree: on ranks of twice the tensor or context parallelism, and with half the
micro-batch, an operator moves at least half the bytes and leaves at least half of what it left, while operations are
exactly half. Messages of tensor parallelism are whole hidden states, whatever its degree.
"""

from dataclasses import dataclass
from functools import cache

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.extrapolate.stage_sample import FIRST, LAST, MIDDLE, StageSample
from titan_exp.plan.extrapolate.step_cost import TracedParts
from titan_exp.plan.search.layout_cost import axes_of, kv_heads, safety_factor
from titan_exp.plan.time.roofline import message_seconds
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.segments import Segment, join_segments, sum_costs

BOUND_MARGIN = 0.985
"""Of what follows from other traces, what is relied on: sizes are rounded up, and in places copies become views."""


@dataclass(frozen=True)
class Profile:
    """What a trace tells of a micro-batch that is neither the first nor the last, where there is such a one."""

    experiment: Experiment
    """Whose it is."""
    block: OpCosts
    """Of a block in the middle, forward and backward."""
    ends: OpCosts
    """Of the head and the loss on the last rank, and of the embedding where it is on the same."""
    left: int
    """Bytes that a block's forward pass leaves for its backward pass."""
    passing: int
    """Bytes that a backward pass takes for a moment beyond what was left for it."""
    kept: int
    """Bytes of a block's parameters and the optimizer's state."""
    gathered: int
    """Bytes that stay of a block from the first micro-batch on: gathered parameters, gradients before they are
    reduced."""
    first_kept: int
    """As `kept`, of the embedding on the first rank of a pipeline."""
    first_gathered: int
    """Likewise as `gathered`."""
    reduced: OpCosts
    """Messages of a block's gradients in a step without a pipeline."""


@dataclass(frozen=True)
class LowerBound:
    """What a layout takes at least."""

    seconds: float
    """Of a step."""
    bytes: float
    """On the rank with the most layers, or the first one."""


def profile_of(experiment: Experiment, parts: TracedParts) -> Profile | None:
    """What a trace tells; None where it has no block that is like most of them.

    Args:
        experiment: that was traced.
        parts: its trace.
    """
    if parts.stage_optimizer_steps is None:
        return _of_whole(experiment, parts)
    if False not in parts.stage_samples:
        return None
    sample = parts.stage_samples[False][0]
    forward, backward = (_middle(sample.actions[MIDDLE, kind, False].blocks) for kind in "FB")
    first = [_middle(sample.actions[MIDDLE, kind, True].blocks) for kind in "FB"]
    last = [sample.actions[LAST, kind, False] for kind in "FB"]
    ends = sum_costs([piece.costs for window in last for piece in (*window.before, *window.after)])
    grown = sum(int((early.net - late.net).sum()) for early, late in zip(first, (forward, backward), strict=True))
    return Profile(
        experiment,
        sum_costs([forward.costs, backward.costs]),
        ends,
        max(0, int(forward.net.sum())),
        int(backward.peak.sum()),
        int(parts.stage_optimizer_steps.block.persistent.sum()),
        max(0, grown),
        int(parts.stage_optimizer_steps.first.persistent.sum()),
        max(0, _grown_outside(sample, FIRST)),
        OpCosts(),
    )


def _of_whole(experiment: Experiment, parts: TracedParts) -> Profile:
    assert parts.model_optimizer_steps is not None, "one of them is there"
    passes = parts.model_samples[0].micro_batches[min(1, len(parts.model_samples[0].micro_batches) - 1)]
    forward, backward = _middle(passes.forward), _middle(passes.backward)
    # Gradients are reduced once, in whichever micro-batch that is.
    reduced = OpCosts()
    for each in parts.model_samples[0].micro_batches:
        for (axis, kind), size in _middle(each.backward).costs.messages.items():
            if kind in ("reduce-scatter", "all-reduce") and _is_sharding(axis):
                reduced.messages[axis, kind] += size
    one, two = parts.model_optimizer_steps
    first = parts.model_samples[0].micro_batches[0]
    grown = int((_middle(first.forward).net + _middle(first.backward).net).sum())
    return Profile(
        experiment,
        sum_costs([forward.costs, backward.costs]),
        sum_costs([piece.costs for piece in (*passes.before, *passes.between, *passes.after)]),
        max(0, int(forward.net.sum())),
        max(int(backward.peak.sum()), int(join_segments("ends", passes.between).peak.sum())),
        int((two.persistent - one.persistent).sum()),
        max(0, grown) if len(parts.model_samples[0].micro_batches) > 1 else 0,
        0,
        0,
        reduced,
    )


class LowerBounds:
    """Bounds of layouts, which rise with every profile that is learned.

    Args:
        device: what layouts run on.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._profiles: list[Profile] = []
        self._rates: dict[tuple[object, ...], float] = {}

    def add(self, profile: Profile) -> None:
        """Take note of a trace."""
        self._profiles.append(profile)

    def of(self, experiment: Experiment, bubble: float | None = None) -> LowerBound:
        """What a layout, resolved, takes at least.

        Args:
            experiment: with this layout.
            bubble: of its pipeline, where it is known.
        """
        share = _share_of(experiment)
        # Of operations, bytes and messages each by itself, what most is known of.
        most: dict[str, float] = {}
        for profile in self._profiles:
            for name, value in self._terms(experiment, share, profile).items():
                most[name] = max(value, most.get(name, 0.0))
        block, ends, behind = (
            sum(value for name, value in most.items() if name.startswith(unit)) for unit in ("block", "ends", "behind")
        )
        working = share.micro_batches * max(share.layers * block, share.last_layers * block + ends)
        # The first and the last block are gathered once a micro-batch, or not at all.
        behind = max(0, share.layers - 2) * (share.micro_batches * behind + most.get("reduces", 0.0))
        least = _least_bubble(experiment, share.micro_batches)
        seconds = max(working, behind) / (1 - (least if bubble is None else max(bubble, least)))
        stays = most.get("kept", 0.0) + most.get("gathered", 0.0)
        first = (
            most.get("first", 0.0)
            + share.first_layers * stays
            + share.chunks * most.get("left", 0.0)
            + most.get("passing", 0.0)
        )
        return LowerBound(BOUND_MARGIN * seconds, BOUND_MARGIN * max(share.layers * stays, first))

    def _terms(self, experiment: Experiment, share: "_Share", profile: Profile) -> dict[str, float]:
        """What one profile tells of a micro-batch and a block: seconds by unit and kind of work, and bytes held."""
        own, other = experiment.parallelism, profile.experiment.parallelism
        # Beyond that, weights are divided by less than the degree.
        if own.tp < other.tp > kv_heads(experiment):
            return {}
        there = _share_of(profile.experiment)
        found = _held(profile, own, there, share)
        mode = profile.experiment.activation_checkpoint.mode
        # What is computed anew comes on top.
        if mode not in ("none", experiment.activation_checkpoint.mode):
            return found
        tokens = share.tokens / there.tokens
        rate = self._device.matmul_rate
        found["block flops"] = profile.block.flops * tokens * other.tp / own.tp / rate
        found["ends flops"] = profile.ends.flops * tokens * other.tp / own.tp / rate
        found |= self._messages(experiment, profile, tokens)
        if other.cp > own.cp:
            return found
        scale = other.cp / own.cp * (other.tp / own.tp if other.tp <= own.tp else 0.5)
        scale *= safety_factor(experiment, profile.experiment)
        same = mode == experiment.activation_checkpoint.mode
        # With a pipeline, sharded weights are gathered before, and no part of what a later micro-batch leaves.
        tokens_alone = other.pp > 1 and there.shards > 1
        alike = same and (tokens_alone or _kept_alike(profile, own, there, share))
        if alike and (tokens_alone or share.sequences <= there.sequences):
            found["left"] = profile.left * scale * share.sequences / there.sequences
        if factor := _of_sizes(share, there):
            if alike:
                found["passing"] = profile.passing * scale * factor
            if _comparable(profile.experiment, experiment):
                bandwidth = self._device.bandwidth_tbs * 1e12 * self._device.bandwidth_share
                found["block bytes"] = profile.block.bytes_moved * scale * factor / bandwidth
                found["ends bytes"] = profile.ends.bytes_moved * scale * factor / bandwidth
        return found

    def _messages(self, experiment: Experiment, profile: Profile, tokens: float) -> dict[str, float]:
        """Of these seconds, those of messages."""
        own, other, found = experiment.parallelism, profile.experiment.parallelism, dict[str, float]()
        smaller = min(1.0, other.tp / own.tp)
        for (axis, kind), size in profile.block.messages.items():
            factor, unit = 0.0, "block"
            if axis == "tp" and own.tp > 1:
                factor = tokens
            elif axis.startswith("cp_") and "=" not in axis and 1 < other.cp <= own.cp:
                factor = tokens * smaller
                if axis == "cp_across":
                    # Half of a ring's hops are there for every two ranks, at least.
                    factor *= (own.cp // own.ulysses_degree) / (other.cp // other.ulysses_degree)
            elif axis == "fsdp" and own.pp == 1 and kind == "all-gather":
                factor, unit = smaller, "behind"
            if factor:
                found[f"{unit} {axis} {kind}"] = size * factor * self._rate(experiment, axis, kind)
        if own.pp == 1:
            found["reduces"] = sum(
                size * smaller * self._rate(experiment, axis, kind)
                for (axis, kind), size in profile.reduced.messages.items()
                if axis == "fsdp"
            )
        return found

    def _rate(self, experiment: Experiment, axis: str, kind: str) -> float:
        """Seconds of a byte of such messages."""
        parallelism = experiment.parallelism
        key = (axis, kind, parallelism.tp, parallelism.cp, parallelism.dp_shard if axis == "fsdp" else 0)
        if key not in self._rates:
            work = OpCosts()
            work.messages[axis, kind] = 1
            ranks = axes_of(experiment, 0, work)[axis]
            node = ResolvedLayout.of(experiment).node_size
            self._rates[key] = message_seconds(kind, 2**40, ranks, self._device, node) / 2**40
        return self._rates[key]


@dataclass(frozen=True)
class _Share:
    """What a rank has to do."""

    tokens: float
    """Of a micro-batch."""
    sequences: int
    """Likewise."""
    micro_batches: int
    shards: int
    layers: int
    """Of the rank with the most."""
    first_layers: int
    """Of the first."""
    last_layers: int
    """Of the last."""
    chunks: int
    """Blocks that the first one has gone forward through, and not back, when that is the most."""


@cache
def in_flight(schedule: str, ranks: int, own: tuple[int, ...], micro_batches: int) -> int:
    """Blocks that the first rank has gone forward through before it goes back through the first, at least.

    Args:
        schedule: the pipeline's.
        ranks: of it.
        own: layers of each stage of that rank.
        micro_batches: of a step.
    """
    if schedule == "1F1B":
        return own[0] * min(ranks, micro_batches)
    if schedule == "Interleaved1F1B" and micro_batches % ranks == 0:
        # As many micro-batches as there are ranks through each of its stages but the last, and on until one comes back.
        turns = min((len(own) + 1) * ranks - 1, micro_batches * len(own))
        return sum(own[(turn // ranks) % len(own)] for turn in range(turns))
    return sum(own)


def _share_of(experiment: Experiment) -> _Share:
    parallelism, layers = experiment.parallelism, experiment.model.layers
    layout = ResolvedLayout.of(experiment)
    size, batches, ranks = layout.micro_batch_size, layout.gradient_accumulation, parallelism.pp
    by_rank, held = [layers], layers
    if ranks > 1:
        placed = list(zip(layout.stage_placement, layout.layer_counts, strict=True))
        by_rank = [sum(count for rank, count in placed if rank == each) for each in range(ranks)]
        own = tuple(count for rank, count in placed if rank == 0)
        held = in_flight(parallelism.pp_schedule, ranks, own, batches)
    return _Share(
        tokens=size * experiment.training.seq_len / parallelism.cp,
        sequences=size,
        micro_batches=batches,
        shards=parallelism.dp_shard * parallelism.cp,
        layers=max(by_rank),
        first_layers=by_rank[0],
        last_layers=by_rank[-1],
        chunks=held,
    )


def _held(profile: Profile, own: ParallelismConfig, there: _Share, share: _Share) -> dict[str, float]:
    """Bytes of a block that are of no micro-batch."""
    other = profile.experiment.parallelism
    smaller = min(1.0, other.tp / own.tp) * 0.999
    kept = smaller * there.shards / share.shards
    found = {"kept": profile.kept * kept}
    if _kept_alike(profile, own, there, share) and share.micro_batches > 1:
        found["gathered"] = profile.gathered * smaller
        found["first"] = profile.first_gathered * smaller + profile.first_kept * kept
    return found


def _kept_alike(profile: Profile, own: ParallelismConfig, there: _Share, share: _Share) -> bool:
    """Whether weights stay as long in one as in the other; what is not sharded is not gathered either."""
    return (own.pp > 1) == (profile.experiment.parallelism.pp > 1) and (share.shards == 1) == (there.shards == 1)


def _grown_outside(sample: StageSample, stage: str) -> int:
    """What the first micro-batch leaves behind, and no other does, beside blocks."""
    found = 0
    for kind in "FB":
        for first, sign in ((True, 1), (False, -1)):
            window = sample.actions[stage, kind, first]
            found += sign * sum(int(piece.net.sum()) for piece in (*window.before, *window.after))
    return found


def _middle(pieces: list[Segment]) -> Segment:
    return pieces[len(pieces) // 2]


def _is_sharding(axis: str) -> bool:
    return bool({"fsdp", "dp_replicate"} & set(axis.split("=")))


def _of_sizes(share: _Share, there: _Share) -> float:
    """Of what a profile's micro-batch takes, the part that another's takes at least.

    Of one sequence there are fewer copies than of several, whose layouts in memory differ.
    """
    if share.sequences == there.sequences:
        return 1.0
    if share.sequences == 1:
        return 0.0
    if there.sequences == 1:
        return 1.0
    return min(1.0, share.sequences / there.sequences)


def _comparable(sampled: Experiment, experiment: Experiment) -> bool:
    """Whether operators of one are among those of the other, too: a pipeline gathers and reduces the least."""
    if sampled.parallelism.pp > 1:
        return True
    few = [min(ResolvedLayout.of(its).gradient_accumulation, 3) for its in (sampled, experiment)]
    return experiment.parallelism.pp == 1 and few[0] == few[1]


def _least_bubble(experiment: Experiment, micro_batches: int) -> float:
    """What no schedule is below whose stages go round the ranks.

    The last rank waits until the first micro-batch has come through a stage of every other, and after its last one
    they are not done.
    """
    ranks = experiment.parallelism.pp
    if ranks == 1:
        return 0.0
    waits = (ranks - 1) * ranks / ResolvedLayout.of(experiment).stage_count
    return waits / (micro_batches + waits)
