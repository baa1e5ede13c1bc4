"""State-dict maps from Hugging Face, Meta and torchtune decoders to ours, including fused qkv and gate/up rows.

Hugging Face rotates pairs (i, i + head_dim / 2) as we do. Meta's own checkpoints and torchtune rotate neighbours (2i,
2i + 1), so we permute the rows of their query and key projections within each head. They store a tensor per expert, we
one for all experts of a layer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from titan_exp.models.convert.state_dict_map import RowRange, StateDictMap, gate_up_rows, qkv_rows, rotated_tail_rows
from titan_exp.models.spec.mixers import AttentionSpec, LinearAttentionSpec
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec
from titan_exp.models.spec.transformer import LatentAttentionSpec

Parts = Mapping[str, tuple[str, ...]]
"""Projections of query, key, value, gate, beta and decay in the rows of a weight, by its name."""


@dataclass(frozen=True)
class LinearAttentionNames:
    """Tensor names of linear attention of one tool, inside a layer."""

    projections: Parts  # projections, each with the parts in its rows
    convolutions: Parts  # filters of the convolution, each with the parts in its channels
    parts: Mapping[str, str]  # names by ours, as in `TensorNames`, of layers with linear attention
    by_head: bool = False  # True if the rows of a projection go by key head, False if they go by part
    log_rate_dims: int = 1
    """Number of dims of the logarithm of the decay rates, whose second to last are the heads if there are several."""


@dataclass(frozen=True)
class TensorNames:
    """Tensor names of one tool."""

    parts: Mapping[str, str]
    """Name by ours: of a whole parameter outside of blocks (`norm.weight`), and of a module or a projection in a block
    (`attention.query`), where `{}` stands for the expert. A bias is named like its weight, with `bias` for `weight`."""
    layer: str = "layers.{}."  # prefix of a block's names; `{}` stands for the layer
    interleaved: bool = False
    """True for interleaved RoPE, which rotates the pairs (2i, 2i + 1). Latent attention always has it."""
    tied_head: bool = False  # True if a tied head is stored a second time, as its own tensor
    alternating_gate_up: bool = False
    """True if outputs of `feed_forward.experts.gate_up` alternate, gate first; False if the first half is the gate."""
    linear_attention: LinearAttentionNames | None = None  # names of linear attention, in families with such layers
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names under which files may have tensors of a layer, by their name."""

    def but(self, parts: Mapping[str, str], **others: Any) -> "TensorNames":
        """Return the same names, except for these."""
        return replace(self, parts={**self.parts, **parts}, **others)


def swiglu_names(
    module: str, theirs: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, str]:
    """Names of gate, up and down of one of our feed-forwards, which are those of `theirs`."""
    return {
        f"{module}.{part}": f"{theirs}.{name}.weight" for part, name in zip(("gate", "up", "down"), names, strict=True)
    }


HUGGINGFACE = TensorNames(
    layer="model.layers.{}.",
    parts={
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
        "attention_norm": "input_layernorm.weight",
        "attention.query": "self_attn.q_proj.weight",
        "attention.key": "self_attn.k_proj.weight",
        "attention.value": "self_attn.v_proj.weight",
        "attention.out": "self_attn.o_proj.weight",
        "attention.q_norm": "self_attn.q_norm.weight",
        "attention.k_norm": "self_attn.k_norm.weight",
        "attention.sinks": "self_attn.sinks",
        "attention.q_a": "self_attn.q_a_proj.weight",
        "attention.q_a_norm": "self_attn.q_a_layernorm.weight",
        "attention.q": "self_attn.q_b_proj.weight",
        "attention.kv_a": "self_attn.kv_a_proj_with_mqa.weight",
        "attention.kv_a_norm": "self_attn.kv_a_layernorm.weight",
        "attention.kv_b": "self_attn.kv_b_proj.weight",
        "feed_forward_norm": "post_attention_layernorm.weight",
        **swiglu_names("feed_forward", "mlp"),
        **swiglu_names("feed_forward.experts", "mlp.experts.{}"),
        **swiglu_names("feed_forward.shared", "mlp.shared_experts"),
        "feed_forward.router.weight": "mlp.gate.weight",
        "feed_forward.router.bias": "mlp.gate.e_score_correction_bias",
        "projection": "eh_proj.weight",
        "embedding_norm": "enorm.weight",
        "hidden_norm": "hnorm.weight",
        "norm": "shared_head.norm.weight",
        "embedding": "embed_tokens.weight",
        "head": "shared_head.head.weight",
    },
)
"""Names of `transformers` (Llama, Qwen3, DeepSeek, with or without experts). The last six are those of a module of
multi-token prediction, which has copies of embedding and head."""

