"""AdamW (Loshchilov and Hutter 2019): torch's, a version with low-precision moments, or one fused with clipping."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.optimizer import MOMENT_BLOCK
from titan_exp.config.groups.optimizer import AdamWConfig as Config
from titan_exp.config.torch_features import import_torchao
from titan_exp.ops.adamw import adamw_update, bias_rates
from titan_exp.ops.autograd import local_tensor
from titan_exp.optim.matrices import sharded_like
from titan_exp.optim.optimizer import GroupOptimizer, adamw_state
from titan_exp.optim.parameter_groups import NamedParameter, parameter_groups


def build(parameters: Sequence[NamedParameter], config: Config) -> torch.optim.Optimizer:
    """Build the chosen implementation. Raises UserError if a block of 8-bit moments would lie on two ranks."""
    groups, lr, betas = parameter_groups(parameters, config), config.lr, (config.betas[0], config.betas[1])
    assert config.implementation != "auto", "resolved before launch"
    precision, implementation, eps = config.state_precision, config.implementation, config.eps
    if implementation == "triton":
        assert precision in ("fp32", "bf16"), "checked by the rules"
        moments = torch.float32 if precision == "fp32" else torch.bfloat16
        return FusedClipAdamW(groups, lr=lr, betas=betas, eps=eps, moments=moments)
    if precision != "fp32":
        return LowPrecisionAdamW(groups, lr=lr, betas=betas, eps=eps, precision=precision)
    if implementation == "fused":
        return FusedAdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=False, foreach=implementation == "foreach")


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW with a shorter way to its kernel, which takes this rank's shards.

    torch examines options, devices and dtypes again in every step, which takes the host as long as the kernel of a
    small model; and it hands DTensors to the kernel.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, of its dtype."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for dtype in {parameter.dtype for parameter in parameters}:
                self._update([parameter for parameter in parameters if parameter.dtype == dtype], group)
        return loss

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        states = [adamw_state(self.state[parameter], parameter) for parameter in parameters]
        steps, (beta1, beta2) = [state["step"] for state in states], group["betas"]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            [local_tensor(parameter) for parameter in parameters],
            [local_tensor(parameter.grad) for parameter in parameters],  # type: ignore[arg-type]  # not None
            *([local_tensor(state[name]) for state in states] for name in MOMENTS),
            [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


class FusedClipAdamW(GroupOptimizer):
    """Fused AdamW on CUDA: our kernel clips and updates in one pass over memory. Parameters are fp32, moments have the
    dtype `moments`. States have the names, shapes and dtypes of torch's fused AdamW (with bf16 moments, of
    `LowPrecisionAdamW`), so checkpoints are interchangeable."""

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
        """Make each update also round parameters into compute weights, whose dtype gradients may have."""
        self._copies = copies

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Gradients are left unclipped."""
        loss = super().step(closure)
        self._grad_scale = None
        return loss

    def update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update the parameters, with one kernel each."""
        states = [adamw_state(self.state[parameter], parameter, self._moments) for parameter in parameters]
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


class _Rounded:
    """Storage format of one moment: rounded to a torch dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def empty(self, like: Tensor) -> list[Tensor]:
        """Zero moment for this rank's shard of a parameter, as one or two tensors."""
        return [torch.zeros_like(like, dtype=self.dtype)]

    def read(self, kept: list[Tensor]) -> Tensor:
        """Moment in fp32; the caller must not modify it."""
        return kept[0].float()

    def write(self, kept: list[Tensor], moment: Tensor) -> None:
        kept[0].copy_(moment)


class _Float8Blocks(_Rounded):
    """Moment in float8: e4m3 numbers as bytes, and an fp32 scale per block. Blocks lie within rows, so each is whole on
    one rank and a checkpoint fits every layout. Of a non-negative moment, square roots are stored: a second moment
    spans twice its gradients' exponents; one that underflows makes the update far too large."""

    def __init__(self, *, signed: bool) -> None:
        super().__init__(torch.uint8)
        self.signed = signed

    def empty(self, like: Tensor) -> list[Tensor]:
        scales = torch.zeros(*like.shape[:-1], like.shape[-1] // MOMENT_BLOCK, device=like.device)
        return [*super().empty(like), scales]

    def read(self, kept: list[Tensor]) -> Tensor:
        numbers = kept[0].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, MOMENT_BLOCK))
        found = (numbers * kept[1][..., None]).flatten(-2)
        return found if self.signed else found.square_()

    def write(self, kept: list[Tensor], moment: Tensor) -> None:
        from torchao.optim.subclass_fp8 import quantize_fp8

        numbers, scales = quantize_fp8((moment if self.signed else moment.sqrt()).contiguous(), MOMENT_BLOCK)
        kept[0].copy_(numbers.view(torch.uint8))
        kept[1].copy_(scales.view_as(kept[1]))


