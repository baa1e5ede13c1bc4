"""The Llama of other tools in terms of ours: names, and where rows of the fused projections are.

Hugging Face rotates pairs (i, i + head_dim / 2) as we do. Meta's own checkpoints rotate neighbours (2i, 2i + 1), and so
does torchtune: rows of their query and key projections are permuted within each head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from titan_exp.config.groups.model import ModelConfig
from titan_exp.models.convert.state_dict_map import Run, StateDictMap
from titan_exp.ops.swiglu import GROUP

CheckpointFormat = Literal["huggingface", "llama", "torchtune"]
"""Whose names: Hugging Face's, Meta's `consolidated.*.pth`, or torchtune's own."""


@dataclass(frozen=True)
class _Names:
    """What one tool calls the parts; `{}` stands for the layer."""

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
    """Whether neighbours are rotated together."""
    tied_head: bool
    """Whether a tied head is written once more, as a tensor of its own."""


_NAMES: dict[CheckpointFormat, _Names] = {
    "huggingface": _Names(
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
    ),
    "llama": _Names(
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
    ),
    "torchtune": _Names(
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
    ),
}


def llama_map(config: ModelConfig, dialect: CheckpointFormat) -> StateDictMap:
    """Our parameters in terms of a tool's tensors.

    Args:
        config: shape of the built-in decoder.
        dialect: whose names and row order.
    """
    names = _NAMES[dialect]
    dim, width = config.dim, config.heads * config.head_dim
    runs: dict[str, tuple[Run, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    theirs: dict[str, tuple[int, ...]] = {}

    def plain(ours: str, name: str, *shape: int) -> None:
        runs[ours], shapes[ours], theirs[name] = (Run(0, shape[0], name, 0),), shape, shape

    plain("embedding.weight", names.embedding, config.vocab_size, dim)
    for layer in range(config.layers):
        block = f"blocks.{layer}"
        query, key, value = (name.format(layer) for name in (names.query, names.key, names.value))
        gate, up = names.gate.format(layer), names.up.format(layer)
        plain(f"{block}.attention_norm.weight", names.attention_norm.format(layer), dim)
        theirs |= {name: (heads * config.head_dim, dim) for name, heads in _heads(config, query, key, value)}
        fused = f"{block}.attention.qkv.weight"
        runs[fused] = tuple(_qkv(config, query, key, value, names.interleaved))
        shapes[fused] = (width + 2 * config.kv_heads * config.head_dim, dim)
        plain(f"{block}.attention.out.weight", names.out.format(layer), dim, width)
        plain(f"{block}.feed_forward_norm.weight", names.feed_forward_norm.format(layer), dim)
        theirs |= {gate: (config.ffn_dim, dim), up: (config.ffn_dim, dim)}
        fused = f"{block}.feed_forward.gate_up.weight"
        runs[fused], shapes[fused] = tuple(_gate_up(config, gate, up)), (2 * config.ffn_dim, dim)
        plain(f"{block}.feed_forward.down.weight", names.down.format(layer), dim, config.ffn_dim)
    plain("norm.weight", names.norm, dim)
    copies: dict[str, str] = {}
    if not config.tied_embeddings:
        plain("head.weight", names.head, config.vocab_size, dim)
    elif names.tied_head:
        theirs[names.head] = (config.vocab_size, dim)
        copies[names.head] = names.embedding
    return StateDictMap(runs, shapes, theirs, copies)


def names_of(dialect: CheckpointFormat) -> tuple[str, str, str]:
    """What a tool calls the embedding, the head, and the first layer's gate projection."""
    names = _NAMES[dialect]
    return names.embedding, names.head, names.gate.format(0)


def _heads(config: ModelConfig, query: str, key: str, value: str) -> list[tuple[str, int]]:
    return [(query, config.heads), (key, config.kv_heads), (value, config.kv_heads)]


def _qkv(config: ModelConfig, query: str, key: str, value: str, interleaved: bool) -> Iterator[Run]:
    """Ours go by key-value head: its query heads, its key, its value."""
    width, group = config.head_dim, config.heads // config.kv_heads
    start = 0
    for head in range(config.kv_heads):
        rotated = [(query, head * group + member) for member in range(group)] + [(key, head)]
        for name, theirs in rotated:
            if interleaved:
                half = width // 2
                yield Run(start, half, name, theirs * width, step=2)
                yield Run(start + half, half, name, theirs * width + 1, step=2)
            else:
                yield Run(start, width, name, theirs * width)
            start += width
        yield Run(start, width, value, head * width)
        start += width


def _gate_up(config: ModelConfig, gate: str, up: str) -> Iterator[Run]:
    """Ours alternate in groups (see `ops.swiglu`)."""
    for group in range(config.ffn_dim // GROUP):
        yield Run(2 * group * GROUP, GROUP, gate, group * GROUP)
        yield Run((2 * group + 1) * GROUP, GROUP, up, group * GROUP)
