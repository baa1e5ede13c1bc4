"""Whether a device has a recipe's instructions, or it is emulated."""

import torch

from titan_exp.config.errors import UserError, Violation
from titan_exp.config.quantization import QuantizationConfig

LEAST = {
    "float8_tensorwise": (8, 9),
    "float8_rowwise": (9, 0),
    "float8_rowwise_gw_hp": (9, 0),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}
"""Least CUDA compute capability of each recipe: 8.9 is Ada, 9.0 Hopper, 10.0 Blackwell."""


def is_emulated(config: QuantizationConfig, device: torch.device) -> bool:
    """Whether the recipe is emulated on this device.

    Raises:
        UserError: it must not be, and the device lacks the instructions.
    """
    has = _has_instructions(config.recipe, device)
    if config.emulate is False and not has:
        major, minor = LEAST[config.recipe]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        reason = f"{name} lacks the instructions of {config.recipe}, which GPUs of capability {major}.{minor} have"
        violation = Violation("quantization.emulate", False, reason, "quantization.emulate=auto, or quantization=none")
        raise UserError("This run cannot be started.", [violation])
    return config.emulate is True or not has


def _has_instructions(recipe: str, device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= LEAST[recipe]
