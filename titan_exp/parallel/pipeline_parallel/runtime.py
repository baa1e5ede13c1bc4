"""A rank's part in a pipeline: its stages, and the passes of micro-batches through all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from titan_exp.config.layout.pipeline_schedules import Action, Schedule, microbatches_of, splits_backward
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.parallel.fsdp.gradient_sync import disable_gradient_sync, reduce_gradients
from titan_exp.parallel.pipeline_parallel.schedule_actions import P2POp, Step, forward_schedule, insert_p2p
from titan_exp.parallel.pipeline_parallel.stage import Forward, Stage
from titan_exp.parallel.pipeline_parallel.tied_weights import TiedWeights


@dataclass(frozen=True)
class ActivationSpec:
    """What stages send each other."""

    shape: tuple[int, ...]
    """Of one micro-batch's hidden states on one rank: [rows, tokens, dim]."""
    dtype: torch.dtype
    """Their type, and that of their gradients."""
    device: torch.device
    """Where they are."""

    @staticmethod
    def of(layout: ResolvedLayout, device: torch.device) -> "ActivationSpec":
        """ActivationSpec states of one micro-batch on one rank."""
        low = layout.training.mixed_precision == "bf16"
        return ActivationSpec(
            layout.hidden_shape,
            torch.bfloat16 if low else torch.float32,
            device,
        )


class Pipeline:
    """The stages of this rank, and the schedule that all ranks follow.

    Args:
        stages: this rank's, whose modules are parallel already.
        orders: actions of each pipeline rank in one pass of training.
        placement: pipeline rank of each stage.
        group: the ranks of this pipeline, in order.
        hidden: what is sent.
        keep_gathered: whether sharded parameters stay gathered over a training step.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        orders: Schedule,
        placement: list[int],
        group: dist.ProcessGroup,
        hidden: ActivationSpec,
        *,
        keep_gathered: bool,
    ) -> None:
        assert keep_gathered or not splits_backward(orders), "checked by the rules"
        self.stages, self.hidden = list(stages), hidden
        self.microbatches = microbatches_of(orders)
        """Micro-batches in one pass of training."""
        self._placement, self._group, self._keep_gathered = placement, group, keep_gathered
        self._rank = dist.get_rank(group)
        self._by_number = {stage.number: stage for stage in stages}
        self._training = insert_p2p(orders, placement, self._rank)
        self._shared = TiedWeights(self.stages, placement, group)
        # Not a method with a cache: that would keep every pipeline alive.
        self._relay = cache(lambda number: insert_p2p(forward_schedule(placement, number), placement, self._rank))

    def train(self, passes: Iterable[Forward]) -> None:
        """Run passes of `microbatches` each, forward and backward, and leave the sum of their gradients, reduced."""
        for stage in self.stages:
            disable_gradient_sync(stage.module, keep_gathered=self._keep_gathered)
        for compute in passes:
            self._run(self._training, compute)
        for stage in self.stages:
            reduce_gradients(stage.module)
        self._shared.sum_gradients()

    def forward_only(self, microbatches: int, compute: Forward) -> None:
        """Run any number of micro-batches forward only, whatever the schedule of training is."""
        with torch.no_grad():
            self._run(self._relay(microbatches), compute)

    def _run(self, steps: Iterable[Step], compute: Forward) -> None:
        mail = P2PQueue(self._group, self.hidden)
        for step in steps:
            if isinstance(step, P2POp):
                mail.exchange(step)
                continue
            stage = self._by_number[step.stage]
            if step.kind == "W":
                stage.backward_weights(step.microbatch)
                continue
            needed = self._comes_from(step)
            given = None if needed is None else mail.take(needed)
            if step.kind == "F":
                made = stage.forward(step.microbatch, given, compute)
            elif step.kind == "B":
                made = stage.backward(step.microbatch, given)
            else:
                made = stage.backward_input(step.microbatch, given)
            if made is not None and not (step.kind == "F" and stage.last):
                mail.put(step, made)
        mail.close()

    def _comes_from(self, action: Action) -> Action | None:
        """The action whose result this one takes; a backward pass in two is known as one in whole."""
        stage = action.stage + (-1 if action.kind == "F" else 1)
        if not 0 <= stage < len(self._placement):
            return None
        return Action(stage, "F" if action.kind == "F" else "B", action.microbatch)


def has_left(work: dist.Work) -> bool:
    """Whether what is sent is known to have left, and nothing holds it any more."""
    if not work.is_completed():
        return False
    # NCCL's work holds what it sends as well, until somebody waits for it, or its watchdog comes by.
    work.wait()
    return True


class P2PQueue:
    """Results of actions on their way to those that take them, on this rank or between ranks."""

    def __init__(self, group: dist.ProcessGroup, hidden: ActivationSpec) -> None:
        self._group, self._hidden = group, hidden
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
            work = dist.isend(tensor, group=self._group, group_dst=message.peer)
            assert work is not None, "this rank belongs to the group"
            # What has left may be freed; the others are kept until they have. On CUDA that is known late: the host asks
            # whether the GPU has come to it, and runs ahead of it, at most to the end of the pass.
            self._sent = [(kept, its) for kept, its in self._sent if not has_left(its)]
            self._sent.append((tensor, work))
        else:
            tensor = torch.empty(self._hidden.shape, dtype=self._hidden.dtype, device=self._hidden.device)
            work = dist.irecv(tensor, group=self._group, group_src=message.peer)
            self._there[_named(message.action)] = (tensor, work)

    def close(self) -> None:
        """Wait for what is still on its way to others."""
        assert not self._there, "every result is taken"
        for _, work in self._sent:
            work.wait()


def _named(action: Action) -> Action:
    return action._replace(kind="B") if action.kind == "I" else action
