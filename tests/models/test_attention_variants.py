"""Layers with every kind of attention against plain math in fp64, and their cache, counts and state-dict map."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.own_attention import Config, spec, state_dict_map
from tests.models.shapes import TINY
from titan_exp.inference.generate import DecodeSession
from titan_exp.models.blocks.linear import ShardSpec, init_shard_
from titan_exp.models.build import build_model, init_specs, parameter_count
from titan_exp.ops.swiglu import swiglu
from titan_exp.optim.parameter_groups import named_parameters

SEQ = 40
CONFIG = Config(**{**vars(TINY), "architecture": "tests.models.own_attention", "layers": 4}, window=7, chunk=12)


def model_of(dtype: torch.dtype = torch.float64, backend: Any = "flash") -> nn.Module:
    """The model with noise in every parameter, zeros and ones included."""
    model = build_model(CONFIG, seq_len=SEQ, attention_backend=backend).to(dtype)
    table = init_specs(model)
    assert table is not None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init_shard_(parameter, 0, name, table[name], ShardSpec.whole(tuple(parameter.shape)))
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    model.reset_buffers()  # type: ignore[operator]  # the decoder's own
    return model


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(0, 97, (rows, SEQ), generator=torch.Generator().manual_seed(0))


def norm(x: Tensor, weight: Tensor | None, eps: float = 1e-5) -> Tensor:
    normalized = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normalized if weight is None else normalized * weight


def plain_logits(model: nn.Module, ids: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
    """The four kinds of layers written out, one head at a time over the whole score matrix."""
    weights, seq, width = dict(model.named_parameters()), ids.shape[1], CONFIG.head_dim
    index, half = torch.arange(seq), width // 2
    angle = positions[:, :, None] * (10000.0 ** -(torch.arange(half, dtype=torch.float64) / half))

    def turned(x: Tensor) -> Tensor:
        first, second = x[..., :half], x[..., half:]
        cos, sin = angle.cos().float().double(), angle.sin().float().double()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    x = weights["embedding.weight"][ids]
    for layer in range(4):
        of = {
            name.removeprefix(f"blocks.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"blocks.{layer}.")
        }
        seen = (index[:, None] >= index)[None]
        if layer == 0:
            seen = seen & (index > index[:, None] - CONFIG.window)
        if layer == 2:
            seen = seen & (positions[:, :, None] // CONFIG.chunk == positions[:, None] // CONFIG.chunk)
        if documents is not None:
            seen = seen & (documents[:, :, None] == documents[:, None])
        fused = norm(x, of["attention_norm.weight"]) @ of["attention.qkv.weight"].T + of.get("attention.qkv.bias", 0)
        heads = []
        for head in range(CONFIG.heads):
            start = head // 2 * 4 * width
            query = fused[..., start + head % 2 * width :][..., :width]
            key, value = fused[..., start + 2 * width :][..., :width], fused[..., start + 3 * width :][..., :width]
            if layer < 3:
                query, key = turned(query), turned(key)
            if layer == 2:
                query, key = norm(query, None), norm(key, None)
            if layer == 3:
                steps = torch.floor((positions + 1.0) / 8)
                query = query * (1 + 20 * torch.log(1 + steps))[..., None].float()
            scores = (query @ key.mT / width**0.5).masked_fill(~seen, -torch.inf)
            if layer < 2:
                sink = of["attention.sinks.weight"][head].expand(*scores.shape[:2], 1)
                scores = torch.cat((scores, sink), -1)
            heads.append(scores.softmax(-1)[..., :seq] @ value)
        x = x + torch.cat(heads, -1) @ of["attention.out.weight"].T + of.get("attention.out.bias", 0)
        hidden = norm(x, of["feed_forward_norm.weight"]) @ of["feed_forward.gate_up.weight"].T
        x = x + swiglu(hidden) @ of["feed_forward.down.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["head.weight"].T


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_layers_are_plain_math(backend: str, packed: bool):
    model, ids = model_of(backend=backend), tokens()
    documents = positions = None
    counted = torch.arange(SEQ).expand(2, -1)
    if packed:
        documents = torch.tensor([[0] * 15 + [1] * 25, [0] * 30 + [1] * 10])
        positions = counted = torch.cat(
            [torch.cat([torch.arange(n) for n in row])[None] for row in ((15, 25), (30, 10))]
        )
    parameters = dict(model.named_parameters())
    gradient = torch.randn(2, SEQ, 97, dtype=torch.float64)
    found = model(ids, positions, documents)
    mine = torch.autograd.grad(found, list(parameters.values()), gradient)
    expected = plain_logits(model, ids, counted, documents)
    theirs = torch.autograd.grad(expected, list(parameters.values()), gradient)
    # RoPE and SwiGLU compute in fp32.
    assert (found - expected).norm() < 1e-6 * expected.norm()
    for name, ours, other in zip(parameters, mine, theirs, strict=True):
        assert (ours - other).norm() < 1e-5 * other.norm(), name


def test_cache_gives_the_tokens_of_recomputation():
    """Token by token, past window, chunk and steps of the temperature; and past the longest sequence."""
    model, again = model_of(torch.float32), model_of(torch.float32)
    cached, whole = DecodeSession(model, SEQ, cache=True), DecodeSession(again, SEQ, cache=False)
    ids = tokens()[0, :5].tolist()
    for _ in range(SEQ + 10):
        mine, theirs = cached.next_logits(ids), whole.next_logits(ids)
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
        assert mine.argmax() == theirs.argmax()
        ids.append(int(theirs.argmax()))


def test_spec_counts_parameters_and_flops():
    model, described = model_of(), spec(CONFIG)
    assert described.parameters == parameter_count(model)
    assert init_specs(model)["blocks.0.attention.out.bias"].std == 0.1  # type: ignore[index]  # declared
    assert init_specs(model)["blocks.1.attention.sinks.weight"].std == 1.0  # type: ignore[index]  # declared
    index = torch.arange(SEQ)
    causal = index[:, None] >= index
    pairs = [
        (causal & (index > index[:, None] - 7)).sum(),
        causal.sum(),
        (causal & (index // 12 == index[:, None] // 12)).sum(),
        causal.sum(),
    ]
    attention = sum(int(count) for count in pairs) * CONFIG.heads * 3 * 2 * 2 * CONFIG.head_dim / SEQ
    matmuls = sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and n != "embedding.weight")
    assert described.flops_per_token(SEQ) == pytest.approx(6 * matmuls + attention)


def test_biases_and_sinks_are_vectors_without_weight_decay():
    roles = {named.name: named.role for named in named_parameters([model_of()])}
    assert {roles[f"blocks.0.attention.{name}"] for name in ("qkv.bias", "out.bias", "sinks.weight")} == {"vector"}


def test_map_splits_the_fused_bias():
    found, model = state_dict_map(CONFIG, "huggingface"), dict(model_of().named_parameters())
    assert found.runs.keys() == model.keys()
    assert found.their_shapes["model.layers.0.self_attn.sinks"] == (4,)
    assert found.their_shapes["model.layers.1.self_attn.k_proj.bias"] == (2 * CONFIG.head_dim,)
    ours, theirs = model["blocks.0.attention.qkv.bias"].detach(), dict[str, Tensor]()
    for run in found.of("blocks.0.attention.qkv.bias", 0, len(ours)):
        theirs.setdefault(run.name, torch.zeros(found.their_shapes[run.name], dtype=ours.dtype))[run.theirs] = ours[
            run.ours
        ]
    prefix = "model.layers.0.self_attn."
    x = torch.randn(3, 64, dtype=torch.float64)
    by_name = {part: theirs[f"{prefix}{part}_proj.bias"].unflatten(0, (-1, 16)) for part in "qkv"}
    # Groups of two query heads, their key, their value.
    assert torch.equal(ours.unflatten(0, (2, 4, 16))[:, :2].flatten(0, 1), by_name["q"])
    assert torch.equal(ours.unflatten(0, (2, 4, 16))[:, 2], by_name["k"])
    assert torch.equal(ours.unflatten(0, (2, 4, 16))[:, 3], by_name["v"])
    assert F.linear(x, x.new_zeros(128, 64), ours).shape == (3, 128)
