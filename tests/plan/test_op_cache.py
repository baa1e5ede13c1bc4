"""Cached operators on fake tensors: views begin where they would without the cache, and a step is that of torch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.plan.layouts import experiment_of
from tests.plan.test_extrapolate import BF16
from tests.ranks import run_ranks
from titan_exp.config.schema.typed_config import load_experiment, to_yaml
from titan_exp.plan.trace.torch_patches import OpCache

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


MEMO = "model.layers=3 parallelism.dp_shard=2 parallelism.tp=2 parallelism.cp=2 activation_checkpoint=selective " + BF16


@pytest.mark.night
def test_cached_operators_equal_torch(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(to_yaml(experiment_of(MEMO)))
    ((plain, cached, size),) = run_ranks(1, both_ways, str(tmp_path / "config.yaml"))
    assert size > 100
    assert cached == plain


def both_ways(path: str) -> tuple[dict[str, object], dict[str, object], int]:
    """A trace by torch alone, one from the operator cache, and the number of cached operators."""
    from titan_exp.plan.trace import dispatch_mode
    from titan_exp.plan.trace.trace_step import fake_rank, trace_step

    class EmptyCache(OpCache):
        def get(self, key: object, default: object = None) -> None:
            return None

    experiment, found = load_experiment(path), []
    memo = OpCache()
    for cache in (EmptyCache(), memo, memo):
        dispatch_mode._OP_CACHE = cache
        with fake_rank(experiment, 0) as fake:
            trace = trace_step(fake.state, fake.step)
        found.append({"costs": trace.costs, "kept": trace.persistent, "moments": trace.timeline})
    return found[0], found[2], sum(cached is not None for cached in memo.values())
