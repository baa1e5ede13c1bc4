"""Replica groups in the planner: sums over the groups, synchronizations of semi-synchronous training, and its
checkpoints. torch is imported only once a step has been traced."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from titan_exp.config.devices import device_type
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout, share_of_world
from titan_exp.extensions.replica_groups.config import SemiSyncConfig, fragments_of, semi_sync_of
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.plan.devices import Device
from titan_exp.plan.prediction import Beside, Exchange
from titan_exp.tracking.display import format_bytes

if TYPE_CHECKING:
    from titan_exp.plan.trace.memory_tracker import Moment
    from titan_exp.trainer.part import Part
    from titan_exp.trainer.train_state import TrainState

SYNCHRONIZATION = "synchronization"  # phase of semi-synchronous training between two steps
WITHOUT_EFFECT = ("outer_lr", "outer_nesterov")  # keys of `semi_sync` that do not affect predictions


class GroupExchange(Exchange):
    """Sums over replica groups: gradients in every step, or pseudo-gradients at synchronizations."""

    seconds_name = "sums over replica groups"

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self.config = semi_sync_of(experiment)
        self.groups = experiment.cluster.worlds

    @property
    def phase(self) -> str:  # type: ignore[override]
        """Phase of synchronizations in semi-synchronous training. Its fragments are not linear in the layers."""
        return SYNCHRONIZATION if self.config.enabled else ""

    @property
    def title(self) -> str:  # type: ignore[override]
        return "" if self.groups == 1 else f"{self.groups} replica groups of "

    @property
    def inputs(self) -> dict[str, Any]:
        """Keys of semi-synchronous training, and True if checkpoints have the states of all groups."""
        config = {name: value for name, value in asdict(self.config).items() if name not in WITHOUT_EFFECT}
        saves = self.config.enabled and self.experiment.checkpoint.mode != "off"
        return {**config, "mixing": self.config.mixing > 0, "collects_states": saves}

    def most_numbers(self, state: float) -> float:
        """Upper bound: weights of the last synchronization and outer momentum, plus pseudo-gradients and their sum
        during a synchronization; then a checkpoint has the states and weights of all groups."""
        return 4 + (self.config.groups - 1) * (state + 1) if self.config.enabled else 0

    def saved_numbers(self, state: float) -> float:
        """Every group's inner state, its own weights if they differ, and the outer momentum. The kept weights count as
        the weights."""
        if not self.config.enabled:
            return 1 + state
        momentum = int(self.config.outer[1] > 0)
        return 1 + momentum + self.config.groups * (state - 1 - momentum + self.config.keeps_own_weights)

    def seconds(self, weights: float, device: Device, step: float) -> float:
        """Seconds of sums by TCP and host memory: of gradients, or of a synchronization minus the steps meanwhile."""
        from titan_exp.extensions.replica_groups.outer_optimizer import BUCKET_BYTES
        from titan_exp.plan.roofline import message_seconds

        if self.groups == 1:
            return 0.0
        interval, fragments, delay = 1, 1, 0
        if self.config.enabled:
            interval, fragments, delay = self.config.interval, self.config.fragments, self.config.delay
        part = weights / fragments
        calls = math.ceil(part / BUCKET_BYTES)
        seconds = message_seconds("all-reduce", round(part), range(self.groups), device, 1, calls=calls)
        if device_type(self.experiment.cluster) == "cuda":
            seconds += 2 * part / (device.host_gbs * 1e9 * device.link_share)
        return fragments * max(0.0, seconds - delay * step) / interval

    def beside(self, state: "TrainState", parts: "Iterable[Part]") -> Sequence[Beside]:
        """Work of the largest synchronization: a fragment in flight, its outer step, and a checkpoint; no messages."""
        from titan_exp.extensions.replica_groups.outer_optimizer import OuterSteps
        from titan_exp.extensions.replica_groups.semi_sync import LargestSynchronization

        outer = next((part.outer for part in parts if isinstance(part, OuterSteps)), None)
        if outer is None:
            return ()
        saves = self.experiment.checkpoint.mode != "off"
        largest = LargestSynchronization(outer, self.config, state, saves=saves)
        sends, ends = [largest.send], [largest.apply, largest.collect]
        if self.config.delay:
            return (Beside("communication", SYNCHRONIZATION, ends, before=sends),)
        return (Beside("communication", SYNCHRONIZATION, [*sends, *ends]),)

    def peak_on_cpu(self, peak: "Moment", persistent: Mapping[str, int], gradients: int) -> "Moment":
        """Peak of a rank on a CPU, which may lie in the sum of gradients over the groups, with a copy of a bucket."""
        from titan_exp.extensions.replica_groups.outer_optimizer import BUCKET_BYTES
        from titan_exp.plan.trace.memory_tracker import Moment

        if self.groups == 1 or self.config.enabled:
            return peak
        sizes = {**dict.fromkeys(peak.by_category, 0), **persistent, "gradients": gradients}
        sizes["communication"] = sizes.get("communication", 0) + min(gradients, BUCKET_BYTES)
        moment = Moment(sum(sizes.values()), sizes, "sum over the groups")
        return max(peak, moment, key=lambda each: each.bytes)

    @cached_property
    def _layout(self) -> ResolvedLayout:
        """Layout of one group, with its share of a step."""
        return ResolvedLayout.of(share_of_world(self.experiment))

    @property
    def _tokens_per_step(self) -> int:
        return self.experiment.training.global_batch_size * self.experiment.training.seq_len

    def sent_per_token(self, weights: Mapping[int, int]) -> float | None:
        """Bytes that groups send per token, an upper bound if weights divide unevenly; None with one group."""
        from titan_exp.extensions.replica_groups.outer_optimizer import ring_bytes

        if self.groups == 1:
            return None
        held = self._layout.world_size * sum(weights.values()) // len(weights)
        steps = self.config.interval if self.config.enabled else 1
        return self.groups * ring_bytes(held, self.groups) / (steps * self._tokens_per_step)

    def sent_at_once(self, weights: Mapping[int, int]) -> float | None:
        """Bytes that a rank sends for its largest fragment; None in synchronous training and without a spec."""
        from titan_exp.extensions.replica_groups.outer_optimizer import ring_bytes

        spec = model_spec(self.experiment.model)
        if not self.config.enabled or spec is None:
            return None
        sizes = (largest_fragment(self.config, spec, self._layout, rank) * size for rank, size in weights.items())
        return ring_bytes(max(sizes), self.config.groups)

    def values(self, weights: Mapping[int, int]) -> dict[str, Any]:
        sent = {"sent_bytes_per_token": self.sent_per_token(weights), "sent_bytes_at_once": self.sent_at_once(weights)}
        return {"replica_groups": self.groups, **sent}

    def lines(self, weights: Mapping[int, int]) -> Iterator[str]:
        """Lines on what the groups send, and when."""
        config, rate, most = self.config, self.sent_per_token(weights), self.sent_at_once(weights)
        if rate is None:
            return
        interval = config.interval if config.enabled else 1
        size = format_bytes(rate * interval * self._tokens_per_step / self._layout.devices)
        who = "each rank" if self._layout.parallelism.pp == 1 else "the mean rank"
        when = f"every {interval} steps" if config.enabled else "in every step"
        parts = ""
        if config.fragments > 1 and most is not None:
            during = f" during {config.delay} step{'s' * (config.delay > 1)}" if config.delay else ""
            parts = f", in {config.fragments} fragments of at most {format_bytes(most)}{during}"
        yield f"{self.groups} groups send {rate:,.6g} bytes per token: {when} {who} sends {size}{parts}"


def largest_fragment(config: SemiSyncConfig, spec: ModelSpec, layout: ResolvedLayout, pipeline_rank: int) -> float:
    """Share of a pipeline rank's parameters that are in its largest fragment, which it sends at once."""
    shapes, sizes, seen = spec.shapes, [0] * config.fragments, False
    stages = {block: stage for stage, blocks in enumerate(layout.stage_layers) for block in blocks}
    last = layout.stage_count - 1
    for name, fragment in fragments_of(shapes, config, len(spec.blocks)).items():
        first, _, rest = name.partition(".")
        is_in_block = first == "blocks"
        seen = seen or is_in_block
        own = {stages[int(rest.partition(".")[0])] if is_in_block else last * seen}
        if name in spec.pipeline.copied:
            own.add(last)
        held = [layout.stage_placement[stage] for stage in own]
        sizes[fragment] += held.count(pipeline_rank) * math.prod(shapes[name])
    return max(sizes) / sum(sizes)
