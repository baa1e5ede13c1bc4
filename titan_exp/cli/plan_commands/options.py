"""Options shared by `titan-exp plan` and `titan-exp plan search`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment

if TYPE_CHECKING:
    from titan_exp.plan.cuda.devices import Device


def take_options(
    words: Sequence[str], examples: dict[str, str], flags: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Extract `--name VALUE` options, flags and `--help`; returns them by name, and the other words.

    `examples` maps each option to an example value for the error message. Raises UserError if an option lacks its
    value.
    """
    rest, given = list(words), dict[str, Any]()
    for name, example in examples.items():
        if f"--{name}" in rest:
            place = rest.index(f"--{name}")
            if place + 1 == len(rest):
                raise UserError(f"--{name} takes a value, as in --{name} {example}")
            given[name.replace("-", "_")] = rest[place + 1]
            del rest[place : place + 2]
    for name in flags:
        if f"--{name}" in rest:
            rest.remove(f"--{name}")
            given[name] = True
    if {"--help", "-h"} & set(rest):
        given["help"] = True
    return given, rest


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