META = TensorNames(
    parts={
        "embedding.weight": "tok_embeddings.weight",
        "norm.weight": "norm.weight",
        "head.weight": "output.weight",
        "attention_norm": "attention_norm.weight",
        "attention.query": "attention.wq.weight",
        "attention.key": "attention.wk.weight",
        "attention.value": "attention.wv.weight",
        "attention.out": "attention.wo.weight",
        "feed_forward_norm": "ffn_norm.weight",
        **swiglu_names("feed_forward", "feed_forward", ("w1", "w3", "w2")),
    },
    interleaved=True,
    tied_head=True,
)
"""Names in Meta's `consolidated.*.pth`."""

TORCHTUNE = TensorNames(
    parts={
        "embedding.weight": "tok_embeddings.weight",
        "norm.weight": "norm.scale",
        "head.weight": "output.weight",
        "attention_norm": "sa_norm.scale",
        "attention.query": "attn.q_proj.weight",
        "attention.key": "attn.k_proj.weight",
        "attention.value": "attn.v_proj.weight",
        "attention.out": "attn.output_proj.weight",
        "feed_forward_norm": "mlp_norm.scale",
        **swiglu_names("feed_forward", "mlp", ("w1", "w3", "w2")),
    },
    interleaved=True,
)
"""Names of torchtune."""


def decoder_map(spec: ModelSpec, names: TensorNames) -> StateDictMap:
    """State-dict map of a decoder with grouped-query or latent attention, and SwiGLU or experts."""
    found, whole = _MapBuilder(spec, names), names.parts
    found.add("embedding.weight", whole["embedding.weight"])
    for number, layer in enumerate(spec.layers):
        found.add_layer(number, layer)
    found.add("norm.weight", whole["norm.weight"])
    copies: dict[str, str] = {}
    if not spec.tied:
        found.add("head.weight", whole["head.weight"])
    elif names.tied_head:
        copies[whole["head.weight"]] = whole["embedding.weight"]
    for number in range(len(spec.layers), len(spec.blocks)):
        found.add_mtp_module(number, spec.blocks[number])
        copies |= {found.name(table): whole[f"{table}.weight"] for table in ("embedding", "head")}
    found.theirs |= {copy: found.theirs[original] for copy, original in copies.items()}
    layers = [names.layer.format(number) for number in range(len(spec.layers))]
    return StateDictMap(
        found.runs,
        {name: found.shapes[name] for name in found.runs},
        found.theirs,
        copies,
        optional=frozenset({whole["head.weight"]} if spec.tied else ()),
        stacked=frozenset(found.stacked),
        stacks=found.stacks,
        buffers=frozenset(spec.buffers),
        reshaped=found.reshaped,
        aliases={
            f"{layer}{own}": f"{layer}{other}"
            for own, other in names.aliases.items()
            for layer in layers
            if f"{layer}{own}" in found.theirs
        },
    )


