"""Log options that cost speed: at the start of a run, and when much device memory stays unused."""

import torch

from titan_exp.config.groups.experiment import Experiment
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.number_format import GIB
from titan_exp.trainer.profiling.slow_options import slower_options

SPARE_SHARE = 0.5
"""Share of the device's memory that must be unreserved before options that save memory are named."""


def log_slow_options(experiment: Experiment) -> None:
    """Log each option of a run that costs speed."""
    for option in slower_options(experiment):
        get_logger().info("slower than without: %s", option)


class SpareMemory:
    """Logs once that options which trade time for memory may not be needed; on CUDA only."""

    def __init__(self, options: str, device: torch.device) -> None:
        self._options = options
        self._total = torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None

    def check(self, reserved: float | None) -> None:
        """Check the peak of reserved memory since the last row, in GiB."""
        if self._total is None or reserved is None or not self._options:
            return
        if reserved < (1 - SPARE_SHARE) * self._total:
            get_logger().info(
                "slower than without, perhaps: %s; at most %.1f of %.0f GiB were in use",
                self._options,
                reserved,
                self._total,
            )
        self._options = ""


def saving_options(experiment: Experiment) -> str:
    """Options in use that trade time for memory, each with its cost; empty if none."""
    found = []
    mode = experiment.activation_checkpoint.mode
    if mode != "none":
        found.append(f"activation_checkpoint.mode={mode} recomputes activations (activation_checkpoint=none)")
    if experiment.parallelism.cpu_offload:
        found.append(
            "parallelism.cpu_offload=true copies weights and gradients to and from the CPU "
            "(parallelism.cpu_offload=false)"
        )
    return ", ".join(found)
