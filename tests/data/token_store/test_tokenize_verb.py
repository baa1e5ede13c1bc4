"""Tokenization: identical stores after kills and with any number of workers; error messages."""

import errno
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.corpora import experiment
from tests.data.store_sources import STREAM, TEXTS, text
from tests.data.stores import content, make, over
from titan_exp.cli.tokenize import TokenizeOptions, make_store, options_among
from titan_exp.config.data_files import UNFINISHED, Manifest, read_manifest
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.build_store import PartTokenizer
from titan_exp.data.sample_store import TEMPORARY_SUFFIX, AtomicFile
from titan_exp.data.source_check import unit_hashes
from titan_exp.data.tokenizers import build_tokenizer
from titan_exp.data.validation_loader import ValidationLoader

REPOSITORY = Path(__file__).parents[3]


def documents(manifest: Manifest, split: str) -> list[str]:
    """Texts of a split, read independently of the reader."""
    found = []
    for shard in manifest.splits[split]:
        tokens = np.fromfile(manifest.path / f"{shard.name}.tokens", "<u2")
        begins = np.fromfile(manifest.path / f"{shard.name}.documents", "<u8").tolist()
        assert (len(tokens), len(begins), begins[0]) == (shard.numbers["tokens"], shard.numbers["documents"], 0)
        for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
            assert tokens[end - 1] == 256
            found.append(bytes(tokens[begin : end - 1].tolist()).decode())
    return found


def test_a_store_holds_every_document_once_in_order(tmp_path: Path):
    manifest = make(tmp_path / "store")
    held_out = unit_hashes(range(60)) < 0.2  # type: ignore[arg-type]  # only its length counts
    for split, wanted in (("train", ~held_out), ("validation", held_out)):
        expected = [text(number) for number in np.flatnonzero(wanted).tolist() if text(number)]
        assert documents(manifest, split) == expected
        assert manifest.documents[split] == len(expected)
        assert manifest.tokens[split] == sum(len(document) + 1 for document in expected)
    assert len(manifest.splits["train"]) > 4
    assert not (manifest.path / UNFINISHED).exists()


def test_shuffle_permutes_the_documents(tmp_path: Path):
    """Same documents and splits for every number of processes, another order for each seed."""
    plain = make(tmp_path / "plain")
    orders = {"plain": documents(plain, "train")}
    for name, seed, workers, parts in (("one", 1, 1, 4), ("again", 1, 2, 4), ("two", 2, 1, 4)):
        run = experiment(source=TEXTS, validation_fraction=0.2)
        made = TokenizeOptions(str(tmp_path / name), workers=workers, parts=parts, shard_tokens=400, shuffle=seed)
        assert make_store(made, run) == 0
        manifest = read_manifest(tmp_path / name)
        orders[name] = documents(manifest, "train")
        assert sorted(orders[name]) == sorted(orders["plain"])
        assert sorted(documents(manifest, "validation")) == sorted(documents(plain, "validation"))
    assert orders["one"] == orders["again"]
    assert len({tuple(order) for order in orders.values()}) == 3
    neighbours = set(zip(orders["plain"], orders["plain"][1:], strict=False))
    assert len(neighbours & set(zip(orders["one"], orders["one"][1:], strict=False))) < 8
    with pytest.raises(UserError, match=r"shuffle=1: .*stream"):
        make_store(TokenizeOptions(str(tmp_path / "stream"), workers=1, shuffle=1), experiment(source=STREAM))
    with pytest.raises(UserError, match="began with shuffle 1, and you typed 2"):
        make_store(TokenizeOptions(str(tmp_path / "one"), workers=1, parts=4, shard_tokens=400, shuffle=2), run)


def test_a_stream_holds_out_the_documents_that_training_holds_out(tmp_path: Path):
    from titan_exp.config.data_files import unit_hash

    manifest = make(tmp_path / "store", source=STREAM)
    texts = [text(number) for number in range(60) if text(number)]
    assert documents(manifest, "train") == [document for document in texts if unit_hash(document) >= 0.2]
    assert documents(manifest, "validation") == [document for document in texts if unit_hash(document) < 0.2]


