"""Overrides and labels as text: one spelling of a value, words of a label, and whether a point fulfils conditions."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from titan_exp.config.errors.user_error import in_quotes, shown


def override(key: str, value: Any) -> str:
    """Override for a key and a YAML value, quoted if Hydra would parse the text differently."""
    return f"{key}={text_of(value)}"


def text_override(key: str, text: str) -> str:
    """Override for a key that takes text, quoted if Hydra would read a number, a switch or null."""
    reads = _scalar(text) != text or text.lower() in ("true", "false", "null", "inf", "nan")
    return f"{key}={in_quotes(text) if reads else text_of(text)}"


def split_override(text: str) -> tuple[str, str]:
    """Key and value of an override; the key without `+` or `~`."""
    key, _, value = text.partition("=")
    return key.lstrip("+~"), value


def text_of(value: Any) -> str:
    """YAML value as that of an override."""
    return shown(value, lambda text: in_quotes(text) if not text or set(text) & set(" ,()[]{}'\"\\=#\t\n") else text)


def hold(conditions: Mapping[str, Sequence[str]], facts: Mapping[str, str]) -> bool:
    """True if a point with these values by key fulfils all conditions."""
    return all(key in facts and spelled(facts[key]) in map(spelled, values) for key, values in conditions.items())


@cache
def spelled(value: str) -> str:
    """One spelling of a value, whichever is typed: of `4e-3` that of `0.004`, of `[0.90, 'a']` that of `[0.9,a]`."""
    bare = re.sub(r"\s*([\[\]{},:])\s*", r"\1", value.replace("'", "").replace('"', ""))
    return re.sub(r"[^\[\]{},:]+", lambda part: _scalar(part[0].strip()), bare)


def _scalar(word: str) -> str:
    if word.lower() in ("true", "false", "null"):
        return word.lower()
    try:
        number = float(word)
    except ValueError:
        return word
    return repr(number) if number.is_integer() else f"{number:.10g}"  # the digits that tables have


def words_of(label: str) -> list[str]:
    """Words of a label, which spaces or commas separate; those within brackets or quotes are a value's."""
    return re.findall(r"""(?:\[[^\]]*\]|\{[^}]*\}|'[^']*'|"[^"]*"|[^\s,])+""", label)


def names_all(wanted: str, words: Sequence[str]) -> bool:
    """True if each word of a label is among the others, in any spelling of its value, its key with or without the
    groups."""
    found = words_of(wanted)
    return bool(found) and all(any(_is_same(word, other) for other in words) for word in found)


def _is_same(word: str, other: str) -> bool:
    (key, _, value), (name, _, another) = word.partition("="), other.lstrip("+").partition("=")
    is_key = key == name or key.endswith(f".{name}") or name.endswith(f".{key}")
    return word == other or (is_key and "=" in word and spelled(value) == spelled(another))


def described(conditions: Mapping[str, Sequence[str]]) -> str:
    """Conditions as text."""
    return " ".join(f"{key}={','.join(values)}" for key, values in conditions.items())
