"""Remedies of refusals, typed: each removes its refusal, for every refusal of the tables and for two at a time."""

import random
import re
from collections.abc import Iterator, Sequence

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from tests.config import test_rules
from tests.config.composing import experiment, give_gpus
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.rules import violations

WORD = re.compile(
    r"(?:^|(?<=[\s(]))((?:\+\+|\+|~)?[a-z_]+(?:\.\w+)*=(?:'[^']*'|\[[^\]]*\]|[^\s,;)]+)|~[a-z_]+(?:\.\w+)+)"
)
"""Override in a remedy."""


def table(function: object) -> list[tuple[list[str], str]]:
    """Refused overrides, with their key, of a table of tests."""
    (mark,) = [mark for mark in function.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    rows = [getattr(row, "values", row) for row in mark.args[1]]
    return [(row[0], row[1]) for row in rows if row[1]]


def alternatives(remedy: str) -> Iterator[list[str]]:
    """Overrides of each alternative: words side by side belong together, and of `key=a, b or c` the first counts."""
    for part in re.split(r"; or |; |, or |, | or ", remedy):
        words = [word.rstrip(".:") for word in WORD.findall(part)]
        if words and not any("..." in word or "…" in word or word.isupper() for word in words):
            yield words


def found(overrides: Sequence[str]) -> list[Violation]:
    base = [] if any(word.startswith("model=") for word in overrides) else list(test_rules.BASE)
    try:
        return violations(experiment(*base, *overrides))
    except UserError as error:
        return list(error.violations)


def typed(overrides: Sequence[str], words: Sequence[str]) -> list[str]:
    """A command line with more words, in place of those with the same key."""
    keys = {word.partition("=")[0].lstrip("+") for word in words}
    return [*(word for word in overrides if word.partition("=")[0].lstrip("+") not in keys), *words]


def failing(overrides: Sequence[str]) -> list[str]:
    """Remedies that leave their refusal."""
    left = []
    for violation in found(overrides):
        for words in alternatives(violation.remedy):
            try:
                again = found(typed(overrides, words))
            except (OmegaConfBaseException, HydraException):
                again = [violation]
            if any((one.field, one.reason) == (violation.field, violation.reason) for one in again):
                left.append(f"{' '.join(overrides)}\n  {violation}\n  typed: {' '.join(words)}")
    return left


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    give_gpus(monkeypatch, 0)


ROWS = table(test_rules.test_on_a_machine_without_gpus)
PAIRS = 25
"""Pairs of refused compositions by day."""


def test_every_remedy_removes_its_refusal():
    """One row of the table for each refusal, whatever its numbers."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for overrides, _ in ROWS:
        for violation in found(overrides):
            kinds.setdefault((violation.field, re.sub(r"\d+", "", violation.reason)), overrides)
    assert len(kinds) > 100
    assert [
        line for overrides in map(list, {tuple(row) for row in kinds.values()}) for line in failing(overrides)
    ] == []


def pairs(count: int, seed: int) -> Iterator[list[str]]:
    """Overrides of two refused compositions that share no key."""
    draw = random.Random(seed)
    while count:
        (first, _), (second, _) = draw.sample(ROWS, 2)
        keys = [{word.partition("=")[0].lstrip("+~").partition(".")[0] for word in row} for row in (first, second)]
        if not keys[0] & keys[1]:
            count -= 1
            yield [*first, *second]


def test_remedies_of_two_refusals_remove_them():
    assert [line for overrides in pairs(PAIRS, seed=1) for line in failing(overrides)] == []


@pytest.mark.night
@pytest.mark.parametrize("seed", range(2, 6))
def test_remedies_of_many_pairs_remove_them(seed: int):
    assert [line for overrides in pairs(100, seed) for line in failing(overrides)] == []
