"""The warm pool of ranks."""

import itertools
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import Ranks, run_ranks

SLOW_TO_IMPORT = {"torch.distributed.checkpoint", "titan_exp.trainer.trainer", "tests.warm"}


def test_a_rank_starts_with_the_trainer_loaded():
    assert run_ranks(1, _loaded) == [SLOW_TO_IMPORT]


def _loaded() -> set[str]:
    return SLOW_TO_IMPORT & sys.modules.keys()


def test_ranks_are_waited_for_while_they_progress(tmp_path):
    """Only time without progress counts: a busy machine takes longer for the same."""
    go, seconds = tmp_path / "go", itertools.count()

    def progress() -> int:
        if (now := next(seconds)) == 3:
            go.touch()
        return now

    ranks = Ranks(1, _wait_for, go)
    try:
        with pytest.raises(AssertionError, match="did not finish"):
            ranks.results(0.5, lambda: "nothing")
        assert ranks.results(1.0, progress) == ["went"]
    finally:
        ranks.kill()


def _wait_for(path: Path) -> str:
    while not path.exists():
        time.sleep(0.02)
    return "went"
