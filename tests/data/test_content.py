"""Content checksum of corpora: every byte of a small one, samples of a large one, cached until a file changes."""

import os
import time
from pathlib import Path

import pytest

from tests.data.corpora import experiment
from tests.data.test_train_loader import loader
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.sources import base
from titan_exp.data.sources.base import CONTENT, build_source, known_identity
from titan_exp.data.sources.text import TextSource


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "titan_exp" / "corpora"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number in range(40):
        path = tmp_path / "corpus" / f"{number:02d}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(65 + (number + place) % 26 for place in range(1000)))
    return tmp_path / "corpus"


def fingerprint(folder: Path) -> str:
    return TextSource([str(folder)]).content.fingerprint()


def edit(path: Path, offset: int) -> None:
    """Change a byte and restore the modification time, as rsync does."""
    times, data = path.stat(), bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("offset", [0, 499, 999])
def test_a_byte_changes_it_and_a_move_does_not(corpus: Path, tmp_path: Path, offset: int) -> None:
    before = fingerprint(corpus)
    corpus.rename(tmp_path / "moved")
    assert fingerprint(tmp_path / "moved") == before
    edit(tmp_path / "moved" / "17.txt", offset)
    assert fingerprint(tmp_path / "moved") != before
    assert before.startswith("40 files, 40000 bytes, content ")


def test_large_corpora_are_sampled_at_both_ends_and_between(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "WHOLE_BYTES", 10_000)
    monkeypatch.setattr(base, "SAMPLES", 5)
    monkeypatch.setattr(base, "SAMPLE_BYTES", 100)
    before = fingerprint(corpus)
    assert "5 samples" in before
    for name, offset in (("00.txt", 0), ("39.txt", 999), ("19.txt", 980)):  # of a sample at 19950
        edit(corpus / name, offset)
        after = fingerprint(corpus)
        assert after != before, name
        before = after
    edit(corpus / "05.txt", 500)
    assert fingerprint(corpus) == before  # between the samples
    (corpus / "05.txt").rename(corpus / "05b.txt")
    assert fingerprint(corpus) != before


def test_many_files_are_sampled(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "WHOLE_FILES", 39)
    assert "samples" in fingerprint(corpus)


def test_unchanged_files_are_not_read_again(corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint(corpus)
    assert not cache.exists()  # the files are too new: a write in the same tick would not be seen
    monkeypatch.setattr(base, "SETTLED", -time.time())
    before = fingerprint(corpus)
    assert [path.read_text() for path in cache.iterdir()] == [before]
    monkeypatch.setattr(base.CorpusContent, "_checksum", lambda self: "read again")
    assert fingerprint(corpus) == before
    edit(corpus / "17.txt", 3)
    assert "read again" in fingerprint(corpus)


def test_without_a_cache_folder(corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SETTLED", -time.time())
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file")
    assert "40 files" in fingerprint(corpus)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without a home, as in a container
    monkeypatch.chdir(corpus.parent)
    before = {*corpus.parent.iterdir()}
    assert "40 files" in fingerprint(corpus)
    assert {*corpus.parent.iterdir()} == before


@pytest.mark.parametrize("document", ["file", "paragraph"])
def test_known_without_opening_the_source(corpus: Path, document: str) -> None:
    run = experiment(source="text", paths=(str(corpus),), document=document)
    identity, files = known_identity(run.data)
    assert files is not None
    assert identity == {CONTENT: loader(run).corpus[CONTENT]}


def test_known_of_every_built_in_source_with_local_files(corpus: Path) -> None:
    assert CONTENT in known_identity(experiment(source="python_stdlib").data)[0]
    (corpus / "rows.json").write_text('{"text": "a"}\n')
    local = {"dataset": "json", "data_files": (str(corpus / "*.json"),)}
    before = known_identity(experiment(source="huggingface", **local).data)[0]
    (corpus / "rows.json").write_text('{"text": "b"}\n')
    assert known_identity(experiment(source="huggingface", **local).data)[0][CONTENT] != before[CONTENT]
    assert known_identity(experiment(source="huggingface", dataset="allenai/c4").data) == ({}, None)
    assert known_identity(experiment(source="huggingface", dataset=str(corpus)).data)[1] is not None


def test_a_checkpoint_of_other_content_is_refused(corpus: Path) -> None:
    run = experiment(source="text", paths=(str(corpus),))
    state = loader(run).state_dict()
    edit(corpus / "03.txt", 3)
    with pytest.raises(UserError, match=r"other data[\s\S]*data\.content=[\s\S]*continue_data=restart"):
        loader(run).load_state_dict(state)


def test_a_checkpoint_without_contents_resumes_with_a_warning(corpus: Path) -> None:
    run = experiment(source="text", paths=(str(corpus),))
    state = loader(run).state_dict()
    del state["corpus"][CONTENT]
    with pytest.warns(UserWarning, match="names and sizes only"):
        loader(run).load_state_dict(state)


def test_another_revision_on_the_hub_does_not_stop_a_run(corpus: Path) -> None:
    run = experiment(source="text", paths=(str(corpus),))
    state = loader(run).state_dict()
    state["corpus"]["data.revision"] = "0f0f"
    loader(run).load_state_dict(state)


def test_a_source_of_another_kind_has_no_content() -> None:
    assert build_source(experiment().data)
    assert CONTENT not in loader(experiment()).corpus
