"""Model spec: layers with their attention, linears and norms, and how each is sharded. Imports no torch.

Tensor and pipeline parallelism, quantization filters, rules, planner, converters, initialization and FLOPs read it, so
a family describes itself once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from titan_exp.models.spec.mixers import AttentionSpec, LinearAttentionSpec, QueryTemperature
from titan_exp.models.spec.moe import RouterSpec
from titan_exp.models.spec.rope import PlainRope
from titan_exp.models.spec.tp_plan import SEQUENCE_PARALLEL, FusedRows, TPStyle
from titan_exp.ops.attention.mask_pattern import MaskPattern
from titan_exp.ops.swiglu_variant import SWIGLU, SwiGLUVariant


class ModelInputs(ABC):
    """Inputs of a model by the arguments of its `forward`, and the settings that depend on their kind."""

    positional: ClassVar[tuple[str, ...]]
    """Positional arguments of `forward`."""
    named: ClassVar[tuple[str, ...]]
    """Its other arguments."""
    trained_by: ClassVar[str]
    """Overrides that select training of such a model."""
    makes: ClassVar[str]
    """Kind of outputs of `titan-exp generate`, by its name in `Extension.generators`."""

    @abstractmethod
    def streams(self, seq_len: int) -> tuple[int, ...]:
        """Number of tokens in each stream of a sequence; ranks that share the sequence divide each stream."""

    @abstractmethod
    def example(self, rows: int, seq_len: int) -> Any:
        """Micro-batch of zeros with the same tensors as the loader's."""


@dataclass(frozen=True)
class PipelinePlan:
    """Stage placement of a model's children. `blocks` are split, and every stage holds the children that are not named
    here."""

    first: tuple[str, ...]
    """Children of the first stage only."""
    last: tuple[str, ...]
    """Children of the last stage only."""
    shared: tuple[str, ...] = ()
    """Children of `first` whose parameters the head shares, so that the last stage has a copy (tied embeddings)."""
    looked_up: tuple[str, ...] = ()
    """Children of `first` that the last stage calls too, with a copy of their parameters (multi-token prediction)."""
    called_in_parts: tuple[str, ...] = ()
    """Further children of the last stage only, whose parts are called one by one, so that FSDP gathers them with the
    rest of the model."""
    extra_tokens: int = 0
    """Tokens of `dim` numbers that stages send each other beside the tokens of the sequence (a conditioning)."""

    @property
    def copied(self) -> tuple[str, ...]:
        """Children of `first` that the last stage has copies of."""
        return tuple(dict.fromkeys((*self.shared, *self.looked_up)))


@dataclass(frozen=True)
class TokenSpan:
    """Span of tokens of a sequence that a layer computes, as the bounds of a slice."""

    start: int = 0
    """First token."""
    stop: int | None = None
    """End of the span; None is the end of the sequence."""

    def share(self, seq_len: int) -> float:
        """Computed tokens per token of a sequence."""
        return len(range(seq_len)[self.start : self.stop]) / seq_len


