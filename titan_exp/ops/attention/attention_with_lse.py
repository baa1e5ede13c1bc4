"""Attention to a part of the keys, with the log-sum-exp by which parts are merged into the whole (Milakov and
Gimelshein 2018), and its backward pass given the whole.

Parts are merged in fp32. Keys and values stay shared by their group of query heads, in memory and between ranks.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

PartialBackend = Literal["cpu", "flash", "efficient"]

HIDDEN = -1e30
"""Added to the score of a hidden key. Finite, so that a row whose keys in this part are all hidden stays a number; its
weight in the whole, exp(HIDDEN), is exactly 0."""

ALIGNMENT = 32
"""Rows to which the efficient kernel fills up its log-sum-exp."""

Heads = Float[Tensor, "batch heads rows head_dim"]
KVHeads = Float[Tensor, "batch kv_heads keys head_dim"]
Rows = Float[Tensor, "batch heads rows"]
Bias = Float[Tensor, "batch 1 rows keys"]


def attention_forward(
    query: Heads, key: KVHeads, value: KVHeads, *, bias: Bias | None, causal: bool, backend: PartialBackend
) -> tuple[Heads, Rows]:
    """Softmax attention over these keys alone.

    Args:
        query: queries, any number of them per key and value head.
        key: keys.
        value: values.
        bias: added to the scores, in the type of `query`; None adds nothing.
        causal: whether row i sees keys 0 .. i only; not together with a bias.
        backend: the kernel: `cpu` on a CPU, else one of CUDA's, of which flash takes no bias and no fp32.

    Returns:
        The attention output in the type of `query`, and the log of its softmax's denominator in fp32.
    """
    if backend == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias
        )
    if backend == "flash":
        assert bias is None, "choose_backend takes the efficient kernel for masks"
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
        return out, lse
    key, value = _for_every_head(query, key), _for_every_head(query, value)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, _for_kernel(query, bias), True, 0.0, causal
    )
    return out, lse[:, :, : query.shape[2]]


def attention_backward(
    gradient: Heads,
    query: Heads,
    key: KVHeads,
    value: KVHeads,
    *,
    out: Heads,
    lse: Rows,
    bias: Bias | None,
    causal: bool,
    backend: PartialBackend,
) -> tuple[Heads, KVHeads, KVHeads]:
    """Gradients of query, key and value that flow through these keys.

    Args:
        gradient: of the whole output.
        query: as in `attention_forward`, and so are the other arguments not named here.
        key: keys of this part.
        value: values of this part.
        out: output over all parts.
        lse: log-sum-exp over all parts.
        bias: of this part.
        causal: within this part.
        backend: the kernel.
    """
    # The kernel's softmax is exp(score - lse): with the lse of the whole, the probabilities of the whole.
    lse = lse.contiguous()
    if backend == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, 0.0, causal, attn_mask=bias
        )
    unused: Any = torch.empty(2, dtype=torch.int64, device=query.device)  # state of dropout, which is 0
    if backend == "flash":
        rows, keys = query.shape[2], key.shape[2]
        # No cumulative lengths: the sequences of a batch are all equally long.
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, lse, None, None, rows, keys, 0.0, causal, unused, unused
        )
    lse = F.pad(lse, (0, -lse.shape[2] % ALIGNMENT), value=torch.inf)
    heads = _for_every_head(query, key), _for_every_head(query, value)
    bias, wanted = _for_kernel(query, bias), [True, True, True, False]
    grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, *heads, bias, out, lse, unused[0], unused[1], 0.0, wanted, causal
    )
    groups = (-1, query.shape[1] // key.shape[1])
    return grads[0], grads[1].unflatten(1, groups).sum(2), grads[2].unflatten(1, groups).sum(2)


def merge_lse(out: Heads, lse: Rows, part: Heads, part_lse: Rows) -> None:
    """Merge attention to other keys into `out` and `lse`, which are fp32, in place."""
    whole = torch.logaddexp(lse, part_lse)
    out.mul_((lse - whole).exp_()[..., None]).add_(part * (part_lse - whole).exp_()[..., None])
    lse.copy_(whole)


def _for_every_head(query: Heads, shared: KVHeads) -> Tensor:
    """Keys or values repeated for each query head of their group, for the one kernel that takes no groups."""
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], 1)


def _for_kernel(query: Heads, bias: Bias | None) -> Tensor | None:
    """The bias over all heads, its rows at addresses that the efficient kernel can load from."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % 16))[..., :keys].expand(-1, query.shape[1], -1, -1)
