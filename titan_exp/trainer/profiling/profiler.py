"""A window of steps recorded by torch's profiler: a trace file and a summary for each rank."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from titan_exp.config.groups.tracking import ProfilingConfig
from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.profiling.trace_summary import summarize_profile


class ProfileWindow:
    """Records the steps that the configuration names; costs nothing outside them.

    Args:
        config: the window.
        folder: the run's `traces/` folder.
        rank: number of this process.
        first_step: step after which this attempt starts; the window counts from there.
        device: what trains.
    """

    def __init__(
        self, config: ProfilingConfig, folder: Path, *, rank: int, first_step: int, device: torch.device
    ) -> None:
        self.config, self.folder, self.rank, self.device = config, folder, rank, device
        self.first = first_step + config.start
        self._profiler: profile | None = None

    def before(self, step: int) -> None:
        """Called before each step."""
        if self.config.enabled and step == self.first + 1:
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
            self._profiler.start()

    def after(self, step: int) -> None:
        """Called after each step."""
        if self._profiler is not None and step >= self.first + self.config.steps:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            try:
                self._write(profiler, step)
            except OSError as error:
                # What watches a run must not end it.
                get_logger().error("the trace cannot be written to %s (%s)", self.folder, error.strerror or error)

    def _write(self, profiler: profile, step: int) -> None:
        first = self.first + 1
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"steps-{first}-{step}-rank-{self.rank:05d}.json"
        profiler.export_chrome_trace(str(target))
        get_logger().info("trace of steps %d to %d: %s", first, step, target)
        summary = summarize_profile(profiler, device=self.device.type, first_step=first, last_step=step)
        written = summary.write(self.folder, self.rank)
        get_logger().info("steps %d to %d: %s; %s", first, step, summary.line(), written)
