from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.corpora import Ranks, experiment, rows_of, text
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.source_check import training_subset, validation_subset
from titan_exp.data.sources import text as text_source
from titan_exp.data.sources.base import RandomAccessSource, build_source
from titan_exp.data.sources.text import Granularity, SplitFileSource, TextSource
from titan_exp.data.train_loader import TrainLoader
from titan_exp.data.validation_loader import ValidationLoader

Divide = Callable[..., SplitFileSource]


@pytest.fixture
def divide(tmp_path: Path) -> Divide:
    """Build a source of files with given contents."""

    def make(part: Granularity, **files: bytes) -> SplitFileSource:
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        return SplitFileSource(TextSource([str(tmp_path)]), part)

    return make


def documents(source: RandomAccessSource) -> list[str]:
    return [source[index] for index in range(len(source))]


CONTENTS: dict[str, tuple[bytes, list[str], list[str]]] = {
    "plain": (b"a\nb\n\nc\n", ["a\nb", "c"], ["a", "b", "c"]),
    "no newline at the end": (b"a\n\nb", ["a", "b"], ["a", "b"]),
    "blank at both ends": (b"\n \n\na\n\t\n\n", ["a"], ["a"]),
    "blank lines of white space": (b"a\n \t\n\nb\n", ["a", "b"], ["a", "b"]),
    "indentation stays": (b"  a\n    b  \n\n  c\n", ["  a\n    b", "  c"], ["  a", "    b", "  c"]),
    "Windows": (b"a\r\nb\r\n\r\nc\r\n", ["a\r\nb", "c"], ["a", "b", "c"]),
    "byte-order mark": ("\ufeffa\n\nb".encode(), ["a", "b"], ["a", "b"]),
    "wide characters": ("é\nœ\n\n水\U0001f600\n".encode(), ["é\nœ", "水\U0001f600"], ["é", "œ", "水\U0001f600"]),
    # U+2028 and U+0085 end a line for str.splitlines, and inside UTF-8 they hold no byte that could.
    "other line ends": ("a\u2028b\x85c\n".encode(), ["a\u2028b\x85c"], ["a\u2028b\x85c"]),
    "undecodable": (b"caf\xe9\n\nx", ["caf\ufffd", "x"], ["caf\ufffd", "x"]),
}


@pytest.mark.parametrize(("content", "paragraphs", "lines"), CONTENTS.values(), ids=CONTENTS)
def test_files_are_split_into_paragraphs_or_lines(
    divide: Divide, content: bytes, paragraphs: list[str], lines: list[str]
):
    assert documents(divide("paragraph", a=content)) == paragraphs
    assert documents(divide("line", a=content)) == lines


def test_documents_are_in_file_order_with_keys_within_each_file(divide: Divide):
    source = divide("line", a=b"1\n2\n", b=b"\n\n", c=b"3", d=b"\n4\n\n5\n")
    assert documents(source) == ["1", "2", "3", "4", "5"]
    assert [source.key(index) for index in range(len(source))] == ["a#0", "a#1", "c#0", "d#0", "d#1"]


def test_more_files_than_open_descriptors(divide: Divide, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_source, "_OPEN_FILES", 2)
    source = divide("line", **{f"f{number}": f"{number} x\n{number} y".encode() for number in range(6)})
    expected = [f"{number} {line}" for number in range(6) for line in "xy"]
    assert documents(source) == documents(source) == expected
    assert [source[index] for index in range(11, -1, -1)] == expected[::-1]


def test_blank_files_are_refused(divide: Divide):
    with pytest.raises(UserError, match=r"data\.document=line: all files of data\.paths are blank"):
        divide("line", a=b"\n \n", b=b"\n")


def test_the_fingerprint_depends_on_the_split(tmp_path: Path):
    (tmp_path / "a").write_text("a\n\nb\n")
    found = []
    for document in ("file", "paragraph", "line"):
        run = experiment(source="text", paths=(str(tmp_path),), document=document)
        loader = TrainLoader(
            run.data, run.training, run.experiment.seed, dp_rank=0, dp_degree=1, micro_batch_size=8, pin_memory=False
        )
        found.append(loader.fingerprint)
        loader.close()
    assert len(set(found)) == 3


def test_a_single_file_without_held_out_documents_is_refused_with_a_remedy(tmp_path: Path):
    (tmp_path / "input.txt").write_text("\n\n".join(map(text, range(40))))
    texts = TextSource([str(tmp_path / "input.txt")])
    with pytest.raises(UserError, match=r"none of the 1 documents[\s\S]*data\.document=paragraph"):
        validation_subset(texts, 0.1)
    with pytest.raises(UserError, match=r"none of the 1 documents to train on[\s\S]*data\.document=paragraph"):
        training_subset(texts, 0.999999)
    paragraphs = SplitFileSource(texts, "paragraph")
    assert len(validation_subset(paragraphs, 0.1)) > 0
    with pytest.raises(UserError, match=r"none of the 40 documents[\s\S]*data\.document=line"):
        validation_subset(paragraphs, 0.000001)
    with pytest.raises(UserError, match=r"none of the 40 documents") as caught:
        validation_subset(SplitFileSource(texts, "line"), 0.000001)
    assert "data.document" not in str(caught.value)


@pytest.mark.parametrize(("document", "separator"), [("paragraph", "\n\n"), ("line", "\n")])
def test_one_file_is_trained_and_evaluated_on_in_every_layout(tmp_path: Path, document: str, separator: str):
    (tmp_path / "input.txt").write_text(separator.join(map(text, range(60))))
    paths = (str(tmp_path / "input.txt"),)
    run = experiment(source="text", paths=paths, document=document, validation_fraction=0.2)
    source = build_source(run.data)
    assert isinstance(source, RandomAccessSource)
    held_out = documents(validation_subset(source, 0.2))
    assert 4 < len(held_out) < 30

    validation = ValidationLoader(run.data, run.training.seq_len, dp_rank=0, dp_degree=1, micro_batch_size=4)
    evaluated = [token for batch in validation for row in rows_of(batch) for token in row[:-1]]
    expected = [token for document in held_out for token in [*document.encode(), 256]]
    assert evaluated[: len(expected) - 1] == expected[:-1]

    with Ranks(run, 1, 8) as ranks:
        reference = ranks.global_batches(40)
        assert ranks.loaders[0].epochs() > 1
    with Ranks(run, 4, 2) as ranks:
        assert ranks.global_batches(40) == reference
    trained = bytes(token for batch in reference for row in batch for token in (*row, 32) if token < 256)
    # Every word names its document; the first and the last word of a row may be cut.
    numbers = {word[:4] for word in trained.decode().split() if len(word) == 7}
    assert {document[:4] for document in held_out}.isdisjoint(numbers)
    assert len(numbers) == 60 - len(held_out)
