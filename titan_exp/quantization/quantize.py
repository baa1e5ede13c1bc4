"""Application of a quantization recipe: replaces the matmul of the selected linear layers, before any sharding, and
casts all of a rank's weights together, once per optimizer step.

`WeightScales` reduces the amax of all shards over ranks in one message. Rounding is monotonic, so amax before rounding,
then rounded, equals amax of the gathered rounded weight. It also quantizes shards for a float8 all-gather: every gather
until the next step sends the same bytes, half as many as bf16. They are sent as bytes, because gloo does not support
float8. `Float8Weights` casts weights in both layouts, if a rank holds them whole or as a tensor-parallel shard: one
pass computes all amax values, one message reduces them, and one kernel casts all weights.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean
from titan_exp.config.groups.parallelism import BLOCK, QuantizationConfig
from titan_exp.config.torch_features import import_torchao
from titan_exp.models.blocks.linear import GroupedLinear, Linear, LinearImpl
from titan_exp.ops.autograd import local_tensor
from titan_exp.ops.float8 import cast_weights, weights_amax
from titan_exp.quantization import recipes
from titan_exp.quantization.float8 import E4M3, AmaxReduce, Float8, amax_of, cast


def quantize(model: nn.Module, config: QuantizationConfig, *, layers: int, device: torch.device) -> None:
    """Replace the matmul of every linear and grouped linear that the recipe selects, in place.

    `model` is the whole model or a pipeline stage, unsharded, with module names of the whole model; `layers` counts the
    blocks of the whole model. Raises UserError if emulation is forbidden and instructions or kernels are missing, or if
    dims of experts do not fit.
    """
    if config.recipe == "none":
        return
    emulated = recipes.needs_emulation(config, device)
    if config.recipe.startswith("float8") or (config.recipe == "nvfp4" and emulated):
        # Otherwise inductor skips eager's rounding to bf16 between operators, and casts and their scales differ.
        import torch._inductor.config as inductor

        inductor.emulate_precision_casts = True
    for name, linear in _quantized_linears(model, config, layers):
        if isinstance(linear, Linear):
            linear.linear_impl = recipes.linear_impl_for(config, emulated=emulated)
            continue
        from titan_exp.quantization.grouped import grouped_linear_impl_for

        grouped_emulated = _is_grouped_emulated(name, linear, config, device)
        linear.linear_impl = grouped_linear_impl_for(config, emulated=grouped_emulated)


def require_quantized_linears(model: nn.Module, config: QuantizationConfig, *, layers: int) -> None:
    """Raise UserError if the recipe selects no linear of the whole model, `filter` matches none, or the recipe's blocks
    do not divide the dims of one."""
    if config.recipe == "none":
        return
    found, quantized, violations = dict(_linears(model)), dict(_quantized_linears(model, config, layers)), []
    for pattern in config.filter if found else ():
        if not any(fnmatchcase(name, pattern) for name in found):
            offer = did_you_mean(pattern, found) or "write a pattern such as blocks.*.attention.*"
            violations.append(Violation("quantization.filter", pattern, "the model has no such linear layer", offer))
    if not quantized and not violations:
        reason, remedy = "the recipe would quantize no linear layer", "use quantization=none"
        if not found and any(type(module) is nn.Linear for module in model.modules()):
            reason = "it replaces the matmul of titan_exp's Linear, and the model has torch.nn.Linear layers"
            remedy = "make them titan_exp.models.blocks.linear.Linear layers, or use quantization=none"
        violations.append(Violation("quantization.recipe", config.recipe, reason, remedy))
    for name, linear in quantized.items():
        if not isinstance(linear, Linear):
            continue  # `_is_grouped_emulated` knows the kernel's multiple
        for size, dim in ((linear.in_features, "inputs"), (linear.out_features, "outputs")):
            if size % BLOCK[config.recipe]:
                reason = f"it needs dims that are multiples of {BLOCK[config.recipe]}, and {name} has {size} {dim}"
                offer = f"use quantization.filter=['{name}'] to keep it in high precision, or change its shape"
                violations.append(Violation("quantization.recipe", config.recipe, reason, offer))
    if violations:
        raise UserError("This run cannot start.", violations)


def describe(model: nn.Module, config: QuantizationConfig, *, layers: int, device: torch.device) -> str | None:
    """One-line summary of a recipe applied to a model; None without a recipe. Raises UserError as
    `require_quantized_linears` and `quantize` do."""
    if config.recipe == "none":
        return None
    require_quantized_linears(model, config, layers=layers)
    found, quantized = dict(_linears(model)), dict(_quantized_linears(model, config, layers))
    experts = {name: linear for name, linear in quantized.items() if isinstance(linear, GroupedLinear)}
    emulated_experts = [_is_grouped_emulated(name, linear, config, device) for name, linear in experts.items()]
    weights = sum(linear.weight.numel() for linear in quantized.values())
    share = weights / sum(parameter.numel() for parameter in model.parameters())
    emulated = recipes.needs_emulation(config, device)
    kernels = f"emulated on {device.type}" if emulated else f"by the instructions of {device.type}"
    if config.fused_casts is not False and config.has_dual_casts and not emulated:
        kernels += ", dual casts"
    if any(emulated_experts) and not emulated:
        layers_of = f"{len(experts)} expert layer{'s' * (len(experts) > 1)}"
        kernels += f", {layers_of} emulated, because torchao has no kernel for them here"
    return (
        f"{config.recipe}, {kernels}: {len(quantized)} of {len(found)} linear layers, {100 * share:.0f} % of the "
        "parameters. Embedding and head stay in high precision, and MFU refers to the bf16 peak"
    )


def _is_grouped_emulated(name: str, linear: GroupedLinear, config: QuantizationConfig, device: torch.device) -> bool:
    """True if a grouped linear must be emulated. Refuses it if the configuration forbids emulation."""
    emulated, pattern = recipes.needs_grouped_emulation(config, device), re.sub(r"^blocks\.\d+\.", "*.", name)
    if emulated and config.emulate is False:
        scales = "" if config.power_of_two_scales else " without power-of-two scales"
        reason = f"torchao has no kernel here for the experts of {name} in {config.recipe}{scales}"
        offer = f"use quantization.emulate=auto to emulate only those, or quantization.filter=['{pattern}']"
        raise UserError("This run cannot start.", [Violation("quantization.emulate", False, reason, offer)])
    multiple = BLOCK[config.recipe] if emulated else recipes.GROUPED_MULTIPLE[config.recipe]
    for size, dim in ((linear.in_features, "inputs"), (linear.out_features, "outputs")):
        if size % multiple:
            reason = f"it needs multiples of {multiple}, and the experts of {name} have {size} {dim}"
            offer = f"use quantization.filter=['{pattern}'] to keep them in high precision, or change their shape"
            if multiple > BLOCK[config.recipe]:
                offer += f", or use quantization.emulate=true, which takes multiples of {BLOCK[config.recipe]}"
            raise UserError("This run cannot start.", [Violation("quantization.recipe", config.recipe, reason, offer)])
    return emulated


def _quantized_linears(
    model: nn.Module, config: QuantizationConfig, layers: int
) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    for name, module in _linears(model):
        quantizable = not isinstance(module, Linear) or module.quantizable
        if quantizable and config.quantizes(name, module.in_features, module.out_features, layers=layers):
            yield name, module


def _linears(model: nn.Module) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Linear | GroupedLinear))


with import_torchao():
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

Form = tuple[Callable[[Tensor, torch.dtype], Tensor], Callable[[Tensor, torch.dtype], Tensor]]
Impl = TypeVar("Impl", bound=LinearImpl)


class WeightScales:
    """Precomputed scales of the quantized weights of this rank's modules, which compute in `dtype`. `groups` are ranks
    that hold other shards of the same weights, and possibly some of the same shards."""

    def __init__(self, parts: Sequence[nn.Module], groups: Sequence[dist.ProcessGroup], dtype: torch.dtype) -> None:
        found = _linears_of_kind(parts, recipes.ScaledLinearImpl)
        self._linears = [(module, impl) for module, impl in found if impl.weight_scale is not None]
        self._scales = [linear.weight_scale for _, linear in self._linears if linear.weight_scale is not None]
        self._groups, self._dtype = groups, dtype

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute scales and sent shards after the weights have changed; all ranks call it."""
        if not self._linears:
            return
        first = self._linears[0][1]
        shards = [local_tensor(module.get_parameter("weight")) for module, _ in self._linears]
        amax = shards[0].new_zeros(len(shards))
        # Uneven shards may be empty, which have no maximum.
        filled = [number for number, shard in enumerate(shards) if shard.numel()]
        if filled:
            norms = torch._foreach_norm([shards[number] for number in filled], torch.inf)
            torch._foreach_copy_([amax[number] for number in filled], norms)
        amax = amax.to(self._scales[0].device)
        for group in self._groups:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        scales = first.scales_of(amax.to(self._dtype))
        torch._foreach_copy_(self._scales, list(scales.unbind()))
        for (_, linear_impl), shard, scale in zip(self._linears, shards, self._scales, strict=True):
            if isinstance(linear_impl, recipes.Float8LinearImpl) and linear_impl.sent_shard is not None:
                # We first round to the compute dtype, as for a bf16 all-gather; torchao casts directly from fp32.
                linear_impl.sent_shard.copy_(cast(shard.to(self._dtype), scale, E4M3).view(torch.uint8))


