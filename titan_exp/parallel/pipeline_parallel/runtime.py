"""Pipeline runtime: runs this rank's stages through a schedule of actions and P2P operations."""

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
    """This rank's stages and the schedules of all ranks.

    `schedules` are of passes with different numbers of micro-batches, as steps of a batch ramp have. `placement` gives
    the pipeline rank of each stage; `keep_gathered` keeps sharded parameters gathered over a step.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedules: Sequence[Schedule],
        placement: list[int],
        transport: P2PTransport,
        *,
        keep_gathered: bool,
    ) -> None:
        assert keep_gathered or not any(map(splits_backward, schedules)), "checked by the rules"
        self.stages, self.transport = list(stages), transport
        self._training = {
            microbatches_of(schedule): insert_p2p(schedule, placement, transport.rank) for schedule in schedules
        }
        self.microbatches = max(self._training)
        """Micro-batches of the largest training pass."""
        self._placement, self._keep_gathered = placement, keep_gathered
        self._by_number = {stage.number: stage for stage in stages}
        self._tied = TiedWeights(self.stages, placement, transport)
        # A cached method would keep every pipeline alive.
        self._forward = cache(lambda number: insert_p2p(forward_schedule(placement, number), placement, transport.rank))

    def pass_size(self, microbatches: int) -> int:
        """Micro-batches per pass of a training step with so many: all of them if there is such a schedule."""
        return microbatches if microbatches in self._training else self.microbatches

    def train(self, passes: Iterable[Forward], microbatches: int) -> None:
        """Run passes of `microbatches` micro-batches each, forward and backward, then reduce the summed gradients."""
        for stage in self.stages:
            disable_gradient_sync(stage.module, keep_gathered=self._keep_gathered)
        for compute in passes:
            self._run(self._training[microbatches], compute)
        for stage in self.stages:
            step_observer().stage_reduction_begin(stage.number)
            reduce_gradients(stage.module)

    def sum_tied_gradients(self) -> None:
        """Give the copies of tied weights the sum of their reduced gradients; called by all ranks after `train`."""
        step_observer().tied_sum_begin()
        self._tied.sum_gradients()

    def forward_only(self, microbatches: int, compute: Forward) -> None:
        """Run any number of micro-batches forward."""
        with torch.no_grad():
            self._run(self._forward(microbatches), compute)

    def from_last_stage(self, result: Tensor | None) -> Tensor:
        """Result [rows, tokens, width] of the last stage in fp32, given by its rank, on every rank of the pipeline."""
        return self.transport.broadcast(result, self._placement[-1])

    def _run(self, steps: Iterable[Step], compute: Forward) -> None:
        queue, observer = P2PQueue(self.transport), step_observer()
        for step in steps:
            if isinstance(step, P2POp):
                queue.exchange(step)
                continue
            if step.kind == "W":
                self._act(step, None, compute, observer)
                continue
            source = self._comes_from(step)
            received = None if source is None else queue.take(source)
            result = self._act(step, received, compute, observer)
            if result is not None and not (step.kind == "F" and self._by_number[step.stage].last):
                queue.put(step, result)
        queue.close()

    def _act(self, action: Action, received: Tensor | None, compute: Forward, observer: StepObserver) -> Tensor | None:
        stage, result = self._by_number[action.stage], None
        observer.action_begin(action)
        if action.kind == "F":
            result = stage.forward(action.microbatch, received, compute)
        elif action.kind == "B":
            result = stage.backward(action.microbatch, received)
        elif action.kind == "I":
            result = stage.backward_input(action.microbatch, received)
        else:
            stage.backward_weights(action.microbatch)
        observer.action_end(action, result)
        return result

    def _comes_from(self, action: Action) -> Action | None:
        """Action whose result this one takes; an input gradient (`I`) counts as a whole backward (`B`)."""
        stage = action.stage + (-1 if action.kind == "F" else 1)
        if not 0 <= stage < len(self._placement):
            return None
        return Action(stage, "F" if action.kind == "F" else "B", action.microbatch)


class P2PQueue:
    """Results of actions on their way to their consumers, on this rank or another."""

    def __init__(self, transport: P2PTransport) -> None:
        self._transport = transport
        self._results: dict[Action, tuple[Tensor, dist.Work | None]] = {}
        self._sent: list[tuple[Tensor, dist.Work]] = []

    def put(self, action: Action, tensor: Tensor) -> None:
        """Store a result of this rank, to be taken or sent."""
        self._results[_key(action)] = (tensor, None)

    def take(self, action: Action) -> Tensor:
        """Remove a result, waiting until it has arrived."""
        tensor, work = self._results.pop(action)
        if work is not None:
            work.wait()
        return tensor

    def exchange(self, message: P2POp) -> None:
        """Start to send or receive a result."""
        if message.sending:
            tensor = self.take(_key(message.action)).contiguous()
            work = self._transport.send(tensor, message.peer)
            # Completed sends free their tensors. On CUDA the host runs ahead of the GPU and sees completion late, at
            # the end of the pass at the latest.
            self._sent = [(sent, pending) for sent, pending in self._sent if not self._transport.is_sent(pending)]
            self._sent.append((tensor, work))
        else:
            tensor = self._transport.empty()
            work = self._transport.receive(tensor, message.peer)
            self._results[_key(message.action)] = (tensor, work)

    def close(self) -> None:
        """Wait for pending sends."""
        assert not self._results, "all results are consumed"
        for _, work in self._sent:
            work.wait()


def _key(action: Action) -> Action:
    return action._replace(kind="B") if action.kind == "I" else action
