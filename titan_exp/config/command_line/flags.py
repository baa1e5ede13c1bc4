"""Flags of a verb (`--dry-run`, `--jobs 4`), taken out of the typed words."""

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
        switches: flags without a value.
        valued: flags with a value, `--jobs 4` or `--jobs=4`, and its type: `str`, or `int` from 0.
        others: flags of another parser, which stay among the words.
        verb: name of the verb, for messages.

    Raises:
        UserError: a flag is unknown, lacks its value or has an invalid one.
    """
    alone, with_value, foreign = set(switches), dict(valued or {}), set(others or ())
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
        elif word.startswith("-") and word != "-" and name not in foreign:
            raise UserError(_unknown(word, [*alone, *with_value], foreign, verb))
        else:
            rest.append(word)
    return found, rest


def _unknown(word: str, own: Sequence[str], foreign: Iterable[str], verb: str) -> str:
    key = word.lstrip("-")
    if "=" in key or "." in key:
        return f"{word}: keys are set without dashes: {key if '=' in key else key + '=...'}"
    offer = did_you_mean(word, nearest(word, [*own, *foreign]))
    flags = listed(sorted(flag for flag in own if flag.startswith("--")), "and")
    return f"{word}: there is no such flag; {offer or f'titan-exp {verb} has {flags}'}"


def _read(name: str, value: str, kind: type) -> str | int:
    if kind is str:
        return value
    if not value.isdigit():
        raise UserError(f"{name} {value}: must be a whole number, such as {name} 2.")
    return int(value)