class _MapBuilder:
    """Collects row ranges and shapes module by module, in the order of writing."""

    def __init__(self, spec: ModelSpec, names: TensorNames) -> None:
        self._names, self._parts, self._number = names, names.parts, 0
        self.shapes = spec.state_shapes
        self.runs: dict[str, tuple[RowRange, ...]] = {}
        self.theirs: dict[str, tuple[int, ...]] = {}
        self.stacked: set[str] = set()
        self.stacks: dict[str, str] = {}
        self.reshaped: dict[str, tuple[int, ...]] = {}

    def name(self, part: str) -> str:
        """Their name of a part of the current block."""
        return self._names.layer.format(self._number) + self._parts[part]

    def ours(self, part: str, kind: str = "weight") -> str:
        """Our name of a parameter of the current block."""
        return f"blocks.{self._number}.{part}.{kind}"

    def add(self, ours: str, name: str, rows: Iterable[RowRange] = ()) -> None:
        """Add a parameter that equals one of their tensors, or the given rows of it."""
        self.theirs[name] = self.shapes[ours]
        self.runs[ours] = tuple(rows) or (RowRange(0, self.shapes[ours][0], name, 0),)

    def add_parts(self, *parts: str) -> None:
        """Add weights of the current block that equal one of their tensors."""
        for part in parts:
            self.add(self.ours(part), self.name(part))

    def add_stacked(self, ours: str, names: Sequence[str], rows: Iterable[RowRange] = ()) -> None:
        """Add a parameter stacked per expert. It takes equal shares of each expert's tensors, named with `{}` for the
        expert."""
        experts, outputs, *inputs = self.shapes[ours]
        shape = (outputs // len(names), *inputs)
        for expert in range(experts):
            self.theirs |= {name.format(expert): shape for name in names}
        self.stacked.add(ours)
        self.runs[ours] = tuple(rows) or (RowRange(0, outputs, names[0], 0),)

    def add_layer(self, number: int, layer: LayerSpec) -> None:
        """Add the parameters and buffers of a block."""
        linear, self._number, self._parts = self._names.linear_attention, number, self._names.parts
        norms = [vector.name for vector in layer.vectors if vector.name.startswith("attention.")]
        if layer.linear_attention is not None:
            assert linear is not None, "the family has names for linear attention"
            self._parts = {**self._parts, **linear.parts}
        self.add_parts(*(vector.name for vector in layer.vectors if vector.name == "attention_norm"))
        if layer.linear_attention is not None and linear is not None:
            self._add_linear_attention(layer.linear_attention, linear)
        elif isinstance(layer.attention, LatentAttentionSpec):
            self._add_latent_attention(layer.attention, norms)
        elif layer.attention is not None:
            self._add_attention(layer.attention, norms)
        self.add_parts(*(vector.name for vector in layer.vectors if vector.name == "feed_forward_norm"))
        if layer.router is not None:
            for kind in ("weight", "bias", "logit_bias"):
                if (ours := self.ours(layer.router.name, kind)) in self.shapes:
                    self.add(ours, self.name(f"{layer.router.name}.{kind}"))
        for linear_layer in layer.linears:
            module, _, part = linear_layer.name.rpartition(".")
            if part == "gate_up":
                self._add_swiglu(module)
            elif part == "shared_gate":
                self.add_parts(linear_layer.name)

    def add_mtp_module(self, number: int, layer: LayerSpec) -> None:
        """Add the parameters and buffers of a module of multi-token prediction."""
        self._number, self._parts = number, self._names.parts
        self.add_parts("embedding_norm", "hidden_norm", "projection")
        self.add_layer(number, layer)
        self.add_parts("norm")

    def _add_attention(self, attention: AttentionSpec, norms: list[str]) -> None:
        names = [self.name(f"attention.{part}") for part in ("query", "key", "value")]
        heads, kv_heads, width = attention.heads, attention.kv_heads, attention.qk_dim
        rows = (heads * width * (1 + attention.gated), kv_heads * width, kv_heads * attention.v_dim)
        for kind in ("weight", "bias"):
            if (ours := self.ours("attention.qkv", kind)) in self.shapes:
                of_kind = names if kind == "weight" else [_bias(name) for name in names]
                columns = self.shapes[ours][1:]
                self.theirs |= {name: (count, *columns) for name, count in zip(of_kind, rows, strict=True)}
                self.runs[ours] = tuple(qkv_rows(attention, of_kind, interleaved=self._names.interleaved))
        self.add_parts(*norms, "attention.out")
        if (ours := self.ours("attention.out", "bias")) in self.shapes:
            self.add(ours, _bias(self.name("attention.out")))

    def _add_latent_attention(self, attention: LatentAttentionSpec, norms: list[str]) -> None:
        rope_dim, has_query_latent = attention.rope_dim, self.ours("attention.q_a") in self.shapes
        if has_query_latent:
            self.add_parts("attention.q_a")
        query, latent = self.name("attention.q" if has_query_latent else "attention.query"), self.name("attention.kv_a")
        for part, name, heads, width in (
            ("attention.q", query, attention.heads, attention.qk_dim),
            ("attention.kv_a", latent, 1, attention.latent_dim + rope_dim),
        ):
            self.add(self.ours(part), name, rotated_tail_rows(heads, width, rope_dim, name) if attention.rope else ())
        self.add_parts(*norms, "attention.kv_b", "attention.out")

    def _add_linear_attention(self, mixer: LinearAttentionSpec, names: LinearAttentionNames) -> None:
        per_channel = mixer.decay == "channel"
        if per_channel:
            self.add_parts("attention.decay_a", "attention.gate_a")
        widths = {"query": mixer.key_dim, "key": mixer.key_dim, "value": mixer.group * mixer.value_dim}
        decays = mixer.group * (mixer.key_dim if per_channel else 1)
        projected = {**widths, "gate": widths["value"], "beta": mixer.group, "decay": decays}
        qkv, suffix = ("query", "key", "value"), "_b" if per_channel else ""
        ours: Parts = {"qkv": qkv, f"gate{suffix}": ("gate",), "beta": ("beta",), f"decay{suffix}": ("decay",)}
        self._add_projections(mixer.key_heads, ours, projected, names.projections, by_head=names.by_head)
        self._add_projections(mixer.key_heads, {"convolution": qkv}, widths, names.convolutions, by_head=False)
        layer = self._names.layer.format(self._number)
        for name in names.convolutions:
            channels, taps = self.theirs[layer + name]
            self.reshaped[layer + name] = (channels, 1, taps)
        rate = self.name("attention.forget.log_rate")
        self.add(self.ours("attention.forget", "log_rate"), rate)
        if names.log_rate_dims > 1:
            self.reshaped[rate] = (*(1,) * (names.log_rate_dims - 2), mixer.value_heads, 1)
        self.add(self.ours("attention.forget", "bias"), self.name("attention.forget.bias"))
        self.add_parts("attention.out_norm", "attention.out")

    def _add_projections(
        self, heads: int, ours: Parts, widths: Mapping[str, int], theirs: Parts, *, by_head: bool
    ) -> None:
        """Add weights of attention whose rows go by key head, each with the given parts of a head. Their tensors have
        parts too, whose rows go by head or by part."""
        places, layer = dict[str, tuple[str, int, int]](), self._names.layer.format(self._number)
        for name, parts in theirs.items():
            unit, first = sum(widths[part] for part in parts), 0
            for part in parts:
                places[part] = (layer + name, first, unit if by_head else widths[part])
                first += widths[part] * (1 if by_head else heads)
        for module, parts in ours.items():
            parameter = self.ours(f"attention.{module}")
            runs, start, columns = [], 0, self.shapes[parameter][1:]
            for head in range(heads):
                for part in parts:
                    name, first, step = places[part]
                    runs.append(RowRange(start, widths[part], name, first + head * step))
                    start += widths[part]
            self.runs[parameter] = tuple(runs)
            for name, their_parts in theirs.items():
                if set(parts) & set(their_parts):
                    self.theirs[layer + name] = (heads * sum(widths[part] for part in their_parts), *columns)

    def _add_swiglu(self, module: str) -> None:
        """Add a feed-forward, or the feed-forwards of all experts, with their biases."""
        *stacked, _, channels = self.shapes[self.ours(f"{module}.down")]
        fused = f"{module}.gate_up" if stacked and f"{module}.gate_up" in self._parts else ""
        names = [self.name(fused or f"{module}.{part}") for part in ("gate", "up")] + [self.name(f"{module}.down")]
        how: dict[str, int] = {}
        if fused:
            how = {"up_first": 1, "step": 2} if self._names.alternating_gate_up else {"up_first": channels}
        for kind in ("weight", "bias"):
            gate_up_name, down_name = (self.ours(f"{module}.{part}", kind) for part in ("gate_up", "down"))
            if down_name not in self.shapes:
                continue
            of_kind = names if kind == "weight" else map(_bias, names)
            # Stored tensors of all experts; the name of one expert's inside has its number.
            gate, up, down = (self.stacks.setdefault(name, f"{name}[{{}}]") if fused else name for name in of_kind)
            rows, pair = gate_up_rows(channels, gate, up, **how), list(dict.fromkeys((gate, up)))
            if stacked:
                self.add_stacked(gate_up_name, pair, rows)
                self.add_stacked(down_name, [down])
                continue
            self.theirs |= dict.fromkeys(pair, (channels, *self.shapes[gate_up_name][1:]))
            self.runs[gate_up_name] = tuple(rows)
            self.add(down_name, down)


def _bias(weight: str) -> str:
    """Their name of the bias beside a weight."""
    return f"{weight.removesuffix('weight')}bias" if weight.endswith("weight") else f"{weight}_bias"
