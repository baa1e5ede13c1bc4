"""A rank's trace, put together from those of small runs: equal to the trace of the whole, allocations included."""

from collections.abc import Mapping
from dataclasses import dataclass

from titan_exp.config.experiment import Experiment
from titan_exp.config.layout import gradient_accumulation
from titan_exp.config.pipeline import stage_layers
from titan_exp.plan.layout_plan import axes_of
from titan_exp.plan.shortcut import Parts, recomputation, rehearsed, stages_of, work_of
from titan_exp.plan.stage_story import StagesStory, stages_story, weave_stages
from titan_exp.plan.story import SampleStory, TailStory
from titan_exp.plan.trace import Trace
from titan_exp.plan.whole_story import weave_whole, whole_story


@dataclass(frozen=True)
class Stories:
    """What traces are put together from."""

    parts: Parts
    """Traced for this layout, stories told."""
    whole: list[SampleStory]
    """Without a pipeline."""
    stages: Mapping[bool, StagesStory]
    """With one."""


def stories_of(parts: Parts) -> Stories:
    """What happens where in parts.

    Raises:
        Unwoven: it is not clear.
    """
    stages = {alone: stages_story(samples) for alone, samples in parts.stages.items()}
    return Stories(parts, [whole_story(sample) for sample in parts.whole], stages)


def retold(
    experiment: Experiment, pipeline_rank: int, stories: Stories, tail: TailStory, matmul_workspace: int = 0
) -> Trace:
    """The trace of a rank's step.

    Args:
        experiment: the run, its layout resolved.
        pipeline_rank: its number along pp.
        stories: of its small runs.
        tail: of a rank with its layers.
        matmul_workspace: bytes that the library of matmuls keeps for each thread that calls it.

    Raises:
        Unwoven: it cannot be put together.
    """
    _, modes = recomputation(experiment)
    rehearsal = None
    if experiment.parallelism.pp == 1:
        weaver, gradients = weave_whole(stories.whole, modes, gradient_accumulation(experiment), tail, matmul_workspace)
    else:
        stages = stages_of(experiment, pipeline_rank)
        rehearsal = rehearsed(experiment, pipeline_rank, stories.parts)
        weaver, gradients = weave_stages(
            stories.stages, stages, stage_layers(experiment), rehearsal, tail, matmul_workspace
        )
    ledger, before, step = weaver.told()
    work = work_of(experiment, pipeline_rank, stories.parts, rehearsal)
    axes = axes_of(experiment, pipeline_rank, work)
    return Trace(ledger.peak(), ledger.held(), gradients, work, axes, ledger.timeline(), before, step)
