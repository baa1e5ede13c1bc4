"""A pretended world: any rank of any layout in one process, on tensors that have shapes and no data.

Collectives come from torch's `fake` process groups and tensors from its `FakeTensorMode`; what runs on them is the
trainer's own `assemble` and `train_step`.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # gives collectives on shapes alone
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.data.batch import Batch
from titan_exp.plan.cuda.cpu_offload import GPU, gpu_beside_host
from titan_exp.trainer.train_state import TrainState, assemble
from titan_exp.trainer.train_step import train_step

DEVICE = torch.device("cpu")
"""Where tensors pretend to be. Torch without CUDA cannot run backward on pretended CUDA tensors."""


@dataclass(frozen=True)
class FakeRank:
    """One rank of a world that is not there."""

    experiment: Experiment
    """The run, its layout resolved."""
    state: TrainState
    """What the trainer has put together for this rank."""
    batches: list[Batch]
    """Micro-batches as the loader would hand them over."""

    @property
    def preallocated(self) -> list[torch.Tensor]:
        """What is there before the first step: batches, where every stage cuts its part out of a sequence."""
        if self.state.mesh.pp_group is None or self.experiment.parallelism.cp == 1:
            return []
        values = [getattr(batch, field.name) for batch in self.batches for field in fields(batch)]
        return [value for value in values if value is not None]

    def step(self) -> None:
        """One optimizer step of the trainer."""
        self._step(self.batches)

    def warmup_step(self) -> None:
        """One of as few micro-batches as the model takes, which leaves the optimizer with the same state."""
        model = self.state.model
        self._step(self.batches[: model.eval_microbatches if self.state.mesh.pp_group is not None else 1])

    def _step(self, batches: list[Batch]) -> None:
        train_step(
            self.state.model,
            self.state.optimizer,
            batches,
            tokens=self.experiment.training.global_batch_size * self.experiment.training.seq_len,
            lr=self.experiment.optimizer.lr,
            max_grad_norm=self.experiment.training.max_grad_norm,
            mesh=self.state.mesh,
        )


@contextmanager
def fake_rank(experiment: Experiment, rank: int, device: torch.device = DEVICE) -> Iterator[FakeRank]:
    """Be a rank of an experiment's layout for the time of the block, its model built, before its first step.

    Args:
        experiment: the run, its layout resolved.
        rank: rank in the layout.
        device: where it computes; `plan.host.GPU` where parameters lie in another memory.

    Raises:
        UserError: as the trainer's build.
    """
    assert not dist.is_initialized(), "a rank of a real job cannot pretend to be another"
    layout = ResolvedLayout.of(experiment)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        mode = _mode()
        with _meshes_answer(), gpu_beside_host() if device == GPU else nullcontext():
            state = assemble(experiment, ResolvedLayout.of(experiment), device, fake_mode=mode)
            with mode:
                yield FakeRank(experiment, state, fake_batches(experiment))
    finally:
        dist.destroy_process_group()
        # Remembered layouts name process groups of this world; the next one has others.
        _clear_sharding_prop_cache()


def pipeline_ranks(experiment: Experiment) -> list[int]:
    """The first rank of each pipeline rank's group: ranks that differ in pp alone."""
    degree = experiment.parallelism.pp
    return [rank * ResolvedLayout.of(experiment).world_size // degree for rank in range(degree)]


@functools.cache
def _mode() -> FakeTensorMode:
    """One for all worlds of this process: a constant that code keeps from one of them serves the next."""
    # Buffers and rank tables are real; what they are mixed with need not be.
    # An operator that torch cannot pretend is refused, not computed.
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


def fake_batches(experiment: Experiment) -> list[Batch]:
    """The micro-batches of one data rank, as the loader would hand them over."""
    layout = ResolvedLayout.of(experiment)
    shape = (layout.micro_batch_size, experiment.training.seq_len)
    data = experiment.data

    def made() -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    return [
        Batch(made(), made(), made() if data.reset_positions else None, made() if data.document_mask else None)
        for _ in range(layout.gradient_accumulation)
    ]


_ASKED = ("__getitem__", "get_group", "get_local_rank", "get_coordinate", "get_rank", "size", "_get_root_mesh")


@contextmanager
def _meshes_answer() -> Iterator[None]:
    """Let meshes look at their own rank tables, which are real tensors, while everything else has no data."""

    def without_modes(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return method(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in _ASKED:
            if hasattr(DeviceMesh, name):
                stack.enter_context(patch.object(DeviceMesh, name, without_modes(getattr(DeviceMesh, name))))
        yield
