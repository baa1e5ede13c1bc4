"""Schedule-free AdamW (Defazio et al. 2024): averages weights instead of decaying the learning rate."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_exp.config.groups.optimizer import ScheduleFreeAdamWConfig as Config
from titan_exp.ops.autograd import local_tensor
from titan_exp.optim.parameter_groups import NamedParameter, parameter_groups


def build(parameters: Sequence[NamedParameter], config: Config) -> torch.optim.Optimizer:
    """Build schedule-free AdamW."""
    return ScheduleFreeAdamW(parameter_groups(parameters, config), config)


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """Schedule-free AdamW for plain tensors and DTensors, parameter by parameter. No messages. Between steps the
    parameters are the averaged weights x, so evaluations, checkpoints and exports use them without switching.
    `to_gradient_point` moves them to y = x + (1 - beta1) · (z - x) before the passes of a step, and `step` moves them
    on to the next x. State: z and the second moment, sharded like the parameter; x is recovered from y and z."""

    def __init__(self, groups: Iterable[dict[str, Any]], config: Config) -> None:
        super().__init__(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": 0.0})
        self._power = config.averaging_power

    @torch.no_grad()
    def to_gradient_point(self) -> None:
        """Move the parameters from x to y."""
        for group in self.param_groups:
            for parameter in group["params"]:
                z = self._state_of(parameter)["z"]
                local_tensor(parameter).lerp_(local_tensor(z), 1 - group["betas"][0])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update from gradients at y to the next x; a parameter without gradient returns to x."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, (share, decay) = self._state_of(parameter), group["betas"]
        weight, z, square = (local_tensor(x) for x in (parameter, state["z"], state["exp_avg_sq"]))
        averaged = weight.lerp(z, 1 - 1 / share)
        if parameter.grad is None:
            weight.copy_(averaged)
            return
        gradient = local_tensor(parameter.grad)
        state["step"] += 1
        torch.maximum(state["peak_lr"], torch.tensor(group["lr"]), out=state["peak_lr"])
        contribution = state["peak_lr"] ** self._power
        state["weight_sum"] += contribution
        square.mul_(decay).addcmul_(gradient, gradient, value=1 - decay)
        denominator = (square / (1 - decay ** float(state["step"]))).sqrt_().add_(group["eps"])
        z.addcdiv_(gradient, denominator, value=-group["lr"])
        z.add_(weight, alpha=-group["lr"] * group["weight_decay"])
        total = float(state["weight_sum"])
        weight.copy_(averaged.lerp_(z, float(contribution) / total if total else 0.0))

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state |= {name: torch.tensor(0.0) for name in ("step", "weight_sum", "peak_lr")}
            state["z"] = parameter.detach().clone(memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
