"""Promise 1 for moments in fewer bits: their blocks are the same in every layout, and go from one to another."""

from pathlib import Path

import pytest

from tests.parity.runs import remembered, train
from tests.parity.test_continued import continued

EXPERIMENTS = {name: f"optimizer.state_precision={name} optimizer.lr=5e-4" for name in ("int8", "fp8")}
EXPERIMENTS["exact"] = "optimizer.lr=5e-4"


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


@pytest.mark.parametrize(
    ("precision", "layout"),
    [("int8", "parallelism.tp=2 parallelism.dp_shard=2"), ("fp8", "parallelism.pp=2")],
)
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, precision: str, layout: str):
    found, expected = train(tmp_path, *EXPERIMENTS[precision].split(), *layout.split()), one_device(precision)
    assert found.disputed == []
    # What is rounded to its other neighbour here and there changes an update by a hundredth.
    assert found.loss == pytest.approx(expected.loss, rel=2e-5)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=2e-3)
    assert expected.loss != one_device("exact").loss


@pytest.mark.night
def test_resumes_with_blocks_on_other_ranks(tmp_path: Path):
    how = EXPERIMENTS["int8"].split()
    whole, changed = continued(tmp_path, [*how, "parallelism.dp_shard=4"], [*how, "parallelism.tp=2"])
    assert [row["step"] for row in changed.rows] == [6, 7, 8, 9, 10]
    assert changed.loss == pytest.approx(whole.loss[5:], rel=2e-5)
