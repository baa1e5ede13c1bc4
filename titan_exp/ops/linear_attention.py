"""Linear attention by the gated delta rule, and the short causal convolution in front of it.

Gated DeltaNet (Yang et al. 2025) has one decay for each value head and token, Kimi Delta Attention (Kimi Team 2025) one
for each of the K channels of a key. The state S [K, V] of a value head changes with every token:

    S = exp(g) · S;    S = S + k · (β · (v - Sᵀ k))ᵀ;    out = Sᵀ q
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.torch_features import LINEAR_ATTENTION_BACKEND, has_fla
from titan_exp.ops.delta_chunk import chunk_backward, read_chunk, state_after, write

Keys = Float[Tensor, "batch seq key_heads K"]
Values = Float[Tensor, "batch seq value_heads V"]
Decays = Float[Tensor, "batch seq value_heads *K"]
Strengths = Float[Tensor, "batch seq value_heads"]
Documents = Int[Tensor, "batch seq"]
State = Float[Tensor, "batch value_heads K V"]
Channels = Float[Tensor, "batch seq channels"]
Taps = Float[Tensor, "channels taps"]
Before = Float[Tensor, "batch taps_minus_1 channels"]

LinearAttentionBackend = Literal["fla", "torch"]

CHUNK = 64  # tokens of a chunk, inside which tokens are computed at once
TRACED_CHUNKS = 8
"""Most chunks that a planner traces operator by operator; more are alike, and it counts them by their formula."""


def choose_linear_attention_backend(requested: str, device: torch.device) -> LinearAttentionBackend:
    """Choose the kernels of linear attention; `auto` means those of the package fla-core on CUDA if it is installed,
    and torch's operators elsewhere. Raises UserError if fla is requested, and is not installed or the device is not a
    GPU."""
    runs = device.type == "cuda" and has_fla()
    if requested == "fla" and not runs:
        reason, first = "Python finds no module fla", "type pip install 'fla-core[cuda]', or "
        if has_fla():
            reason, first = f"its kernels need a GPU, and this run uses a {device.type.upper()}", ""
        remedy = f"{first}use {LINEAR_ATTENTION_BACKEND}=auto"
        raise UserError("This run cannot start.", [Violation(LINEAR_ATTENTION_BACKEND, requested, reason, remedy)])
    return "fla" if runs and requested != "torch" else "torch"


def gated_delta(  # noqa: PLR0917  # the arguments of the rule
    q: Keys,
    k: Keys,
    v: Values,
    g: Decays,
    beta: Strengths,
    documents: Documents | None,
    *,
    state: State | None = None,
    carry: Int[Tensor, " batch"] | None = None,
    chunk: int = CHUNK,
    backend: LinearAttentionBackend = "torch",
) -> tuple[Values, State]:
    """Outputs of a segment of tokens in the dtype of `v`, and the state after it, in fp32 or fp64.

    The caller normalizes queries and keys and scales queries. Key head j serves value heads j · r to j · r + r - 1. `g`
    is the log of the decay, at most 0, one number or K. The state starts anew where the number in
    `documents` changes. `state` is the one before the segment, zero if None, and `carry` the document of the token
    before the segment, -1 if there is none; if it is None, the first token continues the document of `state`.
    """
    batch, _, heads, width = v.shape
    if state is None:
        state = torch.zeros(batch, heads, k.shape[-1], width, dtype=_wide(v.dtype), device=v.device)
    return linear_attention(q, k, v, g, beta, state, _runs(documents, carry), chunk, backend)


def transition(
    k: Keys,
    v: Values,
    g: Decays,
    beta: Strengths,
    documents: Documents | None,
    *,
    carry: Int[Tensor, " batch"] | None = None,
    chunk: int = CHUNK,
    backend: LinearAttentionBackend = "torch",
) -> Float[Tensor, "batch value_heads K V_plus_K"]:
    """Affine map [B | A] of the state over a segment: the state after it is A · S + B, if it was S before. Arguments
    are those of `gated_delta`. The map (A, B) and then (C, D) is the map (C · A, C · B + D)."""
    batch, _, heads, width = v.shape
    identity = torch.eye(k.shape[-1], dtype=_wide(v.dtype), device=v.device)
    # Columns of a state do not mix. Those beyond the values start as the identity, and no value is written to them.
    start = F.pad(identity, (width, 0)).repeat(batch, heads, 1, 1)
    return linear_attention(None, k, v, g, beta, start, _runs(documents, carry), chunk, backend)[1]


def gated_delta_step(  # noqa: PLR0917  # as of `gated_delta`
    q: Float[Tensor, "batch key_heads K"],
    k: Float[Tensor, "batch key_heads K"],
    v: Float[Tensor, "batch value_heads V"],
    g: Float[Tensor, "batch value_heads *K"],
    beta: Float[Tensor, "batch value_heads"],
    state: State,
) -> tuple[Float[Tensor, "batch value_heads V"], State]:
    """`gated_delta` of one token, for generation: its output, and the state after it."""
    times = v.shape[1] // k.shape[1]
    query, key = (heads.to(state.dtype).repeat_interleave(times, 1)[:, :, None] for heads in (q, k))
    value, strength, decay = (x.to(state.dtype) for x in (v[:, :, None], beta[..., None, None], g))
    state = state * decay.exp().view(*state.shape[:2], -1, 1)
    state = state + key.mT @ (strength * (value - key @ state))
    return (query @ state)[:, :, 0].to(v.dtype), state


def l2_normalized(
    x: Float[Tensor, "*heads width"], scale: float = 1.0, eps: float = 1e-6
) -> Float[Tensor, "*heads width"]:
    """scale · x / sqrt(sum of x² + eps), computed in fp32 or fp64, in the dtype of `x`."""
    wide = x.to(_wide(x.dtype))
    return (wide * (scale * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps))).to(x.dtype)


class GatedDeltaCore(nn.Module):
    """Gated delta rule without linears. It is a module, so that context parallelism can replace it."""

    def __init__(self, backend: LinearAttentionBackend = "torch", chunk: int = CHUNK) -> None:
        super().__init__()
        self.backend: LinearAttentionBackend = backend
        self.chunk = chunk

    def forward(  # noqa: PLR0917  # as of `gated_delta`
        self, q: Keys, k: Keys, v: Values, g: Decays, beta: Strengths, documents: Documents | None
    ) -> Values:
        return gated_delta(q, k, v, g, beta, documents, chunk=self.chunk, backend=self.backend)[0]


class ShortConvolutionCore(nn.Module):
    """Short convolution without its weight. It is a module, so that context parallelism can replace it."""

    def forward(self, x: Channels, weight: Taps, documents: Documents | None) -> Channels:
        return short_convolution(x, weight, documents)


def short_convolution(
    x: Channels,
    weight: Taps,
    documents: Documents | None,
    before: Before | None = None,
    before_documents: Int[Tensor, "batch taps_minus_1"] | None = None,
) -> Channels:
    """Causal convolution of each channel by itself within documents, then SiLU; the last tap is the token's own.
    `before` are the inputs in front of the sequence, zeros if None, and `before_documents` their documents, -1 for
    none. Sums are in fp32 or fp64. Backward keeps the input alone."""
    reach = weight.shape[1] - 1
    links = None
    if documents is not None and reach:
        if before_documents is None:
            before_documents = documents[:, :1].expand(-1, reach)
        ids = torch.cat((before_documents, documents), dim=1)
        runs, seq = F.pad((ids[:, 1:] != ids[:, :-1]).cumsum(1), (1, 0)), documents.shape[1]
        links = torch.stack(
            [runs[:, reach:] == runs[:, reach - tap : reach - tap + seq] for tap in range(1, reach + 1)]
        )
    if torch.compiler.is_compiling():
        # A compiler derives the same backward pass and fuses it.
        return F.silu(_convolve(_padded(x, before, reach), weight, links)).to(x.dtype)
    return _ShortConvolution.apply(x, weight, before, links)  # type: ignore[return-value]  # a Tensor


def short_convolution_step(
    x: Float[Tensor, "batch channels"], weight: Taps, window: Before
) -> tuple[Float[Tensor, "batch channels"], Before]:
    """`short_convolution` of one token, for generation: its output, and the last inputs for the next token."""
    out = short_convolution(x[:, None], weight, None, window)[:, 0]
    return out, torch.cat((window, x[:, None]), dim=1)[:, 1:]


def _padded(x: Tensor, before: Tensor | None, reach: int) -> Tensor:
    before = x.new_zeros(x.shape[0], reach, x.shape[2]) if before is None else before
    return torch.cat((before, x), dim=1)


def _taps(padded: Tensor, weight: Tensor, links: Bool[Tensor, "reach batch seq"] | None) -> Any:
    """Yield for each distance to an earlier token the column of its weights, the slice of padded input, and the mask
    of tokens of one document [batch, seq, 1]."""
    reach = weight.shape[1] - 1
    for tap in range(reach + 1):
        linked = None if links is None or tap == 0 else links[tap - 1][..., None]
        yield reach - tap, slice(reach - tap, padded.shape[1] - tap), linked


def _convolve(padded: Tensor, weight: Tensor, links: Tensor | None) -> Tensor:
    weight, out = weight.to(_wide(padded.dtype)), None
    for column, at, linked in _taps(padded, weight, links):
        term = padded[:, at] * weight[:, column]
        term = term if linked is None else term * linked
        out = term if out is None else out + term
    assert out is not None, "there are taps"
    return out


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, before: Tensor | None, links: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, before, links)
        out = _convolve(_padded(x, before, weight.shape[1] - 1), weight, links)
        return F.silu(out, inplace=True).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, before, links = ctx.saved_tensors
        padded, gradient = _padded(x, before, weight.shape[1] - 1), gradients[0].to(_wide(x.dtype))
        gradient = torch.ops.aten.silu_backward(gradient, _convolve(padded, weight, links))
        of_padded, of_weight = torch.zeros_like(padded, dtype=gradient.dtype), torch.empty_like(weight)
        for column, at, linked in _taps(padded, weight, links):
            part = gradient if linked is None else gradient * linked
            of_padded[:, at].addcmul_(part, weight[:, column].to(gradient.dtype))
            of_weight[:, column] = (part * padded[:, at]).sum((0, 1))
        of_before, of_x = of_padded.to(x.dtype).tensor_split([weight.shape[1] - 1], dim=1)
        return of_x.contiguous(), of_weight, None if before is None else of_before.contiguous(), None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _runs(documents: Tensor | None, carry: Tensor | None) -> Tensor | None:
    """Number of document starts up to each token; 0 for tokens that continue the document before the segment."""
    if documents is None:
        return None
    before = documents[:, :1] if carry is None else carry[:, None].to(documents.dtype)
    return (documents != torch.cat((before, documents[:, :-1]), dim=1)).cumsum(1)


def _is_planned(v: Tensor, chunk: int) -> bool:
    """True for tensors without data whose chunks are too many to trace."""
    return isinstance(v, FakeTensor) and v.shape[1] > TRACED_CHUNKS * chunk


def _slices(seq: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, seq)) for start in range(0, seq, chunk)]


# Custom ops are opaque to the compiler, which would otherwise unroll the loop over chunks. Activation checkpointing
# keeps the results of attention, by this name.
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
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Outputs, empty without queries, and the state after the last token. `state` may have more columns than `v`, to
    which zeros are written; `runs` count document starts. Backward keeps the arguments alone."""
    if backend == "fla":
        return _fla(q, k, v, g, beta, state, runs)
    if _is_planned(v, chunk):
        return _empty_results(q, k, v, g, beta, state, runs, chunk, backend)
    out, state = _empty_results(q, k, v, g, beta, state, runs, chunk, backend)[0], state.clone()
    for at in _slices(v.shape[1], chunk):
        tokens = read_chunk(q, k, v, g, beta, state, runs, at)
        scores, reading, _, written = write(tokens, state)
        if q is not None:
            out[:, at] = (reading[:, :, 1] + scores[:, :, 1] @ written).transpose(1, 2)
        state = state_after(tokens, state, written)
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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the floating-point arguments; that of the queries is empty without them. The states in front of all
    chunks are recomputed, then each chunk from the last to the first."""
    if backend == "fla":
        return _fla_backward(out_grad, state_grad, q, k, v, g, beta, state, runs)
    if _is_planned(v, chunk):
        _states = [state.new_empty(state.shape) for _ in _slices(v.shape[1], chunk)]  # as long as the call
        return _empty_gradients(out_grad, state_grad, q, k, v, g, beta, state)
    of_q, of_k, of_v, of_g, of_beta, _ = _empty_gradients(out_grad, state_grad, q, k, v, g, beta, state)
    places, states, state_grad = _slices(v.shape[1], chunk), [state], state_grad.clone()
    for at in places[:-1]:
        tokens = read_chunk(None, k, v, g, beta, state, runs, at)
        states.append(state_after(tokens, states[-1], write(tokens, states[-1])[3]))
    for at in reversed(places):
        tokens, upstream = read_chunk(q, k, v, g, beta, state, runs, at), None
        if q is not None:
            upstream = out_grad[:, at].to(state.dtype).transpose(1, 2)
        rows, keys, values, decay, strength, state_grad = chunk_backward(tokens, states.pop(), upstream, state_grad)
        of_k[:, at] = _sum_groups(rows[:, :, 0] + keys, k.shape[2])
        if q is not None:
            of_q[:, at] = _sum_groups(rows[:, :, 1], k.shape[2])
        of_v[:, at] = values[..., : v.shape[-1]].transpose(1, 2)
        of_g[:, at] = decay.transpose(1, 2).view_as(of_g[:, at])
        of_beta[:, at] = strength.transpose(1, 2)
    return of_q, of_k, of_v, of_g, of_beta, state_grad


def _sum_groups(gradient: Tensor, key_heads: int) -> Tensor:
    """Sum [batch, value_heads, chunk, K] over the value heads of each key head: [batch, chunk, key_heads, K]."""
    return gradient.unflatten(1, (key_heads, -1)).sum(2).transpose(1, 2)


@linear_attention.register_fake
def _empty_results(q: Tensor | None, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    state = others[2]
    return v.new_empty((0,) if q is None else v.shape), state.new_empty(state.shape)


@linear_attention_backward.register_fake
def _empty_gradients(out_grad: Tensor, state_grad: Tensor, q: Tensor | None, *inputs: Any) -> Any:
    of_q = state_grad.new_empty(0) if q is None else q.new_empty(q.shape)
    return of_q, *(x.new_empty(x.shape) for x in inputs[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.chunk, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, out_grad: Tensor, state_grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing hands them out a single time
    of_q, *others = linear_attention_backward(out_grad, state_grad, *saved, ctx.chunk, ctx.backend)
    return (None if saved[0] is None else of_q, *others, None, None, None)


linear_attention.register_autograd(_backward, setup_context=_save)


def _fla(  # noqa: PLR0917  # as the operator
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, runs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The operator by the kernels of fla-core, whose documents are sequences one after another in a single row."""
    if isinstance(v, FakeTensor):
        return _empty_results(q, k, v, g, beta, state)  # the planner counts the call by its formula
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]  # optional
    from fla.ops.kda import chunk_kda  # type: ignore[import-not-found]  # optional

    width, (batch, seq) = v.shape[-1], v.shape[:2]
    heads = [k if q is None else q, k, F.pad(v, (0, state.shape[-1] - width)), g, beta]
    if g.dim() == 4:  # one decay by channel: this kernel has as many key heads as value heads
        heads[:2] = [x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in heads[:2]]
    kernel = chunk_kda if g.dim() == 4 else chunk_gated_delta_rule
    if runs is None:
        out, last = kernel(*heads, scale=1.0, initial_state=state, output_final_state=True)
    else:
        firsts = F.pad(runs[:, 1:] != runs[:, :-1], (1, 0), value=True)
        places = firsts.flatten().nonzero()[:, 0]
        ends = torch.cat((places, places.new_tensor([batch * seq])))
        goes_on = (places % seq == 0) & (runs.flatten()[places] == 0)
        initial = state[places // seq] * goes_on[:, None, None, None]
        row = (x.flatten(0, 1)[None] for x in heads)
        out, last = kernel(*row, scale=1.0, initial_state=initial, output_final_state=True, cu_seqlens=ends)
        out, last = out[0].unflatten(0, (batch, seq)), last[firsts.sum(1).cumsum(0) - 1]
    return (v.new_empty(0) if q is None else out[..., :width].to(v.dtype)), last


def _fla_backward(out_grad: Tensor, state_grad: Tensor, *inputs: Any) -> Any:
    """Gradients through the kernels' own autograd functions, after a second forward pass."""
    if isinstance(out_grad, FakeTensor):
        return _empty_gradients(out_grad, state_grad, *inputs)
    *floats, runs = inputs
    # The dispatcher has switched autograd off inside an operator, whatever the gradient mode.
    keys = [getattr(torch._C.DispatchKey, name) for name in ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA")]
    with ExitStack() as stack:
        for key in keys:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        leaves: list[Any] = [None if x is None else x.detach().requires_grad_() for x in floats]
        out, last = _fla(*leaves, runs)  # type: ignore[call-arg]  # six of them, and the runs
        if leaves[0] is None:
            return (state_grad.new_empty(0), *torch.autograd.grad(last, leaves[1:], state_grad))
        return torch.autograd.grad((out, last), leaves, (out_grad, state_grad))


@register_flop_formula(torch.ops.titan_exp.linear_attention)
def _forward_flops(q: Sequence[int] | None, k: Sequence[int], v: Sequence[int], *others: Any, **out: Any) -> int:
    return _flops(v, others[-4], others[-2], rows=1 if q is None else 2)


@register_flop_formula(torch.ops.titan_exp.linear_attention_backward)
def _backward_flops(
    out_grad: Sequence[int], state_grad: Sequence[int], q: Any, k: Any, v: Sequence[int], *others: Any, **out: Any
) -> int:
    return _flops(v, others[-4], others[-2], rows=1 if q is None else 2, backward=True)


def _flops(v: Sequence[int], state: Sequence[int], chunk: int, *, rows: int, backward: bool = False) -> int:
    """FLOPs with one decay for each head, the triangular solves included; `rows` are keys, and queries if any."""
    (batch, seq, heads, _), (key, columns) = v, state[2:]
    lengths = [at.stop - at.start for at in _slices(seq, chunk)]
    pairs, queries, update = sum(n * n for n in lengths), rows - 1, 2 * key * columns
    scores, solve = 2 * key * pairs, columns * pairs
    total = rows * scores + solve + rows * update * seq
    if not backward:
        return batch * heads * (total + 2 * solve * queries + update * seq)
    known = sum(n * n for n in lengths[:-1])
    total += (2 * key + columns) * known + 2 * update * (seq - lengths[-1])
    total += (3 + 4 * queries) * solve + 2 * rows * scores + (2 + 2 * rows) * update * seq
    return batch * heads * total
