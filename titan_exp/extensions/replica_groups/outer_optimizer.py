"""Outer optimizer of semi-synchronous training, and the buckets in which groups exchange tensors."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_exp.config.groups.experiment import Experiment
from titan_exp.extensions.replica_groups.config import SemiSyncConfig, fragments_of, semi_sync_of
from titan_exp.models.spec.lookup import block_count
from titan_exp.ops.autograd import local_tensor
from titan_exp.trainer.part import Part, Update
from titan_exp.trainer.train_state import TrainState
from titan_exp.trainer.updates import Acting

KEPT, MOMENTUM = "kept_weights", "outer_momentum"
"""Keys in a parameter's optimizer state: weights of the last synchronization, and momentum of the outer optimizer."""


class OuterOptimizer:
    """Outer optimizer: SGD with momentum (torch's SGD) on the change that the inner `optimizer` has made since the last
    synchronization. `fragments` has the fragment of each parameter; by default all are in one."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, config: SemiSyncConfig, fragments: Mapping[Tensor, int] | None = None
    ) -> None:
        self._optimizer, self._fragments = optimizer, fragments
        self._lr, self._momentum, self._nesterov = config.outer
        self._mixing = config.mixing
        self.after_move: Callable[[], object] = lambda: None
        """Called after weights are moved, to recompute copies of the weights."""
        self.swapped = False
        """True while parameters hold the kept weights, equal in all groups, and `KEPT` this group's own."""
        self._first: dict[Tensor, Tensor] = {}
        """Weights before the first step, until the inner optimizer has allocated its state, which must start empty."""

    def parameters(self, fragment: int | None = None) -> list[Tensor]:
        """Trained parameters of this rank, in one fragment or in all; empty before the first step."""
        return [
            parameter
            for parameter in self._all()
            if KEPT in self._optimizer.state.get(parameter, {})
            and (fragment is None or self._fragments is None or self._fragments[parameter] == fragment)
        ]

    @torch.no_grad()
    def pseudo_gradients(self, fragment: int | None = None) -> Iterator[Tensor]:
        """Weights of the last synchronization minus the present ones, one by one: this rank's shards, in fp32."""
        parameters = self.parameters(fragment)
        for parameter, kept in zip(parameters, self._state(KEPT, parameters), strict=True):
            yield kept - local_tensor(parameter)

    @torch.no_grad()
    def step(self, gradients: list[Tensor], fragment: int | None = None) -> None:
        """Step a fragment's kept weights along the mean pseudo-gradient, which is overwritten. They become the present
        weights, or are mixed with them: θ ← α·θ + (1 − α)·θ_kept."""
        parameters = self.parameters(fragment)
        kept = self._state(KEPT, parameters)
        if self._momentum:
            momenta = self._state(MOMENTUM, parameters)
            torch._foreach_mul_(momenta, self._momentum)
            torch._foreach_add_(momenta, gradients)
            if self._nesterov:
                torch._foreach_add_(gradients, momenta, alpha=self._momentum)
            else:
                gradients = momenta
        torch._foreach_add_(kept, gradients, alpha=-self._lr)
        self.mix(parameters)
        self.after_move()

    @torch.no_grad()
    def mix(self, parameters: list[Tensor]) -> None:
        """Replace the present weights by the mixture of present and kept ones."""
        present, kept = [local_tensor(parameter) for parameter in parameters], self._state(KEPT, parameters)
        if self._mixing:
            torch._foreach_mul_(present, self._mixing)
            torch._foreach_add_(present, kept, alpha=1 - self._mixing)
        else:
            torch._foreach_copy_(present, kept)

    @torch.no_grad()
    def back_to_kept(self) -> None:
        """Replace the present weights by those of the last synchronization."""
        if parameters := self.parameters():
            torch._foreach_copy_([local_tensor(parameter) for parameter in parameters], self._state(KEPT, parameters))
        self.after_move()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the present weights with the kept ones."""
        parameters = self.parameters()
        for parameter, kept in zip(parameters, self._state(KEPT, parameters), strict=True):
            present = local_tensor(parameter)
            own = present.clone()
            present.copy_(kept)
            kept.copy_(own)
        self.swapped = not self.swapped
        self.after_move()

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the present weights, from a checkpoint, as those of the last synchronization."""
        self._first = {
            parameter: parameter.detach().clone().float()
            for parameter in self._all()
            if (state := self._optimizer.state.get(parameter)) and KEPT not in state
        }
        self.after_inner_step()
        if parameters := self.parameters():
            torch._foreach_copy_(self._state(KEPT, parameters), [local_tensor(parameter) for parameter in parameters])

    @torch.no_grad()
    def before_inner_step(self) -> None:
        """Keep the weights before the first step of the inner optimizer."""
        for parameter in self._all():
            if parameter.grad is not None and KEPT not in self._optimizer.state.get(parameter, {}):
                self._first[parameter] = parameter.detach().clone().float()

    @torch.no_grad()
    def after_inner_step(self) -> None:
        """Allocate the outer state after the first step."""
        while self._first:
            parameter, weights = self._first.popitem()
            state = self._optimizer.state[parameter]
            state[KEPT] = weights
            if self._momentum and MOMENTUM not in state:  # only a checkpoint has it
                state[MOMENTUM] = torch.zeros_like(weights)

    def _all(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _state(self, name: str, parameters: list[Tensor]) -> list[Tensor]:
        return [local_tensor(self._optimizer.state[parameter][name]) for parameter in parameters]


class OuterSteps(Acting):
    """Part that keeps the outer optimizer's state; the outer optimizer itself steps at synchronizations."""

    name = "outer_optimizer"
    keeps = (KEPT, MOMENTUM)

    def __init__(self, outer: OuterOptimizer) -> None:
        self.outer = outer

    def on_gradients(self, update: Update) -> None:
        self.outer.before_inner_step()

    def on_update(self, update: Update) -> None:
        self.outer.after_inner_step()


def outer_steps(experiment: Experiment, state: TrainState) -> Iterator[Part]:
    """Part of semi-synchronous training that acts after the optimizer, if there is one."""
    config = semi_sync_of(experiment)
    if config.enabled:
        outer = OuterOptimizer(state.optimizer, config, _fragments(experiment, state))
        outer.after_move = state.moved
        yield OuterSteps(outer)


def _fragments(experiment: Experiment, state: TrainState) -> dict[Tensor, int]:
    names = [name for name, _ in state.built.module.named_parameters()]
    fragments = fragments_of(names, semi_sync_of(experiment), block_count(experiment.model))
    return {parameter: fragments[name] for part in state.model.parts for name, parameter in part.named_parameters()}


BUCKET_BYTES = 64 * 2**20  # maximum bytes of a bucket; a larger tensor has its own bucket


def ring_bytes(size: float, groups: int) -> float:
    """Bytes that one member of a ring all-reduce, like Gloo's, sends for a tensor of `size` bytes."""
    return 2 * (groups - 1) / groups * size


@torch.no_grad()
def exchange(
    tensors: Sequence[Tensor], operation: Callable[[Tensor], object], *, read: bool = True, write_back: bool
) -> None:
    """Call `operation` on flat buckets of the tensors, copied there if `read` and back if `write_back`."""
    for bucket in _buckets(tensors):
        flat = _flat(bucket, read=read)
        operation(flat)
        if write_back:
            for tensor, part in zip(bucket, _parts(flat, [tensor.shape for tensor in bucket]), strict=True):
                tensor.copy_(part, non_blocking=True)
            _wait_for_copies(bucket)


class AsyncAllReduce:
    """Sum of tensors over the groups that runs in the background, on flat copies in buckets."""

    def __init__(self) -> None:
        self._flat: list[Tensor] = []
        """Buckets whose sum has been started; nobody touches them until it is done."""
        self._shapes: list[list[torch.Size]] = []
        self._devices: list[torch.device] = []
        self._works: list[tuple[Any, int]] = []
        """Running collectives of the buckets, with their bytes; none in a group that is alone."""
        self.summed_bytes = 0

    @torch.no_grad()
    def start(self, tensors: Iterable[Tensor], begin: Callable[[Tensor], Any]) -> None:
        """Start to sum copies of the tensors. `begin` returns the running collective of a bucket, if any."""
        for bucket in _buckets(tensors):
            self._flat.append(flat := _flat(bucket))
            self._shapes.append([tensor.shape for tensor in bucket])
            self._devices.append(bucket[0].device)
            work = begin(flat)
            if work is not None:
                self._works.append((work, flat.nbytes))

    def wait(self) -> None:
        """Wait for all collectives, even if one has failed. Raises RuntimeError if one has."""
        failures: list[RuntimeError] = []
        for work, size in self._works:
            try:
                work.wait()
                self.summed_bytes += size
            except RuntimeError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    @property
    def sums(self) -> list[Tensor]:
        """Sums of the tensors, on their device; call it after `wait`. On a CPU they share memory with the buckets."""
        buckets = zip(self._flat, self._shapes, self._devices, strict=True)
        return [part for flat, shapes, device in buckets for part in _parts(flat.to(device), shapes)]


def _flat(bucket: Sequence[Tensor], *, read: bool = True) -> Tensor:
    """Flat host memory for a bucket; with `read`, a finished copy of it."""
    pinned = any(tensor.device.type == "cuda" for tensor in bucket)
    flat = torch.empty(sum(tensor.numel() for tensor in bucket), dtype=bucket[0].dtype, pin_memory=pinned)
    if read:
        for tensor, part in zip(bucket, _parts(flat, [tensor.shape for tensor in bucket]), strict=True):
            part.copy_(tensor, non_blocking=True)
        _wait_for_copies(bucket)
    return flat


def _wait_for_copies(bucket: Sequence[Tensor]) -> None:
    """Wait for copies between the host and the devices of a bucket's tensors."""
    for device in {tensor.device for tensor in bucket if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def _parts(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for shape, part in zip(shapes, parts, strict=True)]


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, at most `BUCKET_BYTES` each; the same on equal ranks of all groups."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
