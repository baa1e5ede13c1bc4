"""User errors: violations of the configuration, printed without a traceback; near words and numbers for them."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache


@dataclass(frozen=True)
class Violation:
    """Violation of a rule or type: key, value, reason, remedy."""

    field: str
    """Configuration key, as typed on the command line (`training.global_batch_size`)."""
    value: object
    """Value of the key."""
    reason: str
    """Reason why the value cannot be used."""
    remedy: str
    """Nearest values that work, or the command to type."""

    def __str__(self) -> str:
        setting = f"{self.field}={shown(self.value)}" if self.value != "" else self.field
        return f"{setting}: {self.reason}\n    {self.remedy}"


class UserError(Exception):
    """Error that the user can fix; printed without a traceback, exit status 2."""

    exit_code = 2

    def __init__(self, message: str, violations: Sequence[Violation] = ()) -> None:
        self.message, self.violations = message, tuple(violations)
        lines = [message, *(f"  {violation}" for violation in self.violations)]
        super().__init__("\n".join(lines))


class Outcome(Exception):
    """Failure that is an outcome of a run and no bug, such as divergence; printed without a traceback, exit status
    1."""


def shown(value: object, text: Callable[[str], str] = str) -> str:
    """Format a value as typed on the command line; `text` formats its strings."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{','.join(shown(part, text) for part in value)}]"
        case dict():
            return f"{{{','.join(f'{key}:{shown(part, text)}' for key, part in value.items())}}}"
        case str():
            return text(value)
        case _:
            return str(value)


def in_quotes(text: str) -> str:
    """String in quotes as Hydra reads them: a backslash is one before a quote and at the end alone."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def nearest(word: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` candidates similar to a word, best first, without those much less similar than the best. A dotted
    candidate is also similar if its last part is (`lr` finds `optimizer.lr`), and a longer candidate if it begins with
    the word."""
    scored = [(_similarity(word.lower(), choice.lower()), choice) for choice in dict.fromkeys(candidates)]
    best = max((score for score, _ in scored), default=0.0)
    margin = 0.12 if best < 0.9 else 0.04
    near = [(score, choice) for score, choice in scored if score >= max(0.68, best - margin)]
    return [choice for _, choice in sorted(near, key=lambda pair: -pair[0])[:count]]


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`did you mean a, b or c?`, or an empty string if no candidate is similar."""
    found = nearest(word, candidates)
    return f"did you mean {listed(found)}?" if found else ""


def listed(words: Iterable[object], joined_by: str = "or") -> str:
    """Join words as in `a, b or c`."""
    *head, last = [str(word) for word in words] or [""]
    return f"{', '.join(head)} {joined_by} {last}" if head else last


def some_of(words: Sequence[str], most: int = 5) -> str:
    """Join the first words, and count the others: `a, b and 3 more`."""
    rest = [f"{len(words) - most} more"] if len(words) > most else []
    return listed([*words[:most], *rest], "and")


def nearest_numbers(value: int, numbers: Iterable[int], count: int = 3) -> list[int]:
    """Nearest `count` numbers to a value, in increasing order."""
    return sorted(sorted(set(numbers), key=lambda number: (abs(number - value), number))[:count])


def divisors(number: int) -> list[int]:
    """Divisors of a positive whole number, in increasing order."""
    small = [candidate for candidate in range(1, int(number**0.5) + 1) if number % candidate == 0]
    return small + [number // candidate for candidate in reversed(small) if candidate * candidate != number]


def multiples_near(value: int, of: int) -> list[int]:
    """Nearest multiples below and above a value, without 0."""
    below = value // of * of
    return [number for number in (below, below + of) if number > 0]


@lru_cache(maxsize=4096)
def _similarity(word: str, choice: str) -> float:
    group, _, leaf = word.rpartition(".")
    choice_group, _, choice_leaf = choice.rpartition(".")
    score = SequenceMatcher(None, word, choice).ratio()
    if choice_group:
        by_leaf = SequenceMatcher(None, leaf, choice_leaf).ratio()
        # A shared group is not evidence for the rest of the word.
        score = min(1.0, by_leaf + 0.1) if group == choice_group else max(score, 0.95 * by_leaf)
    shared = set(leaf.split("_")) & set(choice_leaf.split("_"))
    if max(map(len, shared), default=0) > 2:
        score = max(score, 0.7)  # max_steps and training.steps
    if len(word) > 1 and choice.startswith(word):
        score = max(score, 0.8 + 0.1 * len(word) / len(choice))
    return score
