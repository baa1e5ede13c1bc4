"""Schedules as data: files, completeness, and the time that they leave idle."""

from pathlib import Path

import pytest

from titan_exp.config.layout.pipeline_schedules import (
    Action,
    MalformedSchedule,
    check_complete,
    microbatches_of,
    placement_of,
    read_schedule,
    splits_backward,
    timeline,
)


def orders(text: str) -> list[list[Action]]:
    """One rank a line, actions apart by spaces."""
    return [[Action(int(cell[0]), cell[1], int(cell[2:])) for cell in line.split()] for line in text.splitlines()]


GOOD = orders("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")


def test_a_file_is_read(tmp_path: Path):
    path = tmp_path / "own.csv"
    path.write_text("0F0,0F1,,,0B0,,0B1\n\n,1F0,1B0,(1F1;1B1)OVERLAP_F_B\n")
    assert read_schedule(path) == GOOD
    assert placement_of(GOOD) == {0: 0, 1: 1}
    assert microbatches_of(GOOD) == 2
    assert not splits_backward(GOOD)
    assert splits_backward(orders("0F0 0I0 0W0"))


@pytest.mark.parametrize(("cell", "where"), [("0X0", "cell 2 of row 1 is '0X0'"), ("0F", "'0F'"), ("0SEND_F1", "2F0")])
def test_a_cell_that_is_no_action(tmp_path: Path, cell: str, where: str):
    (tmp_path / "own.csv").write_text(f"0F0,{cell}\n")
    with pytest.raises(MalformedSchedule, match=where):
        read_schedule(tmp_path / "own.csv")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0 0B0\n1F0", "stage 1 does 1F0 of micro-batch 0"),
        ("0F0 0B0\n1F0 1B0 1I0 1W0", "stage 1 does 1F0, 1B0, 1I0, 1W0"),
        ("0F0 0B0\n1F0 1I0", "1F0, 1I0"),
        ("0F0 0F0 0B0\n1F0 1B0", "0F0 occurs twice"),
        ("0F0 0B0 1F0\n1B0", "stage 1 is on ranks 0 and 1"),
        ("0F0 0B0\n2F0 2B0", "stage 1 does nothing"),
        ("0F0 0B0 0F1 0B1\n1F0 1B0", "stage 1 does nothing of micro-batch 1"),
    ],
)
def test_what_is_left_out_or_twice(text: str, says: str):
    check_complete(GOOD)
    with pytest.raises(MalformedSchedule, match=says):
        check_complete(orders(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0B0 0F0\n1F0 1B0", "rank 0 deadlocks in 0B0: 0F0 never"),
        ("0F0 0W0 0I0\n1F0 1B0", "0W0: 0I0 never"),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", "0B0: 1B0 never"),
    ],
)
def test_ranks_that_wait_for_each_other(text: str, says: str):
    with pytest.raises(MalformedSchedule, match=says):
        timeline(orders(text))


def test_the_bubble_by_hand():
    """Rank 0: F F _ _ B B _ B B... counted in units of a forward pass, backward passes taking two."""
    found = timeline(GOOD)
    assert found.end[Action(1, "B", 0)] == 4
    assert found.end[Action(0, "B", 1)] == 9
    assert found.bubble == pytest.approx(1 - 12 / 18)
    assert timeline(orders("0F0 0B0")).bubble == 0


def test_stages_of_unequal_cost():
    found = timeline(GOOD, [1.0, 2.0])
    assert found.end[Action(1, "B", 0)] == 1 + 2 + 4
    assert found.bubble == pytest.approx(1 - 18 / (2 * max(found.end.values())))