@pytest.mark.parametrize("source", [TEXTS, STREAM])
def test_a_store_does_not_depend_on_the_number_of_workers(source: str, tmp_path: Path):
    make(tmp_path / "one", source=source)
    make(tmp_path / "three", source=source, workers=3)
    assert content(tmp_path / "one") == content(tmp_path / "three")


PROGRAM = """
import signal, sys
from titan_exp.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background may have switched off
sys.exit(main())
"""


def command(out: Path, source: str, workers: int, options: str) -> subprocess.CompletedProcess[str]:
    words = [f"data.source={source}", "data.validation_fraction=0.2", f"+data.options={{{options}}}"]
    words += [f"out={out}", f"workers={workers}", "parts=4", "shard_tokens=100"]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, "tokenize", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("source", "at", "workers", "victim"),
    [
        pytest.param(TEXTS, 0, 1, "", marks=pytest.mark.night),
        pytest.param(TEXTS, 41, 1, "", marks=pytest.mark.night),
        pytest.param(STREAM, 33, 1, "", marks=pytest.mark.night),
        pytest.param(TEXTS, 38, 2, "parent", marks=pytest.mark.night),
        (TEXTS, 38, 2, "worker"),
        (STREAM, 38, 2, "interrupted parent"),
    ],
)
def test_a_killed_tokenization_resumes_to_the_same_store(
    source: str, at: int, workers: int, victim: str, tmp_path: Path
):
    reference = make(tmp_path / "reference", source=source, shard_tokens=100)
    out, once, reads = tmp_path / "store", tmp_path / "once", tmp_path / "reads"
    options = f"at:{at},once:{once},victim:'{victim}',reads:{reads}"
    died = command(out, source, workers, options)
    assert once.exists()
    if victim == "worker":
        assert died.returncode == 2
        assert "SIGKILL" in died.stderr
        assert "To continue, type the same command" in died.stderr
    else:
        assert died.returncode == (130 if victim.startswith("interrupted") else -9)
    wait_for_the_end_of(int(once.read_text()))
    before = content(out)
    assert f"{UNFINISHED}/job.json" in before
    reads.unlink()
    continued = command(out, source, workers, options)
    assert continued.returncode == 0, continued.stderr
    assert content(out) == content(reference.path)
    if at > 30 and workers == 1:
        assert "continued" in continued.stdout
        # What had been finished is not read again.
        assert len(set(reads.read_text().split())) < 60 - at + 12


