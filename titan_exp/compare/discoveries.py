"""Discoveries among all registered questions of a folder of runs, at a false discovery rate."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from titan_exp.compare.output.study_sections import NONE, Section, markdown
from titan_exp.config.errors.user_error import UserError, did_you_mean, listed
from titan_exp.config.study.study_file import OWN_DIR, study_files
from titan_exp.launch.evidence import e_bh, e_lond
from titan_exp.launch.ledger import Question, read_ledger
from titan_exp.launch.run_lookup import StudyFolder, sweep_command
from titan_exp.tracking.display import format_items


@dataclass(frozen=True)
class Judged:
    """Question among all others."""

    question: Question
    discovery: bool  # True if e-BH finds it among all questions
    online: bool  # True if e-LOND finds it in the order of registration
    again: Question | None  # first later question about the same configurations with other seeds, if this one is better
    command: str  # line that registers it again with new seeds; empty unless it is better and nobody did so yet


@dataclass(frozen=True)
class Discoveries:
    """Questions of a ledger."""

    path: Path
    alpha: float  # false discovery rate, at most
    every: tuple[Judged, ...]  # all questions, which all count, in the order of registration
    shown: tuple[Judged, ...]
    faults: tuple[str, ...]  # reasons for which no rate can be stated
    foreign: tuple[int, ...]  # lines that this user's key has not signed


def judge(runs: Path, alpha: float, studies: Sequence[str] = ()) -> Discoveries:
    """Judge all questions of a folder of runs together, and show those of some studies, or all. Raises UserError if no
    question was registered, or a study has none."""
    ledger = read_ledger(runs)
    questions = ledger.questions
    faults = (*ledger.faults, *_missing(runs, questions))
    if not (questions or faults):
        raise UserError(f"{ledger.path}: no study under {runs}/ has registered a question. Add pairs: to its file.")
    e_values = [question.e_value for question in questions]
    every = []
    for one, discovery, online in zip(questions, e_bh(e_values, alpha), e_lond(e_values, alpha), strict=True):
        same = [other for other in questions if (other.arms, other.metric) == (one.arms, one.metric)]
        is_winner = _has_won(one) and one == next(filter(_has_won, same))
        later = [other for other in same[same.index(one) :] if other.study != one.study] if is_winner else []
        command = _command(runs, one.study) if is_winner and not later else ""
        every.append(Judged(one, discovery, online, next(iter(later), None), command))
    names = {question.study for question in questions}
    wanted = [Path(study).name for study in studies]
    for name in wanted:
        if name not in names:
            offer = did_you_mean(name, names) or f"Those that have are {listed(sorted(names) or ['none'], 'and')}."
            raise UserError(f"{name}: this study has registered no question. {offer[:1].upper()}{offer[1:]}")
    shown = tuple(one for one in every if not wanted or one.question.study in wanted)
    return Discoveries(ledger.path, alpha, tuple(every), shown, faults, ledger.foreign)


def _missing(runs: Path, questions: Sequence[Question]) -> Iterator[str]:
    """Studies whose registered question, or a change of it, is not in the ledger."""
    known = {(question.id, question.changed) for question in questions}
    for path in sorted(runs.glob("*/study.json")):
        with suppress(UserError):
            record = StudyFolder(path.parent).read()
            one = None if record is None else record.registered
            if record is not None and one is not None and (one.id, one.changed) not in known:
                yield f"the question of {path.parent.name} is missing, and {record.command} enters it"


def _has_won(question: Question) -> bool:
    return question.outcome == "better" and not question.changed


def _command(runs: Path, study: str) -> str:
    """Line that copies a study's file to a name that is not taken, and runs it; empty if the study is gone."""
    folder = StudyFolder(runs / study)
    try:
        record = folder.read()
    except UserError:
        record = None
    if record is None or not folder.yaml.is_file():
        return ""
    names = (f"{record.name}_{number}" for number in count(2))
    size, taken = study.removeprefix(record.name), study_files()
    name = next(name for name in names if name not in taken and not (runs / f"{name}{size}").exists())
    make = "" if OWN_DIR.is_dir() else f"mkdir {OWN_DIR}; "
    copy = shlex.join(["cp", str(folder.yaml), f"{OWN_DIR / name}.yaml"])
    return f"{make}{copy}; {sweep_command(name, record.size, record.typed)}"