EVERY_TOKEN = TokenSpan()
"""All tokens of a sequence."""
ONCE = TokenSpan(stop=1)
"""Span as long as one token, for a layer over one vector per sequence."""


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer, or one stacked per expert."""

    name: str
    """Module path inside the block (`attention.qkv`)."""
    inputs: int
    """Input features."""
    outputs: int
    """Output features."""
    std: float
    """Standard deviation of initial weights."""
    tp: TPStyle | None
    """Tensor-parallel sharding, `SequenceParallel` if the weight is replicated; None if the linear has none, so that
    tensor parallelism is refused."""
    experts: int = 1
    """Number of stacked weights [experts, outputs, inputs]; 1 is a plain linear."""
    active_experts: int = 1
    """Experts that a token is routed to."""
    rows: FusedRows | None = None
    """Projections or heads in the weight's rows; None is one matrix."""
    bias: bool = False
    """True if a bias is added to the outputs."""
    bias_std: float = 0.0
    """Standard deviation of the initial bias; 0 is zeros."""
    writes_residual: bool = False
    """True if the outputs are added to the residual stream, whose branches a parametrization may scale by depth; False
    if a norm comes between."""
    tokens: TokenSpan = EVERY_TOKEN
    """Tokens of a sequence that it computes."""
    full_precision: bool = False
    """True for a small projection that recipes leave alone, such as one output per head."""

    @property
    def parameters(self) -> int:
        """Number of parameters, all experts counted."""
        return (self.inputs + self.bias) * self.outputs * self.experts

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses."""
        return (self.inputs + self.bias) * self.outputs * self.active_experts

    @property
    def flops_per_token(self) -> int:
        """Forward and backward FLOPs of the matmul, per token that the layer computes."""
        return 6 * self.inputs * self.outputs * self.active_experts

    @property
    def divided(self) -> Literal["inputs", "outputs"] | None:
        """Dim of the weight that tensor-parallel ranks divide; None if each has all of it."""
        return None if self.tp is None else self.tp.divided

    @property
    def quantizable(self) -> bool:
        """False for a layer over one vector per sequence, whose rows form no scaling blocks, and for small ones."""
        return self.tokens != ONCE and not self.full_precision


@dataclass(frozen=True)
class VectorSpec:
    """Weight vector of a norm, or of one number per head."""

    name: str
    """Module path inside the block (`attention_norm`)."""
    size: int
    """Number of elements."""
    tp: TPStyle = SEQUENCE_PARALLEL
    """Tensor-parallel use: on this rank's tokens, on this rank's heads, or sharded with the heads."""
    std: float | None = None
    """Standard deviation of initial values; None is ones."""
    writes_residual: bool = False
    """True for a norm over what a branch adds to the residual stream, False for a norm over what it reads."""
    zero_centered: bool = False
    """True for a norm that multiplies by one plus its weight, which starts as zeros."""


@dataclass(frozen=True)
class TensorSpec:
    """Parameter, by its full name in the block or model, that is neither a linear's weight nor the only vector of a
    norm."""

    name: str
    """Parameter name (`norm.bias`)."""
    shape: tuple[int, ...]
    """Shape."""
    in_matmul: bool = False
    """True if each token is multiplied by it."""
    tokens: TokenSpan = EVERY_TOKEN
    """Span of the tokens that are multiplied by it."""
    vectors: bool = False
    """True for vectors, or a stack of them such as the filters of a convolution, that optimizers do not take for a
    matrix."""

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def flops_per_token(self) -> int:
        """Forward and backward FLOPs of the matmul, per token that is multiplied."""
        return 6 * self.parameters if self.in_matmul else 0


@dataclass(frozen=True)
class Unsupported:
    """Axis along which the model cannot be divided."""

    key: str
    """Key of the axis's degree (`parallelism.cp`)."""
    reason: str
    """Reason, for error messages."""


@dataclass(frozen=True)
class LayerSpec:
    """One block of the model."""

    attention: AttentionSpec | None
    """Softmax attention, whose module is `attention` in the block; None for a block without."""
    linears: tuple[LinearSpec, ...]
    """Linear layers in forward order."""
    vectors: tuple[VectorSpec, ...]
    """Norm weights, and vectors of one number per head."""
    router: RouterSpec | None = None
    """Router of a layer with experts."""
    swiglu: SwiGLUVariant = SWIGLU
    """Gate of the feed-forward, or of every expert."""
    tensors: tuple[TensorSpec, ...] = ()
    """All other parameters."""
    linear_attention: LinearAttentionSpec | None = None
    """Linear attention, whose module is `attention` in the block, in place of softmax attention."""

    def linear(self, name: str) -> LinearSpec:
        """Linear layer by module path."""
        return next(linear for linear in self.linears if linear.name == name)

    def vector(self, name: str) -> VectorSpec | None:
        """Norm weight by module path; None if absent."""
        return next((vector for vector in self.vectors if vector.name == name), None)

    def tp_plan(self, module: str) -> dict[str, TPStyle]:
        """Tensor-parallel styles of the linears of a module, or of the block itself (""), by their name in it."""
        prefix = f"{module}." if module else ""
        return {
            linear.name.removeprefix(prefix): linear.tp
            for linear in self.linears
            if linear.name.startswith(prefix) and linear.tp is not None
        }

    def fused_rows(self, module: str) -> dict[str, FusedRows]:
        """Row layout of a module's fused weights, by their linear's name in it."""
        prefix = f"{module}."
        return {
            linear.name.removeprefix(prefix): linear.rows
            for linear in self.linears
            if linear.name.startswith(prefix) and linear.rows is not None
        }

    @property
    def residual_outputs(self) -> frozenset[str]:
        """Linears and norms, by module path, whose outputs are added to the residual stream."""
        return frozenset(part.name for part in (*self.linears, *self.vectors) if part.writes_residual)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by its name inside the block."""
        shapes: dict[str, tuple[int, ...]] = {f"{vector.name}.weight": (vector.size,) for vector in self.vectors}
        if self.router is not None:
            shapes |= {f"{self.router.name}.{name}": shape for name, shape in self.router.shapes.items()}
        for linear in self.linears:
            stacked = (linear.experts,) if linear.experts > 1 else ()
            shapes[f"{linear.name}.weight"] = (*stacked, linear.outputs, linear.inputs)
            if linear.bias:
                shapes[f"{linear.name}.bias"] = (*stacked, linear.outputs)
        return shapes | {tensor.name: tensor.shape for tensor in self.tensors}

    @property
    def parameters(self) -> int:
        """Number of parameters, all experts counted."""
        router = 0 if self.router is None else self.router.parameters
        matrices = sum(part.parameters for part in (*self.linears, *self.tensors))
        return router + matrices + sum(part.size for part in self.vectors)

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward FLOPs of matmuls per token."""
        mixer = self.attention or self.linear_attention
        attention = 0.0 if mixer is None else mixer.flops_per_token(seq_len)
        router = 0 if self.router is None else self.router.flops_per_token
        return router + _flops_per_token((*self.linears, *self.tensors), seq_len) + attention


