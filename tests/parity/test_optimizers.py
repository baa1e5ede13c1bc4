"""Promise 1 for a user's optimizer in one file, which updates matrices differently by their role."""

from pathlib import Path

import pytest

from tests.parity.runs import LINES, Curve, assert_same_curve, train

OWN = ["optimizer.name=tests.optim.matrix_momentum", "+optimizer.momentum=0.8", "optimizer.lr=0.02", *LINES]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return train(tmp_path_factory.mktemp("one"), *OWN)


@pytest.mark.parametrize("layout", ["parallelism.tp=2", "parallelism.tp=2 parallelism.dp_shard=2"])
def test_matrices_are_updated_apart_in_every_layout(tmp_path: Path, one_device: Curve, layout: str):
    curve = train(tmp_path, *OWN, *layout.split())
    assert_same_curve(curve, one_device)
    name = "optimizer/largest_momentum"
    expected = [row[name] for row in one_device.rows]
    assert min(expected) > 0
    assert [row[name] for row in curve.rows] == pytest.approx(expected, rel=1e-4)
