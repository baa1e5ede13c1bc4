"""Stub of a GPU without one: tensors that claim to be on it, whose copies happen when its stream is waited for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GPU = torch.device("cuda", 0)


class OnGPU(Tensor):
    """Tensor of the stub, with its values in `held`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnGPU":
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=GPU)  # type: ignore[attr-defined]

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, operator: Any, *_: object) -> Any:
        raise AssertionError(f"{operator} outside of `LateCopies`")


class LateCopies(TorchFunctionMode):
    """Copies to and from the stub, late if they do not block; and the buffers that were pinned for them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._late: list[tuple[Tensor, Tensor]] = []
        self.pinned: list[int] = []
        """Bytes of each pinned buffer."""
        patch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=self._synchronize))

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.empty and kwargs.pop("pin_memory", False):
            buffer = torch.empty(*args, **kwargs)
            self.pinned.append(buffer.nbytes)
            return buffer.fill_(float("nan"))
        if function is Tensor.to and args[1] == GPU:
            return OnGPU(args[0].clone())
        if function is Tensor.copy_ and any(isinstance(tensor, OnGPU) for tensor in args):
            target, source = (tensor.held if isinstance(tensor, OnGPU) else tensor for tensor in args[:2])
            self._late.append((target, source))
            if not kwargs.get("non_blocking", False):
                self._synchronize()
            return args[0]
        return function(*args, **kwargs)

    def _synchronize(self) -> None:
        for target, source in self._late:
            target.copy_(source)
        self._late.clear()
