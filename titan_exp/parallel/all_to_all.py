"""All-to-all of equal parts, and of rows with other numbers for each rank, as differentiable custom ops.

A custom op is opaque to the compiler, which would otherwise break the graph at the message. Activation checkpointing
keeps the results of those that exchange counts and rows by their names.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.autograd import keep_unsaved, unsaved_tensors
from titan_exp.parallel.process_groups import group_named


@torch.library.custom_op("titan_exp::all_to_all", mutates_args=())
def all_to_all(parts: Tensor, group: str) -> Tensor:
    """Send `parts[r]` of [degree, ...] to rank r and receive its part for this rank at index r."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts.contiguous(), group=group_named(group))
    return received


@all_to_all.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts)


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    _, ctx.group = inputs


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return all_to_all(gradient.contiguous(), ctx.group), None


all_to_all.register_autograd(_backward, setup_context=_save)


_PENDING: dict[int, tuple[Callable[[], Any], Tensor]] = {}
"""Wait for each count exchange under way, by the address of its sums, and the counts that it still reads."""


@torch.library.custom_op("titan_exp::start_count_exchange", mutates_args=())
def start_count_exchange(counts: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Start to send `counts[r]` of int64 [degree, n] to rank r; `finish_count_exchange` must take both results.

    These are what is received by rank, and the sums [2, degree] on the CPU of the counts sent to and received from each
    rank: NCCL takes numbers of rows from the host. On CUDA they travel in a stream beside the current one, so that the
    host waits for them alone, and not for the kernels queued since.
    """
    received, sums = _empty_counts(counts, group)
    if isinstance(counts, FakeTensor):
        dist.all_to_all_single(received, counts.contiguous(), group=group_named(group))
        return received, sums
    counts = counts.contiguous()
    if not counts.is_cuda:
        work = dist.all_to_all_single(received, counts, group=group_named(group), async_op=True)
        assert work is not None, "asked for one"
        _PENDING[sums.data_ptr()] = (lambda: (work.wait(), sums.copy_(_sums(counts, received)))), counts
        return received, sums
    sums = sums.pin_memory()
    stream = _stream_beside(counts.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        dist.all_to_all_single(received, counts, group=group_named(group))
        sums.copy_(_sums(counts, received), non_blocking=True)
        done = stream.record_event()
    _PENDING[sums.data_ptr()] = (lambda: (done.synchronize(), done.wait())), counts
    return received, sums


@start_count_exchange.register_fake
def _empty_counts(counts: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(counts), counts.new_empty(2, counts.shape[0], device="cpu")


@torch.library.custom_op("titan_exp::finish_count_exchange", mutates_args=())
def finish_count_exchange(received: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Wait for the results of `start_count_exchange`; synchronizes with the host."""
    if not isinstance(received, FakeTensor):
        wait, _ = _PENDING.pop(sums.data_ptr())
        wait()
    return received.clone(), sums.clone()


@finish_count_exchange.register_fake
def _(received: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(received), torch.empty_like(sums)


def _sums(sent: Tensor, received: Tensor) -> Tensor:
    return torch.stack([sent.sum(1), received.sum(1)])


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@torch.library.custom_op("titan_exp::all_to_all_rows", mutates_args=())
def all_to_all_rows(rows: Tensor, sent: Tensor, received: Tensor, size: int | None, group: str) -> Tensor:
    """Send the first `sent[0]` rows to rank 0, the next `sent[1]` to rank 1, and so on; receive by rank.

    `sent` and `received` are counts on the CPU. `size` is the sum of `received`, or None if unknown.
    """
    counts = received.tolist()
    found = rows.new_empty((sum(counts), *rows.shape[1:]))
    dist.all_to_all_single(found, rows.contiguous(), counts, sent.tolist(), group=group_named(group))
    return found


@torch.library.custom_op("titan_exp::return_rows", mutates_args=())
def return_rows(rows: Tensor, sent: Tensor, received: Tensor, size: int | None, group: str) -> Tensor:
    """`all_to_all_rows` for rows that no backward pass reads: activation checkpointing does not keep them."""
    return all_to_all_rows._init_fn(rows, sent, received, size, group)


@return_rows.register_fake
@all_to_all_rows.register_fake
def _(rows: Tensor, sent: Tensor, received: Tensor, size: int | None, group: str) -> Tensor:
    if size is None:
        # The compiler gets an unknown number; where sizes are plain numbers, as many as are sent stand for it.
        symbolic = isinstance(rows, FakeTensor) and rows.fake_mode.shape_env is not None
        size = torch.library.get_ctx().new_dynamic_size() if symbolic else rows.shape[0]  # type: ignore[assignment]
    return rows.new_empty((size, *rows.shape[1:]))  # type: ignore[arg-type]


def _save_rows(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int | None, str], output: Tensor) -> None:
    rows, sent, received, _, ctx.group = inputs
    ctx.size = rows.shape[0]
    ctx.save_for_backward(sent, received)


def _backward_rows(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    sent, received = ctx.saved_tensors
    return all_to_all_rows(gradient.contiguous(), received, sent, ctx.size, ctx.group), None, None, None, None


def _set_rows(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int | None, str], output: Tensor) -> None:
    rows, *counts, _, ctx.group = inputs
    keep_unsaved(ctx, *counts)
    ctx.size = rows.shape[0]


def _return_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    sent, received = unsaved_tensors(ctx)
    return all_to_all_rows(gradient.contiguous(), received, sent, ctx.size, ctx.group), None, None, None, None


all_to_all_rows.register_autograd(_backward_rows, setup_context=_save_rows)
return_rows.register_autograd(_return_gradient, setup_context=_set_rows)
