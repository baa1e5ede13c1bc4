"""Tasks while training, and by the verb: the same scores of every item, and no trace in the curve."""

import json
import shutil
from pathlib import Path

import pytest

from tests.extensions.tasks.test_formats import olmo, request
from tests.parity.runs import PARAGRAPHS, Curve, train
from titan_exp.cli.main import main
from titan_exp.extensions.tasks.jobs import Jobs, Request
from titan_exp.extensions.tasks.tasks import read_all
from titan_exp.tracking.run_folder.run_folder import RunFolder

NIGHT = pytest.mark.night

RUN = [*PARAGRAPHS, "training.steps=4", "evaluation.every=2", "data.validation_fraction=0.1"]
RUN += ["data.validation_documents=4", "checkpoint=sync"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tasks") / "mine" / "easy"
    requests = [request(document, choice, document % 2) for document in range(9) for choice in (0, 1)]
    return str(olmo(folder, requests, num_instances=9))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, tasks: str) -> tuple[Path, Curve]:
    path = tmp_path_factory.mktemp("one")
    return path, train(path, *RUN, f"evaluation.tasks=[{tasks}]")


def items(path: Path, step: int) -> dict:
    return json.loads((path / "tasks" / f"step-{step:08d}.json").read_text())


def test_rows_and_files_have_the_scores(one: tuple[Path, Curve]):
    path, curve = one
    assert sorted(file.name for file in (path / "tasks").iterdir()) == ["step-00000002.json", "step-00000004.json"]
    for row in curve.rows:
        found = {name: value for name, value in row.items() if name.startswith("tasks/")}
        assert bool(found) == (row["step"] in (2, 4))
    (task,) = items(path, 4)["tasks"].values()
    assert curve.rows[-1]["tasks/mine_easy/bits_per_byte"] == task["metrics"]["bits_per_byte"]["value"]
    assert len(task["metrics"]["acc"]["items"]) == 9
    assert 0 < sum(task["metrics"]["acc"]["items"]) < 9


def test_the_curve_is_that_of_a_run_without(one: tuple[Path, Curve], tmp_path: Path):
    plain = train(tmp_path, *RUN)
    assert plain.loss == one[1].loss
    assert all(plain.weights[name].equal(weight) for name, weight in one[1].weights.items())


@pytest.mark.parametrize("layout", ["parallelism.dp_shard=2", "parallelism.pp=2 training.micro_batch_size=4"])
def test_a_layout_has_the_same_items(one: tuple[Path, Curve], tasks: str, tmp_path: Path, layout: str):
    train(tmp_path, *RUN, f"evaluation.tasks=[{tasks}]", *layout.split())
    found, expected = items(tmp_path, 4)["tasks"]["mine_easy"], items(one[0], 4)["tasks"]["mine_easy"]
    assert found["ids"] == expected["ids"]
    assert found["metrics"]["acc"]["items"] == expected["metrics"]["acc"]["items"]
    bits = (each["metrics"]["bits_per_byte"]["items"] for each in (found, expected))
    assert next(bits) == pytest.approx(next(bits), rel=1e-4)


def test_the_verb_scores_the_checkpoint(one: tuple[Path, Curve], tasks: str, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", str(one[0]), "--tasks", tasks, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]["mine_easy"]
    expected = items(one[0], 4)["tasks"]["mine_easy"]
    assert found["metrics"]["acc"] == expected["metrics"]["acc"]
    for metric, value in found["metrics"].items():
        assert value["items"] == pytest.approx(expected["metrics"][metric]["items"], rel=1e-5, abs=1e-7)
    assert main(["evaluate", str(one[0]), "--tasks", tasks]) == 0
    assert "bits_per_byte" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["parallelism.dp_shard=1", pytest.param("parallelism.dp_shard=2", marks=NIGHT)])
def test_the_verb_and_a_job_score_in_the_precision_of_the_run(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
):
    train(tmp_path, *RUN, "training.mixed_precision=bf16", f"evaluation.tasks=[{tasks}]")
    expected = items(tmp_path, 4)["tasks"]["mine_easy"]["metrics"]["bits_per_byte"]["items"]
    found = []
    for precision in ("bf16", "fp32"):
        words = ["evaluate", str(tmp_path), "--tasks", tasks, "--json", layout, f"training.mixed_precision={precision}"]
        assert main(words) == 0
        found.append(json.loads(capsys.readouterr().out)["tasks"]["mine_easy"]["metrics"]["bits_per_byte"]["items"])
    errors = [max(abs(a - b) for a, b in zip(one, expected, strict=True)) for one in found]
    assert errors[0] < errors[1] / 10
    jobs = Jobs(RunFolder(tmp_path))
    shutil.rmtree(tmp_path / "tasks")
    digests = {task.name: task.digest for task in read_all([tasks])}
    jobs._write(Request(4, 0, (tasks,), None, digests, 1), trust=False)
    scored = items(tmp_path, 4)["tasks"]["mine_easy"]["metrics"]["bits_per_byte"]["items"]
    assert max(abs(a - b) for a, b in zip(scored, expected, strict=True)) < errors[1] / 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "nowhere"], "There is no nowhere. Give a file or folder that exists."),
        (["--tasks"], "has no request for scores of tasks. Give the tasks: titan-exp evaluate"),
        (["--tasks", "TASKS", "TASKS"], "both hold a task mine_easy"),
        (["--tasks", "TASKS", "evaluation.task_items=some"], "task_items=some: must be a whole number"),
    ],
)
def test_wrong_words(
    one: tuple[Path, Curve], tasks: str, capsys: pytest.CaptureFixture[str], words: list[str], said: str
):
    assert main(["evaluate", str(one[0]), *(tasks if word == "TASKS" else word for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_run_with_a_missing_task_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["train", "model=llama_debug", f"paths.runs={tmp_path}", "evaluation.tasks=[nowhere]", "cluster.device=cpu"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "evaluation.tasks=[nowhere]: There is no nowhere" in said
    assert not list(tmp_path.iterdir())
