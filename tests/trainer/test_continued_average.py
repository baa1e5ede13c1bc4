"""The tail of a continued run is its own: of pieces, of extensions, and of another checkpoint of the parent."""

from pathlib import Path

import pytest
import torch

from tests.parity.runs import SMALL, train
from tests.parity.test_weight_average import averages
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch.run_plan import plan_run, rate_after_decay

TAIL = ["weight_average=tail", "weight_average.steps=4", "checkpoint=sync", "checkpoint.every=2", "checkpoint.keep=9"]
SHORT = ["training.seq_len=32", "training.global_batch_size=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of eight steps, a piece of it, and a run of six."""
    path = tmp_path_factory.mktemp("runs")
    for name, steps in (("whole", ["8"]), ("piece", ["8", "training.stop_after=6"]), ("short", ["6"])):
        train(path / "a" / name, *TAIL, *SHORT, f"training.steps={steps[0]}", *steps[1:])
    return path


def child(runs: Path, parent: str, *words: str) -> list[str]:
    return [*TAIL, *SHORT, "training.steps=8", f"checkpoint.continue_from={runs / 'a' / parent}", *words]


def refusal(runs: Path, *words: str) -> str:
    small = [word for word in SMALL if word.partition("=")[0] not in {each.partition("=")[0] for each in words}]
    try:
        plan_run(to_experiment(compose([*small, *words, f"paths.runs={runs}"])))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("parent", "words"), [("piece", []), ("short", ["checkpoint.continue_step=4"])])
def test_a_tail_is_of_this_runs_last_steps(tmp_path: Path, runs: Path, parent: str, words: list[str]):
    assert refusal(runs, *child(runs, parent, *words)) == ""
    train(tmp_path / "child", *child(runs, parent, *words))
    found, expected = averages(tmp_path / "child", 8), averages(runs / "a" / "whole", 8)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_mean_with_earlier_steps_is_refused(runs: Path):
    said = refusal(runs, *child(runs, "short"))
    assert "the tail to average is steps 5 to 8. The checkpoint of step 6 holds the mean of steps 3 to 6" in said
    assert "weight_average.steps=2, or checkpoint.continue_step=4" in said
    words = [word for word in child(runs, "short") if not word.startswith("weight_average.steps")]
    assert refusal(runs, *words, "weight_average.steps=2") == ""


def test_a_piece_may_end_before_the_tail(runs: Path):
    assert refusal(runs, *TAIL, "training.steps=8", "training.stop_after=2") == ""
    assert "use weight_average.steps=3 or less" in refusal(runs, *TAIL, "training.steps=3")


@pytest.mark.parametrize(
    ("parent", "said"), [("short", "at step 7, since this run has a schedule of 8 steps"), ("piece", "")]
)
def test_a_rate_that_rises_again_is_said(runs: Path, parent: str, said: str):
    experiment = to_experiment(compose([*SMALL, *child(runs, parent), f"paths.runs={runs}"]))
    sentences = list(rate_after_decay(experiment))
    assert len(sentences) == bool(said)
    assert said in "".join(sentences)
