"""Gated delta rule inside one chunk of tokens: what they read, what they write, and the gradients of both.

With c the cumulative log decay, the tokens of a chunk write D = (I + L)⁻¹ β (V - (exp(c) K) S), where S is the state
before the chunk and L_ij = β_i k_i · k_j exp(c_i - c_j) for j < i (Yang et al. 2025). We solve for D instead of
multiplying by an inverse: the inverse by squaring L is wrong for similar keys. Documents are masks, because a very
negative decay in their place would cost the digits of every later token of the chunk. No exponent is positive, so a
strong decay gives zeros and never infinities.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16
"""Tokens whose decays by channel are computed pair by pair; farther pairs go through the first token of a block."""
LEAST = -50.0
"""Smallest log decay, a factor of 2e-22: a smaller one, such as -inf, would cost the digits of the tokens after it."""


@dataclass(frozen=True)
class Chunk:
    """Tokens of a chunk by value head, in the state's dtype. Decays have one channel for Gated DeltaNet, else K."""

    rows: Tensor  # keys, then queries if outputs are wanted [batch, heads, 1 or 2, chunk, K]
    values: Tensor  # values [batch, heads, chunk, columns of the state]; zeros beyond the values' own columns
    beta: Tensor  # strengths [batch, heads, chunk, 1]
    decay: Tensor  # sum of log decays up to each token, its own included [batch, heads, chunk, 1 or K]
    visible: Tensor
    """True where a token (second to last dim) may read another one's write [batch or 1, 1, chunk, chunk]."""
    into: Tensor
    """Decay from the state before the chunk to each token, like `decay`; 0 if a document started on the way."""
    out: Tensor  # decay from each token to the end of the chunk, like `decay`; 0 if a document starts on the way
    whole: Tensor  # decay over the chunk [batch, heads, 1 or K, 1]
    starts: Tensor | None  # True for the first token of a document [batch, 1, chunk, 1]; None if there is none

    @property
    def key(self) -> Tensor:
        """Keys [batch, heads, chunk, K]."""
        return self.rows[:, :, 0]

    @property
    def read(self) -> Tensor:
        """Rows, decayed since the state before the chunk, which they read [batch, heads, 1 or 2, chunk, K]."""
        return self.rows * self.into[:, :, None]


def read_chunk(  # noqa: PLR0917  # as the operator
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, runs: Tensor | None, at: slice
) -> Chunk:
    """Tokens `at` these places of the arguments of the operator `linear_attention`."""

    def by_head(tensor: Tensor) -> Tensor:
        part = tensor[:, at].to(state.dtype)
        return (part[..., None] if part.dim() == 3 else part).transpose(1, 2)

    times = v.shape[2] // k.shape[2]
    rows = torch.stack([by_head(x).repeat_interleave(times, 1) for x in (k, q) if x is not None], 2)
    values, strength, log_decay = by_head(v), by_head(beta), by_head(g).clamp(min=LEAST)
    values = torch.nn.functional.pad(values, (0, state.shape[-1] - v.shape[-1]))
    visible = torch.ones(values.shape[2], values.shape[2], dtype=torch.bool, device=v.device).tril()[None, None]
    if runs is None:
        decay = log_decay.cumsum(2)
        into, out, whole, starts = decay.exp(), (decay[:, :, -1:] - decay).exp(), decay[:, :, -1].exp(), None
    else:
        run = runs[:, None, at, None]
        before = runs[:, None, at.start - 1, None, None] if at.start else torch.zeros_like(run[:, :, :1])
        starts, last = run != torch.cat((before, run[:, :, :-1]), dim=2), run[:, :, -1:]
        # Nothing crosses the start of a document, so its decay must not cost digits.
        decay = log_decay.masked_fill(starts, 0).cumsum(2)
        visible = visible & (run == run.mT)
        into, out = decay.exp() * (run == before), (decay[:, :, -1:] - decay).exp() * (run == last)
        whole = decay[:, :, -1].exp() * (last == before)[:, :, 0]
    return Chunk(rows, values, strength, decay, visible, into, out, whole[..., None], starts)


