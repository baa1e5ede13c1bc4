"""The actions of each pipeline rank, from torch's schedules or a file, and the messages between them."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from titan_exp.config.layout.pipeline_schedules import SCHEDULES, Action, Schedule, is_file, read_schedule
from titan_exp.config.layout.schedule_timeline import timeline


@dataclass(frozen=True)
class P2POp:
    """One tensor that goes from a rank to another: a stage's output forward, or its input's gradient backward."""

    sending: bool
    """Whether this rank sends it, or receives it."""
    peer: int
    """Pipeline rank at the other end."""
    action: Action
    """The action that makes it."""


Step = Action | P2POp
"""What a rank does next."""


def build_schedule(schedule: str, ranks: int, stages: int, microbatches: int) -> Schedule:
    """The actions of each rank in one pass of training.

    Args:
        schedule: a name of `SCHEDULES`, or the path of a CSV file.
        ranks: pipeline-parallel degree.
        stages: stages of the whole model.
        microbatches: micro-batches of the pass.
    """
    if is_file(schedule):
        return read_schedule(schedule)
    if schedule == "GPipe":
        return [
            [Action(rank, kind, number) for kind in "FB" for number in range(microbatches)] for rank in range(ranks)
        ]
    if schedule == "1F1B":
        return [_one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks)]
    return _by_torch(schedule, ranks, stages // ranks, microbatches)


def forward_schedule(placement: list[int], microbatches: int) -> Schedule:
    """The actions of each rank in a pass without backward: all micro-batches through its first stage, then the next."""
    return [
        [
            Action(stage, "F", number)
            for stage, its_rank in enumerate(placement)
            if its_rank == rank
            for number in range(microbatches)
        ]
        for rank in range(max(placement) + 1)
    ]


def insert_p2p(orders: Schedule, placement: list[int], rank: int) -> list[Step]:
    """Steps of one rank: its actions, with the P2P operations between them.

    All ranks derive their steps from one order of all actions, that in which they end where communication is free, and
    a message stands right behind the action that makes it, on both sides. So any two ranks meet in their messages in
    the same order, as NCCL asks for, so ranks cannot deadlock.
    """
    last = len(placement) - 1
    steps: list[Step] = []
    for action, _ in sorted(timeline(orders).end.items(), key=lambda item: (item[1], item[0])):
        here = placement[action.stage]
        if here == rank:
            steps.append(action)
        if action.kind == "W":
            continue
        to = action.stage + (1 if action.kind == "F" else -1)
        if not 0 <= to <= last:
            continue
        there = placement[to]
        if here != there and rank in (here, there):
            sending = rank == here
            steps.append(P2POp(sending, there if sending else here, action))
    return steps


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """1F1B: forward until the first gradient returns, then one forward for each backward."""
    ahead = min(ranks - 1 - rank, microbatches)
    order = [Action(rank, "F", number) for number in range(ahead)]
    for number in range(ahead, microbatches):
        order += [Action(rank, "F", number), Action(rank, "B", number - ahead)]
    return order + [Action(rank, "B", number) for number in range(microbatches - ahead, microbatches)]


def _by_torch(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
    """Actions of torch's schedule of this name, read from it over stages without modules."""
    assert SCHEDULES[name].takes(microbatches, ranks), "checked by the rules"
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=local * ranks,
            num_stages=stages_per_rank * ranks,
            group_rank=0,
            group_size=ranks,
            submod=None,
            has_backward=True,
            is_first=local == 0,
            is_last=False,
        )
        for local in range(stages_per_rank)
    ]
    schedule: Any = schedules.get_schedule_class(name)(stages, microbatches, loss_fn=_no_loss)  # type: ignore[arg-type]
    return [
        [
            Action(part.stage_index, part.computation_type.value, part.microbatch_index)
            for action in schedule.pipeline_order[rank]
            if action is not None
            # An overlapped forward and backward is computed one after the other.
            for part in (action.sub_actions or (action,))
            if part.is_compute_op
        ]
        for rank in range(ranks)
    ]


def _no_loss() -> None:
    """Never called: these schedules are read, not run."""