def float8_all_gather_format(module: nn.Module) -> Form | None:
    """All-gather format of a module's evenly sharded weight in float8, with the bytes to send allocated. None if the
    weight has no precomputed scale, or is replicated by tensor-parallel ranks, which quantize the rows that they
    use."""
    if getattr(module, "rows", None) is not None:
        return None
    linear_impl = getattr(module, "linear_impl", None)
    if not isinstance(linear_impl, recipes.Float8LinearImpl) or linear_impl.recipe.rowwise:
        return None
    if (scale := linear_impl.weight_scale) is None:
        return None
    sent = linear_impl.sent_shard = torch.zeros_like(local_tensor(module.get_parameter("weight")), dtype=torch.uint8)

    def encode(_: Tensor, __: torch.dtype) -> Tensor:
        return sent

    def decode(gathered: Tensor, dtype: torch.dtype) -> Tensor:
        return Float8TrainingTensor(gathered.view(E4M3), scale, dtype, None, GemmInputRole.WEIGHT)

    return encode, decode


def allocate_float8_weights(model: nn.Module) -> None:
    """Allocate the float8 weights of a materialized model that FSDP does not shard. Skips weights replicated by
    tensor-parallel ranks, which quantize the rows that they use."""
    for module, linear_impl in _linears_of_kind([model], recipes.Float8LinearImpl):
        if getattr(module, "rows", None) is None:
            linear_impl.allocate_weight(local_tensor(module.get_parameter("weight")))


