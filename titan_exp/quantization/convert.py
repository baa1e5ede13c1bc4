"""Gives the projections that a recipe takes its product, before anything is divided."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import nn

from titan_exp.config.errors import UserError, Violation
from titan_exp.config.projections import is_quantized
from titan_exp.config.quantization import QuantizationConfig
from titan_exp.config.suggest import did_you_mean
from titan_exp.models.blocks import Linear
from titan_exp.quantization.instructions import is_emulated


def quantize(model: nn.Module, config: QuantizationConfig, *, layers: int, device: torch.device) -> None:
    """Replace the product of every projection that the recipe takes, in place, in a whole model or a part of it.

    Args:
        model: its projections not yet divided; names of modules are those in the whole model.
        config: the recipe, its `smallest_gemm` resolved.
        layers: blocks of the whole model.
        device: what it will run on.

    Raises:
        UserError: the device lacks instructions that must not be emulated.
    """
    if config.recipe == "none":
        return
    from titan_exp.quantization.recipe_product import product_of

    emulated = is_emulated(config, device)
    if config.recipe.startswith("float8_row") or (config.recipe == "nvfp4" and emulated):
        # Else inductor keeps what eager rounds to bf16 between operators, and a row's scale is of other numbers.
        import torch._inductor.config as inductor

        inductor.emulate_precision_casts = True
    for _, projection in _taken(model, config, layers):
        projection.product = product_of(config, emulated=emulated)


def describe(model: nn.Module, config: QuantizationConfig, *, layers: int, device: torch.device) -> str | None:
    """What a recipe does to a whole model, in a line; None where there is none.

    Raises:
        UserError: it takes no projection, or `filter` names one that is not there.
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
    share = sum(it.weight.numel() for it in taken.values()) / sum(it.numel() for it in model.parameters())
    emulated = is_emulated(config, device)
    how = f"emulated on {device.type}" if emulated else f"by the instructions of {device.type}"
    if config.fused_casts:
        how += ", torch's casts" if emulated else ", casts both ways in one pass"
    return (
        f"{config.recipe}, {how}: {len(taken)} of {len(found)} projections, {100 * share:.0f} % of the parameters; "
        "embedding and head stay in high precision, and MFU is of the bf16 peak"
    )


def _taken(model: nn.Module, config: QuantizationConfig, layers: int) -> Iterator[tuple[str, Linear]]:
    for name, module in _projections(model):
        if is_quantized(config, layers, name, module.in_features, module.out_features):
            yield name, module


def _projections(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            yield name, module
