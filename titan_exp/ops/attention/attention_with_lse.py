"""Attention to a part of the keys, with its log-sum-exp (LSE) for merging partial outputs (Milakov and Gimelshein
2018).

Merging is in fp32. Keys and values are shared by their group of query heads, in memory and between ranks.

An attention sink is one learned logit per head beside the keys, dropped after the softmax (Xiao et al. 2023): a key
whose value is zero. Output and log-sum-exp merge with it as with any part of the keys. The backward kernels take the
merged ones and give the right gradients of queries, keys and values without a change.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from titan_exp.ops.autograd import is_recomputing

Heads = Float[Tensor, "batch heads rows head_dim"]
Keys = Float[Tensor, "batch kv_heads keys head_dim"]
Values = Float[Tensor, "batch kv_heads keys v_dim"]
Outputs = Float[Tensor, "batch heads rows v_dim"]
Rows = Float[Tensor, "batch heads rows"]
Bias = Float[Tensor, "batch_or_1 1 rows keys"]
Visible = Bool[Tensor, "batch_or_1 1 rows keys"]
PerHead = Float[Tensor, " heads"]

PartialBackend = Literal["cpu", "flash", "efficient"]

HIDDEN = -1e30
"""Bias of a hidden key's score. Finite, so that a row whose keys in this part are all hidden stays finite; its
weight in the merge, exp(HIDDEN), is exactly 0."""

ALIGNMENT = 32  # multiple of rows to which the efficient kernel pads its log-sum-exp


def attention_forward(
    query: Heads,
    key: Keys,
    value: Values,
    *,
    bias: Bias | None,
    causal: bool,
    backend: PartialBackend,
    scale: float | None = None,
) -> tuple[Outputs, Rows]:
    """Attention output over these keys in the dtype of `query`, and its log-sum-exp in fp32. `bias`, in the dtype of
    `query`, is added to the scores and excludes `causal`; the flash kernel takes neither a bias nor fp32. `scale` is
    the scores' factor; None means 1 / sqrt(head_dim)."""
    if backend == "efficient":
        key, value = _for_every_head(query, key), _for_every_head(query, value)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, _for_kernel(query, bias), True, 0.0, causal, scale=scale
        )
        return out, lse[:, :, : query.shape[2]]
    padded = _as_wide(value, key)
    if backend == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, padded, 0.0, causal, attn_mask=bias, scale=scale
        )
    else:
        assert bias is None, "choose_backend takes the efficient kernel for masks"
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, padded, 0.0, causal, scale=scale)
    return out[..., : value.shape[-1]], lse


def attention_backward(
    gradient: Outputs,
    query: Heads,
    key: Keys,
    value: Values,
    *,
    out: Outputs,
    lse: Rows,
    bias: Bias | None,
    causal: bool,
    backend: PartialBackend,
    scale: float | None = None,
) -> tuple[Heads, Keys, Values]:
    """Gradients of query, key and value through these keys; `out` and `lse` are those merged over all parts."""
    # The kernel computes exp(score - lse): with the merged lse, the probabilities of the whole softmax.
    lse = lse.contiguous()
    unused: Any = torch.empty(2, dtype=torch.int64, device=query.device)  # dropout's RNG state
    if backend == "efficient":
        lse = F.pad(lse, (0, -lse.shape[2] % ALIGNMENT), value=torch.inf)
        heads = _for_every_head(query, key), _for_every_head(query, value)
        bias, needed = _for_kernel(query, bias), [True, True, True, False]
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, *heads, bias, out, lse, unused[0], unused[1], 0.0, needed, causal, scale=scale
        )
        groups = (-1, query.shape[1] // key.shape[1])
        return grads[0], grads[1].unflatten(1, groups).sum(2), grads[2].unflatten(1, groups).sum(2)
    gradient, padded, out = (_as_wide(tensor, key) for tensor in (gradient, value, out))
    if backend == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, padded, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    else:
        rows, keys = query.shape[2], key.shape[2]
        # Cumulative lengths are not needed, since all sequences of a batch have the same length.
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, padded, out, lse, None, None, rows, keys, 0.0, causal, unused, unused, scale=scale
        )
    return grads[0], grads[1], grads[2][..., : value.shape[-1]]


def merge_lse(out: Outputs, lse: Rows, part: Outputs, part_lse: Rows) -> None:
    """Merge attention to other keys into `out` and `lse`, both fp32, in place."""
    whole = torch.logaddexp(lse, part_lse)
    out.mul_((lse - whole).exp_()[..., None]).addcmul_(part, (part_lse - whole).exp_()[..., None])
    lse.copy_(whole)


def merge_sinks(out: Outputs, lse: Rows, sinks: PerHead) -> tuple[Outputs, Rows]:
    """Merge sinks into the output and log-sum-exp of a softmax over all keys; the output has the dtype of `lse`."""
    whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * (lse - whole).exp()[..., None], whole


def sinks_grad(gradient: Outputs, out: Outputs, lse: Rows, sinks: PerHead) -> PerHead:
    """Gradient of the sinks through merged `out` and `lse`: minus a sink's probability times gradient · output."""
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(share * (gradient.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)


def additive(visible: Visible | None, query: Tensor) -> Tensor | None:
    """Convert a mask to an additive bias in the dtype of `query`."""
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, HIDDEN)


