"""Promise 1 on layouts that nobody chose: a few fresh ones each time, hundreds with `--layouts 300`."""

import os
import random

import pytest

from tests.parity.drawn import draw
from tests.parity.runs import assert_same_curve, train

MOST_RANKS, MOST_RANKS_BY_DAY = 16, 4


def seeds(config: pytest.Config) -> list[str]:
    """Seeds of the layouts of a session, fresh ones unless `--layout-seed` names them."""
    given, count = config.getoption("--layout-seed"), config.getoption("--layouts")
    assert isinstance(count, int)
    # Processes that share a test run must draw the same; without others this is None, and the seed a fresh one.
    together = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    seed = given if isinstance(given, int) else random.Random(together).randrange(10**6)
    return [f"{seed}-{number}" for number in range(count)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("drawn_by", seeds(metafunc.config))


def test_a_drawn_layout_does_not_change_the_curve(tmp_path, request: pytest.FixtureRequest, drawn_by: str):
    many = int(str(request.config.getoption("--layouts"))) > 1
    drawn = draw(random.Random(drawn_by), MOST_RANKS if many else MOST_RANKS_BY_DAY)
    print(f"the run: {drawn}")
    alone = train(tmp_path / "one", *drawn.experiment)
    assert_same_curve(train(tmp_path / "many", *drawn.experiment, *drawn.layout, timeout=240), alone)
