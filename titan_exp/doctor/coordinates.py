"""Coordinate check (Yang et al. 2022, Tensor Programs V, appendix D.1): sizes of activations against width.

Models of several widths take a few optimizer steps. In the maximal update parametrization, activations and their change
by training stay of one size at every width; in the standard one the change grows with the width.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.batch import Batch
from titan_exp.models.blocks.iter_blocks import iter_blocks
from titan_exp.models.blocks.transformer import RMSNorm
from titan_exp.models.build import build_model, choose_attention_backend, init_specs
from titan_exp.models.parametrization.lookup import scales_of
from titan_exp.models.spec.lookup import with_mtp_depth
from titan_exp.optim.build import build_optimizer
from titan_exp.optim.gradient_point import HasGradientPoint
from titan_exp.optim.lr_schedule import set_lr
from titan_exp.parallel.meta_init import (
    buffer_places,
    copy_initial_weights,
    init_buffers,
    init_weights,
    materialize_parameters,
)
from titan_exp.trainer.objective.language_modeling import LanguageModeling

Sizes = Mapping[str, float]
"""Mean |x| by kind of layer."""


@dataclass(frozen=True)
class Coordinates:
    """Activations of a model on one batch, after each step."""

    sizes: tuple[Sizes, ...]
    """Mean |x|, of initial weights and after every step."""
    changes: tuple[Sizes, ...]
    """Mean |x - x of initial weights|, after every step."""


def measure_coordinates(experiment: Experiment, batches: Sequence[Batch], device: torch.device) -> Coordinates:
    """Train a model on these batches, one per step and without warm-up, and measure activations on the first."""
    model, optimizer = _build(experiment, device)
    loss_of, probe = LanguageModeling(), batches[0].to(device)
    sizes, changes = [], list[Sizes]()
    before = _activations(model, probe)
    sizes.append(_mean_sizes(before))
    for batch in batches:
        if isinstance(optimizer, HasGradientPoint):
            optimizer.to_gradient_point()
        loss = loss_of(model, batch.to(device))
        (loss.total / max(int((batch.labels >= 0).sum()), 1)).backward()
        set_lr(optimizer, experiment.optimizer.lr)
        optimizer.step()
        optimizer.zero_grad()
        after = _activations(model, probe)
        sizes.append(_mean_sizes(after))
        changes.append(_mean_sizes({name: after[name] - before[name] for name in after}))
    return Coordinates(tuple(sizes), tuple(changes))


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Slope of a least-squares line through log2 values over log2 widths; infinite for values that are not finite and
    positive."""
    if not all(math.isfinite(value) and value > 0 for value in values):
        return math.inf
    x, y = ([math.log2(number) for number in numbers] for numbers in (widths, values))
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    products = sum((one - x_mean) * (other - y_mean) for one, other in zip(x, y, strict=True))
    return products / sum((one - x_mean) ** 2 for one in x)


def _build(experiment: Experiment, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    config, seed = with_mtp_depth(experiment.model, 0), experiment.experiment.seed
    seq_len, documents = experiment.training.seq_len, experiment.data.document_mask
    # The model is in fp32, which few GPU attention kernels support.
    backend = choose_attention_backend(
        config, device, bf16=False, seq_len=seq_len, documents=documents, auto=device.type == "cuda"
    )

    def build() -> nn.Module:
        return build_model(config, seq_len=seq_len, attention_backend=backend)

    with torch.device("meta"):
        model = build()
    scales = scales_of(experiment.parametrization, config)
    table = init_specs(model, scales)
    init_buffers(buffer_places(model), materialize_parameters(model, device), build, seed)
    if table is None:
        copy_initial_weights(model, build, seed)
    else:
        init_weights(model, table, seed)
    return model, build_optimizer([model], experiment.optimizer, scales)


@torch.no_grad()
def _activations(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Outputs by module: the embedding, every block and its parts, and the logits."""
    found = dict[str, Tensor]()
    with _recording(model, found):
        found["logits"] = model(batch.tokens, batch.positions, batch.documents)
    return found


@contextlib.contextmanager
def _recording(model: nn.Module, found: dict[str, Tensor]) -> Iterator[None]:
    handles = []
    for name, module in _recorded(model).items():

        def record(_: nn.Module, __: object, output: Tensor, name: str = name) -> None:
            found[name] = output.detach().clone()

        handles.append(module.register_forward_hook(record))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _recorded(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose outputs are measured, by block number and kind: `3.attention`."""
    found: dict[str, nn.Module] = {}
    embedding = getattr(model, "embedding", None)
    if isinstance(embedding, nn.Module):
        found["embedding"] = embedding
    for number, block in enumerate(iter_blocks(model)):
        parts = {name: part for name, part in block.named_children() if not isinstance(part, RMSNorm)}
        found |= {f"{number}.{name}": part for name, part in parts.items()}
        found[f"{number}.residual stream"] = block
    return found


def _mean_sizes(activations: Mapping[str, Tensor]) -> Sizes:
    """Mean |x| by kind, over the blocks."""
    values = defaultdict[str, list[float]](list)
    for name, activation in activations.items():
        values[name.partition(".")[2] or name].append(float(activation.float().abs().mean()))
    return {kind: sum(found) / len(found) for kind, found in values.items()}