def section(found: Discoveries) -> Section:
    """Table of the shown questions, with sentences about all."""
    heads = ("study", "question", "outcome", "e-BH", "e-LOND", "pairs", "e-value")
    return Section("Discoveries", heads, 5, tuple(map(_row, found.shown)), tuple(_notes(found)))


def _row(one: Judged) -> tuple[str, ...]:
    asked = one.question
    return (
        asked.study,
        f"{asked.candidate} against {asked.baseline} in {asked.metric}",
        _outcome(asked) + (", changed after a look" if asked.changed else ""),
        *("discovery" if yes else NONE for yes in (one.discovery, one.online)),
        str(asked.pairs),
        f"{asked.e_value:.3g}",
    )


def _outcome(question: Question) -> str:
    return "no verdict yet" if question.outcome == "continue" else question.outcome


def _notes(found: Discoveries) -> Iterator[str]:
    all_of_them = [one.question for one in found.every]
    asked, rate = format_items(len(all_of_them), "question"), f"{100 * found.alpha:.3g} %"
    if found.faults:
        yield f"{found.path} is not whole, so that no rate can be stated: {'; '.join(found.faults)}."
    else:
        yield (
            f"At most {rate} of the discoveries by e-BH are false on average, over the {asked} of {found.path} and "
            "whatever runs they share. The same holds for e-LOND, which decides in the order of registration."
        )
    if found.foreign:
        lines = f"{format_items(len(found.foreign), 'line')}, the first is line {found.foreign[0]}"
        yield f"Not signed by your key: {lines}. Another user wrote such a line, or somebody edited it."
    if going := sum(question.outcome == "continue" for question in all_of_them):
        yield f"Without a verdict yet: {going}. Such a question counts with its e-value so far."
    if changed := sum(bool(question.changed) for question in all_of_them):
        yield f"Changed after a look: {changed}. Such a question counts with an e-value of 1."
    for one in found.shown:
        if (again := one.again) is not None:
            yield (
                f"{again.study} measures {one.question.study} again with new seeds: {_outcome(again)}. That needs no "
                f"correction ({again.rule})."
            )
    missed = [one.question.study for one in found.shown if _has_won(one.question)]
    if missed and not any(one.discovery for one in found.every):
        number = len(all_of_them)
        yield (
            f"{listed(missed, 'and')}: better, but no discovery. Alone among {asked}, one needs an e-value of "
            f"{number / found.alpha:.3g}, and planned looks stop long before. In the next studies write "
            f"pairs: {{looks: anytime, tries: {number}}}, or measure a winner again."
        )


def commands(found: Discoveries) -> list[str]:
    """Lines that measure the winners again, the largest e-value first, after a sentence."""
    winners = sorted(found.shown, key=lambda one: -one.question.e_value)
    lines = [f"  {one.command}" for one in winners if one.command]
    why = "A gain that won looks larger than it is. To measure it with new seeds, which needs no correction:"
    return [why, *lines] if lines else []


def to_markdown(found: Discoveries) -> str:
    """Table and sentences as GitHub Markdown."""
    why, *lines = commands(found) or [""]
    again = [why, "", "```bash", *map(str.strip, lines), "```"] if lines else []
    return "\n".join([*markdown([section(found)]), *again]).rstrip("\n") + "\n"


def json_values(found: Discoveries) -> dict[str, Any]:
    """All numbers as JSON values; `false_discovery_rate` is null if none can be stated."""
    return {
        "false_discovery_rate": None if found.faults else found.alpha,
        "questions": len(found.every),
        "shown": [
            {
                **asdict(one.question),
                "e_value": one.question.e_value,
                "discovery": one.discovery,
                "online_discovery": one.online,
                "again": one.command or None,
                "measured_again": one.again and one.again.study,
            }
            for one in found.shown
        ],
        "faults": found.faults,
        "unsigned_lines": found.foreign,
        "remarks": section(found).notes,
    }
