"""Application of a quantization recipe: replaces the matmul of the selected linear layers, before any sharding."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import nn

from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean
from titan_exp.config.groups.parallelism import BLOCK, QuantizationConfig
from titan_exp.models.blocks.linear import GroupedLinear, Linear
from titan_exp.quantization.recipes import GROUPED_MULTIPLE, needs_emulation, needs_grouped_emulation


def quantize(model: nn.Module, config: QuantizationConfig, *, layers: int, device: torch.device) -> None:
    """Replace the matmul of every linear and grouped linear that the recipe selects, in place.

    `model` is the whole model or a pipeline stage, unsharded, with module names of the whole model; `layers` counts the
    blocks of the whole model.

    Raises:
        UserError: emulation is forbidden and instructions or kernels are missing, or dims of experts do not fit.
    """
    if config.recipe == "none":
        return
    from titan_exp.quantization.recipes import linear_impl_for

    emulated = needs_emulation(config, device)
    if config.recipe.startswith("float8") or (config.recipe == "nvfp4" and emulated):
        # Otherwise inductor skips eager's rounding to bf16 between operators, and casts and their scales differ.
        import torch._inductor.config as inductor

        inductor.emulate_precision_casts = True
    for name, linear in _quantized_linears(model, config, layers):
        if isinstance(linear, Linear):
            linear.linear_impl = linear_impl_for(config, emulated=emulated)
            continue
        from titan_exp.quantization.grouped import grouped_linear_impl_for

        grouped_emulated = _is_grouped_emulated(name, linear, config, device)
        linear.linear_impl = grouped_linear_impl_for(config, emulated=grouped_emulated)


def require_quantized_linears(model: nn.Module, config: QuantizationConfig, *, layers: int) -> None:
    """Check that the recipe selects linear layers of the whole model, and that its blocks divide them.

    Raises:
        UserError: the recipe selects no linear, `filter` matches none, or the dims of a linear do not fit.
    """
    if config.recipe == "none":
        return
    found, quantized = dict(_linears(model)), dict(_quantized_linears(model, config, layers))
    violations = []
    for pattern in config.filter if found else ():
        if not any(fnmatchcase(name, pattern) for name in found):
            offer = did_you_mean(pattern, found) or "write a pattern such as blocks.*.attention.*"
            violations.append(Violation("quantization.filter", pattern, "the model has no such linear layer", offer))
    if not quantized and not violations:
        reason, remedy = "the recipe would quantize no linear layer", "use quantization=none"
        if not found and any(type(module) is nn.Linear for module in model.modules()):
            reason = "it replaces the matmul of titan_exp's Linear, and the model has torch.nn.Linear layers"
            remedy = "make them titan_exp.models.blocks.linear.Linear layers, or use quantization=none"
        violations.append(Violation("quantization.recipe", config.recipe, reason, remedy))
    for name, linear in quantized.items():
        if not isinstance(linear, Linear):
            continue  # `_is_grouped_emulated` knows the kernel's multiple
        for size, dim in ((linear.in_features, "inputs"), (linear.out_features, "outputs")):
            if size % BLOCK[config.recipe]:
                reason = f"it needs dims that are multiples of {BLOCK[config.recipe]}, and {name} has {size} {dim}"
                offer = f"use quantization.filter=['{name}'] to keep it in high precision, or change its shape"
                violations.append(Violation("quantization.recipe", config.recipe, reason, offer))
    if violations:
        raise UserError("This run cannot start.", violations)


def describe(model: nn.Module, config: QuantizationConfig, *, layers: int, device: torch.device) -> str | None:
    """One-line summary of a recipe applied to a model; None without a recipe.

    Raises:
        UserError: the recipe selects no linear, `filter` matches none, or as in `quantize`.
    """
    if config.recipe == "none":
        return None
    require_quantized_linears(model, config, layers=layers)
    found, quantized = dict(_linears(model)), dict(_quantized_linears(model, config, layers))
    experts = {name: linear for name, linear in quantized.items() if isinstance(linear, GroupedLinear)}
    emulated_experts = [_is_grouped_emulated(name, linear, config, device) for name, linear in experts.items()]
    weights = sum(linear.weight.numel() for linear in quantized.values())
    share = weights / sum(parameter.numel() for parameter in model.parameters())
    emulated = needs_emulation(config, device)
    kernels = f"emulated on {device.type}" if emulated else f"by the instructions of {device.type}"
    if config.fused_casts is not False and config.has_dual_casts and not emulated:
        kernels += ", dual casts"
    if any(emulated_experts) and not emulated:
        layers_of = f"{len(experts)} expert layer{'s' * (len(experts) > 1)}"
        kernels += f", {layers_of} emulated, because torchao has no kernel for them here"
    return (
        f"{config.recipe}, {kernels}: {len(quantized)} of {len(found)} linear layers, {100 * share:.0f} % of the "
        "parameters. Embedding and head stay in high precision, and MFU refers to the bf16 peak"
    )


def _is_grouped_emulated(name: str, linear: GroupedLinear, config: QuantizationConfig, device: torch.device) -> bool:
    """True if a grouped linear must be emulated. Refuses it if the configuration forbids emulation."""
    emulated, pattern = needs_grouped_emulation(config, device), re.sub(r"^blocks\.\d+\.", "*.", name)
    if emulated and config.emulate is False:
        scales = "" if config.power_of_two_scales else " without power-of-two scales"
        reason = f"torchao has no kernel here for the experts of {name} in {config.recipe}{scales}"
        offer = f"use quantization.emulate=auto to emulate only those, or quantization.filter=['{pattern}']"
        raise UserError("This run cannot start.", [Violation("quantization.emulate", False, reason, offer)])
    multiple = BLOCK[config.recipe] if emulated else GROUPED_MULTIPLE[config.recipe]
    for size, dim in ((linear.in_features, "inputs"), (linear.out_features, "outputs")):
        if size % multiple:
            reason = f"it needs multiples of {multiple}, and the experts of {name} have {size} {dim}"
            offer = f"use quantization.filter=['{pattern}'] to keep them in high precision, or change their shape"
            if multiple > BLOCK[config.recipe]:
                offer += f", or use quantization.emulate=true, which takes multiples of {BLOCK[config.recipe]}"
            raise UserError("This run cannot start.", [Violation("quantization.recipe", config.recipe, reason, offer)])
    return emulated


def _quantized_linears(
    model: nn.Module, config: QuantizationConfig, layers: int
) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    for name, module in _linears(model):
        if isinstance(module, Linear) and not module.quantizable:
            continue
        if config.quantizes(name, module.in_features, module.out_features, layers=layers):
            yield name, module


def _linears(model: nn.Module) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, Linear | GroupedLinear):
            yield name, module
