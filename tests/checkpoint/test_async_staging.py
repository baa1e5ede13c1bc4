"""Staging of an asynchronous save: what is written is the state at the save, whatever the device does meanwhile."""

import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.patching import patch
from tests.ranks import run_ranks
from titan_exp.checkpoint.async_save import AsyncSaver, _ReusedMemory

ON_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize(
    ("device", "mode"),
    [
        ("cpu", "async"),
        pytest.param("cpu", "async_process", marks=pytest.mark.night),  # tests/trainer/test_death.py trains with it
        *(pytest.param("cuda", mode, marks=ON_CUDA) for mode in ("async", "async_pinned", "async_process")),
    ],
)
def test_a_save_holds_the_state_at_its_start(tmp_path: Path, device: str, mode: str):
    """Two saves, so that the second reuses the staging memory of the first while its own tensors change."""
    assert run_ranks(1, _save_while_training, str(tmp_path), device, mode) == [[True, True]]


def test_saves_reuse_staging_memory_until_it_is_closed():
    stager, weight, places = _ReusedMemory(pinned=False), torch.zeros(1000), []
    for number in (1.0, 2.0):
        staged = stager.stage({"weight": weight.fill_(number)})
        weight.fill_(-1.0)
        assert isinstance(staged, dict), "staging is synchronous"
        assert torch.equal(staged["weight"], torch.full((1000,), number))
        places.append(staged["weight"].data_ptr())
    memory = weakref.ref(staged["weight"].untyped_storage())
    assert places[0] == places[1]
    del staged
    assert memory() is not None
    stager.close()
    assert memory() is None


@pytest.mark.night
def test_a_save_without_staging_is_noticed(tmp_path: Path):
    assert run_ranks(1, _save_while_training, str(tmp_path), "cpu", "async", _nothing_is_staged) == [[False, False]]


def _nothing_is_staged() -> None:
    patch("titan_exp.checkpoint.async_save._Copies.stage", lambda _: lambda self, state: state)


class _SlowWriter(dcp.FileSystemWriter):
    """A disk so slow that the tensors have changed before any is written."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        time.sleep(1)
        return super().write_data(plan, planner)


def _save_while_training(path: str, device: str, mode: str, mutate: Callable[[], None] | None = None) -> list[bool]:
    from titan_exp.parallel.mesh import new_cpu_group
    from titan_exp.trainer.distributed import joined_process_group

    if mutate is not None:
        mutate()
    size, equal = (4_000_000 if device == "cuda" else 100_000), []
    with joined_process_group(torch.device(device, 0) if device == "cuda" else torch.device("cpu")):
        saver = AsyncSaver(mode, new_cpu_group())
        state = {"weight": torch.zeros(size, device=device), "moment": torch.zeros(3, 5, device=device).T}
        for number in (1.0, 2.0):
            for tensor in state.values():
                tensor.fill_(number)
            if device == "cuda":
                # The values are still being computed when the save is asked for.
                matrix = torch.randn(4096, 4096, device=device)
                for _ in range(20):
                    matrix = matrix @ matrix / 4096
                for tensor in state.values():
                    tensor.add_(matrix.isfinite().all() * 0.5)
            else:
                for tensor in state.values():
                    tensor.add_(0.5)
            writer = dcp.FileSystemWriter if mode == "async_process" else _SlowWriter
            future = saver.start(state, writer(f"{path}/{number}"))
            for tensor in state.values():
                tensor.fill_(-1.0)
            saver.wait(future)
            found = {name: torch.zeros(tensor.shape) for name, tensor in state.items()}
            dcp.load(found, checkpoint_id=f"{path}/{number}", no_dist=True)
            equal.append(all(torch.equal(it, torch.full_like(it, number + 0.5)) for it in found.values()))
        saver.close()
    return equal
