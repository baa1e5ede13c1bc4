"""A window of steps recorded by torch's profiler, one trace file a rank."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from titan_exp.config.tracking import ProfilingConfig
from titan_exp.tracking.log import get_logger


class ProfileWindow:
    """Records the steps that the configuration names; costs nothing outside them.

    Args:
        config: the window.
        folder: the run's `traces/` folder.
        rank: number of this process.
        first_step: step after which this attempt starts; the window counts from there.
    """

    def __init__(self, config: ProfilingConfig, folder: Path, *, rank: int, first_step: int) -> None:
        self.config, self.folder, self.rank = config, folder, rank
        self.first = first_step + config.start
        self._profiler: profile | None = None

    def before(self, step: int) -> None:
        """Called before each step."""
        if self.config.enabled and step == self.first + 1:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
            self._profiler.start()

    def after(self, step: int) -> None:
        """Called after each step."""
        if self._profiler is not None and step >= self.first + self.config.steps:
            self._profiler.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            target = self.folder / f"steps-{self.first + 1}-{step}-rank-{self.rank:05d}.json"
            self._profiler.export_chrome_trace(str(target))
            get_logger().info("trace of steps %d to %d: %s", self.first + 1, step, target)
            self._profiler = None
