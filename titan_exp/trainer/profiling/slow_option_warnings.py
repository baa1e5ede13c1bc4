"""No option is slower than leaving it off without the log saying so: at the start, and where memory is left over."""

import torch

from titan_exp.config.groups.experiment import Experiment
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.memory_stats import GIB
from titan_exp.trainer.profiling.slow_options import slower_options

TO_SPARE = 0.5
"""Share of a device's memory that is not even reserved, from which on options that save memory are named."""


def note_slower(experiment: Experiment) -> None:
    """Say which options of a run cost speed, a line for each."""
    for words in slower_options(experiment):
        get_logger().info("slower than without: %s", words)


class MemoryToSpare:
    """Says once that options which save memory at the price of time may not be needed.

    Args:
        experiment: the run.
        device: of this rank; on a CPU nothing is known, and nothing said.
    """

    def __init__(self, experiment: Experiment, device: torch.device) -> None:
        self._options = saving_options(experiment)
        self._total = torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None

    def see(self, reserved: float | None) -> None:
        """Judge the largest amount that was reserved since the last row, in GiB; None is unknown."""
        if self._total is None or reserved is None or not self._options:
            return
        if reserved < (1 - TO_SPARE) * self._total:
            get_logger().info(
                "slower than without, perhaps: %s; of %.0f GiB at most %.1f were in use",
                self._options,
                self._total,
                reserved,
            )
        self._options = ""


def saving_options(experiment: Experiment) -> str:
    """Those in use, each with what it costs; empty where there is none."""
    found = []
    mode = experiment.activation_checkpoint.mode
    if mode != "none":
        found.append(
            f"activation_checkpoint.mode={mode} computes again what backward needs (activation_checkpoint=none)"
        )
    if experiment.parallelism.cpu_offload:
        found.append(
            "parallelism.cpu_offload=true moves weights and gradients to and fro (parallelism.cpu_offload=false)"
        )
    return ", ".join(found)
