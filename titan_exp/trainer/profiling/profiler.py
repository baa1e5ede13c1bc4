"""Profile a window of steps with torch's profiler: a trace file and a summary per rank."""

from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from titan_exp.config.groups.run import ProfilingConfig
from titan_exp.config.layout.pipeline_schedules import Action
from titan_exp.parallel.step_observer import StepObserver, observe_steps
from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.part import Part, Run, Step
from titan_exp.trainer.profiling.trace_summary import PHASE, summarize_profile


class PhaseMarker(StepObserver):
    """Marks micro-batches, pipeline actions, gradient reduction and optimizer as ranges of the trace."""

    def __init__(self) -> None:
        self._range: record_function | None = None

    def microbatch_begin(self, index: int) -> None:
        """Mark forward and backward of a micro-batch."""
        self._begin(f"micro-batch {index}")

    def action_begin(self, action: Action) -> None:
        """Mark a pipeline action: its kind, stage and micro-batch."""
        self._begin(f"{action.kind} stage {action.stage} micro-batch {action.microbatch}")

    def action_end(self, action: Action, result: Tensor | None) -> None:
        """Leave the communication between actions unmarked."""
        self.end()

    def stage_reduction_begin(self, stage: int) -> None:
        """Mark the gradient reduction of a pipeline stage."""
        self._begin(f"reduce gradients of stage {stage}")

    def gradients_ready(self, parts: object) -> None:
        """Mark clipping and the optimizer."""
        self._begin("clip and optimizer")

    def end(self) -> None:
        """End the current range."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = None

    def _begin(self, phase: str) -> None:
        self.end()
        self._range = record_function(PHASE + phase)
        self._range.__enter__()


class ProfileWindow(Part):
    """Profiles the window of steps given by `profiling.start` and `profiling.steps`, counted from the first step of
    this attempt."""

    name = "profile"
    isolated = False  # it runs nothing of a model's

    def __init__(self, config: ProfilingConfig, folder: Path, device: torch.device) -> None:
        self.config, self.folder, self.rank, self.device = config, folder, dist.get_rank(), device
        self._profiler: profile | None = None
        self._stack = ExitStack()

    def begin(self, run: Run) -> None:
        """Count from the first step of this attempt."""
        self.first = run.first_step + self.config.start

    def before(self, step: int) -> None:
        """Start the profiler at the first step of the window, and mark every step in it."""
        if step == self.first + 1:
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
            self._profiler.start()
        if self._profiler is not None:
            marker = PhaseMarker()
            self._stack.callback(marker.end)
            self._stack.enter_context(observe_steps(marker))

    def refused(self, step: int) -> None:
        """End the trace ranges of a step that is repeated."""
        self._stack.close()

    def after(self, step: Step) -> None:
        """Write the trace after the last step of the window."""
        self._stack.close()
        if self._profiler is not None and step.step >= self.first + self.config.steps:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            try:
                self._write(profiler, step.step)
            except OSError as error:
                # A failing instrument does not end a run.
                get_logger().error("cannot write the trace to %s (%s)", self.folder, error.strerror or error)

    def _write(self, profiler: profile, step: int) -> None:
        first = self.first + 1
        self.folder.mkdir(exist_ok=True)
        target = self.folder / f"steps-{first}-{step}-rank-{self.rank:05d}.json"
        profiler.export_chrome_trace(str(target))
        get_logger().info("trace of steps %d to %d: %s", first, step, target)
        summary = summarize_profile(profiler, device=self.device.type, first_step=first, last_step=step)
        written = summary.write(self.folder, self.rank)
        get_logger().info("steps %d to %d: %s; %s", first, step, summary.line(), written)
