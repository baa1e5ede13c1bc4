"""The lm-evaluation-harness, if installed, on our model: the same table as ours, item by item."""

import json
import random
from pathlib import Path

import pytest
import yaml

from tests.parity.runs import train
from titan_exp.cli.main import main

pytestmark = [
    pytest.mark.slow,
    # What other projects warn of is theirs.
    pytest.mark.filterwarnings("ignore"),
]
WORDS = ["red", "blue", "é", "über", "tree", "naïve", "def", "данные", "self", "日本", "import", "value"]
"""Words whose characters have one to three bytes, so that lengths in characters and in bytes differ."""
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "Q: {{q}}\nA:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "gold",
    "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")],
}
TASKS = {
    "zero": CHOICES,
    "shots": {**CHOICES, "fewshot_split": "train", "num_fewshot": 2, "description": "Answer.\n\n"},
    "own_shots": {**CHOICES, "fewshot_split": "test", "num_fewshot": 3, "doc_to_choice": ["yes", "no", "it is"]},
    "spaces": {**CHOICES, "doc_to_text": "{{q}}  ", "target_delimiter": ""},
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{' ' + choices[0]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "documents": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{q}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(0)
    for name, items in (("train", 12), ("test", 20)):
        lines = []
        for _ in range(items):
            question = " ".join(draw.choices(WORDS, k=draw.randint(2, 40)))
            lines.append({"q": question, "choices": draw.sample(WORDS, 3), "gold": draw.randrange(3)})
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", "test")}
    for name, values in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, **values}))
    return [str(folder / f"{name}.yaml") for name in TASKS]


@pytest.mark.parametrize("layout", ["", "parallelism.dp_shard=2"])
def test_both_give_the_same_scores(
    paths: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, layout: str
):
    pytest.importorskip("lm_eval", exc_type=ImportError)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    train(tmp_path / "run", "training.steps=6", "checkpoint=sync")
    found = []
    for backend in ([], ["backend=lm-eval"]):
        words = [*layout.split(), "--json", *backend]
        assert main(["evaluate", str(tmp_path / "run"), "--tasks", *paths, *words]) == 0
        found.append(json.loads(capfd.readouterr().out)["tasks"])
    ours, theirs = found
    hits = [
        [ours[name]["metrics"][f"acc_per_{unit}"]["items"] for unit in ("char", "byte")] for name in ("zero", "shots")
    ]
    assert any(by_char != by_byte for by_char, by_byte in hits)
    for name, values in TASKS.items():
        assert len(theirs[name]["metrics"]) == len(values["metric_list"])
        assert ours[name]["ids"] == theirs[name]["ids"]
        for metric, value in theirs[name]["metrics"].items():
            own = ours[name]["metrics"][metric]
            assert own["value"] == pytest.approx(value["value"], rel=1e-6), (name, metric)
            if metric.startswith("acc"):
                assert own["items"] == value["items"], (name, metric)


def test_a_backend_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    for words in (["backend=other"], ["--backend", "other"], ["--backend=other"]):
        assert main(["evaluate", "run", "--tasks", "a.yaml", *words]) == 2
        assert "backend=other: unknown choice\n    choose titan_exp or lm-eval" in capsys.readouterr().err
