"""Gradient clipping by value, by the norms of parameter groups, or by AdaGC: one device's in every layout."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_exp.config.groups.grad_clip import GradClipConfig
from titan_exp.config.groups.optimizer import ParameterGroup
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.optim.clipping.adagc import AdaGC
from titan_exp.optim.grad_clip import clip_factor, clip_gradients, parameter_norms, sum_over_shards
from titan_exp.optim.parameter_groups import NamedParameter

REST = "rest"
"""Name of the parameters whose group has no `max_grad_norm`."""


class NormClipper:
    """Clips gradients by their global norm alone, which an optimizer may do inside its step; without `max_norm`, never.
    `parameters` are all of this rank."""

    in_place = False
    """True if gradients must have the dtype of their parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], max_norm: float | None) -> None:
        self._optimizer, self._parameters, self._max_norm = optimizer, list(parameters), max_norm

    def clip(self, grad_norm: Tensor, *, step: int) -> Mapping[str, Tensor]:
        """Clip gradients of the global norm `grad_norm`. There are no metrics."""
        if self._max_norm is not None:
            clip_gradients(self._optimizer, self._parameters, grad_norm, self._max_norm)
        return {}

    def keep(self) -> None:
        """Nothing is kept in the optimizer's state."""

    def state(self) -> dict[str, Any]:
        """Nothing is kept beside it."""
        return {}

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Nothing is restored from it."""


class GradientClipper:
    """Clips the gradients of this rank's parameters in place, in the dtype of the parameters.

    `unique` are those without copies of tied weights that another pipeline stage counts; `max_norm` is that of
    parameters without a limit of their own.
    """

    in_place = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[NamedParameter],
        unique: Iterable[Tensor],
        config: GradClipConfig,
        groups: Mapping[str, ParameterGroup],
        *,
        max_norm: float | None,
        pp_group: dist.ProcessGroup | None,
    ) -> None:
        self._config, self._max_norm, self._pp_group = config, max_norm, pp_group
        self._parameters = [named.parameter for named in parameters]
        self._limits = {REST: max_norm} | {
            name: group.max_grad_norm for name, group in groups.items() if group.max_grad_norm is not None
        }
        own = {name: groups[name] for name in self._limits if name != REST}
        self._limit_of = [
            next((name for name, group in own.items() if group.has(named.name, named.role)), REST)
            for named in parameters
        ]
        counted = set(unique)
        self._counted = torch.tensor([float(parameter in counted) for parameter in self._parameters])
        if self._parameters:
            self._counted = self._counted.to(local_tensor(self._parameters[0]).device)
        self._adagc = AdaGC(optimizer, self._parameters, config) if config.mode == "adagc" else None

    @property
    def averages(self) -> Tensor | None:
        """Average norm of each parameter, with AdaGC."""
        return None if self._adagc is None else self._adagc.averages

    def state(self) -> dict[str, Any]:
        """Step after which AdaGC's averages began, if that was not the run's first."""
        return {"begun": self._adagc.begun} if self._adagc is not None and self._adagc.begun else {}

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Take over AdaGC's averages from the optimizer's state, after a checkpoint of `step` is loaded."""
        if self._adagc is not None:
            self._adagc.restore(None if state is None else state["begun"], step)

    def keep(self) -> None:
        """Keep AdaGC's averages in the optimizer's state; after its step."""
        if self._adagc is not None:
            self._adagc.keep()

    @torch.no_grad()
    def clip(self, grad_norm: Tensor, *, step: int) -> Mapping[str, Tensor]:
        """Clip gradients of the global norm `grad_norm`. Returns metrics, the same on every rank."""
        metrics = {"clip/share": self._clamp()} if self._config.mode == "value" else {}
        norms = parameter_norms(self._parameters)
        if self._adagc is None:
            factors, limited = self._by_limit(norms)
            metrics |= limited
        else:
            factors = self._adagc.factors(norms, step=step, grad_norm=grad_norm, max_norm=self._max_norm)
            metrics["clip/share"] = self._share((factors < 1).float(), torch.ones_like(factors))
        for parameter, factor in zip(self._parameters, factors.unbind(), strict=True):
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(factor)
        smallest = factors.amin()
        if self._pp_group is not None:
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self._pp_group)
        return {**metrics, "clip/factor": smallest}

    def _clamp(self) -> Tensor:
        """Clamp every number of the gradients; returns the share that was beyond the limit."""
        limit, beyond = self._config.max_value, []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                beyond.append(self._counted.new_zeros(()))
                continue
            local = local_tensor(gradient)
            beyond.append((local.abs() > limit).sum(dtype=torch.float32))
            local.clamp_(-limit, limit)
        sizes = [0 if parameter.grad is None else parameter.numel() for parameter in self._parameters]
        return self._share(sum_over_shards(beyond, self._parameters), self._counted.new_tensor(sizes))

    def _by_limit(self, norms: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Factors [parameters] that limit the norm of each group of parameters; metrics of several groups."""
        squares = norms.square() * self._counted
        places = {name: [index for index, of in enumerate(self._limit_of) if of == name] for name in self._limits}
        sums = torch.stack([sum((squares[index] for index in of), squares.new_zeros(())) for of in places.values()])
        if self._pp_group is not None:
            dist.all_reduce(sums, group=self._pp_group)
        found = dict(zip(places, sums.sqrt().unbind(), strict=True))
        one = norms.new_ones(())
        factor = {
            name: one if (limit := self._limits[name]) is None else clip_factor(norm, limit)
            for name, norm in found.items()
        }
        metrics = {f"clip/norm/{name}": norm for name, norm in found.items()} if len(found) > 1 else {}
        return torch.stack([factor[name] for name in self._limit_of]), metrics

    def _share(self, numbers: Tensor, of: Tensor) -> Tensor:
        """Ratio of two sums over all parameters of the model."""
        sums = torch.stack([(numbers * self._counted).sum(), (of * self._counted).sum()])
        if self._pp_group is not None:
            dist.all_reduce(sums, group=self._pp_group)
        return sums[0] / sums[1]
