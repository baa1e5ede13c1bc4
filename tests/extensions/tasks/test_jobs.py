"""Jobs that score tasks beside training: the scores of `titan-exp evaluate`, each once, whoever is killed."""

import io
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.config.composing import experiment, give_gpus
from tests.parity.runs import EVALUATE, PARAGRAPHS, Curve, train
from tests.ranks import run_ranks
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.cli.main import main
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.extensions.tasks import jobs, part
from titan_exp.extensions.tasks.jobs import Jobs, Request, report
from titan_exp.extensions.tasks.scores import evaluation_file
from titan_exp.launch.rank.rank_env import outer_launch
from titan_exp.rules import violations
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run import Run, read_history
from titan_exp.tracking.run_folder.run_folder import RunFolder

WORDS = ["training.steps=4", *EVALUATE.replace("every=6", "every=2").split(), "checkpoint=sync", "checkpoint.every=100"]
WORDS += ["data.validation_documents=8", "checkpoint.keep=1", "training.global_batch_size=4", *PARAGRAPHS]
ITEMS = 6
LIMIT = 60.0
"""Seconds for a job, on a busy machine."""


def toy(path: Path) -> Path:
    """Rendered requests of a task with three choices."""
    path.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {
            "request_type": "loglikelihood",
            "doc": {"query": f"q{item}", "choices": ["a", "b", "c"], "gold": item % 3},
            "request": {"context": f"def name{item}(self)", "continuation": f" return {'xyz'[choice] * (item + 1)}"},
            "idx": choice,
            "doc_id": item,
            "native_id": f"n{item}",
            "label": item % 3,
        }
        for item in range(ITEMS)
        for choice in range(3)
    ]
    (path / "requests.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = {"split": "test", "num_shots": 0, "primary_metric": "acc_raw"}
    (path / "config.json").write_text(json.dumps({"task_name": "toy", "task_config": config, "num_instances": ITEMS}))
    return path


def die_before_a_job() -> None:
    _killed(lambda step, whole: step == 3 or (whole(), False)[1])


def die_with_a_job() -> None:
    _killed(lambda step, whole: (whole(), step == 3)[1])


def _killed(ends: Callable[[int, Callable[[], object]], bool]) -> None:
    """Kill this rank where `ends` says so, which is given the step and what follows it."""
    look_at_once()
    whole = part.TaskJobs.after

    def after(self: part.TaskJobs, step: Any) -> None:
        if ends(step.step, lambda: whole(self, step)):
            os.kill(os.getpid(), signal.SIGKILL)

    part.TaskJobs.after = after


def look_at_once() -> None:
    part.LOOK_SECONDS = 0.0


def typed(*words: str) -> tuple[int, str]:
    """Exit code and output of a command, in a process of its own without checks of types."""
    return run_ranks(1, _typed, words)[0]


def _typed(words: Sequence[str]) -> tuple[int, str]:
    for name in outer_launch():
        del os.environ[name]
    with redirect_stdout(io.StringIO()) as printed:
        code = main(words)
    return code, printed.getvalue()


def until(condition: Callable[[], object], story: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, story()
        time.sleep(0.1)


def logs(path: Path) -> dict[str, list[str]]:
    return {log.stem: log.read_text().splitlines() for log in sorted(path.glob("tasks/requests/*.log"))}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("tasks") / "toy")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, task: Path) -> tuple[Path, Curve]:
    """A run that is killed before a job could start, and again with the job at work."""
    path = tmp_path_factory.mktemp("run")
    words = [*WORDS, f"evaluation.tasks=[{task}]", "evaluation.where=jobs"]
    for number, mutate in enumerate((die_before_a_job, die_with_a_job)):
        with pytest.raises(AssertionError, match="died"):
            train(path, *words, mutate=mutate)
        assert jobs_at_work(path) == number
    curve = train(path, *words, mutate=look_at_once)
    saved, waiting = CheckpointFolder(path / "checkpoints"), Jobs(RunFolder(path))
    assert set(waiting.open_steps()) <= set(saved.complete_steps()), "kept until they are scored"
    assert saved.complete_steps() == [2, 4], "more than checkpoint.keep"
    until(lambda: not waiting.open_steps() and not jobs_at_work(path), lambda: logs(path))
    return path, curve


