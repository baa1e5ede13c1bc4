"""Flags of our own verbs, such as `--dry-run` and `--jobs 4`, taken out of what was typed."""

from collections.abc import Iterable, Mapping, Sequence

from titan_exp.config.errors.did_you_mean import did_you_mean, listed, nearest
from titan_exp.config.errors.user_error import UserError


def take_flags(
    words: Sequence[str],
    switches: Iterable[str],
    valued: Mapping[str, type] | None = None,
    *,
    others: Iterable[str] | None = None,
    verb: str = "",
) -> tuple[dict[str, str | int | bool], list[str]]:
    """Flags with their values, and the words that are none.

    Args:
        words: as typed.
        switches: flags that stand alone.
        valued: flags that take a value, `--jobs 4` or `--jobs=4`, and of which type: `str`, or `int` from 0.
        others: flags that somebody else reads, and that stay among the words.
        verb: the verb, for messages.

    Raises:
        UserError: a flag is unknown, lacks its value or has one that cannot be.
    """
    alone, with_value, strange = set(switches), dict(valued or {}), set(others or ())
    found: dict[str, str | int | bool] = {}
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if word in alone:
            found[word] = True
        elif name in with_value:
            if not equals:
                if not queue:
                    raise UserError(f"{name} needs a value after it. See titan-exp {verb} --help.")
                value = queue.pop(0)
            found[name] = _read(name, value, with_value[name])
        elif word.startswith("-") and word != "-" and name not in strange:
            if "=" in word or "." in word:
                raise UserError(f"{word}: keys are set without dashes: {word.lstrip('-')}")
            offer = did_you_mean(word, nearest(word, [*alone, *with_value, *strange]))
            has = listed(sorted(flag for flag in {*alone, *with_value} if flag.startswith("--")), "and")
            raise UserError(f"{word}: there is no such flag; {offer or f'titan-exp {verb} has {has}'}")
        else:
            rest.append(word)
    return found, rest


def _read(name: str, value: str, kind: type) -> str | int:
    if kind is str:
        return value
    if not value.isdigit():
        raise UserError(f"{name} {value}: a whole number is meant, such as {name} 2.")
    return int(value)
