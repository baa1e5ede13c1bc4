"""Rules about token stores, over stores that are nothing but a manifest and files of the right sizes."""

import json
from pathlib import Path

import pytest

from tests.config.composing import experiment, give_gpus
from titan_exp.config.data_files import store_names
from titan_exp.config.errors.user_error import Violation
from titan_exp.rules import violations

BASE = (
    "data=tokens",
    "training.seq_len=256",
    "training.steps=600",
    "model.vocab_size=320",
    "evaluation.every=200",
)


@pytest.fixture(autouse=True)
def in_a_folder_of_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    give_gpus(monkeypatch, 0)
    store("a")
    store("b")
    store("small", train=256)
    store("unevaluated", validation=0)
    store("llama", tokenizer="tokenizer.json 1", vocab_size=128_256)
    store("cut")
    Path("cut/train-0.tokens").write_bytes(b"")
    Path("begun/unfinished").mkdir(parents=True)


def store(name: str, *, train: int = 1000, validation: int = 50, tokenizer: str = "bytes", vocab_size: int = 257):
    Path(name).mkdir()
    splits = {}
    for split, tokens in (("train", train), ("validation", validation)):
        splits[split] = []
        if tokens:
            Path(name, f"{split}-0.tokens").write_bytes(bytes(2 * tokens))
            Path(name, f"{split}-0.documents").write_bytes(bytes(8))
            splits[split].append({"name": f"{split}-0", "tokens": tokens, "documents": 1, "checksums": {}})
    described = {
        "format": "titan_exp token store",
        "version": 1,
        "source": "s",
        "fingerprint": name,
        "files": {},
        "tokenizer": {"fingerprint": tokenizer, "vocab_size": vocab_size, "end_of_text": 256},
        "token_bytes": 2,
        "splits": splits,
    }
    Path(name, "manifest.json").write_text(json.dumps(described))


def broken(*overrides: str) -> list[Violation]:
    return violations(experiment(*BASE, *overrides))


@pytest.mark.parametrize(
    ("overrides", "field", "remedy"),
    [
        (["data.paths=[a]"], "", ""),
        (["data.paths=[a,b]"], "", ""),
        (["data.paths=[a,b]", "data.weights=[1,2.5]"], "", ""),
        ([], "data.paths", "data.paths='[stores/mine]'"),
        (["data.paths=[nowhere]"], "data.paths", "titan-exp tokenize"),
        (["data.paths=[begun]"], "data.paths", "run the same titan-exp tokenize command again"),
        (["data.paths=[cut]"], "data.paths", "titan-exp tokenize check=cut"),
        (["data.paths=[a,llama]", "model.vocab_size=128256"], "data.paths", "stores of one"),
        (["data.paths=[llama]"], "model.vocab_size", "model.vocab_size=128256"),
        (["data.paths=[llama]", "model.vocab_size=128256"], "", ""),
        (["data.paths=[small]"], "training.seq_len", "training.seq_len=255 or less"),
        (["data.paths=[small]", "training.seq_len=255"], "", ""),
        (["data.paths=[a,unevaluated]"], "evaluation.every", "into a new store"),
        (["data.paths=[a,unevaluated]", "evaluation.every=0"], "", ""),
        (["data.paths=[a,b]", "data.weights=[1]"], "data.weights", "data.weights='[1,1]'"),
        (["data.paths=[a,a]"], "data.paths", "a larger weight"),
        (["data.paths=[a]", "data.tokenizer=bytes"], "data.tokenizer", "data.tokenizer=store"),
        (["data.paths=[a]", "data.validation_fraction=0.1"], "data.validation_fraction", "into a new store"),
        (["data.paths=[a]", "data.dataset=c4"], "data.dataset", "data=huggingface"),
        (["data.paths=[a]", "data.streaming=true"], "data.streaming", "data=huggingface"),
        (["data=python_stdlib", "data.weights=[1]"], "data.weights", "mix the stores"),
        (["data=python_stdlib", "data.tokenizer=store"], "data.tokenizer", "data.tokenizer=bytes"),
        (["data.paths=[a]", "data.preview=601"], "data.preview", "data.preview=600"),
        (["data.paths=[a]", "data.preview=600"], "", ""),
        (["data.paths=[a]", "parallelism.dp_replicate=3", "training.global_batch_size=18"], "", ""),
    ],
)
def test_rules(overrides: list[str], field: str, remedy: str):
    found = broken(*overrides)
    assert [violation.field for violation in found] == ([field] if field else []), [
        str(violation) for violation in found
    ]
    assert all(remedy in violation.remedy for violation in found)


def test_names_tell_stores_apart():
    assert store_names(["stores/a", "stores/b"]) == ["a", "b"]
    assert store_names(["x/code/v1", "y/web/v1/"]) == ["code/v1", "web/v1"]
    assert store_names(["one"]) == ["one"]
