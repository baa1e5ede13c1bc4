"""Words in place of overrides: what was probably meant, as the line to type."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import grammar_parser
from omegaconf.errors import GrammarParseError

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.explain_values import FREE_TEXT
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.schema.schema import annotation_of, is_number, keys

_PAIRS = {"(": ")", "[": "]", "{": "}"}


def joined_words(overrides: Sequence[str]) -> Iterator[str]:
    """Overrides; one that the shell split at spaces is a single text."""
    rest = list(overrides)
    while rest:
        text = rest.pop(0)
        if rest and "=" not in text and rest[0].startswith("="):
            text = f"{text} {rest.pop(0)}"
        if rest and text.endswith(("=", ":")) and "=" not in rest[0]:
            text = f"{text} {rest.pop(0)}"
        while text.startswith(FREE_TEXT) and rest and "=" not in rest[0]:
            text = f"{text} {rest.pop(0)}"
        if _is_open(text):
            parts = [text]
            while rest and "=" not in rest[0] and _is_open(" ".join(parts)):
                parts.append(rest.pop(0))
            if _is_open(" ".join(parts)):  # never closed: the words are separate mistakes
                rest = [*parts[1:], *rest]
            else:
                text = " ".join(parts)
        yield text


def unreadable(text: str, before: str, options: Mapping[str, Sequence[str]]) -> Violation:
    """Violation of a word that is no override; `before` is the word typed before it, `options` are those by group."""
    key, equals, value = text.partition("=")
    if not equals:
        return Violation(text, "", "an override is key=value, without spaces", _for_word(text, before, options))
    if not text.startswith(FREE_TEXT) and (" " in key or value.startswith(" ")):
        return Violation(text, "", "an override is key=value, without spaces", f"type {''.join(text.split())}")
    return Violation(key, value, "this value cannot be read", _for_value(key, value))


def _for_word(text: str, before: str, options: Mapping[str, Sequence[str]]) -> str:
    groups = [f"{group}={text}" for group, names in options.items() if text in names]
    pair = re.fullmatch(r"([\w./]+):\s*(.+)", text)
    name = text.strip("=:+~ ")
    key, equals, value = before.partition("=")
    remedy = "for example training.steps=100"
    if pair:
        remedy = f"type {pair[1]}={pair[2]}"
    elif groups:
        remedy = f"type {listed(groups)}"
    elif name in keys():
        remedy = f"for example {name}=..., or titan-exp train --cfg job to see its value"
    elif Path(text).suffix in (".yaml", ".yml"):
        remedy = f"to train from a configuration file: titan-exp train --config-path {text}"
    elif not any(map(str.isalnum, text)):
        remedy = "leave it out"
    elif equals and value:
        together = f"{value} {text}" if is_text(key) else f"{value},{text}"
        remedy = f"if it belongs to {key}, quote it for the shell: {_quoted(key, together)}"
    return remedy


def _for_value(key: str, value: str) -> str:
    stripped = value.strip(" ;,:.()[]{}'\"")
    inside = re.fullmatch(r"[({\[]\s*([^()\[\]{}]*?)\s*[)}\]]", value)
    if inside and ("," in inside[1] or (value.startswith("[") and not is_text(key))):
        values = ",".join(part.strip() for part in inside[1].split(","))
        if is_number(annotation_of(key)):
            return (
                f"one value: {key}={values.partition(',')[0]}; several for a sweep: titan-exp train -m {key}={values}"
            )
        return f"write {key}='[{','.join(map(_item, values.split(',')))}]'"
    if is_number(annotation_of(key)) and stripped and _is_readable(f"{key}={stripped}"):
        return f"write {key}={stripped}"
    return f"quote it, once for the shell and once for Hydra: {_quoted(key, value)}"


def is_text(key: str) -> bool:
    """True if a key takes text, so that a value may contain spaces."""
    return annotation_of(key) in (str, str | None)


def _quoted(key: str, value: str) -> str:
    """Override for the shell whose value contains characters of Hydra's grammar."""
    if value.startswith("[") or not is_text(key):
        plain = f"{key}='{value}'"
        if _is_readable(f"{key}={value}") and "'" not in value:
            return plain
    inner = value.strip("'\"").replace("\\", "\\\\").replace('"', '\\"').replace("'", "'\\''")
    with suppress(GrammarParseError):
        grammar_parser.parse(value)
        return f"{key}='\"{inner}\"'"
    inner = inner.replace("${", "\\${")  # text, as it is no interpolation
    return f"{key}='\"{inner}\"'"


def _item(text: str) -> str:
    """Item of a list for the shell, in Hydra's quotes if it has characters of the grammar."""
    if "'" not in text and _is_readable(f"key=[{text}]"):
        return text
    inner = text.strip("'\"").replace("\\", "\\\\").replace('"', '\\"').replace("'", "'\\''")
    return f'"{inner}"'


def _is_readable(text: str) -> bool:
    try:
        OverridesParser.create().parse_override(text)
    except HydraException:
        return False
    return True


def _is_open(text: str) -> bool:
    """True if a value has a bracket or a quote that is not closed."""
    value = text.partition("=")[2]
    if not value:
        return False
    opened = sum(value.count(one) - value.count(other) for one, other in _PAIRS.items())
    return opened > 0 or any(value.count(quote) % 2 for quote in "'\"")
