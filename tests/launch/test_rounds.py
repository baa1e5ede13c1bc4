"""Rounds of a study by an executor that pretends to train: rungs, restarts, schedulers, seeds, failures, Optuna."""

import json
import math
import re
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest

from titan_exp.cli.main import main
from titan_exp.launch.executor import Submission, SubmitOptions
from titan_exp.launch.local.executor import LocalExecutor
from titan_exp.launch.provenance import read_provenance
from titan_exp.launch.rank.rank_env import RankError
from titan_exp.launch.run_plan import RunPlan, create_run_folder
from titan_exp.tracking.run_folder.run import Lineage
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState, has_diverged

HALVING = """\
question: Which rate?
held_fixed:
  - model=llama_debug
  - cluster.device=cpu
  - plan.gate=off
  - training.steps=18
  - evaluation.every=18
  - checkpoint.every=null
axes:
  - grid: {optimizer.lr: [1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]}
halving: {metric: validation_loss, rungs: [2, 6, 18], keep: 1/3}
metrics: {validation_loss: min}
"""


class Pretended(LocalExecutor):
    """Trains in no time: the loss falls with the steps and is least at a rate of 3e-3."""

    trained: ClassVar[list[tuple[str, int, int]]] = []
    """Run ids with the steps at which a training began and ended."""
    limit = 1_000
    """Trainings before Ctrl-C."""
    waits = True
    diverges = 1.0
    fails = ""

    def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
        return [self.train(plan) for plan in plans]

    @classmethod
    def train(cls, plan: RunPlan) -> Submission:
        state = plan.folder.read_state() if plan.folder.path.exists() else None
        if state is not None and state.state == "done":
            return Submission(plan, "done")
        if len(cls.trained) == cls.limit:
            raise KeyboardInterrupt
        create_run_folder(plan, provenance())
        begin, end = parent_step(plan), plan.experiment.training.last_step
        cls.trained.append((plan.run_id, begin, end))
        rate, seed = plan.experiment.optimizer.lr, plan.experiment.experiment.seed
        if rate >= cls.diverges or plan.run_id == cls.fails:
            reason = "rank 0: Diverged: step 1: loss nan" if rate >= cls.diverges else "rank 0: OSError: no"
            plan.folder.write_state(RunState("failed", begin, time.time(), 1, reason))
            return Submission(plan, "failed", reason=reason, exit_code=1)
        loss = abs(math.log10(rate / 3e-3)) + 10 / end + seed * NOISE.get(rate, 0.0)
        row = {"step": end, "tokens": 1000 * end, "loss": loss, "validation_loss": loss, "mfu": -loss, "attempt": 1}
        plan.folder.metrics.write_text(json.dumps(row) + "\n")
        saved = plan.folder.checkpoints / f"step-{end:08d}"
        saved.mkdir(parents=True)
        (saved / ".metadata").touch()
        plan.folder.write_state(RunState("done", end, time.time(), 1, None))
        return Submission(plan, "done")


provenance = cache(read_provenance)
"""Read once: it takes longer than all else here."""

NOISE: dict[float, float] = {}
"""What a seed of 1 adds to the loss, by rate."""


def parent_step(plan: RunPlan) -> int:
    name = plan.experiment.checkpoint.continue_from
    if name is None:
        return 0
    parent = RunFolder(plan.folder.path.parents[1] / name)
    state = parent.read_state()
    assert state is not None
    Lineage(str(parent.path), state.step, 1000 * state.step).write(plan.folder.path)
    return state.step


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("titan_exp.launch.sweep.sweeper.executor_for", Pretended)
    monkeypatch.setattr("titan_exp.launch.run_plan._nondefault", lambda *_: "[]\n")  # half a second a run
    for name, value in {"trained": [], "limit": 1_000, "diverges": 1.0, "fails": ""}.items():
        monkeypatch.setattr(Pretended, name, value)
    NOISE.clear()
    (tmp_path / "sweeps").mkdir()
    write(HALVING)
    return tmp_path


def write(text: str) -> None:
    Path("sweeps/mine.yaml").write_text(text)


def sweep(*words: str) -> int:
    """Exit code of `titan-exp sweep mine`."""
    try:
        return main(["sweep", "mine", *words])
    except SystemExit as end:
        return int(end.code or 0)


