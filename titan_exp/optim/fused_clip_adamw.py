"""Fused clip and AdamW (Loshchilov and Hutter 2019): torch's states, updated by our kernel in one pass over memory."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from titan_exp.ops.adamw import adamw_update, bias_rates
from titan_exp.ops.local_tensor import local_tensor


class FusedClipAdamW(torch.optim.Optimizer):
    """AdamW for fp32 plain tensors and DTensors on CUDA, one kernel per parameter, moments in the dtype `moments`.

    States have the names, shapes and dtypes of torch's fused AdamW, or with bf16 moments of `LowPrecisionAdamW`, so
    that checkpoints are interchangeable.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        moments: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._grad_scale: Tensor | None = None
        self._moments = moments
        self._copies: Mapping[Any, Tensor] = {}

    def set_grad_scale(self, factor: Tensor) -> None:
        """Scale the gradients of the next step by a scalar on the device."""
        self._grad_scale = factor

    def set_compute_weights(self, copies: Mapping[Any, Tensor]) -> None:
        """Round each updated parameter into its compute weight too. Gradients may have the compute weight's dtype."""
        self._copies = copies

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Gradients stay as they are, not clipped."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self._update([parameter for parameter in group["params"] if parameter.grad is not None], group)
        self._grad_scale = None
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        states = [self._state_of(parameter) for parameter in parameters]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        rates = bias_rates(torch.stack(steps), lr=group["lr"], betas=group["betas"])
        for parameter, state, step_rates in zip(parameters, states, rates.unbind(), strict=True):
            gradient, copy = parameter.grad, self._copies.get(parameter)
            assert gradient is not None
            adamw_update(
                local_tensor(parameter),
                local_tensor(gradient),
                local_tensor(state["exp_avg"]),
                local_tensor(state["exp_avg_sq"]),
                rates=step_rates,
                decay=group["lr"] * group["weight_decay"],
                betas=group["betas"],
                eps=group["eps"],
                factor=self._grad_scale,
                copy=None if copy is None else local_tensor(copy),
            )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=local_tensor(parameter).device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=self._moments, memory_format=torch.preserve_format)
        return state