def attention_with_sinks(
    query: Heads,
    key: Keys,
    value: Values,
    *,
    sinks: PerHead,
    visible: Visible | None,
    causal: bool,
    backend: PartialBackend,
    scale: float | None,
) -> Outputs:
    """Compute attention with sinks by a kernel that returns the log-sum-exp; `visible` excludes `causal`."""
    bias = additive(visible, query)
    return _SinkAttention.apply(query, key, value, sinks, bias, causal, backend, scale)  # type: ignore[return-value]


def math_attention_with_sinks(
    query: Heads,
    key: Keys,
    value: Values,
    *,
    sinks: PerHead,
    visible: Visible | None,
    causal: bool,
    scale: float | None,
) -> Outputs:
    """Compute attention with sinks from the whole score matrix, in fp32 at least."""
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
        # Heads are contiguous per token, like those of kernels and as the next projection reads them. The last operator
        # must not be in place (`ops.autograd.in_type`).
        out = merged.transpose(1, 2).to(out.dtype).contiguous().transpose(1, 2)
        ctx.save_for_backward(query, key, value, sinks, bias, out, lse)
        ctx.how = {"causal": causal, "backend": backend, "scale": scale}
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, sinks, bias, out, lse = ctx.saved_tensors
        grads = attention_backward(gradients[0], query, key, value, out=out, lse=lse, bias=bias, **ctx.how)
        return (*grads, sinks_grad(gradients[0], out, lse, sinks), *(None,) * 4)


def _as_wide(narrow: Tensor, key: Keys) -> Tensor:
    """Pad values, or tensors of their width, with zeros to the width of keys, for kernels that need equal widths."""
    missing = key.shape[-1] - narrow.shape[-1]
    return F.pad(narrow, (0, missing)) if missing else narrow


def _for_every_head(query: Heads, shared: Keys | Values) -> Tensor:
    """Repeat keys or values for each query head of their group, for the kernel without grouped-query support."""
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], 1)


def _for_kernel(query: Heads, bias: Bias | None) -> Tensor | None:
    """Expand the bias over heads, with rows aligned for the efficient kernel."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % 16))[..., :keys].expand(query.shape[0], query.shape[1], -1, -1)


TILE_SCORES = 1 << 22  # maximum number of scores held at a time, over batch and heads

TILE_ROWS = 256  # maximum number of rows in a tile; a causal tile has all keys up to its last row


class MaxLogits(nn.Module):
    """Largest logit of each query head in a step, over the visible keys of this rank's micro-batches, recomputation
    excluded. It is reported as `model/max_logit` over all layers and heads, and by layer. It repeats the first of
    attention's two forward matmuls, and needs memory for a tile of scores."""

    def __init__(self, heads: int, layer: str, device: torch.device) -> None:
        super().__init__()
        self.largest = torch.full((heads,), -torch.inf, device=device)
        """Logits [heads], fp32. They are not a buffer, since neither checkpoints nor initialization know them."""
        self.metric_reductions = {"max_logit": "max", f"max_logit/{layer}": "max"}

    def forward(self, query: Heads, key: Keys, visible: Visible | None, *, causal: bool, scale: float) -> None:
        """Include the logits of these queries and keys, if this is a forward pass in training."""
        if torch.is_grad_enabled():
            add_max_logits(self.largest, query.detach(), key.detach(), visible, causal, scale)

    def add(self, found: PerHead) -> None:
        """Include logits that another attention operator has found in a forward pass in training."""
        add_found_logits(self.largest, found.detach())

    def metrics(self) -> dict[str, Tensor]:
        return dict.fromkeys(self.metric_reductions, self.largest.amax())

    def reset_metrics(self) -> None:
        self.largest.fill_(-torch.inf)


# This is an operator so that compiled code checks at run time whether it recomputes.
@torch.library.custom_op("titan_exp::add_max_logits", mutates_args=("largest",))
def add_max_logits(  # noqa: PLR0917  # custom ops take positional arguments
    largest: Tensor, query: Tensor, key: Tensor, visible: Tensor | None, causal: bool, scale: float
) -> None:
    """Raise `largest` to each head's largest logit, unless backward repeats a forward pass."""
    if not is_recomputing():
        raise_to_logits(largest, query, key, visible, causal=causal, scale=scale)


def raise_to_logits(
    largest: PerHead, query: Heads, key: Keys, visible: Visible | None, *, causal: bool, scale: float
) -> None:
    """Raise `largest` to each head's largest logit, by tiles of rows."""
    batch, heads, rows, _ = query.shape
    groups, keys = key.shape[1], key.shape[2]
    step = max(1, min(TILE_ROWS, TILE_SCORES // (batch * heads * keys)))
    columns = torch.arange(keys, device=query.device)
    for first in range(0, rows, step):
        tile, seen = query[:, :, first : first + step], first + step if causal else keys
        # Query heads of a group share their key, so they are rows of one matrix.
        scores = tile.unflatten(1, (groups, -1)).flatten(2, 3) @ key[:, :, :seen].transpose(2, 3)
        scores = scores.unflatten(2, (heads // groups, -1))
        if causal:
            hidden = columns[:seen] > columns[first : first + step, None]
            scores.masked_fill_(hidden, -torch.inf)
        elif visible is not None:
            scores.masked_fill_(~visible[:, :, None, first : first + step], -torch.inf)
        torch.maximum(largest, scale * scores.amax((0, 3, 4)).flatten().float(), out=largest)


@torch.library.custom_op("titan_exp::add_found_logits", mutates_args=("largest",))
def add_found_logits(largest: Tensor, found: Tensor) -> None:
    """Raise `largest` to each head's logit in `found`."""
    torch.maximum(largest, found, out=largest)
