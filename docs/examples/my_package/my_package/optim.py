"""Signum (Bernstein et al. 2018): the sign of a momentum."""

from collections.abc import Iterable
from typing import Any

import torch


class Signum(torch.optim.Optimizer):
    """Called as `Signum(groups, lr=optimizer.lr, **optimizer.options)`; each group has its own `weight_decay`."""

    def __init__(self, params: Iterable[Any], lr: float, beta: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the trainer passes no closure
        """One update. Parameters may be DTensors, so only operators on whole tensors are used."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                momentum.lerp_(parameter.grad, 1 - group["beta"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(momentum.sign(), alpha=group["lr"])
