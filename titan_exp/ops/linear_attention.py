"""Linear attention with the gated delta rule: Gated DeltaNet (Yang et al. 2025) and Kimi Delta Attention (Kimi 2025).

Each value head has a state S [K, V]. A token with key k, value v, decay exp(g) and strength beta does

    S <- exp(g) S;  S <- S + k (beta (v - Sᵀ k))ᵀ;  out = Sᵀ q

where exp(g) is one number for Gated DeltaNet and one per row of S for Kimi Delta Attention. We compute chunks of
tokens by matmuls: with c the cumulative decay inside a chunk, one triangular solve gives what the tokens of a chunk
write to the state. Squaring the triangular matrix instead would be wrong where keys are similar. Documents are masks,
because a very negative decay in their place would cost the digits of all later tokens of its chunk. No exponent is
positive, so strong decays give zeros and never infinities.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 16
"""Tokens whose decays per channel are computed pair by pair; farther pairs go through the first token of a block."""


def gated_delta(
    q: Float[Tensor, "batch seq key_heads K"],
    k: Float[Tensor, "batch seq key_heads K"],
    v: Float[Tensor, "batch seq value_heads V"],
    g: Float[Tensor, "batch seq value_heads *K"],
    beta: Float[Tensor, "batch seq value_heads"],
    documents: Int[Tensor, "batch seq"] | None,
    *,
    state: Float[Tensor, "batch value_heads K V"] | None = None,
    carry: Int[Tensor, " batch"] | None = None,
    chunk: int = 64,
    backend: str = "torch",
) -> tuple[Float[Tensor, "batch seq value_heads V"], Float[Tensor, "batch value_heads K V"]]:
    """Outputs of a segment of tokens, in the dtype of `v`, and the state after it, in at least fp32.

    Queries and keys are normalized and scaled by the caller; key head j serves the value heads j · r to j · r + r - 1.
    `g` is the log of the decay, at most 0, in fp32: one number per value head, or K. The state starts anew where the
    number in `documents` changes. `state` is the one before the segment, zero if None, and `carry` the document of the
    token before it, -1 if there is none. Without `carry` the first token continues the document of `state`.
    """
    batch, _, heads, width = v.shape
    if state is None:
        dtype = torch.promote_types(v.dtype, torch.float32)
        state = torch.zeros(batch, heads, k.shape[-1], width, dtype=dtype, device=v.device)
    return _OPERATORS[backend](q, k, v, g, beta, state, _runs(documents, carry), chunk)


def transition(
    k: Float[Tensor, "batch seq key_heads K"],
    v: Float[Tensor, "batch seq value_heads V"],
    g: Float[Tensor, "batch seq value_heads *K"],
    beta: Float[Tensor, "batch seq value_heads"],
    documents: Int[Tensor, "batch seq"] | None,
    *,
    carry: Int[Tensor, " batch"] | None = None,
    chunk: int = 64,
    backend: str = "torch",
) -> Float[Tensor, "batch value_heads K V_plus_K"]:
    """Affine map [B | A] of the state over a segment: it is A · S + B after the segment if it was S before.

    Segments compose: first (A1, B1), then (A2, B2) is (A2 · A1, A2 · B1 + B2). Arguments are those of `gated_delta`.
    """
    batch, _, heads, width = v.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    identity = torch.eye(k.shape[-1], dtype=dtype, device=v.device).expand(batch, heads, -1, -1)
    # The columns of a state do not mix: those beyond the values start as the identity, and nothing is written to them.
    start = torch.cat((identity.new_zeros(batch, heads, k.shape[-1], width), identity), dim=-1)
    return _OPERATORS[backend](None, k, v, g, beta, start, _runs(documents, carry), chunk)[1]


def gated_delta_step(
    q: Float[Tensor, "batch key_heads K"],
    k: Float[Tensor, "batch key_heads K"],
    v: Float[Tensor, "batch value_heads V"],
    g: Float[Tensor, "batch value_heads *K"],
    beta: Float[Tensor, "batch value_heads"],
    state: Float[Tensor, "batch value_heads K V"],
) -> tuple[Float[Tensor, "batch value_heads V"], Float[Tensor, "batch value_heads K V"]]:
    """One token of `gated_delta`, for generation: its output and the state after it."""
    times = v.shape[1] // k.shape[1]
    query, key = (heads.to(state.dtype).repeat_interleave(times, 1)[:, :, None] for heads in (q, k))
    decay = g.to(state.dtype).exp()
    state = state * (decay[..., None, None] if g.dim() == 2 else decay[..., None])
    written = beta.to(state.dtype)[..., None, None] * (v.to(state.dtype)[:, :, None] - key @ state)
    state = state + key.mT @ written
    return (query @ state)[:, :, 0].to(v.dtype), state


def l2_normalized(x: Float[Tensor, "*heads width"], eps: float = 1e-6) -> Float[Tensor, "*heads width"]:
    """x / sqrt(sum of x² + eps), in fp32 at least, in the dtype of `x`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _runs(documents: Tensor | None, carry: Tensor | None) -> Tensor | None:
    """Number of document starts up to each token; 0 for tokens that continue the document before the segment."""
    if documents is None:
        return None
    before = documents[:, :1] if carry is None else carry[:, None].to(documents.dtype)
    return (documents != torch.cat((before, documents[:, :-1]), dim=1)).cumsum(1)


