"""State-dict maps from Hugging Face, Meta and torchtune decoders to ours, including fused qkv and gate/up rows.

Hugging Face rotates pairs (i, i + head_dim / 2) as we do. Meta's own checkpoints and torchtune rotate neighbours (2i,
2i + 1), so we permute the rows of their query and key projections within each head. They store a tensor per expert, we
one for all experts of a layer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from titan_exp.models.convert.state_dict_map import RowRange, StateDictMap, gate_up_rows, qkv_rows, rotated_tail_rows
from titan_exp.models.spec.mixers import LinearAttentionSpec
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec
from titan_exp.models.spec.transformer import LatentAttentionSpec


@dataclass(frozen=True)
class LinearAttentionNames:
    """Tensor names of linear attention of one tool; `{}` stands for the layer."""

    projections: tuple[tuple[str, tuple[str, ...]], ...]
    """Projections, each with the parts in its rows: query, key, value, gate, beta, decay."""
    convolutions: tuple[tuple[str, tuple[str, ...]], ...]
    """Filters of the convolution, each with the parts in its channels."""
    log_rate: str
    """Logarithm of the decay rates."""
    bias: str
    """Bias of the decay."""
    out_norm: str
    """Norm over the outputs of a value head."""
    out: str
    """Output projection."""
    decay_a: str = ""
    """Latent of the decay, in families with a decay per channel."""
    gate_a: str = ""
    """Latent of the gate, in those families."""
    by_head: bool = False
    """True if the rows of a projection go by key head, False if they go by part."""
    log_rate_dims: int = 1
    """Number of dims of the logarithm of the decay rates, whose second to last are the heads if there are several."""
    attention_norm: str = ""
    """Norm before linear attention, if it has another name than in other layers."""
    feed_forward_norm: str = ""
    """Norm before the feed-forward of such a layer, likewise."""


@dataclass(frozen=True)
class TensorNames:
    """Tensor names of one tool; `{}` stands for the layer, and a second one for the expert."""

    embedding: str
    norm: str
    head: str
    attention_norm: str
    query: str
    key: str
    value: str
    out: str
    feed_forward_norm: str
    gate: str
    up: str
    down: str
    interleaved: bool
    """True for interleaved RoPE, which rotates the pairs (2i, 2i + 1)."""
    tied_head: bool
    """True if a tied head is stored a second time, as its own tensor."""
    query_norm: str = ""
    """Norm over each query head, in families with QK norm."""
    key_norm: str = ""
    """Norm over each key head."""
    sinks: str = ""
    """Attention sinks, in families with them. A bias is named like its weight, with `bias` for `weight`."""
    query_down: str = ""
    """Latent of queries, in families with latent attention."""
    query_down_norm: str = ""
    """Norm over the latent of queries."""
    query_up: str = ""
    """Queries from their latent."""
    kv_down: str = ""
    """Latent of keys and values, and the rotated key that heads share."""
    kv_down_norm: str = ""
    """Norm over the latent of keys and values."""
    kv_up: str = ""
    """Keys and values from their latent."""
    router: str = ""
    """Router of a layer with experts."""
    router_bias: str = ""
    """Bias per expert for the choice."""
    expert_gate: str = ""
    """Gate of one expert."""
    expert_up: str = ""
    """Up of one expert."""
    expert_down: str = ""
    """Down of one expert; of all experts [experts, in, out] if `experts_gate_up` is given."""
    experts_gate_up: str = ""
    """Gate and up of all experts [experts, in, out], in place of `expert_gate` and `expert_up`."""
    alternating_gate_up: bool = False
    """True if outputs of `experts_gate_up` alternate, gate first; False if the first half is the gate."""
    router_logit_bias: str = ""
    """Bias of the router's logits."""
    shared_gate: str = ""
    """Gate of the shared experts, as one feed-forward."""
    shared_up: str = ""
    """Up of the shared experts."""
    shared_down: str = ""
    """Down of the shared experts."""
    shared_output_gate: str = ""
    """Gate of the shared experts' output, one number per token."""
    linear_attention: LinearAttentionNames | None = None
    """Names of linear attention, in families with such layers."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Pairs of a name above and another one under which files may have the tensor."""
    mtp_projection: str = ""
    """Projection of a module of multi-token prediction, from an embedding and a hidden state."""
    mtp_embedding_norm: str = ""
    """Norm over the embedding."""
    mtp_hidden_norm: str = ""
    """Norm over the hidden state."""
    mtp_norm: str = ""
    """Norm before the module's use of the head."""
    mtp_embedding: str = ""
    """The module's copy of the embedding."""
    mtp_head: str = ""
    """The module's copy of the head."""

    def of_norm(self, vector: str) -> str:
        """Their tensor name of one of our norms (`attention.q_norm`)."""
        return {
            "attention_norm": self.attention_norm,
            "feed_forward_norm": self.feed_forward_norm,
            "attention.q_norm": self.query_norm,
            "attention.k_norm": self.key_norm,
            "attention.sinks": self.sinks,
            "attention.q_a_norm": self.query_down_norm,
            "attention.kv_a_norm": self.kv_down_norm,
            "embedding_norm": self.mtp_embedding_norm,
            "hidden_norm": self.mtp_hidden_norm,
            "norm": self.mtp_norm,
        }[vector]

    def of_swiglu(self, module: str) -> tuple[str, str, str]:
        """Their tensor names of gate, up and down in one of our feed-forwards (`feed_forward.experts`)."""
        return {
            "feed_forward": (self.gate, self.up, self.down),
            "feed_forward.experts": (self.expert_gate, self.expert_up, self.expert_down),
            "feed_forward.shared": (self.shared_gate, self.shared_up, self.shared_down),
        }[module]


