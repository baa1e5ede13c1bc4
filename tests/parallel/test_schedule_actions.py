"""Every schedule in every size: complete, free of circles, and with messages that ranks meet in."""

import itertools

import pytest

from titan_exp.config.layout.pipeline_schedules import (
    SCHEDULES,
    Action,
    check_complete,
    placement,
    placement_of,
    timeline,
)
from titan_exp.parallel.pipeline_runtime import P2POp, build_schedule, forward_schedule, insert_p2p

SIZES = [
    (name, ranks, per_rank)
    for name, schedule in SCHEDULES.items()
    for ranks in (2, 3, 4, 8)
    for per_rank in ([schedule.stages_per_rank] if schedule.fixed else [1, 2, 3])
]


@pytest.mark.parametrize(("name", "ranks", "per_rank"), SIZES)
def test_what_a_schedule_takes_can_be_run(name: str, ranks: int, per_rank: int):
    schedule, stages = SCHEDULES[name], ranks * per_rank
    for microbatches in range(1, 20):
        if not schedule.takes(microbatches, ranks):
            continue
        orders = build_schedule(name, ranks, stages, microbatches)
        check_complete(orders)
        assert placement_of(orders) == dict(enumerate(placement(schedule, ranks, stages)))
        assert 0 <= timeline(orders).bubble < 1
        assert any(action.kind == "W" for order in orders for action in order) == schedule.splits_backward
        in_flight = meet(orders, placement(schedule, ranks, stages))
        assert in_flight > 0


@pytest.mark.parametrize("stages", [[0, 1], [0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0], [1, 0, 0, 1]])
def test_the_relay_needs_no_schedule(stages: list[int]):
    for microbatches in (1, 2, 5):
        orders = forward_schedule(stages, microbatches)
        assert len(timeline(orders).end) == len(stages) * microbatches
        meet(orders, stages)


def test_the_bubble_of_a_textbook_pipeline():
    """(p - 1) / (m + p - 1) for GPipe and 1F1B (Narayanan et al. 2021), that over v for interleaved stages."""
    for name in ("GPipe", "1F1B"):
        assert timeline(build_schedule(name, 4, 4, 8)).bubble == pytest.approx(3 / 11)
    assert timeline(build_schedule("Interleaved1F1B", 4, 8, 8)).bubble == pytest.approx(1.5 / 9.5)
    assert timeline(build_schedule("ZBVZeroBubble", 4, 8, 16)).bubble < 0.07


def test_one_forward_one_backward_keeps_few_micro_batches():
    for rank, order in enumerate(build_schedule("1F1B", 4, 4, 12)):
        kept = list(itertools.accumulate(1 if action.kind == "F" else -1 for action in order))
        assert max(kept) == 4 - rank


def meet(orders: list[list[Action]], stages: list[int]) -> int:
    """Execute the steps of all ranks, a message only where both ends have come to it; returns how many there were.

    This is the strictest machine: messages of two ranks in one order, and nobody goes past one before it is taken.
    """
    steps = [insert_p2p(orders, stages, rank) for rank in range(len(orders))]
    at, done, messages = [0] * len(steps), set(), 0
    while any(place < len(its) for place, its in zip(at, steps, strict=True)):
        before = list(at)
        for rank, its in enumerate(steps):
            step = its[at[rank]] if at[rank] < len(its) else None
            if isinstance(step, Action):
                done.add(step)
                at[rank] += 1
            elif isinstance(step, P2POp) and step.sending:
                other = steps[step.peer][at[step.peer]] if at[step.peer] < len(steps[step.peer]) else None
                if other == P2POp(False, rank, step.action):
                    assert step.action in done
                    at[rank] += 1
                    at[step.peer] += 1
                    messages += 1
        assert at != before, "nobody can go on"
    return messages
