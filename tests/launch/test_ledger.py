"""Ledger of registered questions: rows, chain, damage, writers at once, death, a full disk."""

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compare.made_runs import made_question
from tests.launch.test_looks import QUESTION, Pretended, gains, home, record, sweep, write  # noqa: F401  # a fixture
from titan_exp.cli.main import main
from titan_exp.compare.discoveries import judge
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.foreign_code import is_own
from titan_exp.launch.ledger import Question, enter, read_ledger
from titan_exp.tracking.run_folder.files import FileLock, write_atomically

RUNS = Path("runs")
LEDGER = RUNS / "questions.jsonl"


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in LEDGER.read_text().splitlines()]


def several_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pretended, "noise", 0.2)
    gains(0.2, monkeypatch)


def test_a_row_for_the_registration_and_for_each_look(monkeypatch: pytest.MonkeyPatch):
    several_looks(monkeypatch)
    assert sweep("--dry-run") == 0
    assert not LEDGER.exists()
    assert sweep() == 0
    found = rows()
    assert [row["pairs"] for row in found] == [0, 3, 5, 8][: len(found)]
    assert len(found) >= 3
    assert [row["outcome"] for row in found[:-1]] == ["continue"] * (len(found) - 1)
    assert found[-1]["outcome"] != "continue"
    assert {row["id"] for row in found} == {record()["registered"]["id"]}
    assert main(["compare", "mine", "--json=mine.json", "--html=none"]) == 0
    verdict = json.loads(Path("mine.json").read_text())["registered"]["verdict"]
    assert [found[-1][key] for key in ("pairs", "outcome", "e_better", "p_better")] == [
        verdict[key] for key in ("pairs", "outcome", "e_better", "p_better")
    ]
    lines = LEDGER.read_bytes().splitlines()
    digests = ["", *(hashlib.sha256(line).hexdigest() for line in lines[:-1])]
    assert [row["before"] for row in found] == digests
    ledger = read_ledger(RUNS)
    assert (ledger.faults, ledger.foreign) == ((), ())
    assert sweep() == 0
    assert len(rows()) == len(found), "nothing has changed"


def test_the_registration_is_entered_before_the_first_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Pretended, "limit", 0)
    assert sweep() == 130
    assert [(row["pairs"], row["e_better"]) for row in rows()] == [(0, 1.0)]


def test_a_question_that_is_changed_before_a_look_counts_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Pretended, "limit", 1)
    assert sweep() == 130
    write(QUESTION.replace("[3, 5, 8]", "[3, 5]"))
    assert sweep() == 130
    assert [row["rule"] for row in rows()] == [
        "looks after 3, 5 and 8 pairs, alpha 0.05",
        "looks after 3 and 5 pairs, alpha 0.05",
    ]
    (question,) = read_ledger(RUNS).questions
    assert (question.rule, question.changed) == ("looks after 3 and 5 pairs, alpha 0.05", ())


def test_a_question_that_is_changed_after_a_look_counts_with_1(monkeypatch: pytest.MonkeyPatch):
    gains(0.5, monkeypatch)
    assert sweep() == 0
    (question,) = read_ledger(RUNS).questions
    assert question.e_value > 20
    write(QUESTION.replace("[3, 5, 8]", "[3, 5], alpha: 0.2"))
    assert sweep("--change-question") == 0
    (changed,) = read_ledger(RUNS).questions
    assert (changed.id, changed.outcome, changed.e_value) == (question.id, "better", 1.0)
    assert "alpha: 0.05 → 0.2" in changed.changed
    found = judge(RUNS, 0.05)
    assert [(one.discovery, one.online, one.command) for one in found.every] == [(False, False, "")]
    lines = LEDGER.read_text().splitlines()
    LEDGER.write_text("\n".join(lines[:-1]) + "\n")
    assert "mine is missing" in judge(RUNS, 0.05).faults[0], "the row that says so was removed"
    assert sweep() == 0
    assert judge(RUNS, 0.05).faults == ()


