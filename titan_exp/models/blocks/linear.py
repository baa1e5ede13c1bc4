"""Linear layers, plain or one per expert, and the matmul behind them, which quantization recipes replace."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int32
from torch import Tensor, nn

from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.models.spec.tp_plan import TPStyle
from titan_exp.ops.autograd import local_tensor, recompute_input
from titan_exp.ops.moe.grouped_mm import add_expert_bias, grouped_linear, weighted_swiglu_linear
from titan_exp.ops.moe.permutation import PaddedOrder, permute
from titan_exp.ops.swiglu import weighted_swiglu
from titan_exp.ops.swiglu_variant import SwiGLUVariant
from titan_exp.ops.truncated_normal import GAMMA, splitmix64, truncated_normal, wrap

CPU_CHUNK = 2**14
"""Random words drawn at once on a CPU: few enough for its cache. Threads would wait for each other longer
than they compute."""

DEVICE_CHUNK = 2**21
"""Random words drawn at once on an accelerator: temporary tensors of about 100 MB."""


@dataclass(frozen=True)
class InitSpec:
    """Initial distribution of a parameter."""

    kind: Literal["normal", "ones", "zeros", "log_uniform", "inverse_softplus"]
    """Distribution; `normal` is truncated at three standard deviations. `log_uniform` is the logarithm of a uniform
    number, and `inverse_softplus` that of a number whose logarithm is uniform."""
    std: float = 0.0
    """Standard deviation of `normal`, before truncation."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """Bounds of the number that `log_uniform` and `inverse_softplus` take."""
    scale: float = 1.0
    """Factor of the values."""


@dataclass(frozen=True)
class ShardSpec:
    """Rectangular shard of a parameter."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: tuple[int, ...]
    """First index of the shard in each dim."""
    size: tuple[int, ...]
    """Extent of the shard in each dim; zero if this rank holds nothing."""

    @staticmethod
    def whole(shape: tuple[int, ...]) -> "ShardSpec":
        """The whole parameter as one shard."""
        return ShardSpec(shape, (0,) * len(shape), shape)


@torch.no_grad()
def init_shard_(values: Tensor, seed: int, name: str, init: InitSpec, part: ShardSpec) -> None:
    """Fill `values`, a shard of the parameter with this full name, with its initial values, on its device."""
    if init.kind in ("ones", "zeros"):
        values.fill_(init.scale if init.kind == "ones" else 0.0)
        return
    if values.numel() == 0:
        return
    if not part.shape:
        values, part = values.view(1), ShardSpec.whole((1,))
    flat = values.detach().contiguous().view(-1, values.shape[-1])
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    rows, words = _counters(part, values.device)
    rows.mul_(wrap(GAMMA)).add_(wrap(key))
    words.mul_(wrap(GAMMA))
    unused = part.start[-1] % 2  # the first word's first number, if the shard begins with its second

    for of_rows, of_words in _chunks(rows.shape[0], words.shape[0], values.device):
        numbers = _numbers(init, splitmix64(rows[of_rows] + words[of_words]))
        first = 2 * of_words.start - unused
        target = flat[of_rows, max(first, 0) : first + numbers.shape[1]]
        target.copy_(numbers[:, max(-first, 0) :][:, : target.shape[1]])
    if flat.data_ptr() != values.data_ptr():
        values.copy_(flat.view(values.shape))


def _numbers(init: InitSpec, words: Tensor) -> Tensor:
    """Two numbers of the distribution for each random word [rows, words]."""
    if init.kind == "normal":
        return truncated_normal(words, init.std * init.scale)
    # In fp64 on the CPU, so that every device rounds the same values to fp32; only vectors have these distributions.
    uniform = (words.cpu().view(torch.int32).double() + 0.5) * 2.0**-32 + 0.5
    low, high = init.bounds
    if init.kind == "log_uniform":
        return (low + (high - low) * uniform).log() * init.scale
    step = (math.log(low) + (math.log(high) - math.log(low)) * uniform).exp()
    return (step + (-torch.expm1(-step)).log()) * init.scale