def write(chunk: Chunk, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, what the rows read from the state before the chunk, the values that are new to it, and the writes. Scores
    are [batch, heads, 1 or 2, chunk, chunk], the others [batch, heads, (1 or 2,) chunk, columns]."""
    scores, reading = _scores(chunk), _times(chunk.read, state)
    missing = chunk.values - reading[:, :, 0]
    lower = chunk.beta * scores[:, :, 0]
    written = torch.linalg.solve_triangular(lower, chunk.beta * missing, upper=False, unitriangular=True)
    return scores, reading, missing, written


def state_after(chunk: Chunk, state: Tensor, written: Tensor) -> Tensor:
    """State after the chunk, from that before it."""
    return chunk.whole * state + (chunk.key * chunk.out).mT @ written


def chunk_backward(
    chunk: Chunk, state: Tensor, out_grad: Tensor | None, state_grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of rows, of keys as they are written, of values, log decays, strengths and the state before a chunk.
    `out_grad` is None for a chunk without queries; `state_grad` is the gradient of the state after the chunk."""
    scores, _, missing, written = write(chunk, state)
    of_written = (chunk.key * chunk.out) @ state_grad
    if out_grad is not None:
        of_written = of_written + scores[:, :, 1].mT @ out_grad
    upper = (chunk.beta * scores[:, :, 0]).mT
    solved = torch.linalg.solve_triangular(upper, of_written, upper=True, unitriangular=True)
    of_values = chunk.beta * solved
    of_lower = -(solved @ written.mT).tril(-1)
    of_beta = (solved * missing).sum(-1) + (of_lower * scores[:, :, 0]).sum(-1)
    of_scores, of_reading = [chunk.beta * of_lower], [-of_values]
    if out_grad is not None:
        of_scores.append(out_grad @ written.mT)
        of_reading.append(out_grad)
    reading, read = torch.stack(of_reading, 2), chunk.read
    of_rows, of_keys = _scores_backward(chunk, torch.stack(of_scores, 2))
    of_rows = of_rows + _times(reading, state.mT) * chunk.into[:, :, None]
    of_end = (written @ state_grad.mT) * chunk.out
    of_keys = of_keys + of_end
    # A row reads with the factor exp(c), a key is read with exp(-c), and all that is left at the end has exp(c).
    of_decay = (chunk.rows * of_rows).sum(2) - chunk.key * of_keys
    of_decay[:, :, -1] += (chunk.key * of_end).sum(2) + (chunk.whole * state * state_grad).sum(-1)
    if chunk.decay.shape[-1] == 1:
        of_decay = of_decay.sum(-1, keepdim=True)
    of_log_decay = of_decay.flip(2).cumsum(2).flip(2)
    if chunk.starts is not None:
        of_log_decay = of_log_decay.masked_fill(chunk.starts, 0)
    before = chunk.whole * state_grad + read.flatten(2, 3).mT @ reading.flatten(2, 3)
    return of_rows, of_keys, of_values, of_log_decay, of_beta, before


def _scores(chunk: Chunk) -> Tensor:
    """Products of each row with the keys that it sees, decayed in between [batch, heads, 1 or 2, chunk, chunk]. One
    channel of decays is a factor of the products. With K, a decay is part of each product: it is computed pair by pair
    within a block, and through the first token of the block from earlier tokens, in two factors of at most 1."""
    rows, key, decay = chunk.rows, chunk.key, chunk.decay
    if decay.shape[-1] == 1:
        return _times(rows, key.mT) * (_pair_decays(decay)[..., 0] * chunk.visible)[:, :, None]
    length = key.shape[2]
    found = rows.new_zeros(*rows.shape[:3], length, length)
    for block, earlier in _blocks(length):
        near = _pair_decays(decay[:, :, block]) * key[:, :, None, block]
        found[..., block, block] = (rows[:, :, :, block].transpose(2, 3) @ near.mT).transpose(2, 3)
        if earlier is not None:
            from_start, to_start = _through_start(decay, block, earlier)
            far = rows[:, :, :, block] * from_start[:, :, None]
            found[..., block, earlier] = _times(far, (key[:, :, earlier] * to_start).mT)
    return found.mul_(chunk.visible[:, :, None])


def _scores_backward(chunk: Chunk, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of the keys that they are multiplied by, from that of `_scores`."""
    rows, key, decay = chunk.rows, chunk.key, chunk.decay
    if decay.shape[-1] == 1:
        gradient = gradient * (_pair_decays(decay)[..., 0] * chunk.visible)[:, :, None]
        return _times(gradient, key), gradient.flatten(2, 3).mT @ rows.flatten(2, 3)
    gradient = gradient * chunk.visible[:, :, None]
    rows_grad, key_grad = torch.empty_like(rows), torch.zeros_like(key)
    for block, earlier in _blocks(key.shape[2]):
        pairs, upstream = _pair_decays(decay[:, :, block]), gradient[..., block, block].transpose(2, 3)
        rows_grad[:, :, :, block] = (upstream @ (pairs * key[:, :, None, block])).transpose(2, 3)
        key_grad[:, :, block] += ((upstream.mT @ rows[:, :, :, block].transpose(2, 3)).mul_(pairs)).sum(2)
        if earlier is not None:
            from_start, to_start = _through_start(decay, block, earlier)
            upstream = gradient[..., block, earlier]
            near, far = rows[:, :, :, block] * from_start[:, :, None], key[:, :, earlier] * to_start
            rows_grad[:, :, :, block] += _times(upstream, far) * from_start[:, :, None]
            key_grad[:, :, earlier] += (upstream.flatten(2, 3).mT @ near.flatten(2, 3)) * to_start
    return rows_grad, key_grad


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply rows [batch, heads, 1 or 2, chunk, n] by one matrix [batch, heads, n, m] of each head."""
    return (rows.flatten(2, 3) @ matrix).unflatten(2, (rows.shape[2], -1))


def _blocks(length: int) -> Iterator[tuple[slice, slice | None]]:
    """Yield the blocks of a chunk, each with the tokens before it."""
    for start in range(0, length, BLOCK):
        yield slice(start, start + BLOCK), slice(0, start) if start else None


def _pair_decays(decay: Tensor) -> Tensor:
    """Decay from each token (second to last dim) to each later one [batch, heads, tokens, tokens, 1 or K]; 1 for pairs
    in the other order, where it might overflow."""
    return (decay[:, :, :, None] - decay[:, :, None]).clamp_(max=0).exp_()


def _through_start(decay: Tensor, block: slice, earlier: slice) -> tuple[Tensor, Tensor]:
    """Decay from the first token of a block to each of its tokens, and to it from each earlier token."""
    start = decay[:, :, block.start : block.start + 1]
    return (decay[:, :, block] - start).exp(), (start - decay[:, :, earlier]).exp()
