"""Sources are opened before the launch: what would end a rank is refused, and what takes long is left to it."""

import hashlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.data.corpora import OWN_STREAM, OwnTable, experiment, write_files
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.groups.types import PositiveInt
from titan_exp.config.schema.typed_config import typed_options
from titan_exp.config.study.points import Point
from titan_exp.data import source_check
from titan_exp.data.source_check import check_source
from titan_exp.data.sources.base import build_source, fingerprint
from titan_exp.launch.run_plan import plan_run
from titan_exp.launch.sweep.sweep_plan import plan_sweep


class Notes(OwnTable):
    """Source of files, with options."""

    fingerprint = "notes"

    @dataclass(frozen=True)
    class Options:
        """Keys of `data.options`."""

        folder: str = field(compare=False)
        suffix: str = ".txt"
        most: PositiveInt = 100

    def __init__(self, config: DataConfig, options: Options) -> None:
        super().__init__(config, documents=len(list(Path(options.folder).glob(f"*{options.suffix}"))[: options.most]))


class Numbers(OwnTable):
    """Source whose documents are not text."""

    def __getitem__(self, index: int) -> Any:
        return index


class Slow(OwnTable):
    """Source that never opens."""

    def __init__(self, config: DataConfig) -> None:
        Event().wait()


class Closed(OwnTable):
    """Source whose folder does not exist."""

    def __init__(self, config: DataConfig) -> None:
        raise FileNotFoundError("no such folder: notes")


NOTES, NUMBERS, SLOW, CLOSED = (f"{__name__}.{kind.__name__}" for kind in (Notes, Numbers, Slow, Closed))


def data(source: str, **options: Any) -> DataConfig:
    return experiment(source=source, options=options, validation_fraction=0.5).data


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write_files(tmp_path / "notes", 20))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"data\.options\.folder: this key has no value"),
        ({"sufix": ".md"}, r"data\.options\.sufix=\.md: there is no such option\n    did you mean suffix?"),
        ({"most": "all"}, r"data\.options\.most=all: must be a"),
        ({"suffix": ".md"}, "this source has no documents"),
        ({"most": 1}, "holds out|leaves none"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], says: str, folder: str):
    check_source(data(NOTES, folder=folder), evaluates=True)
    given = {"folder": folder, **options} if options else {}
    with pytest.raises(UserError, match=says):
        check_source(data(NOTES, **given), evaluates=True)


def test_options_that_choose_documents_are_part_of_their_identity(folder: str, tmp_path: Path):
    other = str(write_files(tmp_path / "moved", 20))
    given = [{}, {"suffix": ".txt"}, {"folder": other}, {"most": 5}, {"suffix": "9.txt"}]
    configs = [data(NOTES, **{"folder": folder, **options}) for options in given]
    found = [fingerprint(build_source(config), config) for config in configs]
    assert found == ["notes"] * 3 + ["notes, options {'most': 5}", "notes, options {'suffix': '9.txt'}"]


def test_documents_that_are_no_text_are_refused():
    with pytest.raises(UserError, match="a document has the type int"):
        check_source(data(NUMBERS), evaluates=False)


def test_a_stream_needs_a_limit_of_what_is_evaluated():
    check_source(data(OWN_STREAM), evaluates=False)
    check_source(replace(data(OWN_STREAM), validation_documents=5), evaluates=True)
    with pytest.raises(UserError, match=r"data\.validation_documents=1024"):
        check_source(data(OWN_STREAM), evaluates=True)


def test_an_exception_is_that_of_the_source():
    with pytest.raises(FileNotFoundError, match="no such folder: notes"):
        check_source(data(CLOSED), evaluates=True)


def test_an_opening_that_takes_long_is_left_to_the_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(source_check, "CHECK_SECONDS", 0.05)
    check_source(data(SLOW), evaluates=True)


def test_a_built_in_source_is_opened_by_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    run = experiment(source="python_stdlib")
    run = replace(run, paths=replace(run.paths, runs=str(tmp_path)))
    plan_run(run)
    monkeypatch.setattr("titan_exp.data.sources.python_stdlib._modules", lambda root: iter(()))
    with pytest.raises(UserError, match="this Python comes without the source of its library"):
        plan_run(run)


def test_points_of_a_sweep_open_a_source_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    run = experiment(source="python_stdlib")
    run = replace(run, paths=replace(run.paths, runs=str(tmp_path)))
    runs = {f"seed={seed}": replace(run, experiment=replace(run.experiment, seed=seed)) for seed in range(3)}
    runs["other"] = replace(run, data=replace(run.data, validation_fraction=0.25))
    opened, files = list[DataConfig](), source_check.open_files
    monkeypatch.setattr(source_check, "open_files", lambda config: [opened.append(config), files(config)][1])
    plan_sweep([Point((), label) for label in runs], lambda point: runs[point.label], skip=False)
    assert opened == [run.data, runs["other"].data]


def test_the_source_of_the_guide(folder: str, tmp_path: Path):
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "own-data.md").read_text()
    (code,) = re.findall(r"```python\n(class Notes:.*?)```", guide, re.DOTALL)
    names: dict[str, Any] = {"__name__": __name__, "dataclass": dataclass, "field": field, "hashlib": hashlib}
    names["Path"] = Path
    exec(code, names)
    notes = names["Notes"]
    source = notes(None, typed_options(notes.Options, {"folder": folder, "suffix": ".txt"}, "data.options"))
    assert (len(source), source.key(3), source[3]) == (20, "003.txt", (Path(folder) / "003.txt").read_text())
    moved = notes(None, typed_options(notes.Options, {"folder": str(tmp_path / "none")}, "data.options"))
    assert (len(moved), moved.fingerprint == source.fingerprint) == (0, False)
