"""Layers with linear attention: config fields, linears and shape rules of Gated DeltaNet and Kimi Delta Attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from titan_exp.config.errors.user_error import Violation, divisors, listed, nearest_numbers
from titan_exp.config.groups.experiment import NO_CHANGE
from titan_exp.config.groups.types import PositiveInt
from titan_exp.models.spec.mixers import LinearAttentionSpec
from titan_exp.models.spec.model_spec import LayerSpec, LinearSpec, TensorSpec, VectorSpec
from titan_exp.models.spec.tp_plan import SEQUENCE_PARALLEL, Colwise, FusedRows, HeadParallel, RowPiece, Rowwise

LINEAR_ATTENTION = "model.linear_attention"  # key of linear attention in the configuration


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Linear attention by the gated delta rule, in the layers without softmax attention."""

    key_heads: PositiveInt
    """Number of query and key heads. E.g. `model=qwen3_next_debug model.linear_attention.key_heads=4`."""
    value_heads: PositiveInt
    """Number of value heads, a multiple of `key_heads`. Each has a state of its own.
    E.g. `model=qwen3_next_debug model.linear_attention.value_heads=8`."""
    key_dim: PositiveInt
    """Width of a query or key head. E.g. `model=qwen3_next_debug model.linear_attention.key_dim=32`."""
    value_dim: PositiveInt
    """Width of a value head. E.g. `model=qwen3_next_debug model.linear_attention.value_dim=32`."""
    taps: PositiveInt
    """Number of tokens that the causal convolution of queries, keys and values reads, the token itself included.
    E.g. `model=qwen3_next_debug model.linear_attention.taps=2`."""
    full_every: PositiveInt
    """Interval of layers with softmax attention: of every so many layers the last one, and the last layer of the model.
    All others have linear attention. E.g. `model=qwen3_next_debug model.linear_attention.full_every=2`."""

    def is_full(self, layer: int, layers: int) -> bool:
        """True if layer number `layer` of the model's `layers` has softmax attention."""
        return (layer + 1) % self.full_every == 0 or layer == layers - 1

    def kinds(self, layers: int) -> list[str]:
        """Kind of each layer's mixer, by the names of `transformers`."""
        return ["full_attention" if self.is_full(layer, layers) else "linear_attention" for layer in range(layers)]


@dataclass(frozen=True)
class LinearAttentionFields:
    """Fields of a decoder some of whose layers have linear attention."""

    linear_attention: LinearAttentionConfig
    """Linear attention by the gated delta rule, in the layers without softmax attention.
    E.g. `model=qwen3_next_debug model.linear_attention.key_heads=4`."""
    linear_attention_backend: Literal["auto", "torch", "fla"] = field(metadata=NO_CHANGE)
    """Kernels of linear attention. `auto` takes `fla` on CUDA if the package fla-core is installed, else `torch`.
    E.g. `model=qwen3_next_debug model.linear_attention_backend=torch`."""

    def gated_delta_net(self, norm_eps: float) -> LinearAttentionSpec:
        """Gated DeltaNet of this shape."""
        shape = self.linear_attention
        return LinearAttentionSpec(
            *(shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.taps),
            norm_eps=norm_eps,
            backend=self.linear_attention_backend,
        )


def with_linear_attention(layer: LayerSpec, mixer: LinearAttentionSpec, dim: int, std: float) -> LayerSpec:
    """Return the block with linear attention in place of its softmax attention; all its weights start with `std`."""
    heads, width, values = mixer.value_heads, mixer.value_dim, mixer.value_heads * mixer.value_dim
    by_head = Colwise(
        mixer.key_heads,
        described=f"{mixer.key_heads} key heads ({LINEAR_ATTENTION}.key_heads)",
        key=f"{LINEAR_ATTENTION}.key_heads",
        gathers=False,
    )
    pieces = (RowPiece("query", mixer.key_dim), RowPiece("key", mixer.key_dim), RowPiece("value", width, mixer.group))
    rows = FusedRows("attention", pieces)
    name = "attention"
    linears = [
        LinearSpec(f"{name}.qkv", dim, mixer.channels, std, by_head, rows=rows),
        LinearSpec(f"{name}.beta", dim, heads, std, by_head, full_precision=True),
    ]
    # Decay and gate of Kimi Delta Attention come from latents, which each rank computes for its own tokens.
    gathered = replace(by_head, gathers=True)
    if mixer.decay == "channel":
        linears += [
            LinearSpec(f"{name}.decay_a", dim, mixer.key_dim, std, SEQUENCE_PARALLEL, full_precision=True),
            LinearSpec(f"{name}.decay_b", mixer.key_dim, mixer.decays, std, gathered),
            LinearSpec(f"{name}.gate_a", dim, width, std, SEQUENCE_PARALLEL, full_precision=True),
            LinearSpec(f"{name}.gate_b", width, values, std, gathered),
        ]
    else:
        linears += [
            LinearSpec(f"{name}.decay", dim, heads, std, by_head, full_precision=True),
            LinearSpec(f"{name}.gate", dim, values, std, by_head),
        ]
    linears.append(LinearSpec(f"{name}.out", values, dim, std, Rowwise(), writes_residual=True))
    kept = tuple(linear for linear in layer.linears if not linear.name.startswith(f"{name}."))
    vectors = tuple(vector for vector in layer.vectors if not vector.name.startswith(f"{name}."))
    return replace(
        layer,
        attention=None,
        linear_attention=mixer,
        linears=(*linears, *kept),
        vectors=(*vectors, VectorSpec(f"{name}.out_norm", width, HeadParallel())),
        tensors=(
            TensorSpec(f"{name}.convolution.weight", (mixer.channels, mixer.taps), vectors=True),
            TensorSpec(f"{name}.forget.log_rate", (heads,), vectors=True),
            TensorSpec(f"{name}.forget.bias", (mixer.decays,), vectors=True),
        ),
    )


def hybrid_layers(
    config: LinearAttentionConfig, full: Sequence[LayerSpec], linear: Sequence[LayerSpec]
) -> tuple[LayerSpec, ...]:
    """Layers of a hybrid, chosen from those with softmax attention and those with linear attention, layer by layer."""
    return tuple(full[layer] if config.is_full(layer, len(full)) else linear[layer] for layer in range(len(full)))


def linear_attention_violations(config: LinearAttentionConfig) -> Iterator[Violation]:
    """Violations by head counts that linear attention cannot compute."""
    if config.value_heads % config.key_heads:
        reason = f"{config.value_heads} value heads ({LINEAR_ATTENTION}.value_heads) cannot share them evenly"
        remedy = (
            f"nearest: {LINEAR_ATTENTION}.key_heads="
            f"{listed(nearest_numbers(config.key_heads, divisors(config.value_heads)))}"
        )
        yield Violation(f"{LINEAR_ATTENTION}.key_heads", config.key_heads, reason, remedy)
