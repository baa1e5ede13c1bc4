"""Small model shapes for tests."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from titan_exp.models import plain
from titan_exp.models.blocks.linear import ShardSpec, init_shard_
from titan_exp.models.build import build_model, init_specs
from titan_exp.models.llama import Config
from titan_exp.models.spec.rope import RopeConfig

PLAIN_ROPE = RopeConfig(10000.0, "none", 1.0, 1.0, 4.0, 128)

TINY = Config(
    name="tiny",
    architecture="llama",
    layers=2,
    dim=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn_dim=96,
    vocab_size=97,
    context=128,
    norm_eps=1e-5,
    tied_embeddings=False,
    rope=PLAIN_ROPE,
    init_std=0.02,
    attention_backend="auto",
)


TINY_HUGGINGFACE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
"""The same shape for `transformers`."""


def own_class(import_path: str, **options: Any) -> plain.Config:
    """A plain class of the user's own, of the tiny shape."""
    fields: dict[str, Any] = {**vars(TINY), "architecture": import_path}
    return plain.Config(**fields, options=options)


def real_model(seed: int = 0, seq_len: int = 64, **changes: Any) -> nn.Module:
    """A tiny model on the CPU with its initial weights."""
    model = build_model(replace(TINY, **changes), seq_len=seq_len, attention_backend="math")
    table = init_specs(model)
    assert table is not None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init_shard_(parameter, seed, name, table[name], ShardSpec.whole(tuple(parameter.shape)))
    model.reset_buffers()  # type: ignore[operator]  # the decoder's own
    return model