@dataclass(frozen=True)
class _Chunk:
    """Tokens of a chunk by value head, in the state's dtype. Decays have one channel for Gated DeltaNet, else K."""

    rows: Tensor
    """Keys, then queries if outputs are wanted [batch, heads, 1 or 2, chunk, K]."""
    values: Tensor
    """Values [batch, heads, chunk, V]; zeros in the columns of the state beyond those of the values."""
    beta: Tensor
    """Strengths [batch, heads, chunk, 1]."""
    decay: Tensor
    """Sum of log decays up to each token, its own included [batch, heads, chunk, 1 or K]."""
    visible: Tensor
    """True where a token (second to last dim) may read another one's write [batch or 1, 1, chunk, chunk]."""
    into: Tensor
    """Decay from the state before the chunk to each token, like `decay`; 0 if a document started on the way."""
    out: Tensor
    """Decay from each token to the end of the chunk."""
    whole: Tensor
    """Decay over the chunk [batch, heads, 1 or K, 1]."""
    starts: Tensor | None
    """True for the first token of a document [batch, 1, chunk, 1]."""

    @property
    def key(self) -> Tensor:
        """Keys [batch, heads, chunk, K]."""
        return self.rows[:, :, 0]


def _read_chunk(
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, runs: Tensor | None, at: slice
) -> _Chunk:
    times = v.shape[2] // k.shape[2]

    def by_head(tensor: Tensor) -> Tensor:
        part = tensor[:, at].to(state.dtype)
        return part.unsqueeze(-1) if part.dim() == 3 else part

    rows = [by_head(x).transpose(1, 2).repeat_interleave(times, 1) for x in (k, q) if x is not None]
    values, strength, log_decay = (by_head(x).transpose(1, 2) for x in (v, beta, g))
    if state.shape[-1] > values.shape[-1]:
        values = torch.nn.functional.pad(values, (0, state.shape[-1] - values.shape[-1]))
    length = values.shape[2]
    visible = torch.ones(length, length, dtype=torch.bool, device=v.device).tril()[None, None]
    if runs is None:
        decay, starts = log_decay.cumsum(2), None
        into, out, whole = decay, decay[:, :, -1:] - decay, decay[:, :, -1]
        return _Chunk(
            torch.stack(rows, 2), values, strength, decay, visible, into.exp(), out.exp(), whole.exp()[..., None], None
        )
    run = runs[:, None, at, None]
    before = runs[:, None, at.start - 1, None, None] if at.start else torch.zeros_like(run[:, :, :1])
    starts = run != torch.cat((before, run[:, :, :-1]), dim=2)
    # Nothing crosses the start of a document, so its decay must not cost digits.
    decay = log_decay.masked_fill(starts, 0).cumsum(2)
    last = run[:, :, -1:]
    return _Chunk(
        torch.stack(rows, 2),
        values,
        strength,
        decay,
        visible & (run == run.mT),
        decay.exp() * (run == before),
        (decay[:, :, -1:] - decay).exp() * (run == last),
        (decay[:, :, -1].exp() * (last == before)[:, :, 0])[..., None],
        starts,
    )


def _scores(chunk: _Chunk) -> Tensor:
    """Products of each row with the keys that it sees, decayed in between [batch, heads, rows, chunk, chunk].

    One channel of decays is a factor of the products. Otherwise the decay is part of each product: it is computed pair
    by pair within a block, and from a token to the first one of a later block and from there on, both at most 1.
    """
    rows, key, decay = chunk.rows, chunk.key, chunk.decay
    if decay.shape[-1] == 1:
        return (rows @ key[:, :, None].mT) * _pair_decays(decay, chunk.visible)[..., 0][:, :, None]
    length = key.shape[2]
    found = rows.new_zeros(*rows.shape[:3], length, length)
    for block, earlier in _blocks(length):
        near = _pair_decays(decay[:, :, block], chunk.visible[..., block, block]) * key[:, :, None, block]
        found[..., block, block] = (rows[:, :, :, block].transpose(2, 3) @ near.mT).transpose(2, 3)
        if earlier is not None:
            from_start, to_start = _through_start(decay, block, earlier)
            far = (rows[:, :, :, block] * from_start[:, :, None]) @ (key[:, :, earlier] * to_start)[:, :, None].mT
            found[..., block, earlier] = far * chunk.visible[:, :, None, block, earlier]
    return found


