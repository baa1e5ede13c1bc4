"""Reference of Meta's Llama: attention and feed-forward, with RoPE by complex numbers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def logits(state: dict[str, Tensor], params: dict[str, Any], ids: Tensor, frequencies: Tensor) -> Tensor:
    """Logits of Meta's model for tokens [batch, seq], with its parameter names and row order."""
    x = state["tok_embeddings.weight"][ids]
    seq, heads = ids.shape[1], params["n_heads"]
    turns = torch.polar(torch.ones(seq, len(frequencies)), torch.outer(torch.arange(seq).float(), frequencies.float()))
    for layer in range(params["n_layers"]):
        w = {key.removeprefix(f"layers.{layer}."): value for key, value in state.items()}
        h = norm(x, w["attention_norm.weight"], params)
        query, key, value = ((h @ w[f"attention.w{kind}.weight"].T).unflatten(-1, (-1, 16)) for kind in "qkv")
        query, key = rotated(query, turns), rotated(key, turns)
        times = heads // params["n_kv_heads"]
        key, value = key.repeat_interleave(times, 2), value.repeat_interleave(times, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / 16**0.5
        scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -torch.inf).softmax(-1)
        x = x + torch.einsum("bhqk,bkhd->bqhd", scores, value).flatten(2) @ w["attention.wo.weight"].T
        h = norm(x, w["ffn_norm.weight"], params)
        gated = F.silu(h @ w["feed_forward.w1.weight"].T) * (h @ w["feed_forward.w3.weight"].T)
        x = x + gated @ w["feed_forward.w2.weight"].T
    return norm(x, state["norm.weight"], params) @ state["output.weight"].T


def rotated(heads: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(-2)


def norm(x: Tensor, weight: Tensor, params: dict[str, Any]) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + params["norm_eps"]) * weight
