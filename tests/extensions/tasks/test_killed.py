"""A run that is killed while it evaluates continues as if nobody had killed it, and each evaluation has one row."""

import sysconfig
import time
from pathlib import Path

import pytest

from tests.extensions.tasks.made_tasks import made_task
from tests.ranks import Ranks
from tests.trainer.test_death import STEPS, committed_run, final_state, finished, numbers
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.rank_main import main

STDLIB = Path(sysconfig.get_path("stdlib"), "json")
STEP = 20


def lingers(path: str, function: str) -> None:
    """A rank that says when it is inside an evaluation, and stays there."""
    from tests.patching import patch

    def make(original):
        def slow(*args, **options):
            found = original(*args, **options)
            if any(row["step"] >= STEP - 1 for row in read_metrics(RunFolder(path).metrics)):
                Path(path, "inside").touch()
                time.sleep(60)
            return found

        return slow

    patch(function, make)
    main(path)


def evaluations(folder: RunFolder) -> list[tuple[int, float, float, float]]:
    names = ("step", "validation_loss", "validation_loss/mine", "tasks/bits_per_byte")
    return [tuple(row[name] for name in names) for row in read_metrics(folder.metrics) if "validation_loss" in row]


@pytest.mark.parametrize(
    "function", ["titan_exp.trainer.updates.evaluate_split", "titan_exp.extensions.tasks.part.scores_of"]
)
def test_killed_in_an_evaluation(tmp_path: Path, function: str):
    made_task(tmp_path / "task", items=5)
    (tmp_path / "mine.txt").write_text("To be, or not to be. " * 40)
    words = ["data=text", f"data.paths=[{STDLIB}]", "data.document=paragraph", "evaluation.every=5"]
    words += ["data.validation_fraction=0.1", "data.validation_documents=8", f"evaluation.tasks=[{tmp_path}/task]"]
    words += [f"+evaluation.sets.mine={{data:{{paths:[{tmp_path}/mine.txt]}}}}"]
    expected, killed = (committed_run(tmp_path / name, words, 1, "sync") for name in ("whole", "killed"))
    finished(expected, 1)
    killed.add_attempt(world_size=1, hosts=["localhost"])
    ranks, deadline = Ranks(1, lingers, str(killed.path), function), time.monotonic() + 100
    try:
        while not (killed.path / "inside").exists():
            assert ranks.alive()
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        ranks.kill()
    assert max(row["step"] for row in read_metrics(killed.metrics)) == STEP - 1
    finished(killed, 1)
    assert numbers(killed) == numbers(expected)
    assert evaluations(killed) == evaluations(expected)
    assert [row[0] for row in evaluations(killed)] == [5, 10, 15, 20, 25, STEPS]
    files = [sorted((folder.path / "tasks").iterdir()) for folder in (killed, expected)]
    assert [file.name for file in files[0]] == [f"step-{step:08d}.json" for step in (5, 10, 15, 20, 25, STEPS)]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]
    weights, found = final_state(expected), final_state(killed)
    assert found.keys() == weights.keys()
    assert all(found[key].equal(value) for key, value in weights.items())