def points() -> list[dict]:
    return json.loads(Path("runs/mine/study.json").read_text())["points"]


def test_the_best_third_of_each_rung_continues(capsys: pytest.CaptureFixture[str]):
    assert sweep("--dry-run") == 0
    out = capsys.readouterr().out
    assert "9 to start" in out
    assert "rung 2 of 3: 3 runs to step 6, the best of rung 1 by validation_loss" in out
    assert "rung 3 of 3: 1 run to step 18" in out
    assert "All rungs: 42 steps, 26% of the 162 of 9 whole runs." in out
    assert sweep() == 0
    assert [(begin, end) for _, begin, end in Pretended.trained] == [(0, 2)] * 9 + [(2, 6)] * 3 + [(6, 18)]
    said = capsys.readouterr().out
    assert "rung 1 of 3: 3 of 9 continue, by validation_loss: lr=3e-3 (5.0000), lr=1e-3 (5.4771)" in said
    assert "rung 3 of 3: the best by validation_loss is lr=3e-3 (0.5556)" in said
    assert [point["label"] for point in points()[9:]] == [
        *("lr=1e-3 rung=2", "lr=3e-3 rung=2", "lr=1e-2 rung=2"),
        "lr=3e-3 rung=3",
    ]
    chosen = points()[-1]["overrides"]
    assert not any(text.startswith("training.stop_after") for text in chosen), "the last rung is a whole run"
    assert f"checkpoint.continue_from=mine/{points()[-3]['run_id']}" in chosen

    assert sweep() == 0
    assert len(Pretended.trained) == 13, "nothing is trained again"
    assert not Path("runs/mine/history").exists(), "later rungs are not another version of the study"
    capsys.readouterr()
    assert sweep("--dry-run") == 0
    assert "0 to start, 13 done." in capsys.readouterr().out
    assert main(["status", "mine"]) == 0
    status = capsys.readouterr().out
    assert "rung 2 of 3: to step 6, 3 run(s), the best by validation_loss: 3 done" in status
    assert re.search(r"lr=3e-3 rung=3 +[0-9a-f]{12} +3 +done +18/18", status)


@pytest.mark.parametrize(
    "limit", [4, 10, pytest.param(9, marks=pytest.mark.night), pytest.param(12, marks=pytest.mark.night)]
)
def test_a_killed_study_goes_on_where_it_was(limit: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Pretended, "limit", limit)
    assert sweep() == 130
    assert len(Pretended.trained) == limit
    monkeypatch.setattr(Pretended, "limit", 1_000)
    assert sweep() == 0
    assert [(begin, end) for _, begin, end in Pretended.trained] == [(0, 2)] * 9 + [(2, 6)] * 3 + [(6, 18)]
    assert len({run for run, *_ in Pretended.trained}) == 13


def test_a_scheduler_gets_a_rung_at_a_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    queue: list[RunPlan] = []

    class Scheduler(Pretended):
        waits = False

        def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
            for plan in plans:
                create_run_folder(plan, provenance())
            new = [plan for plan in plans if plan.run_id not in {waiting.run_id for waiting in queue}]
            queue.extend(new)
            return [Submission(plan, "submitted" if plan in new else "queued", "7") for plan in plans]

    monkeypatch.setattr("titan_exp.launch.sweep.sweeper.executor_for", Scheduler)
    monkeypatch.setattr("titan_exp.launch.sweep.sweep_table.executor_for", Scheduler)
    assert sweep() == 0
    out = capsys.readouterr().out
    assert len(queue) == 9
    assert "9 submitted" in out
    assert "When these runs are done, the same command continues: titan-exp sweep mine" in out
    assert main(["status", "mine"]) == 0
    assert "rung 2 of 3: starts when the rung before is done" in capsys.readouterr().out
    for plan in queue[:8]:
        Pretended.train(plan)
    assert sweep() == 0
    assert len(queue) == 9, "a rung waits for all of its runs"
    Pretended.train(queue[8])
    assert sweep() == 0
    assert len(queue) == 12
    for plan in queue[9:]:
        Pretended.train(plan)
    assert sweep() == 0
    Pretended.train(queue[12])
    capsys.readouterr()
    assert sweep() == 0
    assert (len(queue), "13 done" in capsys.readouterr().out) == (13, True)