@pytest.mark.parametrize("streaming", [False, True])
def test_a_huggingface_table_resumes_inside_a_file(streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    texts = [text(number) for number in range(60)]
    for part in range(2):
        lines = [json.dumps({"text": document}) for document in texts[30 * part : 30 * part + 30]]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
    data: dict[str, Any] = {"source": "huggingface", "dataset": "json", "streaming": streaming}
    data |= {"data_files": (str(tmp_path / "*.jsonl"),), "validation_fraction": 0.0}
    reference = make(tmp_path / "reference", **data)
    assert documents(reference, "train") == [document for document in texts if document]
    original, left = PartTokenizer._write_cut, [3]

    def cut(self: PartTokenizer, *given: Any) -> bool:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return original(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(PartTokenizer, "_write_cut", cut)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "store", **data)
    make(tmp_path / "store", **data)
    assert content(tmp_path / "store") == content(reference.path)


def test_a_store_contains_its_tokenizer(tmp_path: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {letter: number for number, letter in enumerate("0123456789/ ")}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "Ġ": 12}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|mine|>", "<|endoftext|>"])
    (tmp_path / "own").mkdir()
    tokenizer.save(str(tmp_path / "own" / "named.json"))
    (tmp_path / "own" / "tokenizer_config.json").write_text('{"eos_token": "<|mine|>"}')
    store = make(tmp_path / "store", tokenizer=str(tmp_path / "own" / "named.json"))
    assert sorted(store.files) == ["tokenizer.json", "tokenizer_config.json"]
    make(tmp_path / "again", tokenizer=str(tmp_path / "own" / "named.json"), workers=2)
    assert content(tmp_path / "again") == content(tmp_path / "store")
    (tmp_path / "own").rename(tmp_path / "moved")
    own = build_tokenizer(over(store).data)
    assert (own.vocab_size, own.fingerprint) == (15, store.tokenizer)
    tokens = np.fromfile(store.path / f"{store.splits['train'][0].name}.tokens", "<u2")
    assert (tokens == own.end_of_text).sum() == store.splits["train"][0].numbers["documents"]
    loader = partial(ValidationLoader, over(store).data, 24, dp_rank=0, dp_degree=1, micro_batch_size=1)
    lengths = loader().token_bytes
    assert lengths is not None
    assert lengths.tolist() == [1] * 13 + [0, 0], "also the space, which is the word Ġ"
    (store.path / "tokenizer_config.json").unlink()
    assert loader().token_bytes is None
    with pytest.raises(UserError, match="not the one that built the store"):
        build_tokenizer(over(store).data)


def wait_for_the_end_of(process: int) -> None:
    """Wait until the process has exited or is a zombie."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.05)
    raise AssertionError("a worker outlived its parent")


def test_a_full_disk_is_reported_and_finished_shards_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reference = make(tmp_path / "reference")
    original, left = AtomicFile.commit, [5]

    def finish(self: AtomicFile) -> str:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(AtomicFile, "commit", finish)
        with pytest.raises(UserError, match=r"disk of .*store is full[\s\S]*same command to continue"):
            make(tmp_path / "store")
    with pytest.raises(UserError, match="not complete yet"):
        read_manifest(tmp_path / "store")
    assert list((tmp_path / "store").rglob("*.part")) == []
    assert len(list((tmp_path / "store").glob("*.tokens"))) >= 1
    make(tmp_path / "store")
    assert content(tmp_path / "store") == content(reference.path)


def test_an_unreadable_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.txt").write_text("hello")

    def refuse(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"a\.txt: Permission denied"):
        make(tmp_path / "store", source="text", paths=(str(tmp_path / "a.txt"),), validation_fraction=0.0)


def test_a_store_with_other_settings_is_not_touched(tmp_path: Path):
    make(tmp_path / "store")
    before = content(tmp_path / "store")
    make(tmp_path / "store")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"validation_fraction": 0.3}, r"data\.validation_fraction"),
        ({"source": STREAM}, r"data\.paths"),
        ({"shard_tokens": 500}, "shard_tokens"),
        ({"parts": 5}, "parts"),
    ]
    for changed, key in changes:
        with pytest.raises(UserError, match=f"other settings[\\s\\S]*{key}"):
            make(tmp_path / "store", **changed)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="holds other files"):
        make(tmp_path / "other")
    assert content(tmp_path / "store") == before


def test_a_store_is_locked_while_it_is_made(tmp_path: Path):
    import fcntl

    (tmp_path / "store" / UNFINISHED).mkdir(parents=True)
    with (tmp_path / "store" / UNFINISHED / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another titan-exp tokenize"):
            make(tmp_path / "store")


def test_partial_files_of_a_killed_process_are_removed(tmp_path: Path):
    (tmp_path / "store" / UNFINISHED).mkdir(parents=True)
    (tmp_path / "store" / f"train-00000-0000.tokens.77{TEMPORARY_SUFFIX}").write_bytes(b"torn")
    make(tmp_path / "store")
    assert [name for name in content(tmp_path / "store") if name.endswith(TEMPORARY_SUFFIX)] == []


def test_options_are_separated_from_overrides():
    options, others = options_among(["data=text", "out=a", "data.paths=[b]", "workers=3", "+experiment=smoke"])
    assert (options.out, options.workers) == ("a", 3)
    assert others == ["data=text", "data.paths=[b]", "+experiment=smoke"]
    for word, says in (
        ("worker=3", "did you mean workers"),
        ("workers=many", "workers=many"),
        ("shard_token=3", "did you mean shard_tokens"),
        ("training.steps=3", "tokenize does not read this key"),
        ("parts=0", "parts=0"),
    ):
        with pytest.raises(UserError, match=says):
            options_among([word])


def test_invalid_settings_are_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = experiment(source="text", paths=("nowhere",), tokenizer="nowhere.json")
    with pytest.raises(UserError) as caught:
        make_store(TokenizeOptions(), run)
    assert {violation.field for violation in caught.value.violations} == {"data.paths", "data.tokenizer", "out"}
    with pytest.raises(UserError, match="already tokenized"):
        make_store(TokenizeOptions("out"), experiment(source="tokens", paths=("x",)))
    assert os.listdir(tmp_path) == []
