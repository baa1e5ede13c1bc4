"""Records that a newer release wrote: its further fields are left out, and what is damaged is still refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.rank.rank_env import RankError, RankRecord, read_record, write_record
from titan_exp.launch.run_lookup import StudyFolder, StudyRecord, StudyRun, study_record
from titan_exp.tracking.run_folder.files import FileLock
from titan_exp.tracking.run_folder.run import CodeRecord, CodeVersion, Lineage, read_code
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

RUN = StudyRun("lr=1", "lr=1", None, "0123456789ab", "", 1, 3, "local", ("optimizer.lr=1",))
RANK = RankRecord(0, 12, "here", 1.0, error=RankError("ValueError", "no", "", user=False))
CODE = CodeRecord((CodeVersion("titan_exp", commit="c0ffee"), CodeVersion("mine", version="1.0")), {"model": "mine"})
Reader = Callable[[RunFolder], object]
WRITTEN: dict[str, tuple[Callable[[RunFolder], object], Reader]] = {
    "state.json": (lambda folder: folder.write_state(RunState("failed", 12, 5.5, 2, "no")), RunFolder.read_state),
    "heartbeat": (lambda folder: folder.beat(1, force=True), RunFolder.read_heartbeat),
    "attempts.jsonl": (
        lambda folder: folder.add_attempt(world_size=2, hosts=["a"], job_id="7", token="t"),
        lambda folder: folder.read_attempts()[0],
    ),
    ".lock": (lambda folder: folder.claim("launcher").release(), lambda folder: FileLock(folder.lock).holder()),
    "logs/attempt-001/rank-00000.json": (
        lambda folder: write_record(folder, 1, RANK),
        lambda folder: read_record(folder, 1, 0),
    ),
    "lineage.json": (
        lambda folder: Lineage("x/0123456789ab", 3, 300).write(folder.path),
        lambda folder: Lineage.read(folder.path),
    ),
    "study.json": (
        lambda folder: StudyFolder(folder.path).write(StudyRecord("x", "?", "", (), None, {}, (RUN,), {}), ""),
        lambda folder: StudyFolder(folder.path).read(),
    ),
    "code.json": (lambda folder: folder.code.write_text(CODE.to_json()), lambda folder: read_code(folder.code)),
}
"""Writer and reader of each record, by its file in the folder."""


def records(value: Any) -> list[dict[str, Any]]:
    """Objects of a JSON value that are records, of which each has a text or a number; mappings here have none."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value] if isinstance(value, dict) and value != {"model": "mine"} and value else []
    return [*own, *(record for part in inside for record in records(part))]


@pytest.mark.parametrize("name", WRITTEN)
def test_fields_of_a_newer_release_are_left_out(name: str, tmp_path: Path) -> None:
    folder, (write, read) = RunFolder(tmp_path), WRITTEN[name]
    write(folder)
    whole, content = read(folder), json.loads((tmp_path / name).read_text())
    assert whole is not None
    for record in records(content):
        record["of_a_newer_release"] = {"a": [1]}
    (tmp_path / name).write_text(json.dumps(content))
    assert read(folder) == whole


@pytest.mark.parametrize("name", sorted(WRITTEN.keys() - {"code.json"}))
def test_a_damaged_name_is_no_newer_field(name: str, tmp_path: Path) -> None:
    """Of code.json any field may be missing, as versions before the first release had others."""
    folder, (write, read) = RunFolder(tmp_path), WRITTEN[name]
    write(folder)
    text = (tmp_path / name).read_text()
    for record in records(json.loads(text)):
        for field in record:
            (tmp_path / name).write_text(text.replace(f'"{field}"', f'"{field}x"', 1))
            try:
                found = read(folder)
            except UserError as error:
                found = str(error)
            # Some are read as if they were not there; an attempt keeps the fields that can be read.
            assert found is None or "damaged" in str(found), field


def test_compare_reads_a_study_of_an_earlier_release(tmp_path: Path) -> None:
    """It lacks fields of later releases, and has others that compare does not read."""
    StudyFolder(tmp_path).write(StudyRecord("x", "?", "", (), None, {}, (RUN,), {}), "")
    content = json.loads((tmp_path / "study.json").read_text())
    content = {name: value for name, value in content.items() if name in ("name", "time", "typed", "points")}
    content["points"] = [{k: v for k, v in point.items() if k not in ("rung", "round")} for point in content["points"]]
    found = study_record(content)
    assert (found.name, found.points[0].run_id, found.points[0].variant) == ("x", RUN.run_id, RUN.variant)
    with pytest.raises(ValueError, match="is not"):
        study_record({**content, "rounds": {"rungs": 5}})