def test_more_is_better_where_the_study_says_so(capsys: pytest.CaptureFixture[str]):
    write(HALVING.replace("metric: validation_loss", "metric: mfu").replace("validation_loss: min", "mfu: max"))
    assert sweep() == 0
    assert [point["label"] for point in points()[9:]] == [
        *("lr=1e-3 rung=2", "lr=3e-3 rung=2", "lr=1e-2 rung=2"),
        "lr=3e-3 rung=3",
    ]
    assert "rung 3 of 3: the best by mfu is lr=3e-3 (-0.5556)" in capsys.readouterr().out


def test_seeds_are_ranked_by_their_mean_and_continue_together():
    """The luckiest run is of 1e-3, and its other seed is bad."""
    NOISE.update({1e-3: 3.0, 3e-3: -0.3, 1e-2: -0.3})
    write(HALVING.replace("1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1", "1e-3, 1e-2, 1e-4") + "seeds: 2\n")
    assert sweep() == 0
    assert [point["label"] for point in points() if point["round"] == 2] == [
        "lr=1e-2 seed=0 rung=2",
        "lr=1e-2 seed=1 rung=2",
    ]


@pytest.mark.night
def test_a_diverged_run_is_last_and_a_failed_one_is_awaited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from titan_exp.trainer.parts import Diverged

    reason = RankError(Diverged.__name__, "step 3: loss nan", "", user=False).reason(0)
    assert has_diverged("failed", reason)
    monkeypatch.setattr(Pretended, "diverges", 1e-1)
    assert sweep() == 1, "as of any study with failed runs"
    assert len(Pretended.trained) == 13
    assert sweep() == 1
    assert len(Pretended.trained) == 13, "what diverged would diverge again"

    write(HALVING.replace("training.steps=18", "training.steps=18\n  - training.seq_len=64"))
    monkeypatch.setattr(Pretended, "trained", [])
    capsys.readouterr()
    assert sweep("--dry-run") == 0
    fails = re.search(r"lr=3e-3 +([0-9a-f]{12})", capsys.readouterr().out)
    assert fails is not None
    monkeypatch.setattr(Pretended, "fails", fails[1])
    assert sweep() == 1
    assert len(Pretended.trained) == 9, "no rung begins without the result of every run"
    monkeypatch.setattr(Pretended, "fails", "")
    assert sweep() == 1
    assert Pretended.trained[9][0] == fails[1]
    assert len(Pretended.trained) == 10 + 3 + 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("evaluation.every=18", "evaluation.every=0"), "no run logs validation_loss"),
        (("checkpoint.every=null", "checkpoint=none"), "checkpoint.mode=off: the run saves nothing"),
        (("checkpoint.every=null", "checkpoint.last=weights"), "checkpoint.last=weights: the run saves nothing"),
        (("training.steps=18", "training.steps=20"), "Set training.steps=18"),
        (("rungs: [2, 6, 18]", "rungs: [1/99, 1/98, 1]"), "Give rungs that increase"),
        (("metric: validation_loss", "metric: objective/loss"), "never logged it"),
        (("metric: validation_loss", "metric: validation_loss/none"), "will not log it. It logs validation_loss"),
        (("{validation_loss: min}", "{validation_loss: min, validation_loss/none: min}"), "will not log it"),
    ],
)
def test_rounds_that_could_not_follow_are_refused(
    change: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
):
    write(HALVING.replace(*change).replace("1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1", "1e-3, 3e-3"))
    assert sweep() == 2
    assert said in capsys.readouterr().err


def test_batches_of_optuna_continue_from_results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("optuna")
    head = HALVING.partition("axes:")[0]
    ranges = "{optimizer.lr: {log_uniform: [1e-5, 1e-1]}}"
    write(f"{head}search: {{method: optuna, points: 10, batch: 4, metric: loss, ranges: {ranges}}}\n")
    monkeypatch.setattr(Pretended, "limit", 6)
    assert sweep() == 130
    monkeypatch.setattr(Pretended, "limit", 1_000)
    assert sweep() == 0
    assert len(Pretended.trained) == len({run for run, *_ in Pretended.trained}) == 10
    assert [point["round"] for point in points()] == [1] * 4 + [2] * 4 + [3] * 2
    assert "batch 3 of 3: the best by loss is lr=" in capsys.readouterr().out
    assert sweep() == 0
    assert len(Pretended.trained) == 10
