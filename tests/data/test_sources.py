from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.corpora import OWN_STREAM, OWN_TABLE, OwnTable, experiment, text, write_files
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.sources.base import (
    RandomAccessSource,
    StreamingSource,
    build_source,
    build_validation_source,
    fingerprint,
)
from titan_exp.data.sources.python_stdlib import PythonStdlibSource
from titan_exp.data.sources.text import SplitFileSource, TextSource
from titan_exp.data.tokenizers import ByteTokenizer, encode_document

CONFIG = experiment().data


class TakesNothing:
    """Class with another constructor signature."""


class HoldsNothing:
    """Class without a source interface."""

    def __init__(self, config: object) -> None:
        self.config = config


def test_sources_are_found_by_name(tmp_path: Path):
    assert isinstance(build_source(replace(CONFIG, source="python_stdlib")), PythonStdlibSource)
    paths = (str(write_files(tmp_path / "files", 2)),)
    assert isinstance(build_source(replace(CONFIG, source="text", paths=paths)), TextSource)
    assert isinstance(build_source(replace(CONFIG, source="text", paths=paths, document="line")), SplitFileSource)


def test_a_user_source_gets_the_group_and_its_options():
    source = build_source(replace(CONFIG, source=OWN_TABLE, options={"documents": 7}))
    assert isinstance(source, RandomAccessSource)
    assert (len(source), source[3]) == (7, text(3))
    stream = build_source(replace(CONFIG, source=OWN_STREAM, options={"sizes": (2, 1)}))
    assert isinstance(stream, StreamingSource)
    assert [list(stream.open(part, None)) for part in range(stream.parts)] == [[text(0), text(1)], [text(2)]]
    assert build_validation_source(replace(CONFIG, source=OWN_TABLE, validation_split="test")) is None


def test_the_default_fingerprint_depends_on_options():
    found = set()
    for documents in (5, 6):
        config = replace(CONFIG, options={"documents": documents})
        found.add(fingerprint(build_source(config), config))
    assert len(found) == 2


def test_invalid_user_sources_are_refused():
    with pytest.raises(UserError, match=r"data\.options\.speed=1: \S+ takes no argument speed"):
        build_source(replace(CONFIG, source=OWN_TABLE, options={"speed": 1}))
    with pytest.raises(UserError, match=r"calls TakesNothing as \(config"):
        build_source(replace(CONFIG, source=f"{__name__}.{TakesNothing.__name__}"))
    with pytest.raises(UserError, match="the class defines no __len__ and no __getitem__"):
        build_source(replace(CONFIG, source=f"{__name__}.{HoldsNothing.__name__}"))
    with pytest.raises(UserError, match=r"data\.source"):
        build_source(replace(CONFIG, source="absent_package.Source"))


def test_a_user_source_holds_documents_of_text():
    with pytest.raises(UserError, match="this source has no documents"):
        build_source(replace(CONFIG, source=OWN_TABLE, options={"documents": 0}))
    with pytest.raises(UserError, match="a document has the type bytes, and documents must be str"):
        encode_document(b"bytes", ByteTokenizer())  # type: ignore[arg-type]


def test_an_exception_of_a_user_source_propagates():
    with pytest.raises(TypeError, match="integer"):
        build_source(replace(CONFIG, source=OWN_TABLE, options={"documents": "x"}))


def test_a_list_is_a_random_access_source():
    assert isinstance(["a", "b"], RandomAccessSource)
    assert isinstance(OwnTable(CONFIG), RandomAccessSource)
