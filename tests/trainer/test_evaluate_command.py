import json
import math
from pathlib import Path

import pytest

from tests.trainer.test_train import experiment, run
from titan_exp.checkpoint.convert import convert_command
from titan_exp.config.convert import to_yaml
from titan_exp.config.errors import UserError
from titan_exp.tracking.metrics_file import read_metrics
from titan_exp.trainer.evaluate_command import evaluate_command

SETTINGS = ("checkpoint.mode=sync", "training.evaluate_every=10", "data.validation_documents=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "name" / "id"
    path.mkdir(parents=True)
    run(path, *SETTINGS)
    (path / "config.yaml").write_text(to_yaml(experiment(*SETTINGS)))
    return path


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, float]:
    assert evaluate_command([str(word) for word in words]) == 0
    out = capsys.readouterr().out
    assert "perplexity" in out.splitlines()[1]
    return json.loads(out.splitlines()[-1])


def test_it_is_the_validation_loss_of_the_run(trained: Path, capsys: pytest.CaptureFixture[str]):
    row = read_metrics(trained / "metrics.jsonl")[-1]
    found = evaluated(capsys, trained)
    assert found["loss"] == pytest.approx(row["validation_loss"], rel=1e-6)
    assert found["tokens"] == row["validation_tokens"]
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_an_export_has_the_same_loss(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    expected = evaluated(capsys, trained)
    convert_command([str(trained), str(tmp_path / "export")])
    capsys.readouterr()
    words = ("training.seq_len=64", "data.validation_documents=2")
    assert evaluated(capsys, tmp_path / "export", *words)["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_other_data(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "text.txt").write_text("\n".join(f"line {number} of a text" for number in range(400)))
    words = ["data=text", f"data.paths=[{tmp_path}/text.txt]", "data.document=line", "data.validation_fraction=0.5"]
    found = evaluated(capsys, trained, *words)
    assert found["data"] == "text"
    assert 2000 < found["tokens"] < 6000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "titan-exp evaluate RUN"),
        (["data=texd"], "did you mean text?"),
        (["data.pahts=x"], "did you mean data.paths?"),
        (["optimizer.lr=1"], "evaluate has no such key"),
        (["model=llama3_8b"], "evaluate has no such key"),
        (["step=x"], "the number of a step"),
        (["step=3"], "checkpoints of steps"),
        (["training.seq_len=100000"], "longer than the model's context"),
        (["data=text"], "data.paths"),
    ],
)
def test_wrong_words(words: list[str], says: str, trained: Path):
    with pytest.raises(UserError) as caught:
        evaluate_command([str(trained), *words] if words else [])
    assert says in str(caught.value)
