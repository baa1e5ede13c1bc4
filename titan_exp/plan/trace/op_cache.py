"""What operators make of pretended tensors, remembered: of equal shapes they make the same, whatever step calls them.

Torch remembers that too, and spends most of a trace on asking itself. Only what is known to be a function of shapes is
remembered: an operator of aten that writes into nothing or into what it returns, and whose results are new, are what it
was handed, or are views of the one tensor that it was handed.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Key = tuple[Hashable, ...]

_UNLIKE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Operators of these kinds look at values, or change what a tensor is."""
_LISTS = (list, tuple)
_NOTHING = type(None)


@dataclass(frozen=True)
class OpResult:
    """One result of an operator."""

    given: int
    """Which argument it is; -1 where it is another tensor."""
    viewed: int
    """Which argument it is a view of; -1 where it has memory of its own."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class CachedOp:
    """What a call made and did."""

    mode: FakeTensorMode | None
    """Whose tensors they are, where there are any."""
    device: torch.device | None
    """Where they pretend to be."""
    results: tuple[OpResult, ...]
    """All of them."""
    kind: type | None
    """What they were returned in, or that nothing is; None is a tensor by itself."""
    flops: int
    """As of `OpCosts`."""
    bytes_moved: int
    """Likewise."""

    def again(self, args: Sequence[Any]) -> tuple[Any, list[tuple[Tensor, bool]]]:
        """The same for these arguments: what is returned, and each tensor with whether its memory was there before."""
        made = [self._made(result, args) for result in self.results]
        seen = [(it, result.given + result.viewed > -2) for it, result in zip(made, self.results, strict=True)]
        if self.kind is None:
            return made[0], seen
        return (None if self.kind is _NOTHING else self.kind(made)), seen

    def _made(self, result: OpResult, args: Sequence[Any]) -> Tensor:
        if result.given >= 0:
            return args[result.given]
        # Without the guard, torch would ask all modes of what is only the inside of a tensor.
        with torch._C._DisableTorchDispatch():
            inside = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
            if result.viewed >= 0:
                inside.set_(args[result.viewed].untyped_storage(), result.offset, result.shape, result.stride)
        return FakeTensor(self.mode, inside, self.device)


class OpCache:
    """Outcomes by operator, shapes and constants."""

    def __init__(self) -> None:
        self._outcomes: dict[Key, CachedOp | None] = {}
        self._alike: dict[Any, bool] = {}

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
        """What decides the outcome of a call; None where more than that does."""
        alike = self._alike.get(func)
        if alike is None:
            alike = self._alike[func] = _is_alike(func)
        if not alike:
            return None
        values: list[Hashable] = [func]
        if not _described(args, values):
            return None
        for name, value in kwargs.items():
            values.append(name)
            if not _described((value,), values):
                return None
        return tuple(values)

    def recall(self, key: Key) -> CachedOp | None:
        """The outcome of a call; None where it is not known."""
        return self._outcomes.get(key)

    def remember(self, key: Key, args: tuple[Any, ...], out: Any, flops: int, bytes_moved: int) -> None:
        """Remember the outcome of a call if another would have the same."""
        if key not in self._outcomes:
            self._outcomes[key] = _outcome(args, out, flops, bytes_moved)


def _is_alike(func: Any) -> bool:
    if func.namespace != "aten" or any(tag in func.tags for tag in _UNLIKE) or "lift" in func._schema.name:
        return False
    schema = func._schema
    written = [
        place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    # Into its first argument, which it returns, as `add_`; or into any, and it returns nothing, as optimizers do.
    first = written == [0] and len(schema.returns) == 1 and schema.returns[0].alias_info is not None
    return not written or first or not schema.returns


def _described(args: Sequence[Any], values: list[Hashable]) -> bool:
    """Append what decides of each argument; whether that could be done."""
    for arg in args:
        kind = type(arg)
        if kind is FakeTensor:
            if arg.constant is not None or arg.dtype.is_complex:
                return False
            values += (arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.fake_device)
        elif kind in _LISTS:
            values += (kind, len(arg))
            if not _described(arg, values):
                return False
        elif isinstance(arg, Tensor):
            return False
        else:
            # 1 and 1.0 are equal and make different tensors.
            values += (kind, arg)
    return True


def _outcome(args: tuple[Any, ...], out: Any, flops: int, bytes_moved: int) -> CachedOp | None:
    kind = type(out) if type(out) in (*_LISTS, _NOTHING) else None
    if kind is _NOTHING:
        return CachedOp(None, None, (), kind, flops, bytes_moved)
    made = [out] if kind is None else list(out)
    if not made or not all(type(it) is FakeTensor and _is_plain(it) for it in made):
        return None
    if len({(it.fake_mode, it.fake_device) for it in made}) > 1:
        return None
    results = [_result(args, it) for it in made]
    own = [it.untyped_storage()._cdata for it, how in zip(made, results, strict=True) if how and how.viewed < 0]
    if None in results or len(set(own)) < len(own):
        return None
    known = tuple(result for result in results if result is not None)
    return CachedOp(made[0].fake_mode, made[0].fake_device, known, kind, flops, bytes_moved)


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.constant is None and not tensor.requires_grad and not tensor.dtype.is_complex


def _result(args: tuple[Any, ...], made: FakeTensor) -> OpResult | None:
    which = next((place for place, arg in enumerate(args) if arg is made), -1)
    tensors = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
    storage = made.untyped_storage()
    viewed = [place for place in tensors if args[place].untyped_storage()._cdata == storage._cdata]
    if which < 0 and viewed and len(tensors) > 1:
        return None
    shape, stride, offset = tuple(made.shape), made.stride(), int(made.storage_offset())
    result = OpResult(which, viewed[0] if viewed and which < 0 else -1, shape, stride, offset, made.dtype)
    if which < 0 and not viewed:
        # As much memory as the shape says, and no more.
        with torch._C._DisableTorchDispatch():
            alike = torch.empty_strided(shape, stride, dtype=made.dtype, device="meta")
        if offset or alike.untyped_storage().nbytes() != storage.nbytes():
            return None
    return result
