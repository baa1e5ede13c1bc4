"""Runs that a new run could continue: found, offered, and taken by `auto`."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from titan_exp.cli.main import main
from titan_exp.config.checkpoint_files import METADATA_FILE, step_name
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch.executor import Submission
from titan_exp.launch.local.executor import LocalExecutor
from titan_exp.launch.run_plan import RunPlan, create_run_folder, plan_run, related_runs

SMALL = ("model=llama_debug", "training.seq_len=64", "training.steps=20", "cluster.device=cpu")


def planned(runs: Path, *overrides: str) -> RunPlan:
    return plan_run(to_experiment(compose([*SMALL, f"paths.runs={runs}", *overrides])))


def saved(runs: Path, step: int, *overrides: str) -> RunPlan:
    """A run folder with a checkpoint, as far as names tell."""
    plan = planned(runs, *overrides)
    create_run_folder(plan)
    checkpoint = plan.folder.checkpoints / step_name(step)
    checkpoint.mkdir(parents=True)
    (checkpoint / METADATA_FILE).touch()
    return plan


def names(runs: Path, *overrides: str) -> list[tuple[str, int]]:
    return [(run.name, run.step) for run in related_runs(planned(runs, *overrides).experiment)]


def test_layout_steps_and_schedule_may_differ_and_nothing_else(tmp_path: Path):
    short = saved(tmp_path, 20)
    wide = saved(tmp_path, 8, "parallelism.dp_shard=2", "training.steps=30", "compile=blocks")
    saved(tmp_path, 30, "optimizer.lr=1e-3", "training.steps=40")
    saved(tmp_path, 30, "model.dim=256", "training.steps=40")
    create_run_folder(planned(tmp_path, "training.steps=50"))
    expected = [(f"first/{short.run_id}", 20), (f"first/{wide.run_id}", 8)]
    assert names(tmp_path, "training.steps=60", "lr_schedule=constant") == expected
    assert names(tmp_path, "training.steps=60", "parallelism.tp=2") == expected
    assert names(tmp_path, "parallelism.tp=2") == expected[1:], "one of twenty steps has as many"
    assert names(tmp_path) == expected[1:], "a run is not its own relative"
    assert names(tmp_path, "training.steps=60", "experiment.seed=1") == []
    assert names(tmp_path, "training.steps=60", "experiment.name=second") == []


def test_auto_takes_the_one_with_the_most_steps_and_the_same_again(tmp_path: Path):
    auto = ("training.steps=60", "checkpoint.continue_from=auto")
    assert planned(tmp_path, *auto).experiment.checkpoint.continue_from is None
    parent = saved(tmp_path, 20)
    child = planned(tmp_path, *auto)
    assert child.experiment.checkpoint.continue_from == f"first/{parent.run_id}"
    assert child.run_id != planned(tmp_path, "training.steps=60").run_id
    assert saved(tmp_path, 40, *auto).run_id == child.run_id
    assert planned(tmp_path, *auto).run_id == child.run_id, "the child has more steps than its parent by now"
    later = planned(tmp_path, "training.steps=80", "checkpoint.continue_from=auto").experiment.checkpoint
    assert later.continue_from == f"first/{child.run_id}"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[RunPlan]:
    """Plans that were launched."""
    plans: list[RunPlan] = []

    def launch(self: LocalExecutor, plan: RunPlan) -> Submission:
        plans.append(plan)
        return Submission(plan, "done")

    monkeypatch.setattr(LocalExecutor, "launch", launch)
    return plans


def test_the_line_to_type_is_offered(tmp_path: Path, launched: list[RunPlan], capsys: pytest.CaptureFixture[str]):
    parent = saved(tmp_path, 20)
    words = ["train", *SMALL, f"paths.runs={tmp_path}", "plan.gate=off", "training.steps=60"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"first/{parent.run_id} is this experiment" in said
    line = said.partition("add ")[2].strip()
    assert line == f"checkpoint.continue_from=first/{parent.run_id}"
    assert main([*words, line]) == 0
    assert "this experiment" not in capsys.readouterr().out
    assert [plan.experiment.checkpoint.continue_from for plan in launched] == [None, f"first/{parent.run_id}"]


def test_retry_with_other_values_is_a_new_run_from_the_old_ones_state(tmp_path: Path, launched: list[RunPlan]):
    parent = saved(tmp_path, 20)
    words = ["retry", parent.run_id[:8], f"paths.runs={tmp_path}", "training.steps=60", "parallelism.dp_shard=2"]
    assert main(words) == 0
    (plan,) = launched
    assert plan.experiment.checkpoint.continue_from == f"first/{parent.run_id}"
    assert (plan.experiment.training.steps, plan.layout.world_size) == (60, 2)
    assert plan.folder.path.parent == parent.folder.path.parent
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / "first").rename(moved / "first")
    assert main(["retry", "first", f"paths.runs={moved}", "training.steps=60"]) == 0
    assert launched[-1].folder.path.parents[1] == moved


def test_a_retried_child_begins_at_its_own_state(tmp_path: Path, launched: list[RunPlan]):
    """Not at the step of its parent at which it began itself, nor with data from the start again."""
    parent = saved(tmp_path, 20)
    at = ["checkpoint.continue_step=20", "checkpoint.continue_data=restart"]
    child = saved(tmp_path, 40, "training.steps=60", f"checkpoint.continue_from={parent.folder.path}", *at)
    assert main(["retry", child.run_id[:8], f"paths.runs={tmp_path}", "training.steps=80"]) == 0
    (plan,) = launched
    checkpoint = plan.experiment.checkpoint
    assert checkpoint.continue_from == f"first/{child.run_id}"
    assert (checkpoint.continue_step, checkpoint.continue_data) == (None, "same")


def test_an_option_replaces_a_group_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A run's config.yaml has values and no groups."""
    parent = saved(tmp_path, 20, "optimizer.lr=3e-4")
    words = ["train", "--config-path", str(parent.folder.path), "optimizer=sgd", "optimizer.momentum=0.5"]
    assert main([*words, "--cfg", "job"]) == 0
    optimizer = yaml.safe_load(capsys.readouterr().out)["optimizer"]
    assert (optimizer["name"], optimizer["momentum"]) == ("sgd", 0.5)
    assert "betas" not in optimizer
    assert optimizer["lr"] != 3e-4
    assert main(["train", "--config-path", str(parent.folder.path), "model=qwen3_debug", "--cfg", "job"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["architecture"] == "qwen3"


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> list[RunPlan]:
    """Plans of the points of a sweep, which is not carried out."""
    plans: list[RunPlan] = []

    def shown(sweep_plan: Any, *_: object) -> None:
        plans.extend(entry.plan for entry in sweep_plan.planned)

    monkeypatch.setattr("titan_exp.launch.sweep.sweep_table.show_plan", shown)
    return plans


def test_a_sweep_from_a_run_takes_what_one_run_takes(tmp_path: Path, swept: list[RunPlan]):
    """Options of groups, keys that only they have, and options of one's own, for each point and with its own values."""
    parent = saved(tmp_path, 20, "optimizer.lr=3e-4", "plan.gate=off")
    (tmp_path / "own" / "optimizer").mkdir(parents=True)
    (tmp_path / "own" / "optimizer" / "mine.yaml").write_text("defaults: [sgd, _self_]\nmomentum: 0.7\n")
    begin = ["--config-path", str(parent.folder.path), "--config-dir", str(tmp_path / "own")]
    lines = {
        "optimizer=sgd": ("sgd", 0.9),
        "optimizer=muon": ("muon", 0.95),
        "optimizer=mine": ("sgd", 0.7),
        "optimizer=sgd optimizer.momentum=0.5": ("sgd", 0.5),
    }
    for line, expected in lines.items():
        words = line.split()
        assert main(["train", *begin, "-m", "experiment.seed=0,1", *words, "--dry-run"]) == 0
        assert [plan.experiment.experiment.seed for plan in swept] == [0, 1]
        for plan in swept:
            optimizer: Any = plan.experiment.optimizer
            assert (optimizer.name, optimizer.momentum) == expected
            assert optimizer.lr != 3e-4, "it is the option's"
        swept.clear()
    assert main(["train", *begin, "-m", "optimizer=sgd,muon", "optimizer.momentum=0.5,0.6", "--dry-run"]) == 0
    assert [plan.experiment.optimizer.momentum for plan in swept] == [0.5, 0.6, 0.5, 0.6]  # type: ignore[attr-defined]


@pytest.mark.parametrize("multirun", [(), ("-m",)])
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("optimizer=nonsense", "choose adafactor, adamw"),
        ("optimizer=sgd optimizer.momentm=0.5", "did you mean optimizer.momentum?"),
        ("+experiment=smoke", "titan-exp train +experiment=smoke"),
        ("experiment=smoke", "titan-exp train +experiment=smoke"),
        ("+optimizer=sgd", "leave the plus out: optimizer=sgd"),
    ],
)
def test_a_wrong_option_for_a_run_is_named(
    tmp_path: Path, multirun: tuple[str, ...], line: str, says: str, capsys: pytest.CaptureFixture[str]
):
    parent = saved(tmp_path, 20)
    assert main(["train", *multirun, "--config-path", str(parent.folder.path), *line.split(), "--dry-run"]) == 2
    assert says in capsys.readouterr().err


