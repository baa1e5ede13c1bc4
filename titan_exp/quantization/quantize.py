"""Gives the projections that a recipe takes its product, before anything is divided."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import nn

from titan_exp.config.errors.did_you_mean import did_you_mean
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.quantization import BLOCK, QuantizationConfig
from titan_exp.models.blocks.grouped_linear import GroupedLinear
from titan_exp.models.blocks.transformer import Linear
from titan_exp.quantization.hardware_support import GROUPED_MULTIPLE, needs_emulation, needs_grouped_emulation


def quantize(model: nn.Module, config: QuantizationConfig, *, layers: int, device: torch.device) -> None:
    """Replace the product of every projection that the recipe takes, in place, in a whole model or a part of it. The
    stacked projections of experts are taken by the same rules.

    Args:
        model: its projections not yet divided; names of modules are those in the whole model.
        config: the recipe, its `smallest_gemm` resolved.
        layers: blocks of the whole model.
        device: what it will run on.

    Raises:
        UserError: the device lacks instructions, or torchao a kernel of experts, that must not be emulated; or dims of
            experts are no multiples of what the recipe takes.
    """
    if config.recipe == "none":
        return
    from titan_exp.quantization.recipes import linear_impl_for

    emulated = needs_emulation(config, device)
    if config.recipe.startswith("float8_row") or (config.recipe == "nvfp4" and emulated):
        # Else inductor keeps what eager rounds to bf16 between operators, and a row's scale is of other numbers.
        import torch._inductor.config as inductor

        inductor.emulate_precision_casts = True
    for name, projection in _taken(model, config, layers):
        if isinstance(projection, Linear):
            projection.linear_impl = linear_impl_for(config, emulated=emulated)
            continue
        from titan_exp.quantization.grouped.grouped_linear import grouped_linear_impl_for

        grouped_emulated = _experts_are_emulated(name, projection, config, device)
        projection.linear_impl = grouped_linear_impl_for(config, emulated=grouped_emulated)


def describe(model: nn.Module, config: QuantizationConfig, *, layers: int, device: torch.device) -> str | None:
    """One-line summary of a recipe applied to a model; None without a recipe.

    Raises:
        UserError: it takes no projection, or `filter` names one that is not there; or as of `quantize`.
    """
    if config.recipe == "none":
        return None
    found = dict(_projections(model))
    for pattern in config.filter:
        if not any(fnmatchcase(name, pattern) for name in found):
            offer = did_you_mean(pattern, found) or "patterns look like blocks.*.attention.*"
            violation = Violation("quantization.filter", pattern, "the model has no such projection", offer)
            raise UserError("This run cannot be started.", [violation])
    taken = dict(_taken(model, config, layers))
    if not taken:
        violation = Violation("quantization.recipe", config.recipe, "it takes no projection", "quantization=none")
        raise UserError("This run cannot be started.", [violation])
    experts = {name: it for name, it in taken.items() if isinstance(it, GroupedLinear)}
    alone = [_experts_are_emulated(name, it, config, device) for name, it in experts.items()]
    share = sum(it.weight.numel() for it in taken.values()) / sum(it.numel() for it in model.parameters())
    emulated = needs_emulation(config, device)
    how = f"emulated on {device.type}" if emulated else f"by the instructions of {device.type}"
    if config.fused_casts:
        how += ", torch's casts" if emulated else ", casts both ways in one pass"
    if any(alone) and not emulated:
        how += f", those of experts ({len(experts)}) emulated, for which torchao has no kernel here"
    return (
        f"{config.recipe}, {how}: {len(taken)} of {len(found)} projections, {100 * share:.0f} % of the parameters; "
        "embedding and head stay in high precision, and MFU is of the bf16 peak"
    )


def _experts_are_emulated(
    name: str, projection: GroupedLinear, config: QuantizationConfig, device: torch.device
) -> bool:
    """True if a grouped linear must be emulated; refuses it if the configuration forbids that."""
    emulated, pattern = needs_grouped_emulation(config, device), re.sub(r"^blocks\.\d+\.", "*.", name)
    if emulated and config.emulate is False:
        scales = "" if config.power_of_two_scales else " with scales that are no powers of two"
        reason = f"torchao has no kernel here for the experts of {name} in {config.recipe}{scales}"
        offer = f"quantization.emulate=auto emulates those alone, or quantization.filter=['{pattern}']"
        raise UserError("This run cannot be started.", [Violation("quantization.emulate", False, reason, offer)])
    multiple = BLOCK[config.recipe] if emulated else GROUPED_MULTIPLE[config.recipe]
    for size, dim in ((projection.in_features, "inputs"), (projection.out_features, "outputs")):
        if size % multiple:
            reason = f"its dims are multiples of {multiple}, and the experts of {name} have {size} {dim}"
            offer = f"quantization.filter=['{pattern}'] leaves them in high precision; or another shape"
            if multiple > BLOCK[config.recipe]:
                offer += f"; or quantization.emulate=true, with multiples of {BLOCK[config.recipe]}"
            raise UserError(
                "This run cannot be started.", [Violation("quantization.recipe", config.recipe, reason, offer)]
            )
    return emulated


def _taken(model: nn.Module, config: QuantizationConfig, layers: int) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    for name, module in _projections(model):
        if config.quantizes(name, module.in_features, module.out_features, layers=layers):
            yield name, module


def _projections(model: nn.Module) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, Linear | GroupedLinear):
            yield name, module
