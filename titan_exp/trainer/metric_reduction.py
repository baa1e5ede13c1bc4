"""Reduce reported metrics over ranks: the loss, and metrics of the objective, the model and the optimizer."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.config.errors.user_error import UserError
from titan_exp.parallel.mesh import Mesh
from titan_exp.trainer.experts.load_metrics import ExpertMetrics
from titan_exp.trainer.objective.base import Objective, Reduction

MODEL = "model/"
"""Prefix of metrics of modules."""


class MetricReducer:
    """Reduces named scalars of all ranks, and gathers each rank's own numbers, in one message over the CPU.

    Metrics are logged as `loss`, `objective/NAME`, `model/NAME`, `optimizer/NAME` and, of routers, `experts/NAME` (see
    `experts/load_metrics.py`, which adds those that need no message). Modules and optimizers report
    them by `metric_reductions`, a mapping from name to `mean`, `sum` or `max`, and `metrics()`, which returns these
    scalars as tensors. Modules also have `reset_metrics()`, called before each step. They accumulate over the tokens of
    this rank's micro-batches, recomputation excluded (`is_recomputing`), and modules with the same name add up. A
    module's `mean` is a tensor [2], sum and count, so that it is the same whether tensor-parallel ranks see all tokens
    or, with sequence parallelism, their own; its `sum` is right only where they see all. An optimizer's are over ranks.

    `model` is the whole model, so that all ranks know all names; `parts` are the modules of this rank.
    """

    def __init__(
        self,
        objective: Objective,
        model: nn.Module,
        parts: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        *,
        experts: ExpertMetrics,
    ) -> None:
        self._mesh, self._optimizer, self._experts = mesh, optimizer, experts
        self._modules = [module for part in parts for module in part.modules() if hasattr(module, "metric_reductions")]
        model_metrics: dict[str, Reduction] = {}
        for module in model.modules():
            model_metrics |= getattr(module, "metric_reductions", {})
        optimizer_metrics: Mapping[str, Reduction] = getattr(optimizer, "metric_reductions", {})
        self.reductions: dict[str, Reduction] = {
            "loss": "mean",
            **{f"objective/{name}": reduction for name, reduction in objective.metrics.items()},
            **{f"{MODEL}{name}": reduction for name, reduction in model_metrics.items()},
            **{f"optimizer/{name}": reduction for name, reduction in optimizer_metrics.items()},
            **{f"experts/{name}": reduction for name, reduction in experts.reductions.items()},
        }
        self._counts = {
            name: f"count of {name}"
            for name, kind in self.reductions.items()
            if kind == "mean" and name.startswith((MODEL, "experts/"))
        }
        self._module_metric_names = {f"{of}{MODEL}{name}" for name in model_metrics for of in ("", "count of ")}

    @property
    def module_reductions(self) -> dict[str, Reduction]:
        """Reductions of `module_metrics`, of which sums and counts of means are summed."""
        return {name: kind for name, kind in self.reductions.items() if name.startswith(MODEL) and kind == "max"}

    def module_metrics(self) -> dict[str, Tensor]:
        """This rank's share of the modules' metrics so far, by logged name and name of its count. Worlds reduce
        it before the step is finished, and hand it to `reduce` among the metrics."""
        found: dict[str, Tensor] = {}
        for name, value in (item for module in self._modules for item in module.metrics().items()):  # type: ignore[operator]
            key = f"{MODEL}{name}"
            combine = torch.maximum if self.reductions[key] == "max" else torch.add
            names = [key, self._counts[key]] if key in self._counts else [key]
            for part, scalar in zip(names, value.reshape(-1), strict=True):
                found[part] = combine(found[part], scalar) if part in found else scalar
        return found

    def begin_step(self) -> None:
        """Reset the metrics of the model's modules."""
        for module in self._modules:
            module.reset_metrics()  # type: ignore[operator]  # a method, not a submodule

    def reduce(self, metrics: Mapping[str, Tensor], own: Sequence[float]) -> tuple[dict[str, float], list[list[float]]]:
        """Reduce the metrics of a step; all ranks call it.

        `metrics` are this rank's share, from `StepResult`. The numbers `own` of every rank are returned as rows.
        """
        values = self._on_cpu(metrics)
        sums = [name for name, reduction in self.reductions.items() if reduction != "max"] + [*self._counts.values()]
        maxima = [name for name, reduction in self.reductions.items() if reduction == "max"]
        rank, size = dist.get_rank(), dist.get_world_size()
        # Every rank fills its own row and leaves the others zero, so that one sum gathers them.
        row = [*own, *(values.get(name, -math.inf) for name in maxima)]
        message = torch.zeros(len(sums) + size * len(row), dtype=torch.float64)
        message[: len(sums)] = torch.tensor([values.get(name, 0.0) for name in sums], dtype=torch.float64)
        message[len(sums) + rank * len(row) :][: len(row)] = torch.tensor(row, dtype=torch.float64)
        if size > 1:
            dist.all_reduce(message, group=self._mesh.cpu_group)
        rows = message[len(sums) :].view(size, len(row))
        totals = dict(zip(sums, message[: len(sums)].tolist(), strict=True))
        reduced = {name: total / self._copies(name) for name, total in totals.items()}
        reduced |= {name: totals[name] / max(totals[count], 1) for name, count in self._counts.items()}
        reduced |= dict(zip(maxima, rows[:, len(own) :].amax(0).tolist(), strict=True))
        return {name: reduced[name] for name in self.reductions}, rows[:, : len(own)].tolist()

    def _copies(self, name: str) -> int:
        """Number of ranks that contribute the same value to a sum."""
        if name.startswith("experts/"):
            return 1
        if not name.startswith("optimizer/"):
            return self._mesh.loss_replicas
        return self._mesh.world.size() if self.reductions[name] == "mean" else 1

    def _on_cpu(self, metrics: Mapping[str, Tensor]) -> dict[str, float]:
        names = self._module_metric_names
        of_modules = {name: value for name, value in metrics.items() if name in names} or self.module_metrics()
        own = {name: value for name, value in metrics.items() if name not in names}
        found = {name if name == "loss" else f"objective/{name}": value for name, value in own.items()} | of_modules
        for name, value in self._experts.shares().items():
            key = f"experts/{name}"
            names = [key, self._counts[key]] if key in self._counts else [key]
            found |= dict(zip(names, value.reshape(-1), strict=True))
        if hasattr(self._optimizer, "metric_reductions"):
            found |= {f"optimizer/{name}": value for name, value in self._optimizer.metrics().items()}  # type: ignore[attr-defined]
        for name, value in found.items():
            if value.numel() != 1:
                raise UserError(f"{name} is a tensor of {list(value.shape)}, but a metric is one number.")
        # fp64, so that the order of ranks does not change the logged digits.
        device = self._mesh.device
        values = torch.stack(
            [value.detach().to(device, torch.float64).reshape(()) for value in found.values()]
        ).tolist()
        return dict(zip(found, values, strict=True))
