"""A rank's part in a pipeline: its stages, and the passes of micro-batches through all of them."""

from collections.abc import Iterable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from titan_exp.config.layout.pipeline_schedules import Action, Schedule, microbatches_of, splits_backward
from titan_exp.parallel.fsdp.gradient_sync import disable_gradient_sync, reduce_gradients
from titan_exp.parallel.pipeline_parallel.schedule_actions import P2POp, Step, forward_schedule, insert_p2p
from titan_exp.parallel.pipeline_parallel.stage import Forward, Stage
from titan_exp.parallel.pipeline_parallel.tied_weights import TiedWeights
from titan_exp.parallel.pipeline_parallel.transport import P2PTransport
from titan_exp.parallel.step_observer import StepObserver, step_observer


class Pipeline:
    """The stages of this rank, and the schedule that all ranks follow.

    Args:
        stages: this rank's, whose modules are parallel already.
        orders: actions of each pipeline rank in one pass of training.
        placement: pipeline rank of each stage.
        transport: sends and receives between the ranks of this pipeline.
        keep_gathered: whether sharded parameters stay gathered over a training step.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        orders: Schedule,
        placement: list[int],
        transport: P2PTransport,
        *,
        keep_gathered: bool,
    ) -> None:
        assert keep_gathered or not splits_backward(orders), "checked by the rules"
        self.stages, self.transport = list(stages), transport
        self.microbatches = microbatches_of(orders)
        """Micro-batches in one pass of training."""
        self._placement, self._keep_gathered = placement, keep_gathered
        self._by_number = {stage.number: stage for stage in stages}
        self._training = insert_p2p(orders, placement, transport.rank)
        self._shared = TiedWeights(self.stages, placement, transport)
        # Not a method with a cache: that would keep every pipeline alive.
        self._relay = cache(lambda number: insert_p2p(forward_schedule(placement, number), placement, transport.rank))

    def train(self, passes: Iterable[Forward]) -> None:
        """Run passes of `microbatches` each, forward and backward, and leave the sum of their gradients, reduced."""
        for stage in self.stages:
            disable_gradient_sync(stage.module, keep_gathered=self._keep_gathered)
        for compute in passes:
            self._run(self._training, compute)
        for stage in self.stages:
            step_observer().stage_reduction_begin(stage.number)
            reduce_gradients(stage.module)
        self._shared.sum_gradients()

    def forward_only(self, microbatches: int, compute: Forward) -> None:
        """Run any number of micro-batches forward only, whatever the schedule of training is."""
        with torch.no_grad():
            self._run(self._relay(microbatches), compute)

    def _run(self, steps: Iterable[Step], compute: Forward) -> None:
        mail, observer = P2PQueue(self.transport), step_observer()
        for step in steps:
            if isinstance(step, P2POp):
                mail.exchange(step)
                continue
            if step.kind == "W":
                self._act(step, None, compute, observer)
                continue
            needed = self._comes_from(step)
            given = None if needed is None else mail.take(needed)
            made = self._act(step, given, compute, observer)
            if made is not None and not (step.kind == "F" and self._by_number[step.stage].last):
                mail.put(step, made)
        mail.close()

    def _act(self, action: Action, given: Tensor | None, compute: Forward, observer: StepObserver) -> Tensor | None:
        stage, result = self._by_number[action.stage], None
        observer.action_begin(action)
        if action.kind == "F":
            result = stage.forward(action.microbatch, given, compute)
        elif action.kind == "B":
            result = stage.backward(action.microbatch, given)
        elif action.kind == "I":
            result = stage.backward_input(action.microbatch, given)
        else:
            stage.backward_weights(action.microbatch)
        observer.action_end(action, result)
        return result

    def _comes_from(self, action: Action) -> Action | None:
        """The action whose result this one takes; a backward pass in two is known as one in whole."""
        stage = action.stage + (-1 if action.kind == "F" else 1)
        if not 0 <= stage < len(self._placement):
            return None
        return Action(stage, "F" if action.kind == "F" else "B", action.microbatch)


class P2PQueue:
    """Results of actions on their way to those that take them, on this rank or between ranks."""

    def __init__(self, transport: P2PTransport) -> None:
        self._transport = transport
        self._there: dict[Action, tuple[Tensor, dist.Work | None]] = {}
        self._sent: list[tuple[Tensor, dist.Work]] = []

    def put(self, action: Action, tensor: Tensor) -> None:
        """Lay down a result of this rank, for itself or to be sent."""
        self._there[_named(action)] = (tensor, None)

    def take(self, action: Action) -> Tensor:
        """Fetch a result, waiting where it is still on its way."""
        tensor, work = self._there.pop(action)
        if work is not None:
            work.wait()
        return tensor

    def exchange(self, message: P2POp) -> None:
        """Begin to send or to receive a result."""
        if message.sending:
            tensor = self.take(_named(message.action)).contiguous()
            work = self._transport.send(tensor, message.peer)
            # Completed sends may be freed; the others are kept until they have. On CUDA that is known late: the host
            # asks whether the GPU has come to it, and runs ahead of it, at most to the end of the pass.
            self._sent = [(kept, its) for kept, its in self._sent if not self._transport.is_sent(its)]
            self._sent.append((tensor, work))
        else:
            tensor = self._transport.empty()
            work = self._transport.receive(tensor, message.peer)
            self._there[_named(message.action)] = (tensor, work)

    def close(self) -> None:
        """Wait for what is still on its way to others."""
        assert not self._there, "every result is taken"
        for _, work in self._sent:
            work.wait()


def _named(action: Action) -> Action:
    return action._replace(kind="B") if action.kind == "I" else action