def _scores_backward(chunk: _Chunk, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of the keys that they are multiplied by, from that of `_scores`."""
    rows, key, decay = chunk.rows, chunk.key, chunk.decay
    if decay.shape[-1] == 1:
        gradient = gradient * _pair_decays(decay, chunk.visible)[..., 0][:, :, None]
        return gradient @ key[:, :, None], gradient.flatten(2, 3).mT @ rows.flatten(2, 3)
    rows_grad, key_grad = torch.empty_like(rows), torch.zeros_like(key)
    for block, earlier in _blocks(key.shape[2]):
        pairs = _pair_decays(decay[:, :, block], chunk.visible[..., block, block])
        upstream = gradient[..., block, block].transpose(2, 3)
        rows_grad[:, :, :, block] = (upstream @ (pairs * key[:, :, None, block])).transpose(2, 3)
        key_grad[:, :, block] += ((upstream.mT @ rows[:, :, :, block].transpose(2, 3)) * pairs).sum(2)
        if earlier is not None:
            from_start, to_start = _through_start(decay, block, earlier)
            upstream = gradient[..., block, earlier] * chunk.visible[:, :, None, block, earlier]
            near = rows[:, :, :, block] * from_start[:, :, None]
            far = key[:, :, earlier] * to_start
            rows_grad[:, :, :, block] += (upstream @ far[:, :, None]) * from_start[:, :, None]
            key_grad[:, :, earlier] += (upstream.flatten(2, 3).mT @ near.flatten(2, 3)) * to_start
    return rows_grad, key_grad


def _blocks(length: int) -> Iterator[tuple[slice, slice | None]]:
    """Yield the blocks of a chunk, each with the tokens before it."""
    for start in range(0, length, BLOCK):
        yield slice(start, start + BLOCK), slice(0, start) if start else None


def _pair_decays(decay: Tensor, visible: Tensor) -> Tensor:
    """Decay between pairs of tokens that see each other, else 0 [batch, heads, tokens, tokens, 1 or K]."""
    # Masked before the exponential, because the decay backwards in time may overflow.
    between = decay[:, :, :, None] - decay[:, :, None]
    return between.masked_fill_(~visible[..., None], -torch.inf).exp_()


def _through_start(decay: Tensor, block: slice, earlier: slice) -> tuple[Tensor, Tensor]:
    """Decay from the first token of a block to each of its tokens, and to it from each earlier token."""
    start = decay[:, :, block.start : block.start + 1]
    return (decay[:, :, block] - start).exp(), (start - decay[:, :, earlier]).exp()


def _write(chunk: _Chunk, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, rows' readings of the state before the chunk, values less those of keys, and what the tokens write."""
    scores = _scores(chunk)
    reading = (chunk.rows * chunk.into[:, :, None]) @ state[:, :, None]
    missing = chunk.values - reading[:, :, 0]
    written = torch.linalg.solve_triangular(
        chunk.beta * scores[:, :, 0], chunk.beta * missing, upper=False, unitriangular=True
    )
    return scores, reading, missing, written


def _after(chunk: _Chunk, state: Tensor, written: Tensor) -> Tensor:
    return chunk.whole * state + (chunk.key * chunk.out).mT @ written


def _slices(seq: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, seq)) for start in range(0, seq, chunk)]