def _counters(part: ShardSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Counters of a shard's random words, to be added: a column [rows, 1] and a row [words]. A word yields two
    neighbouring elements of the last dim; each row of the parameter begins with a new word."""
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for extent, start, size in zip(part.shape[:-1], part.start[:-1], part.size[:-1], strict=True):
        rows = (rows[:, None] * extent + torch.arange(start, start + size, device=device)).flatten()
    start, end = part.start[-1], part.start[-1] + part.size[-1]
    return rows[:, None] * -(-part.shape[-1] // 2), torch.arange(start // 2, -(-end // 2), device=device)


def _chunks(rows: int, words: int, device: torch.device) -> list[tuple[slice, slice]]:
    """Cut a matrix of random words into blocks of bounded size."""
    limit = CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK
    height = max(1, limit // words)
    return [
        (slice(row, row + height), slice(word, word + limit))
        for row in range(0, rows, height)
        for word in range(0, words, limit)
    ]


@runtime_checkable
class TensorParallelCollectives(Protocol):
    """Collectives around a block's linears under tensor parallelism."""

    @property
    def degree(self) -> int:
        """Number of ranks."""
        ...

    @property
    def sequence(self) -> bool:
        """True if ranks hold parts of the tokens outside the linears (sequence parallelism)."""
        ...

    @property
    def by_sequence(self) -> bool:
        """True if these are parts of each sequence, False if they are consecutive tokens of all sequences."""
        ...

    def gather_input(self, x: Tensor) -> Tensor:
        """Gather all tokens from the ranks' tokens."""
        ...

    def reduce_output(self, x: Tensor) -> Tensor:
        """Sum over ranks and take this rank's tokens."""
        ...

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Gather all tokens [batch, seq, width], without a gradient."""
        ...

    def scatter_tokens(self, x: Tensor) -> Tensor:
        """Sum [batch, seq, width] over ranks and take this rank's tokens, without a gradient."""
        ...


class LinearImpl(nn.Module):
    """Matmul in the dtype of input and weight. A recipe is a subclass."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute x · weightᵀ: [..., inputs] and [outputs, inputs] to [..., outputs]."""
        return nn.functional.linear(x, weight)

    def column_parallel(self, x: Tensor, weight: Tensor, ranks: TensorParallelCollectives) -> Tensor:
        """Compute the outputs of this rank's weight rows for all tokens; `x` are this rank's tokens."""
        return self(ranks.gather_input(x), weight)

    def row_parallel(self, x: Tensor, weight: Tensor, ranks: TensorParallelCollectives) -> Tensor:
        """Compute the outputs of this rank's tokens; `x` are this rank's inputs of all tokens."""
        return ranks.reduce_output(self(x, weight))

    def shard(self, *, input_sharded: bool, amax_reduce: Callable[[Tensor], Tensor]) -> None:
        """Note that tensor-parallel ranks compute with shards of the weight, along inputs or outputs. `amax_reduce`
        takes the elementwise maximum over these ranks."""


class GroupedLinearImpl(nn.Module):
    """Grouped matmul in the dtype of input and weight. A recipe is a subclass."""

    row_multiple = 1
    """Multiple of rows per expert that the kernel requires; it pads rows itself unless they are `padded`."""

    def forward(self, x: Tensor, weight: Tensor, ends: Tensor, *, padded: bool = False) -> Tensor:
        """Compute x · weight[expert]ᵀ: [tokens, inputs] and [experts, outputs, inputs] to [tokens, outputs]. `padded`
        promises that every expert has rows, a multiple of `row_multiple`; rows after the last end may then come out
        uninitialized."""
        return grouped_linear(x, weight, ends)

    def of_tokens(self, tokens: Tensor, weight: Tensor, order: PaddedOrder) -> Tensor:
        """Compute the same for the padded rows of tokens."""
        return recompute_input(
            lambda tokens: permute(tokens, order.order, order.inverse, order.padding),
            tokens,
            lambda rows: self(rows, weight, order.ends, padded=True),
        )

    def of_swiglu(
        self, gate_up: Tensor, weight: Tensor, ends: Tensor, row_weights: Tensor, variant: SwiGLUVariant
    ) -> Tensor:
        """Compute the same for x = silu(gate) · up · row weight, from `gate_up` [tokens, 2 · inputs]; `variant` may
        change SwiGLU."""
        if type(self) is GroupedLinearImpl:
            return weighted_swiglu_linear(gate_up, weight, row_weights, ends, variant=variant)
        return self(weighted_swiglu(gate_up, row_weights, variant=variant), weight, ends)

    def shard(self, *, input_sharded: bool, amax_reduce: Callable[[Tensor], Tensor]) -> None:
        """Note that ranks with the same tokens compute with shards of the experts' channels, along inputs or outputs.
        `amax_reduce` takes the elementwise maximum over these ranks."""


class Linear(nn.Linear):
    """A linear layer initialized with standard deviation `std`. `bias_std` is the bias's; None is a layer without bias.
    Recipes quantize `quantizable` layers only."""

    def __init__(
        self, fan_in: int, fan_out: int, std: float, bias_std: float | None = None, *, quantizable: bool = True
    ) -> None:
        super().__init__(fan_in, fan_out, bias=bias_std is not None)
        self.std, self.bias_std, self.quantizable = std, bias_std, quantizable
        self.linear_impl = LinearImpl()

    def forward(self, input: Float[Tensor, "*any fan_in"]) -> Float[Tensor, "*any fan_out"]:
        return add_bias(self.linear_impl(input, self.weight), self.bias)

    def init_spec(self) -> dict[str, InitSpec]:
        return weight_and_bias(self.std, self.bias_std)


def weight_and_bias(std: float, bias_std: float | None, bias: str = "bias") -> dict[str, InitSpec]:
    """Initialization of a weight, and of the parameter `bias` unless `bias_std` is None; a std of 0 gives zeros."""
    stds = {"weight": std} if bias_std is None else {"weight": std, bias: bias_std}
    return {name: InitSpec("normal", value) if value else InitSpec("zeros") for name, value in stds.items()}


def add_bias(x: Float[Tensor, "*any fan_out"], bias: Float[Tensor, " fan_out"] | None) -> Float[Tensor, "*any fan_out"]:
    """x + bias, in the dtype of `x`; `x` itself without bias."""
    return x if bias is None else x + bias.to(x.dtype)


class Planned(nn.Module):
    """Module whose linears a layer's spec describes under its path in the block, with their tensor-parallel styles."""

    def __init__(self, layer: LayerSpec, path: str) -> None:
        super().__init__()
        self._plan, self.fused_rows = layer.tp_plan(path), layer.fused_rows(path)

    def tp_plan(self) -> dict[str, TPStyle]:
        return self._plan


def linear(layer: LayerSpec, name: str) -> Linear:
    """Build the linear layer that a block's spec describes, by module path."""
    spec = layer.linear(name)
    bias_std = spec.bias_std if spec.bias else None
    return Linear(spec.inputs, spec.outputs, spec.std, bias_std, quantizable=spec.quantizable)


class GroupedLinear(nn.Module):
    """Linear layers, one per expert, initialized with standard deviation `std`. `bias_std` is the biases'; None is
    layers without biases."""

    parameter_role = "expert"

    def __init__(self, experts: int, fan_in: int, fan_out: int, std: float, bias_std: float | None = None) -> None:
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, fan_in, fan_out
        self.std, self.bias_std = std, bias_std
        self.weight = nn.Parameter(torch.empty(experts, fan_out, fan_in))
        self.bias = None if bias_std is None else nn.Parameter(torch.empty(experts, fan_out))
        self.linear_impl = GroupedLinearImpl()
        self.bias_start = 0
        """First output that this rank adds its bias to. Ranks whose outputs are summed each add a different part."""

    def forward(
        self,
        x: Float[Tensor, "tokens columns"],
        ends: Int32[Tensor, " experts"],
        row_weights: Float[Tensor, " tokens"] | None = None,
        *,
        of_swiglu: SwiGLUVariant | None = None,
        order: PaddedOrder | None = None,
        padded: bool = False,
    ) -> Float[Tensor, "_ fan_out"]:
        """x · weight[expert]ᵀ for rows sorted by expert, by `linear_impl`, plus the bias, times `row_weights` if given.

        `ends` are the ends of each expert's rows; rows after the last end give zeros and no gradient. With `of_swiglu`,
        `x` is the fused gate and up of this weighted SwiGLU variant. With `order`, `x` are tokens, whose rows are taken
        in this order. `padded` is that of `GroupedLinearImpl`.
        """
        weight = local_tensor(self.weight)
        if of_swiglu is not None:
            assert row_weights is not None, "the SwiGLU is weighted"
            out = self.linear_impl.of_swiglu(x, weight, ends, row_weights, of_swiglu)
        elif order is not None:
            out = self.linear_impl.of_tokens(x, weight, order)
        else:
            out = self.linear_impl(x, weight, ends, padded=padded)
        if self.bias is None:
            return out
        bias = local_tensor(self.bias)
        if bias.shape[1] < out.shape[1]:
            bias = nn.functional.pad(bias, (self.bias_start, out.shape[1] - self.bias_start - bias.shape[1]))
        return add_expert_bias(out, bias, ends, row_weights)

    def init_spec(self) -> dict[str, InitSpec]:
        return weight_and_bias(self.std, self.bias_std)

    def extra_repr(self) -> str:
        return f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
