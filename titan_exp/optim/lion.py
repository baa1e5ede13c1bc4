"""Lion (Chen et al. 2023): updates by the sign of an interpolated momentum."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from titan_exp.config.groups.optimizer import LionConfig as Config
from titan_exp.ops.autograd import local_tensor
from titan_exp.optim.optimizer import GroupOptimizer
from titan_exp.optim.parameter_groups import NamedParameter, parameter_groups


def build(parameters: Sequence[NamedParameter], config: Config) -> torch.optim.Optimizer:
    """Build Lion."""
    return Lion(parameter_groups(parameters, config), config)


class Lion(GroupOptimizer):
    """Lion, parameter by parameter, without messages; the momentum is sharded like the parameter."""

    def __init__(self, groups: Iterable[dict[str, Any]], config: Config) -> None:
        super().__init__(groups, {"lr": config.lr, "betas": config.betas, "weight_decay": 0.0})
        self._dtype = torch.float32 if config.state_precision == "fp32" else torch.bfloat16

    def update(self, parameters: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state, (share, decay) = self.state[parameter], group["betas"]
            if not state:
                state["momentum"] = torch.zeros_like(parameter, dtype=self._dtype, memory_format=torch.preserve_format)
            weight, gradient, kept = (local_tensor(x) for x in (parameter, parameter.grad, state["momentum"]))  # type: ignore[arg-type]
            momentum = kept.float()
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(gradient.lerp(momentum, share).sign_(), alpha=-group["lr"])
            kept.copy_(momentum.lerp_(gradient, 1 - decay))