@torch.library.custom_op("titan_exp::linear_attention", mutates_args=())
def linear_attention(  # noqa: PLR0917  # custom ops take positional arguments
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    runs: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Outputs, empty without queries, and the last state. `state` may have more columns than `v`, where nothing is
    written; `runs` are document starts up to each token."""
    out, state = _empty_results(q, k, v, g, beta, state, runs, chunk)[0], state.clone()
    for at in _slices(v.shape[1], chunk):
        tokens = _read_chunk(q, k, v, g, beta, state, runs, at)
        scores, reading, _, written = _write(tokens, state)
        if q is not None:
            out[:, at] = (reading[:, :, 1] + scores[:, :, 1] @ written).transpose(1, 2)
        state = _after(tokens, state, written)
    return out, state


@torch.library.custom_op("titan_exp::linear_attention_backward", mutates_args=())
def linear_attention_backward(  # noqa: PLR0917  # custom ops take positional arguments
    out_grad: Tensor,
    state_grad: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    runs: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the floating-point arguments; that of the queries is empty without them.

    The states before all chunks are recomputed, then everything inside a chunk from the last chunk on.
    """
    gradients = _empty_gradients(out_grad, state_grad, q, k, v, g, beta, state, runs, chunk)
    of_q, of_k, of_v, of_g, of_beta, _ = gradients
    places, states, state_grad = _slices(v.shape[1], chunk), [state], state_grad.clone()
    for at in places[:-1]:
        tokens = _read_chunk(None, k, v, g, beta, state, runs, at)
        states.append(_after(tokens, states[-1], _write(tokens, states[-1])[3]))
    for at in reversed(places):
        tokens, before = _read_chunk(q, k, v, g, beta, state, runs, at), states.pop()
        upstream = None if q is None else out_grad[:, at].to(state.dtype).transpose(1, 2)
        rows, keys, values, decay, strength, state_grad = _chunk_backward(tokens, before, upstream, state_grad)
        of_k[:, at] = _sum_groups(rows[:, :, 0] + keys, of_k)
        if q is not None:
            of_q[:, at] = _sum_groups(rows[:, :, 1], of_q)
        of_v[:, at] = values[..., : v.shape[-1]].transpose(1, 2)
        of_beta[:, at] = strength.transpose(1, 2)
        of_g[:, at] = decay.transpose(1, 2).view_as(of_g[:, at])
    return of_q, of_k, of_v, of_g, of_beta, state_grad


def _sum_groups(by_value_head: Tensor, like: Tensor) -> Tensor:
    """Sum [batch, value_heads, chunk, K] over the value heads of each key head: [batch, chunk, key_heads, K]."""
    return by_value_head.unflatten(1, (like.shape[2], -1)).sum(2).transpose(1, 2)


def _chunk_backward(
    chunk: _Chunk, state: Tensor, out_grad: Tensor | None, state_grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of rows, of keys as they are written, of values, log decays, strengths and the state before a chunk.

    `state_grad` is that of the state after it.
    """
    scores, _, missing, written = _write(chunk, state)
    of_written = (chunk.key * chunk.out) @ state_grad
    if out_grad is not None:
        of_written = of_written + scores[:, :, 1].mT @ out_grad
    lower = chunk.beta * scores[:, :, 0]
    solved = torch.linalg.solve_triangular(lower.mT, of_written, upper=True, unitriangular=True)
    of_values = chunk.beta * solved
    of_lower = -(solved @ written.mT).tril(-1)
    of_beta = (solved * missing).sum(-1) + (of_lower * scores[:, :, 0]).sum(-1)
    of_scores, of_reading = [chunk.beta * of_lower], [-of_values]
    if out_grad is not None:
        of_scores.append((out_grad @ written.mT).tril())
        of_reading.append(out_grad)
    reading = torch.stack(of_reading, 2)
    # Rows read the state and the keys. Each product with a decay of exp(c) also is the gradient of c.
    of_rows, of_keys = _scores_backward(chunk, torch.stack(of_scores, 2))
    of_rows = of_rows + (reading @ state[:, :, None].mT) * chunk.into[:, :, None]
    of_writing = (written @ state_grad.mT) * chunk.out
    of_keys = of_keys + of_writing
    of_decay = (chunk.rows * of_rows).sum(2) - chunk.key * of_keys
    of_decay[:, :, -1] += (chunk.key * of_writing).sum(2) + (chunk.whole * state * state_grad).sum(-1)
    if chunk.decay.shape[-1] == 1:
        of_decay = of_decay.sum(-1, keepdim=True)
    of_log_decay = of_decay.flip(2).cumsum(2).flip(2)
    if chunk.starts is not None:
        of_log_decay = of_log_decay.masked_fill(chunk.starts, 0)
    read = (chunk.rows * chunk.into[:, :, None]).flatten(2, 3)
    before = chunk.whole * state_grad + read.mT @ reading.flatten(2, 3)
    return of_rows, of_keys, of_values, of_log_decay, of_beta, before


@linear_attention.register_fake
def _empty_results(  # noqa: PLR0917  # as the operator
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, runs: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape if q is not None else (0,)), state.new_empty(state.shape)


@linear_attention_backward.register_fake
def _empty_gradients(  # as the operator
    out_grad: Tensor, state_grad: Tensor, q: Tensor | None, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_q = state_grad.new_empty(0) if q is None else q.new_empty(q.shape)
    return of_q, *(x.new_empty(x.shape) for x in inputs[:5])  # type: ignore[return-value]  # five of them


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, out_grad: Tensor, state_grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing hands them out a single time
    of_q, *others = linear_attention_backward(out_grad, state_grad, *saved, ctx.chunk)
    return (None if saved[0] is None else of_q, *others, None, None)


linear_attention.register_autograd(_backward, setup_context=_save)

_OPERATORS: dict[str, Any] = {"torch": linear_attention}
