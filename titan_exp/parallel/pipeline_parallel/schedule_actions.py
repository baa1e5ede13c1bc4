"""Pipeline schedules: actions of each rank, from torch or a file, and the P2P operations between them."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from titan_exp.config.layout.pipeline_schedules import SCHEDULES, Action, Schedule, is_file, read_schedule
from titan_exp.config.layout.schedule_timeline import timeline


@dataclass(frozen=True)
class P2POp:
    """Transfer of one tensor between ranks: a stage's output forward, or its input's gradient backward."""

    sending: bool
    """True if this rank sends, False if it receives."""
    peer: int
    """Pipeline rank at the other end."""
    action: Action
    """Action that produces the tensor."""


Step = Action | P2POp
"""An action or a P2P operation of a rank."""


def build_schedule(schedule: str, ranks: int, stages: int, microbatches: int) -> Schedule:
    """Actions of each rank in one training pass; `schedule` is a key of `SCHEDULES` or the path of a CSV file."""
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
    """Actions of each rank in a forward-only pass: all micro-batches through its first stage, then through the next."""
    return [
        [
            Action(stage, "F", number)
            for stage, stage_rank in enumerate(placement)
            if stage_rank == rank
            for number in range(microbatches)
        ]
        for rank in range(max(placement) + 1)
    ]


def insert_p2p(schedule: Schedule, placement: list[int], rank: int) -> list[Step]:
    """Steps of one rank: its actions, with the P2P operations between them.

    All ranks derive their steps from one global order of actions, by their end with free communication, and a transfer
    follows the action that produces its tensor on both sides. So any two ranks meet in the same order, as NCCL
    requires, and cannot deadlock.
    """
    last = len(placement) - 1
    steps: list[Step] = []
    for action, _ in sorted(timeline(schedule).end.items(), key=lambda item: (item[1], item[0])):
        source = placement[action.stage]
        if source == rank:
            steps.append(action)
        if action.kind == "W":
            continue
        consumer = action.stage + (1 if action.kind == "F" else -1)
        if not 0 <= consumer <= last:
            continue
        target = placement[consumer]
        if source != target and rank in (source, target):
            sending = rank == source
            steps.append(P2POp(sending, target if sending else source, action))
    return steps


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """1F1B: forward until the first gradient returns, then one forward for each backward."""
    warmup = min(ranks - 1 - rank, microbatches)
    actions = [Action(rank, "F", number) for number in range(warmup)]
    for number in range(warmup, microbatches):
        actions += [Action(rank, "F", number), Action(rank, "B", number - warmup)]
    return actions + [Action(rank, "B", number) for number in range(microbatches - warmup, microbatches)]


def _by_torch(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
    """Actions of torch's schedule of this name, built over stages without modules."""
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
            # Overlapped forward and backward actions run in sequence.
            for part in (action.sub_actions or (action,))
            if part.is_compute_op
        ]
        for rank in range(ranks)
    ]


def _no_loss() -> None:
    """Never called: torch's schedules are read, not run."""