class _DynamicBlocks(_Float8Blocks):
    """Moment in dynamic 8-bit: codes denser around zero (Dettmers et al. 2022), and an fp32 scale per block."""

    def read(self, kept: list[Tensor]) -> Tensor:
        from torchao.optim.quant_utils import dequant_with_qmap

        return dequant_with_qmap(kept[0], _values(self.signed, kept[0].device), kept[1].flatten())

    def write(self, kept: list[Tensor], moment: Tensor) -> None:
        from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

        scaled, scales = scale_tensor(moment.contiguous(), MOMENT_BLOCK)
        kept[0].copy_(quantize_8bit_with_qmap(scaled, _values(self.signed, moment.device)))
        kept[1].copy_(scales.view_as(kept[1]))


def _formats_of(precision: str) -> tuple[_Rounded, _Rounded]:
    """Formats of the first and second moment, by `optimizer.state_precision`."""
    if precision in ("fp32", "bf16"):
        rounded = _Rounded(torch.float32 if precision == "fp32" else torch.bfloat16)
        return rounded, rounded
    with import_torchao():
        import torchao.optim  # noqa: F401  # its functions are imported where used
    kind = _Float8Blocks if precision == "fp8" else _DynamicBlocks
    return kind(signed=True), kind(signed=False)


@cache
def _values(signed: bool, device: torch.device) -> Tensor:
    from torchao.optim.quant_utils import create_dynamic_map

    return torch.tensor(create_dynamic_map(signed=signed), device=device)


MOMENTS = ("exp_avg", "exp_avg_sq")


class LowPrecisionAdamW(GroupOptimizer):
    """AdamW whose moments are stored in `precision` (`bf16`, `int8` or `fp8`) and computed in fp32, parameter by
    parameter. With 8-bit moments, vectors and matrices whose columns are not a multiple of a block keep fp32 moments.
    Raises UserError if a block of 8-bit moments would lie on two ranks."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, precision: str
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._formats, self._in_blocks = _formats_of(precision), precision in ("int8", "fp8")
        for group in self.param_groups if self._in_blocks else ():
            for parameter in group["params"]:
                _require_whole_blocks(parameter, precision)

    def update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, formats = self.state[parameter], self._formats
        if self._in_blocks and not _has_blocks(parameter):
            formats = (_Rounded(torch.float32), _Rounded(torch.float32))
        if not state:
            state["step"] = torch.tensor(0.0)
            for name, moment in zip(MOMENTS, formats, strict=True):
                empty, dims = moment.empty(local_tensor(parameter)), range(-parameter.ndim, 0)
                state[name] = sharded_like(parameter, empty[0], parameter.shape, *dims)
                for scales in empty[1:]:
                    shape = (*parameter.shape[:-1], parameter.shape[-1] // MOMENT_BLOCK)
                    state[f"{name}_scale"] = sharded_like(parameter, scales, shape, *dims)
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


def _has_blocks(parameter: Tensor) -> bool:
    """True if the whole parameter fits 8-bit blocks, a test that has the same result in every layout."""
    return parameter.dim() >= 2 and parameter.shape[-1] % MOMENT_BLOCK == 0


def _require_whole_blocks(parameter: Tensor, precision: str) -> None:
    columns = local_tensor(parameter).shape[-1] if parameter.dim() else 0
    if _has_blocks(parameter) and columns % MOMENT_BLOCK:
        reason = (
            f"moments are stored in blocks of {MOMENT_BLOCK} numbers of a row, and a rank would hold {columns} of a "
            f"row's {parameter.shape[-1]} numbers, not a multiple of {MOMENT_BLOCK}"
        )
        remedy = "use optimizer.state_precision=bf16, or a smaller parallelism.tp or parallelism.dp_shard"
        violation = Violation("optimizer.state_precision", precision, reason, remedy)
        raise UserError("This run cannot start.", [violation])
