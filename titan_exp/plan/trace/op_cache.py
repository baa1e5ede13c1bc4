"""Op cache: results of operators on fake tensors, by operator, shapes and constants.

Torch's own fake tensor cache spends most of a trace on computing keys. We cache only functions of shapes: aten
operators that are out-of-place or write into their result, and return new tensors, arguments, or views of their only
tensor argument, at an offset from its own.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Key = tuple[Hashable, ...]

_VALUE_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Tags of operators that read values or change a tensor's metadata."""
_LISTS = (list, tuple)
_NOTHING = type(None)


@dataclass(frozen=True)
class OpResult:
    """One result of an operator."""

    argument: int
    """Index of the returned argument; -1 for another tensor."""
    base: int
    """Index of the viewed argument; -1 for a new storage."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Offset in the storage, relative to the viewed argument's."""
    dtype: torch.dtype


@dataclass(frozen=True)
class CachedOp:
    """Results and costs of a call."""

    mode: FakeTensorMode | None
    """Fake tensor mode of the results; None without results."""
    device: torch.device | None
    """Fake device of the results."""
    results: tuple[OpResult, ...]
    """Results in order."""
    kind: type | None
    """Type of the returned container, or NoneType; None for a tensor."""
    flops: int
    """FLOPs of matmuls and attention."""
    bytes_moved: int
    """Bytes read and written."""

    def replay(self, args: Sequence[Any]) -> tuple[Any, list[tuple[Tensor, bool]]]:
        """Results for these arguments: the return value, and each tensor with True if its storage existed before."""
        made = [self._made(result, args) for result in self.results]
        seen = [(tensor, result.argument + result.base > -2) for tensor, result in zip(made, self.results, strict=True)]
        if self.kind is None:
            return made[0], seen
        return (None if self.kind is _NOTHING else self.kind(made)), seen

    def _made(self, result: OpResult, args: Sequence[Any]) -> Tensor:
        if result.argument >= 0:
            return args[result.argument]
        # The guard keeps dispatch modes from seeing the meta tensor inside a fake tensor.
        with torch._C._DisableTorchDispatch():
            inside = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
            if result.base >= 0:
                base = args[result.base]
                offset = base.storage_offset() + result.offset
                inside.set_(base.untyped_storage(), offset, result.shape, result.stride)
        return FakeTensor(self.mode, inside, self.device)


class OpCache:
    """Cached calls by operator, shapes and constants."""

    def __init__(self) -> None:
        self._cached: dict[Key, CachedOp | None] = {}
        self._cacheable: dict[Any, bool] = {}

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
        """Cache key of a call; None if it is not cacheable."""
        cacheable = self._cacheable.get(func)
        if cacheable is None:
            cacheable = self._cacheable[func] = _is_cacheable(func)
        if not cacheable:
            return None
        values: list[Hashable] = [func]
        if not _add_key(args, values):
            return None
        for name, value in kwargs.items():
            values.append(name)
            if not _add_key((value,), values):
                return None
        return tuple(values)

    def get(self, key: Key) -> CachedOp | None:
        """Cached call, or None."""
        return self._cached.get(key)

    def put(self, key: Key, args: tuple[Any, ...], out: Any, flops: int, bytes_moved: int) -> None:
        """Cache a call if its results are a function of its key."""
        if key not in self._cached:
            self._cached[key] = _cached_op(args, out, flops, bytes_moved)


def _is_cacheable(func: Any) -> bool:
    name = func._schema.name
    if func.namespace != "aten" or any(tag in func.tags for tag in _VALUE_DEPENDENT) or "lift" in name:
        return False
    if "as_strided" in name:  # its offset refers to the storage, not to the argument
        return False
    schema = func._schema
    written = [
        place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    # In-place into the returned first argument (`add_`), or into any while returning nothing (`_fused_adamw_`).
    first = written == [0] and len(schema.returns) == 1 and schema.returns[0].alias_info is not None
    return not written or first or not schema.returns


def _add_key(args: Sequence[Any], values: list[Hashable]) -> bool:
    """Append each argument's part of the key; returns False if an argument has none."""
    for arg in args:
        kind = type(arg)
        if kind is FakeTensor:
            if arg.constant is not None or arg.dtype.is_complex:
                return False
            values += (arg.shape, arg.stride(), arg.dtype, arg.fake_device)
        elif kind in _LISTS:
            values += (kind, len(arg))
            if not _add_key(arg, values):
                return False
        elif isinstance(arg, Tensor):
            return False
        else:
            # 1 == 1.0, but the resulting dtypes differ.
            values += (kind, arg)
    return True


def _cached_op(args: tuple[Any, ...], out: Any, flops: int, bytes_moved: int) -> CachedOp | None:
    kind = type(out) if type(out) in (*_LISTS, _NOTHING) else None
    if kind is _NOTHING:
        return CachedOp(None, None, (), kind, flops, bytes_moved)
    made = [out] if kind is None else list(out)
    if not made or not all(type(tensor) is FakeTensor and _is_plain(tensor) for tensor in made):
        return None
    if len({(tensor.fake_mode, tensor.fake_device) for tensor in made}) > 1:
        return None
    results = tuple(result for tensor in made if (result := _result(args, tensor)) is not None)
    if len(results) < len(made):
        return None
    own = [tensor.untyped_storage()._cdata for tensor, result in zip(made, results, strict=True) if result.base < 0]
    if len(set(own)) < len(own):
        return None
    return CachedOp(made[0].fake_mode, made[0].fake_device, results, kind, flops, bytes_moved)


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.constant is None and not tensor.requires_grad and not tensor.dtype.is_complex


def _result(args: tuple[Any, ...], made: FakeTensor) -> OpResult | None:
    shape, stride, offset, dtype = tuple(made.shape), made.stride(), int(made.storage_offset()), made.dtype
    for place, arg in enumerate(args):
        if arg is made:
            return OpResult(place, -1, shape, stride, offset, dtype)
    tensors = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
    storage = made.untyped_storage()
    for place in tensors:
        if args[place].untyped_storage()._cdata == storage._cdata:
            # Offsets count elements, so a view with another dtype multiplies its argument's.
            if len(tensors) > 1 or args[place].dtype != dtype:
                return None
            return OpResult(-1, place, shape, stride, offset - int(args[place].storage_offset()), dtype)
    # Only storages that have exactly the size that the shape needs.
    with torch._C._DisableTorchDispatch():
        dense = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    exact = not offset and dense.untyped_storage().nbytes() == storage.nbytes()
    return OpResult(-1, -1, shape, stride, offset, dtype) if exact else None