def processes(path: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if jobs.HERE in words and str(path) in words and "sh" not in words:
            yield process


def jobs_at_work(path: Path) -> int:
    return len(list(processes(path)))


def test_a_killed_run_starts_one_job_for_each_evaluation(run: tuple[Path, Curve]):
    path, _ = run
    steps = [2, 4]
    names = [f"step-{step:08d}" for step in steps]
    assert logs(path) == {f"{name}": [f"step {int(name[5:])}: {path}/tasks/{name}.json"] for name in names}
    assert [row["step"] for row in read_metrics(path / "tasks.jsonl")] == steps
    assert CheckpointFolder(path / "checkpoints").complete_steps() == [4]
    assert not [*path.glob("checkpoints/*.keep")]


def test_a_job_scores_as_the_verb(run: tuple[Path, Curve], task: Path):
    path, _ = run
    code, said = typed("evaluate", str(path), "--tasks", str(task), "--json")
    found = json.loads(said)["tasks"]
    assert code == 0
    result = json.loads((path / "tasks" / "step-00000004.json").read_text())
    assert (result["step"], result["tasks"]) == (4, found)
    assert [*result] == ["step", "tokens", "tasks"]
    (name,) = found
    assert len(found[name]["ids"]) == ITEMS
    (*_, row) = read_metrics(path / "tasks.jsonl")
    metrics = {f"{name}/{metric}": one["value"] for metric, one in found[name]["metrics"].items()}
    means = {"bits_per_byte": metrics[f"{name}/bits_per_byte"]}
    means["acc_centered"] = pytest.approx((metrics[f"{name}/acc"] - 1 / 3) / (2 / 3))
    assert row == {"step": 4, "tokens": result["tokens"], **metrics, **means}
    shown = {f"tasks/{metric}": value for metric, value in row.items() if metric not in ("step", "tokens")}
    assert shown.items() <= Run(RunFolder(path)).last_values.items()
    (*_, row) = read_history(path)
    assert shown.items() <= row.items()
    assert row["loss"] == run[1].loss[-1]


def test_jobs_leave_no_trace_in_the_curve(run: tuple[Path, Curve], tmp_path: Path):
    plain = train(tmp_path, *WORDS)
    _, curve = run
    assert curve.loss == plain.loss
    assert all(curve.weights[name].equal(weight) for name, weight in plain.weights.items())


def test_a_killed_job_is_named_and_scored_on_request(
    run: tuple[Path, Curve], task: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    path, _ = run
    folder, late = RunFolder(path), []
    asked, configured = Jobs(folder), load_experiment(path / "config.yaml")
    monkeypatch.setattr(part.dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(part, "LOOK_SECONDS", 0.0)
    seen: Any = SimpleNamespace(writes=True, late=lambda axis, row: late.append((axis, row[axis])))
    beside = part.TaskJobs(configured)
    beside.begin(SimpleNamespace(report=seen, folder=folder))  # type: ignore[arg-type]
    asked.ask(Request(4, 1, (str(task),), 2, {"toy": "another version"}, 1))
    beside._look()
    until(lambda: jobs_at_work(path) == 1)  # the shell has forked it
    beside._look()
    (process,) = processes(path)  # one that is alive is not started again
    process.kill()
    until(lambda: asked.waiting("local"))
    beside._look()
    beside._look()
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert str(asked.log(4)) in said
    assert f"titan-exp evaluate {path} --tasks" in said
    assert not jobs_at_work(path)
    assert not late, "the first row of an attempt comes before"
    code, said = typed("show", str(path))
    assert code == 0
    shown = said.splitlines()[-2:]
    assert [line.partition(";")[0] for line in shown[:1]] == ["tasks of step 4: not scored"]
    assert typed(*shown[-1].split()[1:]) == (0, f"step 4: {evaluation_file(asked.folder.path, 4)}\n")
    assert not asked.open_steps()
    assert not [*report(configured, path)]
    beside._logged = True
    beside._look()
    beside._look()
    assert late == [("tasks/step", step) for step in (2, 4)]
    assert typed("evaluate", str(path), "--tasks") == (2, "")


JOBS = ["evaluation.where=jobs", "cluster.device=cpu"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], ""),
        (["checkpoint=none"], "this run saves none"),
        (["checkpoint=none", "evaluation.where=training"], ""),
        (["+evaluation.job.partitoin=small"], "partition"),
        (["+evaluation.job.time_limit=[1]"], "time_limit"),
        (["cluster.kind=my.Executor"], "starts no jobs of its own"),
        (["cluster.device=cuda"], "a GPU of its own"),
        (["cluster.device=cuda", "+evaluation.job.device=cpu"], ""),
        (["cluster.device=cuda", "+evaluation.job.environment.CUDA_VISIBLE_DEVICES='7'"], ""),
    ],
)
def test_refusals(words: Sequence[str], reason: str, task: Path, monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 8)
    whole = experiment(*JOBS, f"evaluation.tasks=[{task}]", "cluster.gpus_per_node=1", *words)
    found = [str(one) for one in violations(whole) if one.field.startswith("evaluation.")]
    assert len(found) == bool(reason), found
    assert reason in "".join(found)