@dataclass(frozen=True)
class ModelSpec:
    """Spec of a model made of blocks. A decoder has an embedding, a final norm and an LM head; other models name their
    parts in `ends`."""

    layers: tuple[LayerSpec, ...]
    """Blocks in order."""
    dim: int
    """Width of the residual stream."""
    vocab_size: int
    """Rows of the embedding and of the head; 0 for a model without them, which reads no tokens."""
    tied: bool
    """True if the head uses the embedding's weight."""
    norm_eps: float
    """Epsilon of the final norm."""
    embedding_std: float
    """Standard deviation of the embedding's and the head's initial weights."""
    rope: PlainRope | None = None
    """Rotary position embedding; None for a model without."""
    rope_dim: int = 0
    """Rotated width of a head."""
    attention_backend: str = "auto"
    """Requested attention kernel."""
    mtp_layers: tuple[LayerSpec, ...] = ()
    """Modules of multi-token prediction, numbered after the blocks; see `spec/transformer.py`."""
    mtp_weight: float = 0.0
    """Factor of their mean loss."""
    ends: tuple[TensorSpec, ...] | None = None
    """Parameters outside of embedding, blocks and head; None means the weight of the final norm."""
    stage_ends: PipelinePlan | None = None
    """Children that the first and the last stage hold; None means a decoder's."""
    unsupported: tuple[Unsupported, ...] = ()
    """Axes along which the model cannot be divided."""
    inputs: ModelInputs | None = None
    """Inputs of a model that reads no token ids; None for a model that does."""
    per_sequence: bool = False
    """True if a family's own modules compute something per sequence, beside attention."""
    zero_centered_norm: bool = False
    """True if the final norm multiplies by one plus its weight."""

    @property
    def blocks(self) -> tuple[LayerSpec, ...]:
        """Blocks in order, modules of multi-token prediction last; the index names `blocks.NUMBER`."""
        return (*self.layers, *self.mtp_layers)

    @cached_property
    def pipeline(self) -> PipelinePlan:
        """Children of the model that the first and the last stage hold."""
        if self.stage_ends is not None:
            return self.stage_ends
        embedding = ("embedding",)
        shared, looked_up = embedding if self.tied else (), embedding if self.mtp_layers else ()
        last = ("norm", "head") if self.ends is None else ("head",)
        return PipelinePlan(first=embedding, last=last, shared=shared, looked_up=looked_up)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by its full name, in module order."""
        table = (self.vocab_size, self.dim)
        embedding = {"embedding.weight": table} if self.vocab_size else {}
        head = {"head.weight": table} if self.vocab_size and not self.tied else {}
        blocks = {
            f"blocks.{number}.{name}": shape
            for number, layer in enumerate(self.blocks)
            for name, shape in layer.shapes.items()
        }
        ends = {"norm.weight": (self.dim,)} if self.ends is None else {end.name: end.shape for end in self.ends}
        return {**embedding, **blocks, **ends, **head}

    @cached_property
    def buffers(self) -> dict[str, tuple[int, ...]]:
        """Shape of each persistent buffer that outputs depend on (router biases), by its full name."""
        return {f"{name}.{key}": shape for name, router in self.routers() for key, shape in router.buffers.items()}

    @cached_property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, and of each persistent buffer that outputs depend on, by its full name."""
        return {**self.shapes, **self.buffers}

    @cached_property
    def parameters(self) -> int:
        """Number of parameters; a tied weight counts once."""
        tables = self.vocab_size * self.dim * (1 if self.tied else 2)
        ends = self.dim if self.ends is None else sum(end.parameters for end in self.ends)
        return tables + ends + sum(layer.parameters for layer in self.blocks)

    @cached_property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses, without the embedding table."""
        unused = sum(linear.parameters - linear.active_parameters for layer in self.blocks for linear in layer.linears)
        return self.parameters - self.vocab_size * self.dim - unused

    @property
    def non_embedding_parameters(self) -> int:
        """Number of parameters that one token uses, without embedding and head: the size N of scaling laws."""
        return self.active_parameters - (0 if self.tied else self.vocab_size * self.dim)

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of a training step per token, as executed. Each weight of a matmul counts 6 (2 forward, 4 backward),
        including the head but not the embedding's look-up. Attention counts visible keys only. Each module of
        multi-token prediction runs the head once more."""
        head = 6 * self.dim * self.vocab_size * (1 + len(self.mtp_layers))
        ends = _flops_per_token(self.ends or (), seq_len)
        return head + ends + sum(layer.flops_per_token(seq_len) for layer in self.blocks)

    @property
    def computes_per_sequence(self) -> bool:
        """True if something beside attention is computed per sequence: by a family's own modules, by a balance loss
        over sequences, or by depths of multi-token prediction, which are joined along the batch."""
        balances = (router.moe.balance for _, router in self.routers())
        over_sequences = any(balance.coefficient and balance.loss in ("switch", "sequence") for balance in balances)
        return self.per_sequence or bool(self.mtp_layers) or over_sequences

    def streams(self, seq_len: int) -> tuple[int, ...]:
        """Number of tokens in each stream of a sequence, which ranks divide each; token ids are one stream."""
        return (seq_len,) if self.inputs is None else self.inputs.streams(seq_len)

    @property
    def has_experts(self) -> bool:
        """True if a layer routes tokens to experts."""
        return bool(self.expert_linears)

    @cached_property
    def expert_linears(self) -> tuple[LinearSpec, ...]:
        """Distinct linears stacked per expert."""
        linears = (linear for layer in self.blocks for linear in layer.linears)
        return tuple(dict.fromkeys(linear for linear in linears if linear.experts > 1))

    @property
    def attention(self) -> AttentionSpec | None:
        """Attention of the first layer that has it; None if a layer has neither softmax nor linear attention."""
        return self.attentions[0] if self.describes_mixers and self.attentions else None

    @property
    def describes_mixers(self) -> bool:
        """True if every layer has softmax attention or linear attention, so that nothing else mixes tokens."""
        return all(layer.attention is not None or layer.linear_attention is not None for layer in self.layers)

    @cached_property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Distinct attention specs of all layers that have attention, in order."""
        return tuple(dict.fromkeys(layer.attention for layer in self.layers if layer.attention is not None))

    @property
    def head_dims(self) -> tuple[tuple[str, int], ...]:
        """Distinct widths of query heads, each with the key that sets it."""
        return tuple(dict.fromkeys((attention.qk_dim_key, attention.qk_dim) for attention in self.attentions))

    @cached_property
    def patterns(self) -> frozenset[MaskPattern]:
        """Mask patterns of all layers with attention."""
        return frozenset(layer.attention.pattern for layer in self.layers if layer.attention is not None)

    @cached_property
    def is_causal(self) -> bool:
        """True if no token sees later ones, so that later tokens cost more."""
        return all(pattern.causal for pattern in self.patterns)

    @cached_property
    def has_sinks(self) -> bool:
        """True if a layer's softmax has attention sinks."""
        return any(layer.attention is not None and layer.attention.sinks for layer in self.layers)

    def is_masked(self, seq_len: int) -> bool:
        """True if some layer sees fewer than all earlier keys in a sequence of this length."""
        return any(not pattern.within(seq_len).is_unlimited for pattern in self.patterns)

    @property
    def temperature(self) -> QueryTemperature | None:
        """Scaling of queries by position, the same in every layer that has one; None if none has."""
        attention = (layer.attention for layer in self.layers if layer.attention is not None)
        return next((spec.temperature for spec in attention if spec.temperature is not None), None)

    @property
    def weights(self) -> tuple[object, ...]:
        """Shapes of all parameters and the heads within them. Weights of specs with equal values are
        interchangeable."""
        # The scale of scores follows from RoPE, on which no weight depends, and no weight depends on a kernel.
        heads = (layer.attention and replace(layer.attention, scale=None) for layer in self.blocks)
        states = (layer.linear_attention and replace(layer.linear_attention, backend="auto") for layer in self.blocks)
        return self.shapes, tuple(heads), tuple(states)

    def routers(self) -> Iterator[tuple[str, RouterSpec]]:
        """Routers of all blocks by full module path."""
        for number, layer in enumerate(self.blocks):
            if layer.router is not None:
                yield f"blocks.{number}.{layer.router.name}", layer.router

    def linears(self) -> Iterator[tuple[str, LinearSpec]]:
        """Linear layers of all blocks by full module path."""
        for number, layer in enumerate(self.blocks):
            for linear in layer.linears:
                yield f"blocks.{number}.{linear.name}", linear


def _flops_per_token(parts: Iterable[LinearSpec | TensorSpec], seq_len: int) -> float:
    """Forward and backward FLOPs of matmuls, per token of a sequence."""
    return sum((part.flops_per_token * part.tokens.share(seq_len) for part in parts), 0.0)
