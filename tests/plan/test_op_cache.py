"""Cached operators on fake tensors: views begin where they would without the cache."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from titan_exp.plan.trace.op_cache import OpCache

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda rows: rows[1],
    "transposed part": lambda rows: rows[:, 2:4].t(),
    "absolute offset": lambda rows: rows.as_strided((2, 3), (8, 1), 5),
    "other dtype": lambda rows: rows.view(torch.int16),
    "new": lambda rows: rows + 1,
    "in place": lambda rows: rows.add_(1),
}


class Cached(TorchDispatchMode):
    """Calls every operator through a cache, as a trace does."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.replayed = OpCache(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        key = self.cache.key(func, args, kwargs or {})
        if key is not None and (known := self.cache.get(key)) is not None:
            self.replayed += 1
            return known.replay(args)[0]
        out = func(*args, **(kwargs or {}))
        if key is not None:
            self.cache.put(key, args, out, 0, 0)
        return out


@pytest.mark.parametrize("name", VIEWS)
def test_cached_results_are_those_of_the_argument(name: str):
    with FakeTensorMode():
        whole = torch.empty(6, 4, 8)
        expected = [_place(VIEWS[name](whole[at])) for at in range(6)]
        with Cached() as mode:
            found = [_place(VIEWS[name](whole[at])) for at in range(6)]
    assert found == expected
    assert mode.replayed >= (0 if name in ("absolute offset", "other dtype") else 5)


def _place(tensor: Tensor) -> tuple[object, ...]:
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.untyped_storage().nbytes(),
    )
