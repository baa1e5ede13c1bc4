"""Shell completion after a verb: its options here, keys of groups by Hydra; the shell completes paths itself."""

import typing
from dataclasses import fields

from titan_exp.config.command_line.verb_options import (
    CompareOptions,
    ConvertOptions,
    DownloadOptions,
    EvaluateOptions,
    GenerateOptions,
    TokenizeOptions,
)

OPTIONS: dict[str, type] = {
    "compare": CompareOptions,
    "generate": GenerateOptions,
    "convert": ConvertOptions,
    "download": DownloadOptions,
    "tokenize": TokenizeOptions,
    "evaluate": EvaluateOptions,
}
"""Options of the verbs that also take groups or none."""

GROUPS = {
    "train": ("",),
    "plan": ("",),
    "tokenize": ("data=", "data.", "experiment.seed"),
    "evaluate": ("data=", "data.", "training.", "parallelism.", "model.attention_backend"),
}
"""Beginnings of what a verb takes of a composed configuration."""


def own_words(verb: str, word: str) -> list[str]:
    """The options of a verb that begin with a word, or the values of the one that it names."""
    if verb not in OPTIONS or not word:
        return []
    kinds = typing.get_type_hints(OPTIONS[verb])
    name, equals, _ = word.partition("=")
    if not equals:
        return [f"{field.name}=" for field in fields(OPTIONS[verb]) if field.name.startswith(word)]
    return [offer for value in _values(kinds.get(name)) if (offer := f"{name}={value}").startswith(word)]


def composes(verb: str, word: str) -> bool:
    """True if a typed word is an override for Hydra."""
    if verb not in OPTIONS:
        return True
    name, equals, _ = word.partition("=")
    return bool(equals) and name not in [field.name for field in fields(OPTIONS[verb])]


def fits(verb: str, offer: str) -> bool:
    """True if the verb takes a word that Hydra offers."""
    return offer.startswith(GROUPS[verb]) or any(beginning.startswith(offer) for beginning in GROUPS[verb])


def _values(kind: object) -> tuple[str, ...]:
    if kind is bool:
        return ("true", "false")
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
