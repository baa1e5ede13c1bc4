"""Optimizers of matrices: their own update for the weights of linear layers, and AdamW for all other parameters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from titan_exp.config.groups.optimizer import MatrixOptimizerConfig
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.optim.parameter_groups import NamedParameter, parameter_groups


class MatrixOptimizer(torch.optim.Optimizer, ABC):
    """Updates groups with `matrices` by `update_matrices`, and others by torch's fused AdamW.

    Embedding, head and vectors are never matrices.
    """

    def __init__(self, parameters: Sequence[NamedParameter], config: MatrixOptimizerConfig) -> None:
        groups = [
            {**group, "matrices": matrices}
            for matrices in (True, False)
            for group in parameter_groups([named for named in parameters if named.is_matrix == matrices], config)
        ]
        defaults = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": 0.0}
        super().__init__(groups, defaults)
        self.named: Mapping[Tensor, NamedParameter] = {named.parameter: named for named in parameters}

    @abstractmethod
    def update_matrices(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update the matrices of a group that have gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                (self.update_matrices if group["matrices"] else self._update_others)(parameters, group)
        return loss

    def _update_others(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        states = [self._moments(parameter) for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [local_tensor(parameter) for parameter in parameters],
            [local_tensor(parameter.grad) for parameter in parameters],  # type: ignore[arg-type]  # not None
            [local_tensor(state["exp_avg"]) for state in states],
            [local_tensor(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=local_tensor(parameter).device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
