"""Lion (Chen et al. 2023): the sign of an interpolated momentum."""

from collections.abc import Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Called as `Lion(groups, lr=optimizer.lr, **optimizer.options)`; each group has its own `weight_decay`."""

    def __init__(self, params: Iterable[Any], lr: float, beta1: float = 0.9, beta2: float = 0.99) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "beta1": beta1, "beta2": beta2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the trainer passes no closure
        """One update. Parameters may be DTensors, so only operators on whole tensors are used."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                update = momentum.lerp(parameter.grad, 1 - group["beta1"]).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                momentum.lerp_(parameter.grad, 1 - group["beta2"])