HUGGINGFACE = TensorNames(
    embedding="model.embed_tokens.weight",
    norm="model.norm.weight",
    head="lm_head.weight",
    attention_norm="model.layers.{}.input_layernorm.weight",
    query="model.layers.{}.self_attn.q_proj.weight",
    key="model.layers.{}.self_attn.k_proj.weight",
    value="model.layers.{}.self_attn.v_proj.weight",
    out="model.layers.{}.self_attn.o_proj.weight",
    feed_forward_norm="model.layers.{}.post_attention_layernorm.weight",
    gate="model.layers.{}.mlp.gate_proj.weight",
    up="model.layers.{}.mlp.up_proj.weight",
    down="model.layers.{}.mlp.down_proj.weight",
    interleaved=False,
    tied_head=False,
    query_norm="model.layers.{}.self_attn.q_norm.weight",
    key_norm="model.layers.{}.self_attn.k_norm.weight",
    sinks="model.layers.{}.self_attn.sinks",
    query_down="model.layers.{}.self_attn.q_a_proj.weight",
    query_down_norm="model.layers.{}.self_attn.q_a_layernorm.weight",
    query_up="model.layers.{}.self_attn.q_b_proj.weight",
    kv_down="model.layers.{}.self_attn.kv_a_proj_with_mqa.weight",
    kv_down_norm="model.layers.{}.self_attn.kv_a_layernorm.weight",
    kv_up="model.layers.{}.self_attn.kv_b_proj.weight",
    router="model.layers.{}.mlp.gate.weight",
    router_bias="model.layers.{}.mlp.gate.e_score_correction_bias",
    expert_gate="model.layers.{}.mlp.experts.{}.gate_proj.weight",
    expert_up="model.layers.{}.mlp.experts.{}.up_proj.weight",
    expert_down="model.layers.{}.mlp.experts.{}.down_proj.weight",
    shared_gate="model.layers.{}.mlp.shared_experts.gate_proj.weight",
    shared_up="model.layers.{}.mlp.shared_experts.up_proj.weight",
    shared_down="model.layers.{}.mlp.shared_experts.down_proj.weight",
    mtp_projection="model.layers.{}.eh_proj.weight",
    mtp_embedding_norm="model.layers.{}.enorm.weight",
    mtp_hidden_norm="model.layers.{}.hnorm.weight",
    mtp_norm="model.layers.{}.shared_head.norm.weight",
    mtp_embedding="model.layers.{}.embed_tokens.weight",
    mtp_head="model.layers.{}.shared_head.head.weight",
)
"""Names of `transformers` (Llama, Qwen3, DeepSeek, with or without experts). Latent attention rotates neighbours."""

META = TensorNames(
    embedding="tok_embeddings.weight",
    norm="norm.weight",
    head="output.weight",
    attention_norm="layers.{}.attention_norm.weight",
    query="layers.{}.attention.wq.weight",
    key="layers.{}.attention.wk.weight",
    value="layers.{}.attention.wv.weight",
    out="layers.{}.attention.wo.weight",
    feed_forward_norm="layers.{}.ffn_norm.weight",
    gate="layers.{}.feed_forward.w1.weight",
    up="layers.{}.feed_forward.w3.weight",
    down="layers.{}.feed_forward.w2.weight",
    interleaved=True,
    tied_head=True,
)
"""Names in Meta's `consolidated.*.pth`."""

