"""Optimizer values that are not sharded tensors, as JSON: numbers, text, containers, and small whole tensors."""

import base64
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_exp.config.errors.user_error import UserError

_MAX_INLINE = 4096
"""Maximum number of elements of a tensor in a parameter group."""
_SCALARS = (bool, int, float, str)


class UnsavedStateError(UserError):
    """State of an optimizer that a checkpoint cannot carry."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(
            f"{where} {reason}, which a checkpoint cannot hold. Keep numbers, text, None, tensors, and lists, tuples "
            "and dicts of them in optimizer.state[parameter] or in optimizer.param_groups."
        )


def encode(value: object, where: str, keep: Callable[[str, Tensor], Any]) -> Any:
    """Encode a value as JSON. `keep` is called with the place and value of each tensor in it, and returns a
    replacement. Raises UnsavedStateError."""
    kind = type(value)
    if value is None or kind in _SCALARS:
        return value
    if isinstance(value, Tensor):
        return {"tensor": keep(where, value)}
    if isinstance(value, list | tuple) and kind in (list, tuple):
        return {kind.__name__: [encode(part, f"{where}.{index}", keep) for index, part in enumerate(value)]}
    if isinstance(value, dict) and kind is dict:
        if odd := [key for key in value if type(key) not in _SCALARS]:
            raise UnsavedStateError(where, f"has a key of {type(odd[0]).__name__}")
        return {"dict": [[key, encode(part, f"{where}.{key}", keep)] for key, part in value.items()]}
    raise UnsavedStateError(where, f"is a {kind.__module__}.{kind.__qualname__}")


def decode(tree: Any, take: Callable[[Any], Tensor]) -> Any:
    """Decode a value of `encode`; `take` returns the tensor for a replacement that `keep` returned. Raises UserError if
    it is damaged."""
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case {"tensor": kept}:
            return take(kept)
        case {"list": [*parts]}:
            return [decode(part, take) for part in parts]
        case {"tuple": [*parts]}:
            return tuple(decode(part, take) for part in parts)
        case {"dict": [*pairs]} if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            return {key: decode(part, take) for key, part in pairs}
    raise UserError(
        "The checkpoint is damaged: a value of the optimizer's state is not a number, a text or a container."
    )


def inline(where: str, tensor: Tensor) -> dict[str, Any]:
    """Encode a small tensor of a parameter group whole. Raises UnsavedStateError if it is large or sharded."""
    if isinstance(tensor, DTensor) or tensor.numel() > _MAX_INLINE:
        kind = "a sharded tensor" if isinstance(tensor, DTensor) else f"a tensor of {tensor.numel():,} numbers"
        raise UnsavedStateError(where, f"is {kind} in a parameter group")
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "bytes": base64.b64encode(content).decode(),
        "on_host": tensor.device.type == "cpu",
    }


def from_inline(kept: Any, device: torch.device) -> Tensor:
    """Decode a tensor of `inline`, to the host or the device, as it was. Raises UserError if it is damaged."""
    try:
        dtype = getattr(torch, kept["dtype"])
        content = bytearray(base64.b64decode(kept["bytes"], validate=True))
        found = torch.frombuffer(content, dtype=torch.uint8).view(dtype) if content else torch.empty(0, dtype=dtype)
        return found.clone().reshape(kept["shape"]).to("cpu" if kept["on_host"] else device)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"The checkpoint is damaged: we cannot read a tensor of a parameter group ({error})."
        ) from error
