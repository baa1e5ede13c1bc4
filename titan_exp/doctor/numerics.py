"""What a recipe does to each projection: a batch in fp32, then with the recipe, from the same weights.

Both in fp32 but for the recipe's own rounding, which is emulated on every device: what is seen is the recipe's.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.quantization import QuantizationConfig
from titan_exp.data.batch import Batch
from titan_exp.models.blocks.grouped_linear import GroupedLinear
from titan_exp.models.blocks.transformer import Linear
from titan_exp.quantization.quantize import quantize
from titan_exp.trainer.objective.language_modeling import LanguageModeling


@dataclass(frozen=True)
class ProjectionError:
    """Signal-to-noise ratios of a projection in dB: 20 · log10(|x| / |x - y|), 20 dB being an error of a tenth."""

    name: str
    """Its name in the model."""
    quantized: bool
    """Whether the recipe takes it."""
    own: float
    """Of its output, from the input that it has in fp32: its own rounding alone."""
    output: float | None
    """Of its output in the model, where every projection before it rounds too. None where for that a router has sent
    tokens to other experts: rows are those of other tokens then."""
    weight_gradient: float
    """Of its weight's gradient in the model."""


@dataclass(frozen=True)
class NumericsReport:
    """A recipe against fp32 on one batch."""

    loss: float
    """Mean cross-entropy in fp32."""
    recipe_loss: float
    """With the recipe."""
    projections: list[ProjectionError]
    """Every projection, that with the worst gradient first."""


@dataclass
class _Pass:
    inputs: dict[str, tuple[Tensor, ...]]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    loss: float = math.nan


def report_numerics(model: nn.Module, experiment: Experiment, batch: Batch) -> NumericsReport:
    """Compare, and leave the model with the recipe.

    Args:
        model: unquantized, in fp32, on its device; its projections are `models.blocks.Linear`, or those of
            experts.
        experiment: its `quantization` is the recipe, resolved.
        batch: on the model's device.
    """
    config = replace(experiment.quantization, emulate=True, precomputed_scales=False, float8_all_gather=False)
    assert isinstance(config, QuantizationConfig)
    names = {name: module for name, module in model.named_modules() if isinstance(module, Linear | GroupedLinear)}
    plain = {name: projection.linear_impl for name, projection in names.items()}
    exact = _run(model, names, batch)
    quantize(model, config, layers=experiment.model.layers, device=batch.tokens.device)
    rounded = _run(model, names, batch)
    found = []
    for name, projection in names.items():
        with torch.no_grad():
            own = projection(*exact.inputs[name])
        # Of experts there is a second input: where their rows end.
        same_rows = all(map(torch.equal, exact.inputs[name][1:], rounded.inputs[name][1:]))
        found.append(
            ProjectionError(
                name,
                projection.linear_impl is not plain[name],
                own=decibels(exact.outputs[name], own),
                output=decibels(exact.outputs[name], rounded.outputs[name]) if same_rows else None,
                weight_gradient=decibels(exact.gradients[name], rounded.gradients[name]),
            )
        )
    return NumericsReport(exact.loss, rounded.loss, sorted(found, key=lambda error: error.weight_gradient))


def decibels(exact: Tensor, found: Tensor) -> float:
    """Signal-to-noise ratio; infinite where nothing differs."""
    noise = float((exact.double() - found.double()).norm())
    signal = float(exact.double().norm())
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal else -math.inf


def _run(model: nn.Module, names: Mapping[str, Linear | GroupedLinear], batch: Batch) -> _Pass:
    found = _Pass({}, {}, {})
    with _recorded(names, found):
        loss = LanguageModeling()(model, batch)
        tokens = max(int((batch.labels >= 0).sum()), 1)
        (loss.total / tokens).backward()
    found.loss = float(loss.metrics["loss"]) / tokens
    for name, projection in names.items():
        gradient = projection.weight.grad
        assert gradient is not None, "every projection takes part"
        found.gradients[name] = gradient
    model.zero_grad(set_to_none=True)
    return found


@contextmanager
def _recorded(names: Mapping[str, Linear | GroupedLinear], found: _Pass) -> Iterator[None]:
    def record(name: str) -> object:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            found.inputs[name], found.outputs[name] = tuple(it.detach() for it in inputs), output.detach()

        return hook

    handles = [projection.register_forward_hook(record(name)) for name, projection in names.items()]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
