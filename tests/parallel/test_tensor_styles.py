"""Tensor-parallel styles: each has its handler, and one of a user's own joins by an entry of the table."""

from pathlib import Path

from tests.models.own_style import AllHeads
from tests.parity.runs import assert_same_curve, train
from titan_exp.models.spec import tp_plan
from titan_exp.parallel.tensor_parallel.styles import LINEARS, MODULES


def test_every_style_has_a_handler():
    styles = {kind for kind in vars(tp_plan).values() if isinstance(kind, type) and issubclass(kind, tp_plan.TPStyle)}
    assert styles - {tp_plan.TPStyle} == {*LINEARS, *MODULES} - {AllHeads}


def test_a_users_style_has_the_curve_of_one_device(tmp_path: Path):
    words = ["model.architecture=tests.models.own_style", "+model.handled=true"]
    expected = train(tmp_path / "one", *words)
    assert_same_curve(train(tmp_path / "many", *words, "parallelism.tp=2", "parallelism.dp_shard=2"), expected)
