"""Ranks' traces, put together from those of small runs: equal to traces of the whole, allocations included.

Pipeline ranks share the small runs, and those with as many layers the build and the end of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.extrapolate.allocation_events import SampleStory, TailStory, Weaver
from titan_exp.plan.extrapolate.eligibility import recomputation
from titan_exp.plan.extrapolate.events_no_pipeline import weave_whole, whole_story
from titan_exp.plan.extrapolate.events_pipeline import StagesStory, stages_story, weave_stages
from titan_exp.plan.extrapolate.extrapolate import Parts, passes_of, rehearsed, stages_of, trace_parts
from titan_exp.plan.extrapolate.optimizer_step import trace_tail_story
from titan_exp.plan.extrapolate.schedule_simulation import Rehearsal
from titan_exp.plan.extrapolate.segments import added
from titan_exp.plan.search.layout_cost import axes_of
from titan_exp.plan.trace.fake_world import ranks_of_pipeline
from titan_exp.plan.trace.trace_step import Trace

MOST_TOLD = 8
"""Micro-batches that are told one after the other: each in between finds what the one before it found."""


@dataclass
class Retelling:
    """Puts traces of one run's ranks together; what they share is traced when it is first needed.

    Args:
        experiment: the run, its layout resolved, of which `shortcut.why_not` is None.
        cuda: as of `trace_step`.
        matmul_workspace: bytes that the library of matmuls keeps for each thread that calls it.
    """

    experiment: Experiment
    cuda: bool
    matmul_workspace: int = 0
    _parts: Parts | None = None
    _whole: list[SampleStory] = field(default_factory=list)
    _stages: Mapping[bool, StagesStory] = field(default_factory=dict)
    _tails: dict[object, TailStory] = field(default_factory=dict)

    def trace(self, pipeline_rank: int) -> Trace:
        """The trace of a rank's step.

        Raises:
            Unwoven: it cannot be put together.
            UserError: the step calls an operator that the planner does not know.
        """
        parts, tail, rehearsal = self._traced(), self.tail(pipeline_rank), None
        if self.experiment.parallelism.pp > 1:
            rehearsal = rehearsed(self.experiment, pipeline_rank, parts)
        weaver, gradients = self._woven(pipeline_rank, tail, rehearsal)
        ledger, before, step = weaver.told()
        passes = passes_of(self.experiment, pipeline_rank, parts, rehearsal)
        work = added([*(piece.work for piece in passes), tail.work])
        axes = axes_of(self.experiment, pipeline_rank, work)
        return Trace(ledger.peak(), ledger.held(), gradients, work, axes, ledger.timeline(), before, step)

    def tail(self, pipeline_rank: int) -> TailStory:
        """Build and ends of the steps of a rank with as many layers."""
        stages, layers = stages_of(self.experiment, pipeline_rank), ResolvedLayout.of(self.experiment).stage_layers
        shape = tuple((stage.kind, len(stage.modes)) for stage in stages)
        if shape not in self._tails:
            rank = ranks_of_pipeline(self.experiment)[pipeline_rank]
            own = [layer for stage in stages for layer in layers[stage.number]]
            self._tails[shape] = trace_tail_story(self.experiment, rank, own, cuda=self.cuda)
        return self._tails[shape]

    def _traced(self) -> Parts:
        if self._parts is None:
            parts = self._parts = trace_parts(self.experiment, cuda=self.cuda, told=True)
            self._whole = [whole_story(sample) for sample in parts.whole]
            self._stages = {alone: stages_story(samples) for alone, samples in parts.stages.items()}
        return self._parts

    def _woven(self, pipeline_rank: int, tail: TailStory, rehearsal: Rehearsal | None) -> tuple[Weaver, int]:
        layout = ResolvedLayout.of(self.experiment)
        if rehearsal is not None:
            stages, layers = stages_of(self.experiment, pipeline_rank), layout.stage_layers
            return weave_stages(self._stages, stages, layers, rehearsal, tail, workspace=self.matmul_workspace)
        _, modes = recomputation(self.experiment)
        number, own = layout.gradient_accumulation, self._traced().whole[0].looked_at
        micro_batches, batches = min(number, MOST_TOLD), (number - 1) * own
        return weave_whole(self._whole, modes, micro_batches, tail, batches=batches, workspace=self.matmul_workspace)