def modules_with_float8_weights(parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules whose float8 weight is allocated; their matmuls read no other weight."""
    found = _linears_of_kind(parts, recipes.Float8LinearImpl)
    return [module for module, linear_impl in found if linear_impl.quantized_weight is not None]


class Float8Weights:
    """Float8 weights of this rank's modules, which compute in `dtype`."""

    def __init__(self, parts: Sequence[nn.Module], dtype: torch.dtype) -> None:
        found = _linears_of_kind(parts, recipes.Float8LinearImpl)
        self._linears = [(module, impl) for module, impl in found if impl.quantized_weight is not None]
        self._dtype = dtype

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantize the weights after they have changed; all ranks call it."""
        if not self._linears:
            return
        recipe = self._linears[0][1].recipe
        weights = [local_tensor(module.get_parameter("weight")).detach() for module, _ in self._linears]
        quantized = [linear_impl.quantized_weight for _, linear_impl in self._linears]
        rows, columns = zip(*((weight.rows, weight.columns) for weight in quantized if weight is not None), strict=True)
        fused = weights[0].is_cuda and not recipe.emulated
        amax = self._reduced(_amax(weights, recipe, fused=fused))
        scales = recipe.scale_of_amax(torch.cat([part.flatten() for part in amax]).to(self._dtype), E4M3)
        matrices = [matrix for pair in zip(rows, columns, strict=True) for matrix in pair]
        of_matrices = [matrix.scale for matrix in matrices], [matrix.inverse for matrix in matrices]
        for new, kept in zip((scales, scales.reciprocal()), of_matrices, strict=True):
            parts = new.split([part.numel() for part in amax])
            torch._foreach_copy_(kept, [part.view_as(old) for part, old in zip(parts, kept, strict=True)])
        if fused:
            by_scale = [matrix.scale for matrix in rows], [matrix.scale for matrix in columns]
            data = [matrix.data for matrix in rows], [matrix.data.t() for matrix in columns]
            cast_weights(weights, *by_scale, *data, dtype=self._dtype)
            return
        for weight, *both in zip(weights, rows, columns, strict=True):
            for matrix in both:
                matrix.data.copy_(cast(weight.to(self._dtype), matrix.scale, E4M3))

    def _reduced(self, amax: list[Tensor]) -> list[Tensor]:
        """Reduce the amax of scales that tensor-parallel ranks share, in one message."""
        reductions: list[AmaxReduce | None] = []
        for _, linear_impl in self._linears:
            over_inputs, over_outputs = linear_impl.recipe.input_amax_reduce, linear_impl.recipe.output_amax_reduce
            whole = over_inputs or over_outputs
            reductions.append(over_inputs if linear_impl.recipe.rowwise else whole)
            reductions.append(over_outputs if linear_impl.recipe.column_scales else whole)
        shared = [number for number, reduction in enumerate(reductions) if reduction is not None]
        if not shared:
            return amax
        reduction = reductions[shared[0]]
        assert reduction is not None
        message = reduction(torch.cat([amax[number].flatten() for number in shared]))
        parts = message.split([amax[number].numel() for number in shared])
        found = dict(zip(shared, parts, strict=True))
        return [found.get(number, part) for number, part in enumerate(amax)]


def _amax(weights: list[Tensor], recipe: Float8, *, fused: bool) -> list[Tensor]:
    """Amax of each weight, first for the scales of its rows, then for those of its columns."""
    if not recipe.rowwise:
        return [amax for amax in torch._foreach_norm(weights, torch.inf) for _ in range(2)]
    both = weights_amax(weights) if fused else [(amax_of(weight, -1), amax_of(weight, 0)) for weight in weights]
    return [amax for rows, columns in both for amax in (rows, columns if recipe.column_scales else rows.amax())]


def _linears_of_kind(parts: Sequence[nn.Module], kind: type[Impl]) -> Iterator[tuple[nn.Module, Impl]]:
    for part in parts:
        for module in part.modules():
            if isinstance(impl := getattr(module, "linear_impl", None), kind):
                yield module, impl
