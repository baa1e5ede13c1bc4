"""Validation sets: the losses of their documents in every layout, beside a curve that they do not touch."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.runs import PARAGRAPHS, Curve, train
from titan_exp.cli.main import main
from titan_exp.config.data_files import Manifest, read_manifest
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.data_sets import validation_documents, validation_metrics
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.data.source_check import training_subset, validation_subset
from titan_exp.data.sources.base import RandomAccessSource, build_source
from titan_exp.rules import check

RUN = [
    *PARAGRAPHS,
    "training.steps=4",
    "evaluation.every=2",
    "data.validation_fraction=0.1",
    "data.validation_documents=4",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"Text {number}: é über alles. " * (20 + 7 * number))
    return folder


def sets(corpus: Path) -> list[str]:
    short = f"{{data:{{source:text,paths:[{corpus}],validation_documents:4}},seq_len:32}}"
    whole = f"{{data:{{source:text,paths:[{corpus}]}}}}"
    return [f"+evaluation.sets.short={short}", f"+evaluation.sets.whole={whole}"]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Curve:
    return train(tmp_path_factory.mktemp("one"), *RUN, *sets(corpus), "checkpoint=sync")


def test_the_curve_is_that_of_a_run_without(one: Curve, tmp_path: Path):
    plain = train(tmp_path, *RUN, "evaluation.every=0")
    assert plain.loss == one.loss
    assert all(plain.weights[name].equal(weight) for name, weight in one.weights.items())


def test_a_set_is_what_evaluate_measures(one: Curve, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(tmp_path / "run", *RUN, *sets(corpus), "checkpoint=sync")
    for name, words in (("whole", []), ("short", ["training.seq_len=32", "data.validation_documents=4"])):
        given = ["data=text", f"data.paths=[{corpus}]", "data.document=paragraph", "split=all", *words]
        assert main(["evaluate", str(tmp_path / "run"), *given, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert one.rows[-1][f"validation_loss/{name}"] == pytest.approx(found["loss"], rel=1e-6)
    row = one.rows[-1]
    # Bytes are the text's: every token but the ends of documents is one.
    text = sum(len(path.read_bytes().strip()) for path in corpus.iterdir())
    nats = row["validation_loss/whole"] * (text + 6 - 1)
    assert row["validation_bits_per_byte/whole"] == pytest.approx(nats / math.log(2) / (text - 1), rel=1e-6)
    assert row["validation_loss"] not in (row["validation_loss/whole"], row["validation_loss/short"])


@pytest.mark.parametrize(
    "layout",
    ["parallelism.dp_shard=2", "parallelism.pp=2 training.micro_batch_size=2", "parallelism.tp=2 parallelism.cp=2"],
)
def test_every_layout_measures_the_same(one: Curve, corpus: Path, tmp_path: Path, layout: str):
    given = sets(corpus) if "dp" in layout else sets(corpus)[1:]
    found = train(tmp_path, *RUN, *given, *layout.split())
    for row, expected in zip(found.rows, one.rows, strict=True):
        for name in ("validation_loss", "validation_loss/whole", "validation_bits_per_byte/whole"):
            assert (name in row) == (name in expected)
            assert row.get(name, 0) == pytest.approx(expected.get(name, 0), rel=5e-6)


def test_logged_metrics_are_known_before(one: Curve, corpus: Path):
    found = validation_metrics(to_experiment(compose([*RUN, *sets(corpus)])))
    assert found is not None
    assert {name for name in one.rows[-1] if name.startswith("validation")} == {*found}


@pytest.fixture(scope="module")
def stores(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """Two stores of the corpus, whose tokens are the bytes of the text and the ends of documents."""
    folder = tmp_path_factory.mktemp("stores")
    for number, name in enumerate(("even", "odd")):
        files = ",".join(map(str, sorted(corpus.iterdir())[number::2]))
        words = [f"data.paths=[{files}]", "data.validation_fraction=0.5", f"out={folder / name}", "workers=1"]
        assert main(["tokenize", "data=text", *words]) == 0
    return [read_manifest(folder / name) for name in ("even", "odd")]


def test_stores_have_bits_per_byte_of_their_text(stores: list[Manifest], tmp_path: Path):
    """In a mixture, and in all splits of a set."""
    even, odd = stores
    words = [word for word in RUN if not word.startswith("data")] + ["data=tokens", "training.seq_len=32"]
    words += [f"data.paths=[{even.path},{odd.path}]", f"+evaluation.sets.whole={{data:{{paths:[{even.path}]}}}}"]
    row = train(tmp_path / "run", *words).rows[-1]
    logged = validation_metrics(to_experiment(compose(words)))
    assert logged is not None
    assert {name for name in row if name.startswith("validation")} == {*logged}
    measured = [("even", even, "validation"), ("odd", odd, "validation")]
    measured += [(f"whole/{split}", even, split) for split in ("train", "validation")]
    for name, store, split in measured:
        text = store.tokens[split] - store.documents[split]
        nats = row[f"validation_loss/{name}"] * (store.tokens[split] - 1)
        assert row[f"validation_bits_per_byte/{name}"] == pytest.approx(nats / math.log(2) / (text - 1), rel=1e-6)
    total = sum(store.tokens["validation"] - store.documents["validation"] - 1 for store in (even, odd))
    bits = row["validation_loss"] * row["validation_tokens"] / math.log(2)
    assert row["validation_bits_per_byte"] == pytest.approx(bits / total, rel=1e-6)


def test_documents_of_a_set_are_in_no_training_data_with_equal_names(corpus: Path, tmp_path: Path):
    """A corpus without some of its documents holds out those that the whole one does."""
    kept = sorted(corpus.iterdir())[1:]
    for path in kept:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = to_experiment(compose(["data=text", f"data.paths=[{corpus}]"])).data
    source = build_source(data)
    assert isinstance(source, RandomAccessSource)
    held_out = validation_subset(source, 0.4)
    texts = {held_out[number] for number in range(len(held_out))}
    for folder in (corpus, tmp_path):
        source = build_source(replace(data, paths=(str(folder),)))
        assert isinstance(source, RandomAccessSource)
        trained = training_subset(source, 0.4)
        assert texts.isdisjoint(trained[number] for number in range(len(trained)))


REFUSED = [
    ("{data:{source:text,paths:[nowhere]}}", "evaluation.sets.mine.data.paths", "no such file"),
    ("{data:{tokenizer:other}}", "evaluation.sets.mine.data.tokenizer", "leave it out"),
    ("{data:{sauce:text}}", "evaluation.sets.mine.data.sauce", "source"),
    ("{data:{},seq_len:4096}", "evaluation.sets.mine.seq_len", "leave it out"),
    ("{data:{},seq_len:32} parallelism.pp=2", "evaluation.sets.mine.seq_len", "pp=2"),
    ("{data:{}} data=tokens data.paths=[mine,other]", "evaluation.sets.mine", "which logs validation_loss/mine"),
    ("{data:{}} data=tokens data.paths=[mine/a,other/a]", "evaluation.sets.mine", "which logs validation_loss/mine/a"),
    ("{data:{validation_fraction:0.9}} data.source=none", "data.source", "none"),
]


@pytest.mark.parametrize(("given", "key", "said"), REFUSED)
def test_wrong_sets_are_refused_under_their_keys(given: str, key: str, said: str):
    with pytest.raises(UserError) as caught:
        check(to_experiment(compose(f"+evaluation.sets.mine={given}".split(" "))))
    assert any(violation.field == key and said in str(violation) for violation in caught.value.violations), str(
        caught.value
    )


def test_tokens_between_evaluations(tmp_path: Path):
    rows = train(tmp_path, *RUN, "training.steps=6", "evaluation.every_tokens=1200").rows
    # Steps of 8 x 64 tokens: 512, 1024, 1536 ...
    assert [row["step"] for row in rows if "validation_loss" in row] == [3, 5, 6]


def test_documents_of_a_metric(stores: list[Manifest]):  # 0.2 s
    """Those of the set, of one of its stores, or of a store of the run's mixture."""
    even, odd = stores
    words = ["data=tokens", f"data.paths=[{even.path},{odd.path}]"]
    words += [f"+evaluation.sets.{name}={{data:{{paths:[{paths}]}}}}"
              for name, paths in (("all", f"{odd.path},{even.path}"), ("one", odd.path))]  # fmt: skip
    run = to_experiment(compose(words))
    whole = (str(even.path), str(odd.path))
    for metric, group, paths, split in (
        ("validation_loss", "data", whole, None),
        ("validation_loss/odd", "data", whole[1], None),
        ("validation_loss/all", "evaluation.sets.all.data", whole[::-1], None),
        ("validation_loss/all/odd train", "evaluation.sets.all.data", whole[1], "train"),
        ("validation_bits_per_byte/one/validation", "evaluation.sets.one.data", whole[1], "validation"),
    ):
        found = validation_documents(run, metric)
        assert (found[0], found[1]["paths"], found[1]["validation_split"]) == (group, paths, split)
        assert ("tokenizer" in found[1]) == metric.startswith("validation_loss")
