"""Lion's update (Chen et al. 2023), elementwise: no messages."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from titan_exp.ops.local_tensor import local_tensor
from titan_exp.optim.lion import Config


class Lion(torch.optim.Optimizer):
    """Lion for plain tensors and DTensors, parameter by parameter; the momentum is sharded like the parameter."""

    def __init__(self, groups: Iterable[dict[str, Any]], config: Config) -> None:
        super().__init__(groups, {"lr": config.lr, "betas": config.betas, "weight_decay": 0.0})
        self._dtype = torch.float32 if config.state_precision == "fp32" else torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter, dtype=self._dtype, memory_format=torch.preserve_format)
        weight, gradient, kept = (local_tensor(x) for x in (parameter, parameter.grad, state["momentum"]))  # type: ignore[arg-type]
        momentum, (share, decay) = kept.float(), group["betas"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(gradient.lerp(momentum, share).sign_(), alpha=-group["lr"])
        kept.copy_(momentum.lerp_(gradient, 1 - decay))