TORCHTUNE = TensorNames(
    embedding="tok_embeddings.weight",
    norm="norm.scale",
    head="output.weight",
    attention_norm="layers.{}.sa_norm.scale",
    query="layers.{}.attn.q_proj.weight",
    key="layers.{}.attn.k_proj.weight",
    value="layers.{}.attn.v_proj.weight",
    out="layers.{}.attn.output_proj.weight",
    feed_forward_norm="layers.{}.mlp_norm.scale",
    gate="layers.{}.mlp.w1.weight",
    up="layers.{}.mlp.w3.weight",
    down="layers.{}.mlp.w2.weight",
    interleaved=True,
    tied_head=False,
)
"""Names of torchtune."""


def decoder_map(spec: ModelSpec, names: TensorNames) -> StateDictMap:
    """State-dict map of a decoder with grouped-query or latent attention, and SwiGLU or experts."""
    found = _MapBuilder(spec, names)
    found.add("embedding.weight", names.embedding)
    for number, layer in enumerate(spec.layers):
        found.add_layer(number, layer)
    found.add("norm.weight", names.norm)
    copies: dict[str, str] = {}
    if not spec.tied:
        found.add("head.weight", names.head)
    elif names.tied_head:
        copies[names.head] = names.embedding
    for number in range(len(spec.layers), len(spec.blocks)):
        found.add_mtp_module(number, spec.blocks[number])
        shared = {names.mtp_embedding: names.embedding, names.mtp_head: names.head}
        copies |= {copy.format(number): original for copy, original in shared.items()}
    found.theirs |= {copy: found.theirs[original] for copy, original in copies.items()}
    optional = frozenset({names.head} if spec.tied else ())
    shapes, buffers = {name: found.shapes[name] for name in found.runs}, frozenset(spec.buffers)
    stacked = frozenset(found.stacked)
    return StateDictMap(
        *(found.runs, shapes, found.theirs, copies, optional, stacked, found.stacks, buffers),
        reshaped=found.reshaped,
        aliases={
            name: other.format(number)
            for own, other in names.aliases
            for number in range(len(spec.layers))
            if (name := own.format(number)) in found.theirs
        },
    )