def test_a_question_that_is_deleted_or_asked_anew_stays(monkeypatch: pytest.MonkeyPatch):
    assert sweep() == 0
    shutil.rmtree(RUNS / "mine")
    assert [one.question.study for one in judge(RUNS, 0.05).every] == ["mine"]
    gains(0.5, monkeypatch)
    write(QUESTION.replace("steps=18", "steps=18\n  - training.seq_len=64"))
    assert sweep() == 0
    first, second = read_ledger(RUNS).questions
    assert (first.study, second.study) == ("mine", "mine")
    assert (first.outcome, second.outcome) != ("better", "better")


def test_a_question_of_an_earlier_version_is_entered_by_the_next_call():
    assert sweep() == 0
    values = record()
    del values["registered"]["id"]
    (RUNS / "mine" / "study.json").write_text(json.dumps(values))
    LEDGER.unlink()
    assert "mine is missing, and titan-exp sweep mine enters it" in judge(RUNS, 0.05).faults[0]
    for _ in range(2):
        assert sweep() == 0
        assert len(read_ledger(RUNS).questions) == 1
    assert judge(RUNS, 0.05).faults == ()


def test_a_ledger_that_cannot_be_written_loses_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    gains(0.5, monkeypatch)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("titan_exp.launch.ledger.write_atomically", full)
        assert sweep() == 0
    out = capsys.readouterr().out
    assert (
        "Cannot enter the question into runs/questions.jsonl (No space left on device). The runs go on"
        in out.replace(str(Path.cwd()) + "/", "")
    )
    assert len(Pretended.trained) == 6
    assert "mine is missing" in judge(RUNS, 0.05).faults[0]
    assert sweep() == 0
    assert [row["outcome"] for row in rows()] == ["better"]
    LEDGER.unlink()
    LEDGER.mkdir()
    assert sweep() == 0
    assert "is a folder" in capsys.readouterr().out


def enter_all(*questions: Question) -> None:
    RUNS.mkdir(exist_ok=True)
    for question in questions:
        enter(RUNS, question)


def four_rows() -> list[bytes]:
    enter_all(*(made_question(name) for name in "abc"), made_question("a", e_better=9.0, outcome="better"))
    return LEDGER.read_bytes().splitlines(keepends=True)


