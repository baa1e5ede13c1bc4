"""State-dict maps from Hugging Face, Meta and torchtune decoders to ours, including fused qkv and gate/up rows.

Hugging Face rotates pairs (i, i + head_dim / 2) as we do. Meta's own checkpoints rotate neighbours (2i, 2i + 1), and so
does torchtune: rows of their query and key projections are permuted within each head.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from titan_exp.models.convert.state_dict_map import RowRange, StateDictMap
from titan_exp.models.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec
from titan_exp.models.spec.transformer import FFN_GROUP


@dataclass(frozen=True)
class TensorNames:
    """Tensor names of one tool; `{}` stands for the layer."""

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
    """True if RoPE rotates neighbours (2i, 2i + 1)."""
    tied_head: bool
    """True if a tied head is stored again as its own tensor."""
    query_norm: str = ""
    """Norm over each query head, in families with QK norm."""
    key_norm: str = ""
    """Norm over each key head."""

    def of_norm(self, vector: str) -> str:
        """Tensor name of one of our norms (`attention.q_norm`)."""
        return {
            "attention_norm": self.attention_norm,
            "feed_forward_norm": self.feed_forward_norm,
            "attention.q_norm": self.query_norm,
            "attention.k_norm": self.key_norm,
        }[vector]


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
)
"""Names of `transformers` (Llama, Qwen3)."""

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
    """State-dict map of a decoder with grouped-query attention and SwiGLU."""
    dim = spec.dim
    runs: dict[str, tuple[RowRange, ...]] = {}
    theirs: dict[str, tuple[int, ...]] = {}

    def plain(ours: str, name: str) -> None:
        shape = spec.shapes[ours]
        runs[ours], theirs[name] = (RowRange(0, shape[0], name, 0),), shape

    def norms(layer: LayerSpec, number: int, prefix: str) -> None:
        for vector in layer.vectors:
            if vector.name.startswith(prefix):
                plain(f"blocks.{number}.{vector.name}.weight", names.of_norm(vector.name).format(number))

    plain("embedding.weight", names.embedding)
    for number, layer in enumerate(spec.layers):
        attention, block = layer.attention, f"blocks.{number}"
        assert attention is not None, "the map is one of attention layers"
        query, key, value = (name.format(number) for name in (names.query, names.key, names.value))
        gate, up = names.gate.format(number), names.up.format(number)
        channels = layer.linear("feed_forward.down").inputs
        norms(layer, number, "attention_norm")
        theirs |= {query: (attention.heads * attention.qk_dim, dim), key: (attention.kv_heads * attention.qk_dim, dim)}
        theirs[value] = (attention.kv_heads * attention.v_dim, dim)
        runs[f"{block}.attention.qkv.weight"] = tuple(_qkv(attention, query, key, value, names.interleaved))
        norms(layer, number, "attention.")
        plain(f"{block}.attention.out.weight", names.out.format(number))
        norms(layer, number, "feed_forward_norm")
        theirs |= {gate: (channels, dim), up: (channels, dim)}
        runs[f"{block}.feed_forward.gate_up.weight"] = tuple(_gate_up(channels, gate, up))
        plain(f"{block}.feed_forward.down.weight", names.down.format(number))
    plain("norm.weight", names.norm)
    copies: dict[str, str] = {}
    if not spec.tied:
        plain("head.weight", names.head)
    elif names.tied_head:
        theirs[names.head] = (spec.vocab_size, dim)
        copies[names.head] = names.embedding
    optional = frozenset({names.head} if spec.tied else ())
    return StateDictMap(runs, {name: spec.shapes[name] for name in runs}, theirs, copies, optional)


def _qkv(attention: AttentionSpec, query: str, key: str, value: str, interleaved: bool) -> Iterator[RowRange]:
    """Rows of the fused weight, by key-value head: its query heads, its key, its value."""
    width, group = attention.qk_dim, attention.group
    start = 0
    for head in range(attention.kv_heads):
        rotated = [(query, head * group + member) for member in range(group)] + [(key, head)]
        for name, theirs in rotated:
            if interleaved:
                half = width // 2
                yield RowRange(start, half, name, theirs * width, step=2)
                yield RowRange(start + half, half, name, theirs * width + 1, step=2)
            else:
                yield RowRange(start, width, name, theirs * width)
            start += width
        yield RowRange(start, attention.v_dim, value, head * attention.v_dim)
        start += attention.v_dim


def _gate_up(channels: int, gate: str, up: str) -> Iterator[RowRange]:
    """Rows of the fused weight, which alternate in groups (see `ops.swiglu`)."""
    for group in range(channels // FFN_GROUP):
        yield RowRange(2 * group * FFN_GROUP, FFN_GROUP, gate, group * FFN_GROUP)
        yield RowRange((2 * group + 1) * FFN_GROUP, FFN_GROUP, up, group * FFN_GROUP)