def test_the_folder_of_an_experiment_is_its_run_for_config_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parent = saved(tmp_path, 20)
    words = ["train", "--config-path", str(parent.folder.path.parent), "--cfg", "job"]
    assert main(words) == 0
    assert yaml.safe_load(capsys.readouterr().out)["training"]["steps"] == 20
    other = saved(tmp_path, 20, "experiment.seed=1")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "this folder holds 2 runs" in said
    for path in (parent.folder.path, other.folder.path):
        assert f"--config-path {path}" in said


def test_a_sweep_says_that_the_rate_rises_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved(tmp_path, 20, "lr_schedule=wsd")
    words = [*SMALL, f"paths.runs={tmp_path}", "plan.gate=off", "lr_schedule=wsd", "checkpoint.continue_from=first"]
    said = []
    for steps in ("training.steps=60", "training.steps=60,80"):
        assert main(["train", *(["-m"] if "," in steps else []), *words, steps, "--dry-run"]) == 0
        said.append(capsys.readouterr().out)
    assert all("the learning rate rises from" in text for text in said)


def test_the_weights_of_a_run_may_get_another_optimizer(tmp_path: Path):
    parent = saved(tmp_path, 20)
    words = ["training.steps=40", f"checkpoint.continue_from={parent.folder.path}", "optimizer=sgd"]
    with pytest.raises(UserError, match="was trained by adamw") as caught:
        planned(tmp_path, *words)
    (found,) = caught.value.violations
    back, weights = found.remedy.removeprefix("use ").split(", or take the weights alone with ")
    planned(tmp_path, *words, back)
    assert planned(tmp_path, *words, *weights.split()).experiment.checkpoint.initial == str(parent.folder.path)


@pytest.mark.parametrize("key", ["initial", "continue_from"])
def test_an_experiments_folder_is_its_run(tmp_path: Path, key: str):
    parent = saved(tmp_path, 20)
    for name in (str(tmp_path / "first"), "first", parent.run_id[:6]):
        checkpoint = planned(tmp_path, "training.steps=40", f"checkpoint.{key}={name}").experiment.checkpoint
        assert str(getattr(checkpoint, key)).endswith(f"first/{parent.run_id}"), name
    saved(tmp_path, 20, "optimizer.lr=1e-3")
    with pytest.raises(UserError, match="this matches 2 runs"):
        planned(tmp_path, "training.steps=40", f"checkpoint.{key}={tmp_path / 'first'}")
