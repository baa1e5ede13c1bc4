"""Shell completion after a verb: options of the verb here, config keys by Hydra, paths by the shell."""

from dataclasses import fields
from typing import Any

from titan_exp.config.command_line.options import option_name
from titan_exp.config.command_line.verb_options import (
    CompareOptions,
    ConvertOptions,
    DiffOptions,
    DownloadOptions,
    EvaluateOptions,
    GenerateOptions,
    LogsOptions,
    PlanOptions,
    ShowOptions,
    StatusOptions,
    TokenizeOptions,
)
from titan_exp.config.extension import load, provided
from titan_exp.config.schema.schema import choices_of, hints

OPTIONS: dict[str, type] = {
    "compare": CompareOptions,
    "generate": GenerateOptions,
    "convert": ConvertOptions,
    "download": DownloadOptions,
    "tokenize": TokenizeOptions,
    "evaluate": EvaluateOptions,
    "diff": DiffOptions,
    "show": ShowOptions,
    "logs": LogsOptions,
    "plan": PlanOptions,
    "status": StatusOptions,
}
"""Option dataclasses of verbs that take only some config groups or none."""


def verb_options(verb: str) -> Any:
    """Option dataclass of a verb, of the core or of an extension; None without one."""
    added = provided("options")
    return OPTIONS.get(verb) or (load(added[verb]) if verb in added else None)


GROUPS = {
    "train": ("",),
    "plan": ("",),
    "tokenize": ("data=", "data.", "experiment.seed"),
    "evaluate": ("data=", "data.", "training.", "parallelism.", "model.attention_backend"),
}
"""Accepted override prefixes by verb."""


def complete_option(verb: str, word: str) -> list[str]:
    """Completions of a word: a verb's options, or the values of the option in the word."""
    kind = verb_options(verb)
    if kind is None or not word:
        return []
    name, equals, _ = word.partition("=")
    if not equals:
        names = [option_name(kind, field) for field in fields(kind)]
        names += [f"--{name}" for name in provided("observations")] if verb == "evaluate" else []
        return [name for name in names if name.startswith(word)]
    annotation = hints(kind).get(name)
    values = ["true", "false"] if annotation is bool else choices_of(annotation)
    return [offer for value in values if (offer := f"{name}={value}").startswith(word)]


def is_override(verb: str, word: str) -> bool:
    """True if a typed word is an override for Hydra."""
    name, equals, _ = word.partition("=")
    kind = verb_options(verb)
    return kind is None or (bool(equals) and name not in hints(kind))


def takes_override(verb: str, offer: str) -> bool:
    """True if the verb accepts an override offered by Hydra."""
    return offer.startswith(GROUPS[verb]) or any(prefix.startswith(offer) for prefix in GROUPS[verb])
