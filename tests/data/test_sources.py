from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.corpora import OWN_STREAM, OWN_TABLE, OwnTable, experiment, text, write_files
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.sources.base import (
    RandomAccessSource,
    StreamingSource,
    fingerprint,
)
from titan_exp.data.sources.build import build_source, build_validation_source
from titan_exp.data.sources.python_stdlib import PythonStdlibSource
from titan_exp.data.sources.split_files import SplitFileSource
from titan_exp.data.sources.text import TextSource

CONFIG = experiment().data


class TakesNothing:
    """A class that is not called as a source is."""


class HoldsNothing:
    """A class that is no source."""

    def __init__(self, config: object) -> None:
        self.config = config


def test_the_name_chooses_the_source(tmp_path: Path):
    assert isinstance(build_source(replace(CONFIG, source="python_stdlib")), PythonStdlibSource)
    paths = (str(write_files(tmp_path / "files", 2)),)
    assert isinstance(build_source(replace(CONFIG, source="text", paths=paths)), TextSource)
    assert isinstance(build_source(replace(CONFIG, source="text", paths=paths, document="line")), SplitFileSource)


def test_a_source_of_ones_own_gets_the_group_and_its_options():
    source = build_source(replace(CONFIG, source=OWN_TABLE, options={"documents": 7}))
    assert isinstance(source, RandomAccessSource)
    assert (len(source), source[3]) == (7, text(3))
    stream = build_source(replace(CONFIG, source=OWN_STREAM, options={"sizes": (2, 1)}))
    assert isinstance(stream, StreamingSource)
    assert [list(stream.open(part, None)) for part in range(stream.parts)] == [[text(0), text(1)], [text(2)]]
    assert build_validation_source(replace(CONFIG, source=OWN_TABLE, validation_split="test")) is None


def test_a_source_without_a_fingerprint_gets_one_that_tells_options_apart():
    found = set()
    for documents in (5, 6):
        config = replace(CONFIG, options={"documents": documents})
        found.add(fingerprint(build_source(config), config))
    assert len(found) == 2


def test_what_cannot_be_a_source_is_refused():
    with pytest.raises(UserError, match=r"data\.options \{'speed': 1\}[\s\S]*\(config, \*\*options\)"):
        build_source(replace(CONFIG, source=OWN_TABLE, options={"speed": 1}))
    with pytest.raises(UserError, match="__init__"):
        build_source(replace(CONFIG, source=f"{__name__}.{TakesNothing.__name__}"))
    with pytest.raises(UserError, match="__len__ and __getitem__, or with parts and open"):
        build_source(replace(CONFIG, source=f"{__name__}.{HoldsNothing.__name__}"))
    with pytest.raises(UserError, match=r"data\.source"):
        build_source(replace(CONFIG, source="absent_package.Source"))


def test_an_error_of_ones_own_source_is_not_hidden():
    with pytest.raises(TypeError, match="integer"):
        build_source(replace(CONFIG, source=OWN_TABLE, options={"documents": "x"}))


def test_lists_are_enough():
    assert isinstance(["a", "b"], RandomAccessSource)
    assert isinstance(OwnTable(CONFIG), RandomAccessSource)
