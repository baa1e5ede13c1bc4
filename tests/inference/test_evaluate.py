import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.stores import make
from tests.parity.runs import PARAGRAPHS
from tests.ranks import run_ranks
from tests.trainer.test_trainer import experiment, run
from titan_exp.cli.convert import run as convert_command
from titan_exp.cli.main import main
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.inference.evaluate import evaluate_command
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics

HELD_OUT = (*PARAGRAPHS, "data.validation_fraction=0.1", "data.validation_documents=40")
SETTINGS = ("checkpoint.mode=sync", "optimizer.lr=2e-2", "evaluation.every=10", *HELD_OUT)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "name" / "id"
    path.mkdir(parents=True)
    run(path, *SETTINGS)
    (path / "config.yaml").write_text(to_yaml(experiment(*SETTINGS)))
    return path


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert evaluate_command([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_table_for_people(trained: Path, capsys: pytest.CaptureFixture[str]):
    assert evaluate_command([str(trained)]) == 0
    assert "perplexity" in capsys.readouterr().out.splitlines()[1]


def test_evaluate_matches_the_validation_loss_of_the_run(trained: Path, capsys: pytest.CaptureFixture[str]):
    row = read_metrics(trained / "metrics.jsonl")[-1]
    found = evaluated(capsys, trained)
    assert found["loss"] == pytest.approx(row["validation_loss"], rel=1e-6)
    assert found["tokens"] == row["validation_tokens"]
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_a_run_is_found_by_its_label_in_a_folder_of_runs(trained: Path, capsys: pytest.CaptureFixture[str]):
    """The key comes before or after the name, and is none of the evaluation's own."""
    runs, loss = f"paths.runs={trained.parent.parent}", evaluated(capsys, trained)["loss"]
    for words in (["name/id", runs], [runs, "name/id"]):
        assert main(["evaluate", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["loss"] == loss
    assert main(["evaluate", "name/id", f"paths.runs={trained}"]) == 2
    assert "name/id does not exist" in capsys.readouterr().err


def test_a_conversion_for_a_program(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    target = tmp_path / "export"
    assert main(["convert", str(trained), str(target), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["source_format"], found["format"], found["target"]) == ("dcp", "huggingface", str(target))
    assert 0 < found["bytes"] <= sum(path.stat().st_size for path in target.glob("*.safetensors"))


@pytest.mark.night
def test_an_export_has_the_same_loss(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    expected = evaluated(capsys, trained)
    convert_command([str(trained), str(tmp_path / "export")])
    capsys.readouterr()
    words = ("training.seq_len=64", *HELD_OUT)
    assert evaluated(capsys, tmp_path / "export", *words)["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_other_data(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "text.txt").write_text("\n".join(f"line {number} of a text" for number in range(400)))
    words = ["data=text", f"data.paths=[{tmp_path}/text.txt]", "data.document=line", "data.validation_fraction=0.5"]
    found = evaluated(capsys, trained, *words)
    assert found["data"] == "text"
    assert 2000 < found["tokens"] < 6000


def test_split_all_evaluates_every_document(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "text.txt").write_text("\n".join(f"line {number} of a text" for number in range(400)))
    words = ["data=text", f"data.paths=[{tmp_path}/text.txt]", "data.document=line", "data.validation_fraction=0.5"]
    part, whole = evaluated(capsys, trained, *words), evaluated(capsys, trained, *words, "split=all")
    # A document's first token is predicted from the end of the one before, but for the very first.
    assert whole["tokens"] == sum(len(f"line {number} of a text") + 1 for number in range(400)) - 1
    assert part["tokens"] < 0.7 * whole["tokens"]
    assert evaluated(capsys, trained, *words, "split=all", "data.validation_documents=3")["tokens"] == 3 * 17 - 1


def test_split_all_of_one_document(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "text.txt").write_text("one text and no more of them")
    words = ["data=text", f"data.paths=[{tmp_path}/text.txt]", "split=all"]
    assert evaluated(capsys, trained, *words)["tokens"] == 28


@pytest.mark.night
def test_both_splits_of_a_store(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    manifest = make(tmp_path / "store")
    capsys.readouterr()
    words = ["data=tokens", f"data.paths=[{manifest.path}]", "data.tokenizer=store"]
    assert evaluated(capsys, trained, *words)["tokens"] == manifest.tokens["validation"] - 1
    assert evaluated(capsys, trained, *words, "split=all")["tokens"] == sum(manifest.tokens.values()) - 2


def test_a_longer_context_is_declared(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(30)))
    words = [trained, "data=text", f"data.paths=[{tmp_path}/text.txt]", "split=all", "training.seq_len=600"]
    plain = evaluated(capsys, *words, "model.context=600")
    words.append("model.rope.factor=2")
    linear, yarn = (evaluated(capsys, *words, f"model.rope.scaling={scaling}") for scaling in ("linear", "yarn"))
    assert plain["tokens"] == linear["tokens"] == yarn["tokens"]
    assert len({plain["loss"], linear["loss"], yarn["loss"]}) == 3


@pytest.mark.parametrize(
    "layout",
    [
        "parallelism.pp=2",
        pytest.param("parallelism.tp=2 parallelism.dp_shard=2", marks=pytest.mark.night),
        pytest.param("parallelism.cp=2", marks=pytest.mark.night),
        pytest.param("parallelism.tp=4", marks=pytest.mark.night),
    ],
)
def test_every_layout_has_the_same_loss(trained: Path, capsys: pytest.CaptureFixture[str], layout: str, tmp_path: Path):
    (tmp_path / "text.txt").write_text("\n".join(f"line {number} of a text" for number in range(200)))
    words = ["data=text", f"data.paths=[{tmp_path}/text.txt]", "data.document=line", "data.validation_fraction=0.5"]
    expected = evaluated(capsys, trained, *words)
    ranks = 4 if "tp" in layout else 2  # 2 s
    found = run_ranks(ranks, evaluate_on_rank, str(trained), [*words, *layout.split()])[0]
    assert found["tokens"] == expected["tokens"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def evaluate_on_rank(path: str, words: list[str]) -> dict[str, Any]:
    import dataclasses

    from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
    from titan_exp.inference.evaluate import Evaluation, evaluate_source, evaluation_experiment
    from titan_exp.parallel.mesh import build_mesh
    from titan_exp.trainer.distributed import joined_process_group

    source, device = open_checkpoint(Path(path)), torch.device("cpu")
    experiment = evaluation_experiment(Path(path), source, words)
    with joined_process_group(device):
        mesh = build_mesh(experiment.parallelism, device)
        found = evaluate_source(source, experiment, mesh)
    read = Evaluation.from_json(json.loads(json.dumps(dataclasses.asdict(found))))
    assert read == found
    return vars(read.result)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "titan-exp evaluate RUN"),
        (["data=texd"], "did you mean text?"),
        (["data.pahts=x"], "did you mean data.paths?"),
        (["optimizer.lr=1"], "evaluate does not take this key"),
        (["model=llama3_8b"], "evaluate does not take this key"),
        (["step=x"], "step=x"),
        (["step=3"], "checkpoints of steps"),
        (["training.seq_len=1024"], "512 or less, or model.rope.scaling=yarn model.rope.factor=2"),
        (["training.seq_len=1024", "model.rope.scaling=linear", "model.rope.factor=1.5"], "model.rope.factor=3"),
        (["model.rope.factor=2"], "model.rope.scaling=llama3"),
        (["data=text"], "data.paths"),
        (["split=some"], "held_out or all"),
        (["parallelism.tp=3"], "parallelism.tp=1, 2 or 4"),
        (["parallelism.pp=64"], "cuts the model into 64 stages"),
    ],
)
def test_invalid_arguments(words: list[str], says: str, trained: Path):
    with pytest.raises(UserError) as caught:
        evaluate_command([str(trained), *words] if words else [])
    assert says in str(caught.value)
