"""Suggestions: similar names for a mistyped word, nearest divisors and multiples of a number."""

from collections.abc import Iterable
from difflib import SequenceMatcher


def nearest(word: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` candidates similar to a word, best first, without those much less similar than the best.

    A dotted candidate is also similar if its last part is (`lr` finds `optimizer.lr`), and a longer candidate if it
    begins with the word.
    """
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


def _similarity(word: str, choice: str) -> float:
    """Similarity from 0 to 1."""
    group, _, leaf = word.rpartition(".")
    choice_group, _, choice_leaf = choice.rpartition(".")
    score = SequenceMatcher(None, word, choice).ratio()
    if choice_group:
        by_leaf = SequenceMatcher(None, leaf, choice_leaf).ratio()
        # A shared group is no evidence for the rest of the word.
        score = min(1.0, by_leaf + 0.1) if group == choice_group else max(score, 0.95 * by_leaf)
    shared = set(leaf.split("_")) & set(choice_leaf.split("_"))
    if max(map(len, shared), default=0) > 2:
        score = max(score, 0.7)  # max_steps and training.steps
    if len(word) > 1 and choice.startswith(word):
        score = max(score, 0.8 + 0.1 * len(word) / len(choice))
    return score
