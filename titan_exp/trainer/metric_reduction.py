"""Reduce reported metrics over ranks: the loss, and metrics of the objective, the model and the optimizer."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.parallel.mesh import Mesh
from titan_exp.trainer.objective.base import Objective, Reduction


class MetricReducer:
    """Reduces named scalars of all ranks, and gathers each rank's own numbers, in one message over the CPU.

    Modules and optimizers report metrics by two members: `metric_reductions`, a mapping from name to `mean`, `sum` or
    `max`, and `metrics()`, which returns these scalars of the last step as tensors. A module's `mean` and `sum` take
    the sum over its tokens on this rank, and modules with the same name add up; an optimizer's are over ranks.

    Args:
        objective: reports `loss` and `objective/NAME`.
        model: the whole model, whose modules report `model/NAME`; all ranks must reduce the same names.
        optimizer: reports `optimizer/NAME`.
        mesh: ranks to reduce over.
    """

    def __init__(self, objective: Objective, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
        self._mesh, self._optimizer = mesh, optimizer
        modules: dict[str, Reduction] = {}
        for module in model.modules():
            modules |= getattr(module, "metric_reductions", {})
        self._modules = modules
        of_optimizer: Mapping[str, Reduction] = getattr(optimizer, "metric_reductions", {})
        self._reductions: dict[str, Reduction] = {
            "loss": "mean",
            **{f"objective/{name}": reduction for name, reduction in objective.metrics.items()},
            **{f"model/{name}": reduction for name, reduction in modules.items()},
            **{f"optimizer/{name}": reduction for name, reduction in of_optimizer.items()},
        }

    def reduce(
        self, metrics: Mapping[str, Tensor], parts: Iterable[nn.Module], tokens: int, own: Sequence[float]
    ) -> tuple[dict[str, float], list[list[float]]]:
        """Reduce the metrics of a step; all ranks call it.

        Args:
            metrics: this rank's share of the loss and of the objective's metrics, from `StepResult`.
            parts: this rank's modules.
            tokens: predicted tokens of the global batch.
            own: numbers of this rank, returned for every rank.
        """
        values = self._on_cpu(metrics, parts, tokens)
        sums = [name for name, reduction in self._reductions.items() if reduction != "max"]
        maxima = [name for name, reduction in self._reductions.items() if reduction == "max"]
        rank, size = dist.get_rank(), dist.get_world_size()
        # Every rank fills its own row and leaves zeros in the others', so that one sum gathers them.
        row = [*own, *(values.get(name, -math.inf) for name in maxima)]
        message = torch.zeros(len(sums) + size * len(row), dtype=torch.float64)
        message[: len(sums)] = torch.tensor([values.get(name, 0.0) for name in sums], dtype=torch.float64)
        message[len(sums) + rank * len(row) :][: len(row)] = torch.tensor(row, dtype=torch.float64)
        if size > 1:
            dist.all_reduce(message, group=self._mesh.cpu_group)
        rows = message[len(sums) :].view(size, len(row))
        reduced = {name: float(value / self._copies(name)) for name, value in zip(sums, message, strict=False)}
        reduced |= dict(zip(maxima, rows[:, len(own) :].amax(0).tolist(), strict=True))
        return {name: reduced[name] for name in self._reductions}, rows[:, : len(own)].tolist()

    def _copies(self, name: str) -> int:
        """Ranks that add the same value to a sum."""
        if not name.startswith("optimizer/"):
            return self._mesh.loss_replicas
        return self._mesh.world.size() if self._reductions[name] == "mean" else 1

    def _on_cpu(self, metrics: Mapping[str, Tensor], parts: Iterable[nn.Module], tokens: int) -> dict[str, float]:
        found = {name if name == "loss" else f"objective/{name}": value for name, value in metrics.items()}
        reporting = [module for part in parts for module in part.modules() if hasattr(module, "metric_reductions")]
        for name, value in (item for module in reporting for item in module.metrics().items()):  # type: ignore[operator]
            key, reduction = f"model/{name}", self._modules[name]
            share = value / max(tokens, 1) if reduction == "mean" else value
            combine = torch.maximum if reduction == "max" else torch.add
            found[key] = combine(found[key], share) if key in found else share
        if hasattr(self._optimizer, "metric_reductions"):
            found |= {f"optimizer/{name}": value for name, value in self._optimizer.metrics().items()}  # type: ignore[attr-defined]
        # In fp64 over the CPU, so that the order of ranks does not show in the logged digits.
        device = self._mesh.device
        values = torch.stack([value.detach().to(device, torch.float64) for value in found.values()]).tolist()
        return dict(zip(found, values, strict=True))
