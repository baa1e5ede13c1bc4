"""Whether a device has a recipe's instructions, and torchao the kernels of experts, or it is emulated."""

import torch

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.quantization import QuantizationConfig
from titan_exp.ops.import_torchao import import_torchao

LEAST = {
    "float8_tensorwise": (8, 9),
    "float8_rowwise": (9, 0),
    "float8_rowwise_gw_hp": (9, 0),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}
"""Least CUDA compute capability of each recipe: 8.9 is Ada, 9.0 Hopper, 10.0 Blackwell."""

GROUPED_MULTIPLE = {"float8_rowwise": 16, "mxfp8": 128}
"""Recipes that torchao has a product of experts for, and what its kernels want dims and an expert's rows to be
multiples of."""

GROUPED_GENERATIONS = (9, 10)
"""CUDA compute capabilities, without what is after the point, that torch's scaled grouped matmul is for."""


def needs_emulation(config: QuantizationConfig, device: torch.device) -> bool:
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


def needs_grouped_emulation(config: QuantizationConfig, device: torch.device) -> bool:
    """Whether the recipe's product of experts is emulated on this device, of which `needs_emulation` has been asked.

    torchao's kernels have scales that are powers of two alone.
    """
    if needs_emulation(config, device) or not config.power_of_two_scales:
        return True
    return not _has_grouped_kernels(config.recipe, device)


def _has_grouped_kernels(recipe: str, device: torch.device) -> bool:
    if recipe not in GROUPED_MULTIPLE or torch.cuda.get_device_capability(device)[0] not in GROUPED_GENERATIONS:
        return False
    if recipe != "mxfp8":
        return True
    with import_torchao():
        from torchao.prototype.moe_training.mxfp8_grouped_mm import _SM100_KERNELS_AVAILABLE
    return bool(_SM100_KERNELS_AVAILABLE)


def _has_instructions(recipe: str, device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= LEAST[recipe]