DAMAGE: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "removed": (lambda all: [all[0], *all[2:]], "before line 2, lines were changed or removed"),
    "the first removed": (lambda all: all[1:], "before line 1, lines were changed or removed"),
    "inserted": (lambda all: [*all[:2], all[0], *all[2:]], "before line 3, lines were changed or removed"),
    "swapped": (lambda all: [all[0], all[2], all[1], all[3]], "before line 2, lines were changed or removed"),
    "edited": (
        lambda all: [all[0], all[1].replace(b'"pairs": 3', b'"pairs": 5'), *all[2:]],
        "before line 3, lines were changed or removed",
    ),
    "blank": (lambda all: [*all[:2], b"\n", *all[2:]], "line 3 is damaged"),
    "garbage": (lambda all: [*all[:3], b"\xff\xfe{{{" + b"[" * 9999 + b"\n"], "line 4 is damaged"),
    "torn": (lambda all: [*all[:3], all[3][:70]], "line 4 is damaged"),
    "of another type": (
        lambda all: [*all[:3], all[3].replace(b'"e_better": 9.0', b'"e_better": "__import__(\'os\')"')],
        "line 4 is damaged",
    ),
    "not finite": (lambda all: [*all[:3], all[3].replace(b"9.0", b"1e999")], "line 4 is damaged"),
    "of another outcome": (lambda all: [*all[:3], all[3].replace(b'"better"', b'"best"')], "line 4 is damaged"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_no_rate_stated(case: str, capsys: pytest.CaptureFixture[str]):
    lines = four_rows()
    assert main(["compare", "--discoveries", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["false_discovery_rate"] == 0.05
    damage, said = DAMAGE[case]
    LEDGER.write_bytes(b"".join(damage(lines)))
    assert main(["compare", "--discoveries"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"no rate can be stated: {said}" in out
    assert "false on average" not in out
    assert main(["compare", "--discoveries", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["false_discovery_rate"] is None
    before = LEDGER.read_bytes()
    enter_all(made_question("d"))
    after = LEDGER.read_bytes()
    assert after.startswith(before), "damaged lines stay as they are"
    assert read_ledger(RUNS).questions[-1].study == "d"


def test_an_edited_last_row_and_rows_of_others_are_not_signed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lines = four_rows()
    LEDGER.write_bytes(b"".join(lines).replace(b"9.0", b"90.0"))
    ledger = read_ledger(RUNS)
    assert (ledger.faults, ledger.foreign) == ((), (4,))
    with monkeypatch.context() as other:
        other.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
        enter_all(made_question("d"))
        assert read_ledger(RUNS).foreign == (1, 2, 3, 4)
        other.setenv("XDG_STATE_HOME", str(tmp_path / "sweeps/mine.yaml"))  # no key can be made
        enter_all(made_question("e"))
    assert read_ledger(RUNS).foreign == (4, 5, 6)
    assert main(["compare", "--discoveries"]) == 0
    assert "Not signed by your key: 3 lines, the first is line 4." in " ".join(capsys.readouterr().out.split())


def test_the_signature_of_a_row_is_none_of_a_configuration(tmp_path: Path):
    """A row is YAML too, with texts that others may choose."""
    four_rows()
    values = rows()[0]
    (tmp_path / "config.sig").write_text(values.pop("signature"))
    assert not is_own(json.dumps(values, sort_keys=True).encode(), tmp_path / "config.sig")


def _enter_many(folder: str, writer: int) -> None:
    for number in range(8):
        enter(Path(folder), made_question(f"{writer}-{number}"))


def test_writers_at_once_lose_no_row():
    RUNS.mkdir()
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_enter_many, args=(str(RUNS), writer)) for writer in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(60)
    ledger = read_ledger(RUNS)
    assert {row.study for row in ledger.rows} == {f"{writer}-{number}" for writer in range(4) for number in range(8)}
    assert (len(ledger.rows), ledger.faults, ledger.foreign) == (32, (), ())


def test_a_writer_killed_before_the_rename_leaves_the_ledger_as_it_was():
    lines = four_rows()

    def die() -> None:
        os.replace = lambda *_: os._exit(9)  # type: ignore[assignment]
        enter(RUNS, made_question("d"))

    process = multiprocessing.get_context("fork").Process(target=die)
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert LEDGER.read_bytes() == b"".join(lines)
    enter_all(made_question("d"))
    ledger = read_ledger(RUNS)
    assert (len(ledger.rows), ledger.faults) == (5, ())


def test_a_launcher_killed_between_the_record_and_the_ledger_counts_once(monkeypatch: pytest.MonkeyPatch):
    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for name in ("titan_exp.launch.sweep.shipped_study.enter", "titan_exp.launch.ledger.write_atomically"):
        with monkeypatch.context() as patched:
            patched.setattr(name, die)
            assert sweep() == 130
        assert (record()["registered"]["candidate"], LEDGER.exists()) == ("high", False)
    assert sweep() == 0
    assert len(read_ledger(RUNS).questions) == 1
    assert judge(RUNS, 0.05).faults == ()


def test_a_lock_that_stays_held_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_exp.launch.ledger.LOCK_TIMEOUT", 0.05)
    RUNS.mkdir()
    with FileLock(RUNS / ".questions.jsonl.lock") as lock:
        lock.acquire("another")
        with pytest.raises(UserError, match=r"another, process \d+ on .* holds .*questions.jsonl.lock"):
            enter(RUNS, made_question("a"))
    write_atomically(LEDGER, "")
    enter(RUNS, made_question("a"))
    assert read_ledger(RUNS).faults == ()
