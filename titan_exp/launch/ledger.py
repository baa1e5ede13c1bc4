"""Ledger of registered questions: `questions.jsonl` beside the runs, which only grows.

Each row holds the digest of the line before it, so that a changed, inserted or removed line shows, and a signature.
"""

import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import of_kind, parse_json, read_file
from titan_exp.config.schema.foreign_code import is_signature, signature
from titan_exp.launch.registration import Outcome
from titan_exp.tracking.run_folder.files import FileLock, LockedError, write_atomically
from titan_exp.tracking.run_folder.run_folder import LOCK_TIMEOUT

if TYPE_CHECKING:
    from titan_exp.launch.standing import Standing


LEDGER = "questions.jsonl"
LARGEST_E = 1e12
"""Largest e-value of a row; JSON has no infinity, and a smaller e-value is one too."""
PURPOSE = b"titan_exp: row of questions.jsonl\0"


@dataclass(frozen=True)
class Question:
    """Row of the ledger: one question at one time."""

    id: str
    """Drawn at the registration, and kept by later rows of the question."""
    study: str
    """Name of the study's folder."""
    candidate: str
    baseline: str
    arms: tuple[str, str]
    """Ids of the candidate's and the baseline's configuration, without the seed."""
    metric: str
    scale: str
    rule: str
    pairs: int
    """Pairs at the last look; 0 before the first."""
    outcome: Outcome
    why: str
    """Reason for the outcome, as of a verdict; `dropped` between looks."""
    e_better: float
    """E-value against the candidate being no better."""
    p_better: float
    """One-sided p-value at this number of pairs, not corrected for looks."""
    changed: tuple[str, ...]
    """Changes after a look."""
    dropped: str
    """Reason for ending the question between looks; empty if there is none."""
    time: float
    """Unix time of the row."""
    before: str = ""
    """SHA-256 of the line before; empty in the first."""

    @property
    def e_value(self) -> float:
        """E-value that counts: 1 without an error rate, and where no evidence may speak for the candidate."""
        return 1.0 if self.changed or self.dropped or self.why == "withheld" else self.e_better


def question_of(study: str, standing: "Standing") -> Question:
    """Row of a standing, for the study in the folder of that name."""
    one, verdict = standing.registration, standing.verdict
    return Question(
        id=one.id,
        study=study,
        candidate=one.candidate,
        baseline=one.baseline,
        arms=one.arms,
        metric=one.metric,
        scale=one.scale,
        rule=one.rule,
        pairs=verdict.pairs,
        outcome=standing.outcome,
        why="dropped" if standing.dropped else verdict.why,
        e_better=min(verdict.e_better, LARGEST_E),
        p_better=verdict.p_better,
        changed=one.changed,
        dropped=standing.dropped,
        time=round(time.time(), 3),
    )


@dataclass(frozen=True)
class Ledger:
    """Content of the ledger of a folder of runs."""

    path: Path
    rows: tuple[Question, ...]
    """Rows that can be read, in the order of the file."""
    faults: tuple[str, ...]
    """Lines that are damaged, and places at which lines were changed or removed."""
    foreign: tuple[int, ...]
    """Lines that this user's key has not signed."""

    @property
    def questions(self) -> list[Question]:
        """Newest row of each question, in the order of registration."""
        return list({row.id: row for row in self.rows}.values())


def read_ledger(runs: Path) -> Ledger:
    """Read the ledger of a folder of runs; without rows if there is none. Raises UserError if it is not a file."""
    path, before = runs / LEDGER, ""
    rows, faults, foreign = list[Question](), list[str](), list[int]()
    for number, line in enumerate(_lines(path), 1):
        try:
            values = parse_json(line, dict)
            row = of_kind(Question, values)
        except (ValueError, RecursionError):
            faults.append(f"line {number} is damaged")
        else:
            if row.before != before:
                faults.append(f"before line {number}, lines were changed or removed")
            mark = str(values.pop("signature", ""))
            if not is_signature(mark, _signed_content(values), PURPOSE):
                foreign.append(number)
            rows.append(row)
        before = hashlib.sha256(line).hexdigest()
    return Ledger(path, tuple(rows), tuple(faults), tuple(foreign))


def enter(runs: Path, question: Question) -> None:
    """Append a row to the ledger of a folder of runs, unless the newest one of its question says the same.

    Raises:
        OSError: it cannot be written; then it is as before.
        UserError: it is not a file, somebody else holds its lock, or the file system has no locks.
    """
    path = runs / LEDGER
    with FileLock(path.with_name(f".{LEDGER}.lock")) as lock:
        try:
            lock.acquire(timeout=LOCK_TIMEOUT)
        except LockedError as error:
            raise UserError(str(error)) from None
        known = next((row for row in reversed(read_ledger(runs).rows) if row.id == question.id), None)
        if known is not None and replace(question, time=known.time, before=known.before) == known:
            return
        lines = _lines(path)
        before = hashlib.sha256(lines[-1]).hexdigest() if lines else ""
        values = asdict(replace(question, before=before))
        values["signature"] = signature(_signed_content(values), PURPOSE) or ""
        # The lines before stay as they are, damaged ones too.
        text = b"".join(line + b"\n" for line in [*lines, json.dumps(values).encode()])
        write_atomically(path, text.decode(errors="surrogateescape"))


def _lines(path: Path) -> list[bytes]:
    try:
        text = read_file(path)
    except FileNotFoundError:
        return []
    return text.removesuffix(b"\n").split(b"\n") if text else []


def _signed_content(values: dict[str, object]) -> bytes:
    return json.dumps(values, sort_keys=True).encode()
