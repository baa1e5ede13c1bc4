"""Device of a plan: `--device`, or that of the cluster."""

from pathlib import Path
from typing import TYPE_CHECKING

from titan_exp.config.errors.user_error import UserError, listed
from titan_exp.config.groups.experiment import Experiment

if TYPE_CHECKING:
    from titan_exp.plan.cuda.devices import DeviceMemory


def device_for(experiment: Experiment, key: str | None) -> "DeviceMemory":
    """Device and memory of a run with a resolved layout, from `--device` or the cluster. Raises UserError if the device
    table lacks the GPU."""
    from titan_exp.config.layout.resolved_layout import ResolvedLayout
    from titan_exp.models.spec.lookup import model_spec
    from titan_exp.plan.cuda.devices import DEVICES, device_memory_of, device_named, memory_of_gpu, refine_gpu

    layout, spec = ResolvedLayout.of(experiment), model_spec(experiment.model)
    runs = Path(experiment.paths.runs).expanduser()
    if key is not None:
        device = refine_gpu(device_named(key), experiment.cluster, runs / ".cache")
        return memory_of_gpu(device, layout, spec)
    found = device_memory_of(layout, spec, runs)
    if found.device is None and layout.device_type == "cuda":
        raise UserError(
            f"plan: cluster.gpu_type={experiment.cluster.gpu_type or 'null'} is not in the planner's device table. "
            f"Use --device {listed(DEVICES)}."
        )
    return found
