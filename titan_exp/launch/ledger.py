"""Questions: their registration in study.json, and the ledger `questions.jsonl` beside the runs, which only grows.

Each row holds the digest of the line before it, so that a changed, inserted or removed line shows, and a signature.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from titan_exp.config.errors.user_error import UserError, listed
from titan_exp.config.foreign_file import of_kind, parse_json, read_file
from titan_exp.config.schema.foreign_code import is_signature, signature
from titan_exp.config.study.study import Direction
from titan_exp.tracking.display import format_count
from titan_exp.tracking.run_folder.files import FileLock, LockedError, write_atomically
from titan_exp.tracking.run_folder.run_folder import LOCK_TIMEOUT

Outcome = Literal["better", "worse", "undecided", "continue"]
"""Outcome about the candidate; `continue` while a look is still to come."""


@dataclass(frozen=True)
class Registration:
    """Question of a study, as recorded in study.json before the first run."""

    candidate: str
    baseline: str
    arms: tuple[str, str]  # ids of the candidate's and the baseline's configuration, without the seed
    metric: str
    better: Direction
    validation: str  # source and size of the validation set
    parameters: int | None  # parameters of the baseline's model, embeddings included; None of a class of the user's own
    tokens: int  # tokens that the baseline is trained on
    looks: tuple[int, ...]  # number of pairs at each look
    anytime: bool  # True if every number of pairs may be looked at, by an e-value
    alpha: float
    futility: bool  # True if the study stops early where a gain has become unlikely
    tries: int  # number of questions that share the error rate
    seeds: tuple[int, ...]  # seed of both runs of each pair
    time: float = 0.0
    changed: tuple[str, ...] = ()  # changes after the first look, which void the error rate
    id: str = ""
    """Name of the question in the ledger, drawn at its registration; empty in a record of an earlier version."""

    @property
    def scale(self) -> str:
        """Parameters and tokens in words."""
        size = "" if self.parameters is None else f"{format_count(self.parameters)} parameters and "
        return f"{size}{format_count(self.tokens)} tokens"

    @property
    def when(self) -> str:
        """Looks in words."""
        if self.anytime:
            return f"after each pair from the third to number {self.looks[-1]}"
        return f"after {listed(self.looks, 'and')} pairs"

    @property
    def rule(self) -> str:
        """Stopping rule and error rate in words."""
        among = "" if self.tries == 1 else f" among {self.tries} tries"
        return f"looks {self.when}{'' if self.futility else ', without futility'}, alpha {self.alpha:g}{among}"

    def changes(self, before: "Registration", keys: Sequence[str] = ()) -> list[str]:
        """Fields that differ from an earlier registration, as `alpha: 0.05 → 0.1`. `keys` says in the same way how the
        configurations differ, of which a registration has only the ids."""
        names = [field.name for field in fields(self) if field.name not in ("seeds", "time", "changed", "id")]
        pairs = [(name, getattr(before, name), getattr(self, name)) for name in names]
        known = {"arms": "configuration of a run", "looks": "looks at pairs"}
        found = {
            name: f"{known.get(name, name)}: {_text(old)} → {_text(new)}" for name, old, new in pairs if old != new
        }
        return [*(keys if keys and found.pop("arms", "") else ()), *found.values()]


def _text(value: object) -> str:
    return ", ".join(map(_text, value)) if isinstance(value, tuple) else str(value)


LEDGER = "questions.jsonl"
LARGEST_E = 1e12  # largest e-value of a row; JSON has no infinity, and a smaller e-value is one too
PURPOSE = b"titan_exp: row of questions.jsonl\0"


@dataclass(frozen=True)
class Question:
    """Row of the ledger: one question at one time."""

    id: str  # drawn at the registration, and kept by later rows of the question
    study: str
    candidate: str
    baseline: str
    arms: tuple[str, str]
    metric: str
    scale: str
    rule: str
    pairs: int  # pairs at the last look; 0 before the first
    outcome: Outcome
    why: str  # reason for the outcome, as of a verdict; `dropped` between looks
    e_better: float  # e-value against the candidate being no better
    p_better: float
    changed: tuple[str, ...]
    dropped: str
    time: float
    before: str = ""  # SHA-256 of the line before; empty in the first

    @property
    def e_value(self) -> float:
        """E-value that counts: 1 without an error rate, and where no evidence may speak for the candidate."""
        return 1.0 if self.changed or self.dropped or self.why == "withheld" else self.e_better


@dataclass(frozen=True)
class Ledger:
    """Content of the ledger of a folder of runs."""

    path: Path
    rows: tuple[Question, ...]  # rows that can be read, in the order of the file
    faults: tuple[str, ...]  # lines that are damaged, and places at which lines were changed or removed
    foreign: tuple[int, ...]  # lines that this user's key has not signed

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
    """Append a row to the ledger of a folder of runs, unless the newest one of its question says the same. Raises
    OSError if it cannot be written, and UserError if it is not a file or cannot be locked; then it is as before."""
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
