"""AdamW (Loshchilov and Hutter 2019) with moments stored in bf16 or 8 bits and computed in fp32."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.optimizer import MOMENT_BLOCK
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.optim.state_quantization import MomentFormat, Rounded, formats_of

MOMENTS = ("exp_avg", "exp_avg_sq")


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW for plain tensors and DTensors, parameter by parameter; `precision` is `bf16`, `int8` or `fp8`.

    8-bit moments of vectors, and of matrices whose columns are no multiple of a block, stay in fp32.

    Raises:
        UserError: a block of 8-bit moments would lie on two ranks.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, precision: str
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._formats, self._in_blocks = formats_of(precision), precision in ("int8", "fp8")
        if self._in_blocks:
            for group in self.param_groups:
                for parameter in group["params"]:
                    _require_whole_blocks(parameter, precision)

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
        state, formats = self.state[parameter], self._formats_of(parameter)
        if not state:
            state["step"] = torch.tensor(0.0)
            for name, moment in zip(MOMENTS, formats, strict=True):
                empty = moment.empty(local_tensor(parameter))
                state[name] = _placed_as(parameter, empty[0], parameter.shape)
                for scales in empty[1:]:
                    shape = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // MOMENT_BLOCK))
                    state[f"{name}_scale"] = _placed_as(parameter, scales, shape)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        weight, gradient = local_tensor(parameter), local_tensor(parameter.grad).float()  # type: ignore[arg-type]  # not None
        kept = [[local_tensor(state[key]) for key in (name, f"{name}_scale") if key in state] for name in MOMENTS]
        # The update uses the moments before they are rounded for storage.
        first = formats[0].read(kept[0]).lerp(gradient, 1 - beta1)
        second = formats[1].read(kept[1]).lerp(gradient.square(), 1 - beta2)
        for moment, tensors, value in zip(formats, kept, (first, second), strict=True):
            moment.write(tensors, value)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = second.sqrt_().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        weight.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**step))

    def _formats_of(self, parameter: Tensor) -> tuple[MomentFormat, MomentFormat]:
        if self._in_blocks and not _has_blocks(parameter):
            return Rounded(torch.float32), Rounded(torch.float32)
        return self._formats


def _has_blocks(parameter: Tensor) -> bool:
    """True if the whole parameter fits 8-bit blocks, so that every layout stores the same."""
    return parameter.dim() >= 2 and parameter.shape[-1] % MOMENT_BLOCK == 0


def _require_whole_blocks(parameter: Tensor, precision: str) -> None:
    columns = local_tensor(parameter).shape[-1] if parameter.dim() else 0
    if _has_blocks(parameter) and columns % MOMENT_BLOCK:
        reason = (
            f"moments are stored in blocks of {MOMENT_BLOCK} numbers of a row, and a rank has {columns} of "
            f"{parameter.shape[-1]}"
        )
        remedy = "optimizer.state_precision=bf16, or a smaller parallelism.tp or parallelism.dp_shard"
        violation = Violation("optimizer.state_precision", precision, reason, remedy)
        raise UserError("This run cannot be started.", [violation])


def _placed_as(parameter: Tensor, local: Tensor, shape: torch.Size) -> Tensor:
    """A rank's part of a tensor of this shape, sharded like the parameter."""
    if not isinstance(parameter, DTensor):
        return local
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
