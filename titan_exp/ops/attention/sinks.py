"""Attention sinks: one learned logit per head beside the keys, dropped after the softmax (Xiao et al. 2023).

A sink is a key whose value is zero: output and log-sum-exp merge with it like those of any part of the keys, and the
backward kernels, which take the merged ones, give the gradients of queries, keys and values as they are.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from titan_exp.ops.attention.attention_with_lse import (
    HIDDEN,
    PartialBackend,
    attention_backward,
    attention_forward,
)

Sinks = Float[Tensor, " heads"]
Rows = Float[Tensor, "batch heads rows"]
Outputs = Float[Tensor, "batch heads rows v_dim"]


def merge_sinks(out: Outputs, lse: Rows, sinks: Sinks) -> tuple[Outputs, Rows]:
    """Output and log-sum-exp of a softmax over all keys, with sinks beside them; in the dtype of `lse`."""
    whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * (lse - whole).exp()[..., None], whole


def sinks_grad(gradient: Outputs, out: Outputs, lse: Rows, sinks: Sinks) -> Sinks:
    """Gradient of the sinks through merged `out` and `lse`: minus a sink's probability times gradient · output."""
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(share * (gradient.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)


def additive(visible: Bool[Tensor, "batch_or_1 1 rows keys"] | None, query: Tensor) -> Tensor | None:
    """Mask as a bias of scores in the dtype of `query`."""
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, HIDDEN)


def attention_with_sinks(
    query: Float[Tensor, "batch heads rows head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys v_dim"],
    *,
    sinks: Sinks,
    visible: Bool[Tensor, "batch_or_1 1 rows keys"] | None,
    causal: bool,
    backend: PartialBackend,
    scale: float | None,
) -> Outputs:
    """Attention with sinks by a kernel that returns the log-sum-exp; `visible` excludes `causal`."""
    bias = additive(visible, query)
    return _SinkAttention.apply(query, key, value, sinks, bias, causal, backend, scale)  # type: ignore[return-value]


def math_attention_with_sinks(
    query: Float[Tensor, "batch heads rows head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys v_dim"],
    *,
    sinks: Sinks,
    visible: Bool[Tensor, "batch_or_1 1 rows keys"] | None,
    causal: bool,
    scale: float | None,
) -> Outputs:
    """The same by the whole score matrix, in fp32 at least."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    beside = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    shares = torch.cat((scores, beside), dim=-1).softmax(-1)[..., :-1]
    return shares.to(value.dtype) @ value


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # autograd functions take positional arguments
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        bias: Tensor | None,
        causal: bool,
        backend: PartialBackend,
        scale: float | None,
    ) -> Tensor:
        out, lse = attention_forward(query, key, value, bias=bias, causal=causal, backend=backend, scale=scale)
        merged, lse = merge_sinks(out, lse, sinks)
        # Heads are contiguous per token, as those of kernels, and as the next projection reads them. No operator in
        # place is the last (`function_output`).
        out = merged.transpose(1, 2).to(out.dtype).contiguous().transpose(1, 2)
        ctx.save_for_backward(query, key, value, sinks, bias, out, lse)
        ctx.how = {"causal": causal, "backend": backend, "scale": scale}
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, sinks, bias, out, lse = ctx.saved_tensors
        grads = attention_backward(gradients[0], query, key, value, out=out, lse=lse, bias=bias, **ctx.how)
        return (*grads, sinks_grad(gradients[0], out, lse, sinks), *(None,) * 4)
