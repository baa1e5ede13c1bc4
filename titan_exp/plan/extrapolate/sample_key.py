"""Keys of samples: stages that are sampled together, and the order of actions in their sample."""

from collections.abc import Iterator
from typing import NamedTuple

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.pipeline_schedules import Schedule
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.extrapolate.eligibility import stage_sizes
from titan_exp.plan.time.roofline import schedule_and_bubble


class SampleKey(NamedTuple):
    """Everything that distinguishes the samples of a run's stages."""

    size: int | None
    """Size of the stages, as in `eligibility.stage_sizes`."""
    ways: tuple[str, ...]
    """Backward passes of its micro-batches, as in `backward_ways`."""
    resharded: bool = False
    """True if parameters are gathered again for each micro-batch."""

    @property
    def order(self) -> Iterator[tuple[str, int]]:
        """Kinds and micro-batches of a sampled stage's actions.

        With `resharded`, passes find parameters as the pass before leaves them: forward passes follow none, a forward
        and a backward pass, and later backward passes either.
        """
        if self.resharded:
            return zip("FFBFBB", (0, 1, 0, 2, 1, 2), strict=True)
        return ((kind, micro) for micro, way in enumerate(self.ways) for kind in "F" + way)


def sample_keys(experiment: Experiment) -> list[SampleKey]:
    """Key of the samples of each pipeline stage."""
    layout, sizes = ResolvedLayout.of(experiment), stage_sizes(experiment)
    if layout.parallelism.pp > 1 and layout.reshard_policy != "never":
        return [SampleKey(size, ("B", "B", "B"), resharded=True) for size in sizes]
    if not layout.splits_backward:
        return [SampleKey(size, ("B", "B")) for size in sizes]
    schedule = layout.parallelism.pp_schedule, layout.parallelism.pp, layout.stage_count, layout.pipeline_microbatches
    ways = backward_ways(schedule_and_bubble(*schedule)[0])
    return [SampleKey(size, ways[stage]) for stage, size in enumerate(sizes)]


def backward_ways(orders: Schedule) -> dict[int, tuple[str, ...]]:
    """Backward passes of a sample's micro-batches, by stage: `B` is a full one, `IW` a split one.

    The first is that of the stage, which allocates its gradients; then each of the schedule's, repeated.
    """
    ways = {"B": "B", "I": "IW"}
    found = [(action.stage, ways[action.kind]) for order in orders for action in order if action.kind in ways]
    later = sorted({way for _, way in found})
    return {stage: (way, *later) for stage, way in reversed(found)}
