import os
import warnings
from pathlib import Path

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.sources.text import TextSource


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name in ("b.txt", "a.md", "deep/c.txt", "deep/er/d.txt", ".git/config", ".hidden"):
        (folder / name).write_text(f"text of {name}")
    (folder / "empty.txt").touch()
    return folder


def documents(text: TextSource) -> list[str]:
    return [text[index] for index in range(len(text))]


def test_folders_are_recursive_and_sorted(corpus: Path):
    text = TextSource([str(corpus)])
    assert [text.key(index) for index in range(len(text))] == ["a.md", "b.txt", "deep/c.txt", "deep/er/d.txt"]
    assert documents(text) == ["text of a.md", "text of b.txt", "text of deep/c.txt", "text of deep/er/d.txt"]


def test_files_and_globs_are_deduplicated(corpus: Path):
    text = TextSource([str(corpus / "a.md"), str(corpus / "**" / "*.txt"), str(corpus / "deep")])
    assert documents(text) == ["text of a.md", "text of b.txt", "text of deep/c.txt", "text of deep/er/d.txt"]


def test_a_home_folder_and_relative_paths(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(corpus))
    assert len(TextSource(["~"])) == 4
    monkeypatch.chdir(corpus)
    assert len(TextSource(["deep", "*.md"])) == 3


def test_a_moved_corpus_keeps_its_fingerprint(corpus: Path, tmp_path: Path):
    before = TextSource([str(corpus)])
    corpus.rename(tmp_path / "moved")
    after = TextSource([str(tmp_path / "moved")])
    assert before.fingerprint == after.fingerprint
    (tmp_path / "moved" / "b.txt").write_text("more text")
    assert TextSource([str(tmp_path / "moved")]).fingerprint != before.fingerprint


def test_binary_files_are_skipped_with_one_warning(corpus: Path):
    for number in range(7):
        (corpus / f"{number}.bin").write_bytes(b"PNG\0\1\2")
    said = r"data\.paths: skipped 7 binary files of 12 files, .*/0\.bin, .*/4\.bin and 2 more\. To .* a narrower glob"
    with pytest.warns(UserWarning, match=said) as caught:
        assert len(TextSource([str(corpus)])) == 4
    (one,) = caught
    shown = warnings.formatwarning(one.message, one.category, one.filename, one.lineno)
    assert shown == f"{one.message}\n", "no line of code beside it"
    other = warnings.formatwarning(UserWarning("another's"), UserWarning, "file.py", 3, line="code")
    assert other == "file.py:3: UserWarning: another's\n  code\n"


def test_undecodable_bytes_and_byte_order_marks(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"caf\xe9!")
    (tmp_path / "b").write_bytes("\ufeffhi".encode())
    assert documents(TextSource([str(tmp_path)])) == ["caf\ufffd!", "hi"]


def test_names_that_are_not_unicode_are_read(tmp_path: Path):
    (tmp_path / os.fsdecode(b"caf\xe9")).write_text("x")
    assert len(TextSource([str(tmp_path)])) == 1


@pytest.mark.parametrize("entry", ["absent.txt", "*.none"])
def test_an_entry_without_matches_is_refused(corpus: Path, entry: str):
    with pytest.raises(UserError, match="matches no file"):
        TextSource([str(corpus), str(corpus / entry)])


def test_a_corpus_without_text_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"you gave no file[\s\S]*data\.paths="):
        TextSource([])
    (tmp_path / "x.bin").write_bytes(b"\0")
    with (
        pytest.warns(UserWarning, match="skipped 1 binary file of 1"),
        pytest.raises(UserError, match="none of these files contains text"),
    ):
        TextSource([str(tmp_path)])
