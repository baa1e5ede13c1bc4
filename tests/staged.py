"""Process group of several ranks on one device: collectives of CUDA tensors go over gloo by way of the host.

NCCL refuses two ranks on one GPU, and gloo does not send from its memory. With this backend every kernel, stream and
allocation of a layout is a GPU's; only the transport is not NCCL's. On a CPU the same code runs, so that it is tested.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

from titan_exp.trainer import distributed

NAME = "staged"
"""Name of the backend."""


_Group: Any = dist.ProcessGroup
_Work: Any = dist.Work
# Untyped: names of methods and arguments differ between torch versions.


class StagedGroup(_Group):
    """Gloo on copies in host memory. A collective is over when its function returns, a receive when it is awaited."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    pg_name = group_name

    def _run(self, outputs: Sequence[Tensor], collective: Callable[[list[Tensor]], Any], *, filled: bool) -> dist.Work:
        """Run `collective` on copies of `outputs` (their values too if `filled`), and copy them back."""
        copies = [(tensor.detach().cpu() if filled else torch.empty_like(tensor, device="cpu")) for tensor in outputs]
        copies = [copy.contiguous().clone() for copy in copies]
        collective(copies).wait()
        with torch.no_grad():
            for tensor, copy in zip(outputs, copies, strict=True):
                tensor.detach().copy_(copy)
        return _done(list(outputs))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._run(
            tensors, lambda copies: self._gloo.allreduce(copies, _options(dist.AllreduceOptions, opts)), filled=True
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        for tensor in tensors:
            self.allreduce([tensor], opts)
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        options = _options(dist.BroadcastOptions, opts)
        return self._run(tensors, lambda copies: self._gloo.broadcast(copies, options), filled=True)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.allreduce([torch.zeros(1)])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for parts, mine in zip(outputs, inputs, strict=True):
            self._run(parts, lambda copies, mine=mine: self._gloo.allgather([copies], [_host(mine)]), filled=False)
        return _done([part for parts in outputs for part in parts])

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        parts = [part.view(mine.shape) for part in output.view(self.size(), -1)]
        return self.allgather([parts], [mine])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for output, mine in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, mine)
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        total = _host(whole)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        self._gloo.allreduce([total], options).wait()
        with torch.no_grad():
            output.detach().copy_(total.view(self.size(), -1)[self.rank()].view(output.shape))
        return _done([output])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        for output, parts in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, torch.cat([part.reshape(-1) for part in parts]), opts)
        return _done(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole, opts)
        return _done(outputs)

    def all_to_all_single(
        self, output: Tensor, whole: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        mine = _host(whole)
        run = getattr(self._gloo, "all_to_all_single", None) or self._gloo.alltoall_base
        return self._run([output], lambda copies: run(copies[0], mine, output_sizes, input_sizes), filled=False)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        copies = [_host(tensor) for tensor in tensors]
        return _Pending(self._gloo.send(copies, peer, tag), [], copies)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        copies = [torch.empty_like(tensor, device="cpu").contiguous() for tensor in tensors]
        return _Pending(self._gloo.recv(copies, peer, tag), tensors, copies)

    # Names of torch 2.11.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _Pending(_Work):
    """A message under way; waiting copies what was received to its device."""

    def __init__(self, work: Any, tensors: list[Tensor], copies: list[Tensor]) -> None:
        super().__init__()
        self._work, self._tensors, self._copies = work, tensors, copies

    def wait(self, timeout: Any = None) -> bool:
        if self._work is not None:
            self._work.wait()
            self._work = None
            with torch.no_grad():
                for tensor, copy in zip(self._tensors, self._copies, strict=False):
                    tensor.detach().copy_(copy)
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


def use_one_device() -> None:
    """From now on process groups of this rank are staged, and its GPU is the first."""
    os.environ["LOCAL_RANK"] = "0"
    dist.Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])
    join = dist.init_process_group

    def staged(backend: str | None = None, **options: Any) -> None:
        options.pop("device_id", None)
        join(NAME, **options)

    dist.init_process_group = staged
    distributed.check_network = lambda *_: None  # by NCCL


def show_gpus_to_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules of this process see a GPU for each rank."""
    for module in ("rules.rule", "config.devices"):
        monkeypatch.setattr(f"titan_exp.{module}.visible_gpus", lambda: 16)


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _options(kind: Any, given: Any) -> Any:
    return kind() if given is None else given


def _done(result: list[Tensor]) -> Any:
    future: Any = Future()
    future.set_result(result)
    return _create_work_from_future(future)  # type: ignore[arg-type]
