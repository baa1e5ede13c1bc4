"""Recomputation of cheap operators in backward: norms, SwiGLU and permutation, whose outputs only a matmul keeps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks


def recompute_input(cheap: Callable[[Tensor], Tensor], x: Tensor, consumer: Callable[[Tensor], Tensor]) -> Tensor:
    """`consumer(cheap(x))`, where backward computes `cheap(x)` again instead of keeping it.

    For an operator whose own backward keeps `x`. Calls nest: if `x` is itself recomputed by a caller, it is not kept
    either. Compiled code is left as it is: `compile_blocks` lets the partitioner recompute. So is code under activation
    checkpointing, whose hooks must see every saved tensor.
    """
    y = cheap(x)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return consumer(y)
    hooks: Any = _top_saved_tensors_default_hooks(True)
    outer = None if hooks is None else hooks[0]
    if outer is not None and not isinstance(outer, _Pack):
        return consumer(y)
    with torch.autograd.graph.saved_tensors_hooks(_Pack(cheap, x, y, outer), _unpack):
        return consumer(y)


class _Recomputed:
    """Saved tensor that backward computes."""

    def __init__(self, cheap: Callable[[Tensor], Tensor], source: "Tensor | _Recomputed", shape: torch.Size) -> None:
        self.cheap, self.source, self.shape = cheap, source, shape


class _Pack:
    """Hook that replaces `cheap(x)` and its views among saved tensors; others are left to the hook around it."""

    def __init__(self, cheap: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, outer: "_Pack | None") -> None:
        self._cheap, self._outer = cheap, outer
        self._source = self._by_caller(x.detach())
        self._identity = _identity(y)

    def __call__(self, saved: Tensor) -> Tensor | _Recomputed:
        if _identity(saved) == self._identity:
            return _Recomputed(self._cheap, self._source, saved.shape)
        return self._by_caller(saved)

    def _by_caller(self, saved: Tensor) -> Tensor | _Recomputed:
        if self._outer is not None:
            return self._outer(saved)
        # An operator that saved its output with the graph behind it would keep itself alive.
        return saved if saved.grad_fn is None else saved.detach()


def _unpack(packed: Tensor | _Recomputed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    with torch.no_grad():
        return packed.cheap(_unpack(packed.source)).view(packed.shape)


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """The same for a contiguous tensor and its views of other shapes."""
    dense = tensor.layout is torch.strided and tensor.is_contiguous()
    return (dense and tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype)
