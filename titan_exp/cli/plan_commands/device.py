"""Device of a plan: `--device`, or that of the cluster."""

from pathlib import Path
from typing import TYPE_CHECKING

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment

if TYPE_CHECKING:
    from titan_exp.plan.cuda.devices import Device


def device_for(experiment: Experiment, key: str | None) -> "Device | None":
    """Device of a run, from `--device` or the cluster; None for a CPU of unknown speed. Raises UserError if the device
    table lacks the GPU."""
    from titan_exp.config.layout.resolved_layout import ResolvedLayout
    from titan_exp.config.machine.devices import device_type
    from titan_exp.plan.cuda.devices import DEVICES, device_named
    from titan_exp.plan.device_memory import device_memory_of, gpu_memory, refine_gpu

    cluster, runs = experiment.cluster, Path(experiment.paths.runs).expanduser()
    if key is not None:
        return refine_gpu(device_named(key), cluster, runs / ".cache")
    if device_type(cluster) == "cpu":
        return device_memory_of(ResolvedLayout.of(experiment), runs).device
    device = gpu_memory(cluster, runs / ".cache").device
    if device is None:
        raise UserError(
            f"plan: cluster.gpu_type={experiment.cluster.gpu_type or 'null'} is not in the planner's device table. "
            f"Use --device {listed(DEVICES)}."
        )
    return device
