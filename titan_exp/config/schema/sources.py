"""Sources of data, asked by `data.source`: what their modules have, their typed options, their files."""

from importlib import import_module
from typing import Any

from titan_exp.config.extension import provided
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.builtins import described, sources
from titan_exp.config.schema.typed_config import typed_options
from titan_exp.config.secrets import revealed


def source_member(source: str, name: str) -> Any:
    """Member of this name of a source of the core or of an extension: of its module, or else of its class `build`. None
    without such a member, and for a user's own class. Imports the module."""
    if source not in sources():
        return None
    module = import_module(provided("sources").get(source, f"titan_exp.data.sources.{source}"))
    return getattr(module, name, getattr(getattr(module, "build", None), name, None))


def asked(source: str, name: str) -> Any:
    """`source_member` of a source of text; None for others, whose modules may import torch."""
    return source_member(source, name) if described(source).holds == "text" else None


def source_arguments(options: Any, config: DataConfig) -> tuple[Any, ...]:
    """Arguments of a source and of its `open_files`: the group `data`, and its options if it has a dataclass of them.

    Raises:
        UserError: an option does not fit, or the environment lacks a secret.
    """
    config = revealed(config, "data")
    return (config,) if options is None else (config, typed_options(options, config.options, "data.options"))


def open_files(config: DataConfig) -> Any:
    """Files that a built-in source of text lists, as its `open_files` returns them; None if it lists none. Raises
    UserError if it cannot."""
    find = asked(config.source, "open_files")
    return None if find is None else find(*source_arguments(asked(config.source, "Options"), config))


def corpus_entries(config: DataConfig) -> tuple[str, ...]:
    """Files, folders and globs of this machine that a built-in source of text reads; empty for data elsewhere."""
    key, entries = described(config.source).files, asked(config.source, "local_entries")
    return getattr(config, key) if key else () if entries is None else entries(config)
