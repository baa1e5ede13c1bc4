"""Hardware support of recipes: device instructions, torchao's grouped kernels, or emulation."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.parallelism import QuantizationConfig
from titan_exp.config.machine.torch_features import import_torchao

MIN_CAPABILITY = {
    "float8_tensorwise": (8, 9),
    "float8_rowwise": (9, 0),
    "float8_rowwise_gw_hp": (9, 0),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}
"""Minimum CUDA compute capability of each recipe: 8.9 is Ada, 9.0 Hopper, 10.0 Blackwell."""

GROUPED_MULTIPLE = {"float8_rowwise": 16, "mxfp8": 128}
"""Recipes with a grouped kernel in torchao, and the multiple that it requires of dims and of each expert's rows."""

GROUPED_GENERATIONS = (9, 10)
"""Major CUDA compute capabilities supported by torch's scaled grouped matmul."""


class Hardware:
    """Instructions and kernels of a device, as torch reports them. The planner substitutes those of an absent GPU."""

    def has_instructions(self, recipe: str, device: torch.device) -> bool:
        """True if the device has the recipe's instructions."""
        if device.type != "cuda" or torch.version.hip is not None:
            return False
        return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY[recipe]

    def has_grouped_kernels(self, recipe: str, device: torch.device) -> bool:
        """True if torchao has kernels of the recipe's grouped matmul for the device."""
        if recipe not in GROUPED_MULTIPLE or torch.cuda.get_device_capability(device)[0] not in GROUPED_GENERATIONS:
            return False
        if recipe != "mxfp8":
            return True
        with import_torchao():
            from torchao.prototype.moe_training.mxfp8_grouped_mm import _SM100_KERNELS_AVAILABLE
        return bool(_SM100_KERNELS_AVAILABLE)


_HARDWARE = ContextVar("hardware", default=Hardware())  # noqa: B039  # stateless


@contextmanager
def assume_hardware(hardware: Hardware) -> Iterator[None]:
    """Let recipes in the `with` block see this hardware instead of the process's own."""
    token = _HARDWARE.set(hardware)
    try:
        yield
    finally:
        _HARDWARE.reset(token)


def needs_emulation(config: QuantizationConfig, device: torch.device) -> bool:
    """True if the recipe is emulated on this device.

    Raises:
        UserError: emulation is forbidden, and the device lacks the instructions.
    """
    has = _HARDWARE.get().has_instructions(config.recipe, device)
    if config.emulate is False and not has:
        major, minor = MIN_CAPABILITY[config.recipe]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        reason = f"{name} lacks the instructions of {config.recipe}, which GPUs of capability {major}.{minor} have"
        violation = Violation("quantization.emulate", False, reason, "quantization.emulate=auto, or quantization=none")
        raise UserError("This run cannot be started.", [violation])
    return config.emulate is True or not has


def needs_grouped_emulation(config: QuantizationConfig, device: torch.device) -> bool:
    """True if the recipe's grouped matmul is emulated on this device; torchao's kernels need power-of-two scales."""
    if needs_emulation(config, device) or not config.power_of_two_scales:
        return True
    return not _HARDWARE.get().has_grouped_kernels(config.recipe, device)