class _MapBuilder:
    """Collects row ranges and shapes module by module, in the order of writing."""

    def __init__(self, spec: ModelSpec, names: TensorNames) -> None:
        self._names = names
        self.shapes = spec.state_shapes
        self.runs: dict[str, tuple[RowRange, ...]] = {}
        self.theirs: dict[str, tuple[int, ...]] = {}
        self.stacked: set[str] = set()
        self.stacks: dict[str, str] = {}
        self.reshaped: dict[str, tuple[int, ...]] = {}

    def add(self, ours: str, name: str, rows: Iterable[RowRange] = ()) -> None:
        """Add a parameter that equals one of their tensors, or the given rows of it."""
        self.theirs[name] = self.shapes[ours]
        self.runs[ours] = tuple(rows) or (RowRange(0, self.shapes[ours][0], name, 0),)

    def add_stacked(self, ours: str, names: Sequence[str], rows: Iterable[RowRange] = ()) -> None:
        """Add a parameter stacked per expert. It takes equal shares of each expert's tensors, named with `{}` for the
        expert."""
        experts, outputs, *inputs = self.shapes[ours]
        shape = (outputs // len(names), *inputs)
        for expert in range(experts):
            self.theirs |= {name.format(expert): shape for name in names}
        self.stacked.add(ours)
        self.runs[ours] = tuple(rows) or (RowRange(0, outputs, names[0], 0),)

    def stack(self, name: str) -> str:
        """Name of one expert's tensor inside a stored tensor of all experts."""
        return self.stacks.setdefault(name, f"{name}[{{}}]")

    def add_layer(self, number: int, layer: LayerSpec) -> None:
        """Add the parameters and buffers of a block."""
        own, linear = self._names, self._names.linear_attention
        if layer.linear_attention is not None and linear is not None and linear.attention_norm:
            norms = {"attention_norm": linear.attention_norm, "feed_forward_norm": linear.feed_forward_norm}
            self._names = replace(own, **norms)
        self._add_norms(number, layer, "attention_norm")
        if layer.linear_attention is not None:
            assert linear is not None, "the family has names for linear attention"
            self._add_linear_attention(number, layer, layer.linear_attention, linear)
        elif isinstance(layer.attention, LatentAttentionSpec):
            self._add_latent_attention(number, layer, layer.attention)
        else:
            self._add_attention(number, layer)
        self._add_norms(number, layer, "feed_forward_norm")
        if layer.router is not None:
            router = f"blocks.{number}.{layer.router.name}"
            self.add(f"{router}.weight", self._names.router.format(number))
            for ours, theirs in (("bias", self._names.router_bias), ("logit_bias", self._names.router_logit_bias)):
                if f"{router}.{ours}" in self.shapes:
                    self.add(f"{router}.{ours}", theirs.format(number))
        for linear_layer in layer.linears:
            module, _, part = linear_layer.name.rpartition(".")
            if part == "gate_up":
                self._add_swiglu(f"blocks.{number}.{module}", number)
            elif part == "shared_gate":
                self.add(f"blocks.{number}.{linear_layer.name}.weight", self._names.shared_output_gate.format(number))
        self._names = own

    def add_mtp_module(self, number: int, layer: LayerSpec) -> None:
        """Add the parameters and buffers of a module of multi-token prediction."""
        module, names = f"blocks.{number}", self._names
        for part in ("embedding_norm", "hidden_norm"):
            self.add(f"{module}.{part}.weight", names.of_norm(part).format(number))
        self.add(f"{module}.projection.weight", names.mtp_projection.format(number))
        self.add_layer(number, layer)
        self.add(f"{module}.norm.weight", names.mtp_norm.format(number))

    def _add_norms(self, number: int, layer: LayerSpec, prefix: str) -> None:
        for vector in layer.vectors:
            if vector.name.startswith(prefix):
                self.add(f"blocks.{number}.{vector.name}.weight", self._names.of_norm(vector.name).format(number))

    def _add_attention(self, number: int, layer: LayerSpec) -> None:
        attention, module, names = layer.attention, f"blocks.{number}.attention", self._names
        assert attention is not None, "the map is one of attention layers"
        query, key, value = (name.format(number) for name in (names.query, names.key, names.value))
        dim = self.shapes[f"{module}.qkv.weight"][-1]
        self.theirs |= {
            query: (attention.heads * attention.qk_dim * (1 + attention.gated), dim),
            key: (attention.kv_heads * attention.qk_dim, dim),
            value: (attention.kv_heads * attention.v_dim, dim),
        }
        self.runs[f"{module}.qkv.weight"] = tuple(qkv_rows(attention, query, key, value, names.interleaved))
        if f"{module}.qkv.bias" in self.shapes:
            self.theirs |= {_bias(name): self.theirs[name][:1] for name in (query, key, value)}
            rows = qkv_rows(attention, _bias(query), _bias(key), _bias(value), names.interleaved)
            self.runs[f"{module}.qkv.bias"] = tuple(rows)
        self._add_norms(number, layer, "attention.")
        out = names.out.format(number)
        self.add(f"{module}.out.weight", out)
        if f"{module}.out.bias" in self.shapes:
            self.add(f"{module}.out.bias", _bias(out))

    def _add_latent_attention(self, number: int, layer: LayerSpec, attention: LatentAttentionSpec) -> None:
        module, names, rope_dim = f"blocks.{number}.attention", self._names, attention.rope_dim
        has_latent = layer.vector("attention.q_a_norm") is not None
        query = (names.query_up if has_latent else names.query).format(number)
        if has_latent:
            self.add(f"{module}.q_a.weight", names.query_down.format(number))
        self.add(f"{module}.q.weight", query)
        down = names.kv_down.format(number)
        self.add(f"{module}.kv_a.weight", down)
        if attention.rope:
            self.runs[f"{module}.q.weight"] = tuple(
                rotated_tail_rows(attention.heads, attention.qk_dim, rope_dim, query)
            )
            self.runs[f"{module}.kv_a.weight"] = tuple(
                rotated_tail_rows(1, attention.latent_dim + rope_dim, rope_dim, down)
            )
        self._add_norms(number, layer, "attention.")
        self.add(f"{module}.kv_b.weight", names.kv_up.format(number))
        self.add(f"{module}.out.weight", names.out.format(number))

    def _add_linear_attention(
        self, number: int, layer: LayerSpec, mixer: LinearAttentionSpec, names: LinearAttentionNames
    ) -> None:
        module = f"blocks.{number}.attention"
        per_channel = mixer.decay == "channel"
        for part, name in (("decay_a", names.decay_a), ("gate_a", names.gate_a)) if per_channel else ():
            self.add(f"{module}.{part}.weight", name.format(number))
        widths = {"query": mixer.key_dim, "key": mixer.key_dim, "value": mixer.group * mixer.value_dim}
        projected = {
            **widths,
            "gate": widths["value"],
            "beta": mixer.group,
            "decay": mixer.group * (mixer.key_dim if per_channel else 1),
        }
        ours = {
            f"{module}.qkv.weight": ("query", "key", "value"),
            f"{module}.{'gate_b' if per_channel else 'gate'}.weight": ("gate",),
            f"{module}.beta.weight": ("beta",),
            f"{module}.{'decay_b' if per_channel else 'decay'}.weight": ("decay",),
        }
        self._add_parts(number, mixer.key_heads, ours, projected, names.projections, by_head=names.by_head)
        filters = {f"{module}.convolution.weight": ("query", "key", "value")}
        self._add_parts(number, mixer.key_heads, filters, widths, names.convolutions, by_head=False)
        for name, _ in names.convolutions:
            channels, taps = self.theirs[name.format(number)]
            self.reshaped[name.format(number)] = (channels, 1, taps)
        rate = names.log_rate.format(number)
        self.add(f"{module}.forget.log_rate", rate)
        if names.log_rate_dims > 1:
            self.reshaped[rate] = (*(1,) * (names.log_rate_dims - 2), mixer.value_heads, 1)
        self.add(f"{module}.forget.bias", names.bias.format(number))
        self.add(f"{module}.out_norm.weight", names.out_norm.format(number))
        self.add(f"{module}.out.weight", names.out.format(number))

    def _add_parts(
        self,
        number: int,
        heads: int,
        ours: Mapping[str, tuple[str, ...]],
        widths: Mapping[str, int],
        theirs: Iterable[tuple[str, tuple[str, ...]]],
        *,
        by_head: bool,
    ) -> None:
        """Add parameters whose rows go by key head, each with the given parts of a head. Their tensors have parts too,
        whose rows go by head or by part."""
        places: dict[str, tuple[str, int, int]] = {}
        for name, parts in theirs:
            unit, first = sum(widths[part] for part in parts), 0
            for part in parts:
                places[part] = (name.format(number), first, unit if by_head else widths[part])
                first += widths[part] * (1 if by_head else heads)
        for parameter, parts in ours.items():
            runs, start, columns = [], 0, self.shapes[parameter][1:]
            for head in range(heads):
                for part in parts:
                    name, first, step = places[part]
                    runs.append(RowRange(start, widths[part], name, first + head * step))
                    start += widths[part]
            self.runs[parameter] = tuple(runs)
            for name, parts_of_theirs in theirs:
                if set(parts) & set(parts_of_theirs):
                    rows = heads * sum(widths[part] for part in parts_of_theirs)
                    self.theirs[name.format(number)] = (rows, *columns)

    def _add_swiglu(self, module: str, number: int) -> None:
        """Add a feed-forward, or the feed-forwards of all experts, with their biases."""
        names, within = self._names, module.removeprefix(f"blocks.{number}.")
        gate, up, down = (name.format(number, "{}") for name in names.of_swiglu(within))
        how: dict[str, int] = {}
        *stacked, _, channels = self.shapes[f"{module}.down.weight"]
        if stacked and names.experts_gate_up:
            gate = up = names.experts_gate_up.format(number)
            how = {"up_first": 1, "step": 2} if names.alternating_gate_up else {"up_first": channels}
        for kind in ("weight", "bias"):
            if f"{module}.down.{kind}" not in self.shapes:
                continue
            of_kind = (gate, up, down) if kind == "weight" else map(_bias, (gate, up, down))
            their_gate, their_up, their_down = map(self.stack, of_kind) if how else of_kind
            rows = gate_up_rows(channels, their_gate, their_up, **how)
            pair = list(dict.fromkeys((their_gate, their_up)))
            if stacked:
                self.add_stacked(f"{module}.gate_up.{kind}", pair, rows)
                self.add_stacked(f"{module}.down.{kind}", [their_down])
                continue
            columns = self.shapes[f"{module}.gate_up.{kind}"][1:]
            self.theirs |= dict.fromkeys(pair, (channels, *columns))
            self.runs[f"{module}.gate_up.{kind}"] = tuple(rows)
            self.add(f"{module}.down.{kind}", their_down)


def _bias(weight: str) -> str:
    """Their name of the bias beside a weight."""
    return f"{weight.removesuffix('weight')}bias" if weight.endswith("weight") else f"{weight}_bias"
