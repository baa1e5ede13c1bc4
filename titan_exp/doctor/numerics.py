"""Quantization error per linear layer: one batch in fp32 and with the recipe, from the same weights.

The recipe's rounding is emulated on every device and the rest is fp32, which isolates the recipe's error.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from titan_exp.config.groups.quantization import QuantizationConfig
from titan_exp.data.batch import Batch
from titan_exp.models.blocks.grouped_linear import GroupedLinear
from titan_exp.models.blocks.linear import Linear
from titan_exp.models.blocks.linear_impl import GroupedLinearImpl
from titan_exp.quantization.quantize import quantize
from titan_exp.trainer.objective.language_modeling import LanguageModeling


@dataclass(frozen=True)
class ProjectionError:
    """Signal-to-noise ratios of a linear layer in dB: 20 · log10(|x| / |x - y|); 20 dB is an error of 10 %."""

    name: str
    quantized: bool
    """True if the recipe's filter includes the layer."""
    own: float
    """Output SNR on the fp32 input: the layer's own rounding."""
    output: float | None
    """Output SNR in the model, including the rounding of all earlier layers. None if that rounding changed the routing
    of tokens to experts."""
    weight_gradient: float
    """Weight gradient SNR in the model."""


@dataclass(frozen=True)
class NumericsReport:
    """Comparison of a recipe with fp32 on one batch."""

    loss: float
    """Mean cross-entropy in fp32."""
    recipe_loss: float
    """Mean cross-entropy with the recipe."""
    projections: list[ProjectionError]
    """All linear layers, worst weight gradient first."""


class HighPrecision(GroupedLinearImpl):
    """Grouped matmul as it is, in the place of a recipe's: experts whose outputs are weighted, not their inputs."""


@dataclass
class _Pass:
    inputs: dict[str, tuple[Tensor, ...]]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    loss: float = math.nan


def report_numerics(model: nn.Module, recipe: QuantizationConfig, layers: int, batch: Batch) -> NumericsReport:
    """Compare a recipe with fp32 on one batch. Quantizes the fp32 `model` of `layers` blocks; model and batch share one
    device."""
    config = replace(recipe, emulate=True, precomputed_scales=False, float8_all_gather=False)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear | GroupedLinear)}
    for linear in linears.values():
        if isinstance(linear, GroupedLinear):
            linear.linear_impl = HighPrecision()
    plain = {name: linear.linear_impl for name, linear in linears.items()}
    exact = _run(model, linears, batch)
    quantize(model, config, layers=layers, device=batch.tokens.device)
    rounded = _run(model, linears, batch)
    found = []
    for name, linear in linears.items():
        with torch.no_grad():
            own = linear(*exact.inputs[name])
        # Grouped linears have a second input, the row offsets of their experts.
        same_rows = all(map(torch.equal, exact.inputs[name][1:], rounded.inputs[name][1:]))
        found.append(
            ProjectionError(
                name,
                linear.linear_impl is not plain[name],
                own=decibels(exact.outputs[name], own),
                output=decibels(exact.outputs[name], rounded.outputs[name]) if same_rows else None,
                weight_gradient=decibels(exact.gradients[name], rounded.gradients[name]),
            )
        )
    return NumericsReport(exact.loss, rounded.loss, sorted(found, key=lambda error: error.weight_gradient))


def decibels(exact: Tensor, found: Tensor) -> float:
    """Signal-to-noise ratio in dB; infinite for equal tensors."""
    noise = float((exact.double() - found.double()).norm())
    signal = float(exact.double().norm())
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal else -math.inf


def _run(model: nn.Module, linears: Mapping[str, Linear | GroupedLinear], batch: Batch) -> _Pass:
    found = _Pass({}, {}, {})
    with _record(linears, found):
        loss = LanguageModeling()(model, batch)
        tokens = max(int((batch.labels >= 0).sum()), 1)
        (loss.total / tokens).backward()
    found.loss = float(loss.metrics["loss"]) / tokens
    for name, linear in linears.items():
        gradient = linear.weight.grad
        assert gradient is not None, "every linear is part of the graph"
        found.gradients[name] = gradient
    model.zero_grad(set_to_none=True)
    return found


@contextmanager
def _record(linears: Mapping[str, Linear | GroupedLinear], found: _Pass) -> Iterator[None]:
    def hook_for(name: str) -> object:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            found.inputs[name], found.outputs[name] = tuple(tensor.detach() for tensor in inputs), output.detach()

        return hook

    handles = [linear.register_forward_hook(hook_for(name)) for name, linear in linears.items()]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
