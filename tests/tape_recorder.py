"""A recorder for the CPU: the operators of a pass on the tensors that they had, done again without Python.

Like a CUDA graph it knows addresses and numbers, and nothing of where they came from: what the host computed while it
recorded stays as it was. Like one it refuses what the host would have to wait for.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_exp.trainer.forward_backward import Recording

ASKING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive")
"""Operators whose result, or its shape, the host has to know."""
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Those that compute nothing: a replay finds there what the one before has left."""


class Tape(TorchDispatchMode):
    """The operators that ran, with every tensor that they took or made, which stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._overloadpacket.__name__
        assert name not in ASKING, f"the host waits for {func}"
        found = func(*args, **kwargs)
        given = {place(tensor) for tensor in _tensors((args, kwargs))}
        made = [tensor for tensor in _tensors(found) if place(tensor) not in given]
        if name not in EMPTY:
            self.calls.append((func, args, kwargs, made))
        else:
            self.calls.append((None, (), {}, made))
        return found

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays so; what aot_eager makes of it calls operators, and those are seen."""
        return True

    def taken(self) -> set[int]:
        """The memory from before the recording that it reads or writes: whatever a replay finds there, it takes."""
        made, found = set[int](), set[int]()
        for _, args, kwargs, its in self.calls:
            found |= {place(tensor) for tensor in _tensors((args, kwargs))} - made
            made |= {place(tensor) for tensor in its}
        return found

    def replay(self) -> None:
        """Every operator again, in order; what it makes goes where it was the first time."""
        with torch.no_grad():
            for func, args, kwargs, made in self.calls:
                if func is None:
                    continue
                given = {place(tensor) for tensor in _tensors((args, kwargs))}
                again = [tensor for tensor in _tensors(func(*args, **kwargs)) if place(tensor) not in given]
                assert len(again) == len(made)
                for target, value in zip(made, again, strict=True):
                    assert target.stride() == value.stride()
                    target.copy_(value)


class TapeRecorder:
    """A `trainer.recorder.Recorder`; it is handed the device of a run in place of `CudaRecorder`."""

    def __init__(self, _: torch.device) -> None:
        self.rehearsals = 0
        self.tapes: list[Tape] = []

    def warmup(self, work: Callable[[], None]) -> None:
        """Just do it."""
        self.rehearsals += 1
        work()

    def record(self, work: Callable[[], None]) -> Recording:
        """Do it and watch."""
        tape = Tape()
        with tape:
            work()
        self.tapes.append(tape)
        return Recording(tape.replay, f"a tape of {len(tape.calls)} operators")


class FromHost(TorchDispatchMode):
    """Fails where an operator on a device takes a tensor of the host, which a recording cannot wait for, or freezes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._overloadpacket.__name__ not in ASKING, f"the host waits for {func}"
        found = func(*args, **(kwargs or {}))
        devices = {tensor.device.type for tensor in _tensors((args, kwargs, found))}
        assert devices <= {"meta"} or "meta" not in devices, f"{func} takes from the host what it computes with"
        return found


class HostWatch:
    """A recorder for tensors on the meta device, which stands for a GPU: its operators have no data and no `item()`."""

    def warmup(self, work: Callable[[], None]) -> None:
        """Do it and watch."""
        with FromHost():
            work()

    def record(self, work: Callable[[], None]) -> Recording:
        """The same."""
        self.warmup(work)
        return Recording(lambda: None, "nothing")


def place(tensor: Tensor) -> int:
    """The memory that a tensor is a view of."""
    return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tree_leaves(tree) if isinstance(tensor, Tensor))
