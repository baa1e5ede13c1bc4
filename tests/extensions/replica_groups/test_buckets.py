"""Buckets of tensors of a GPU go through pinned host memory, and no one reads a copy before it is finished."""

import pytest
import torch
from torch import Tensor

from tests.trainer.late_copies import LateCopies, OnGPU
from titan_exp.extensions.replica_groups import outer_optimizer
from titan_exp.extensions.replica_groups.groups import ReplicaGroups
from titan_exp.extensions.replica_groups.outer_optimizer import AsyncAllReduce, exchange

SHAPES = [(3, 2), (5,), (), (4, 1)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_optimizer, "BUCKET_BYTES", 32)  # a bucket of one tensor, one of two, and so on


def tensors() -> list[Tensor]:
    return [torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) for shape in SHAPES]


def double(flat: Tensor) -> None:
    assert not isinstance(flat, OnGPU)
    assert flat.isfinite().all(), "read before the copy was finished"
    flat.mul_(2)


def test_a_gpu_exchanges_over_pinned_memory(monkeypatch):
    own = tensors()
    with LateCopies(monkeypatch) as copies:
        exchange([OnGPU(tensor) for tensor in own], double, write_back=True)
    assert [tensor.tolist() for tensor in own] == [(2 * tensor).tolist() for tensor in tensors()]
    assert copies.pinned == [24, 24, 16]


def test_a_cpu_needs_no_pinned_memory(monkeypatch):
    own = tensors()
    with LateCopies(monkeypatch) as copies:
        exchange(own, double, write_back=True)
    assert [tensor.tolist() for tensor in own] == [(2 * tensor).tolist() for tensor in tensors()]
    assert copies.pinned == []


def test_a_bucket_of_both_devices(monkeypatch):
    """Buffers of experts beside a table of the host, and optimizer states beside their counters."""
    host, device = torch.ones(2), torch.ones(3)
    with LateCopies(monkeypatch):
        exchange([host, OnGPU(device)], double, write_back=True)
    assert (host.tolist(), device.tolist()) == ([2, 2], [2, 2, 2])


def test_what_is_sent_stays_and_what_is_received_is_not_read(monkeypatch):
    own = tensors()

    def receive(flat: Tensor) -> None:
        assert flat.isnan().all(), "a copy for nothing"
        flat.fill_(7)

    with LateCopies(monkeypatch):
        exchange([OnGPU(tensor) for tensor in own], double, write_back=False)
        assert [tensor.tolist() for tensor in own] == [tensor.tolist() for tensor in tensors()]
        exchange([OnGPU(tensor) for tensor in own], receive, read=False, write_back=True)
    assert {number for tensor in own for number in tensor.flatten().tolist()} == {7}


def test_sums_in_the_background_return_to_the_gpu(monkeypatch):
    own = tensors()
    with LateCopies(monkeypatch):
        started = AsyncAllReduce()
        started.start([OnGPU(tensor) for tensor in own], double)
        flat = [part.to("cpu") for part in started._flat]
        placed: list[Tensor] = []
        monkeypatch.setattr(outer_optimizer, "_parts", lambda flat, _: [placed.append(flat)])
        assert len(started.sums) == len(flat)
    assert all(isinstance(part, OnGPU) for part in placed)
    assert [part.held.tolist() for part in placed if isinstance(part, OnGPU)] == [part.tolist() for part in flat]


def test_an_error_of_the_device_is_no_refused_step():
    """The step would be repeated for ever."""
    groups = ReplicaGroups.__new__(ReplicaGroups)
    groups._error = None

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        groups._attempt(fail)
