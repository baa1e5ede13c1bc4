"""Reference of every key, docs/reference.md, generated from the config dataclasses and the default configuration."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.builtins import decay_names
from titan_exp.config.schema.schema import annotation_of, choices_of, docstrings, hints, keys, meaning_of, value_keys
from titan_exp.optim.lr_schedule import Decays

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"
HEADING = """\
# Every key

Written by `make golden` from the config dataclasses; do not edit. Defaults are those of `titan-exp train` with no
override; – marks a key that the default configuration does not have.
"""
BUILT_IN = {"lr_schedule.decay": {name: getattr(Decays, name).__doc__ for name in decay_names()}}
"""Meanings of built-in values that are described in their own modules, by key."""


def reference() -> str:
    default = compose([])
    lines = [HEADING]
    for group, meaning in docstrings(Experiment).items():
        lines += [f"## {group}", "", meaning, "", "| key | default | meaning |", "|---|---|---|"]
        lines += [_row(key, default) for key in value_keys() if key.startswith(f"{group}.")]
        lines.append("")
    return "\n".join(lines)


def _row(key: str, default: Any) -> str:
    value = OmegaConf.select(default, key, default=...)
    shown = "–" if value is ... else f"`{_text(value)}`"
    choices = choices_of(annotation_of(key))
    allowed = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
    built_in = "".join(f" `{name}`: {meaning}" for name, meaning in BUILT_IN.get(key, {}).items())
    meaning = f"{meaning_of(key)}{allowed}{built_in}".replace("|", r"\|")
    return f"| `{key}` | {shown} | {meaning} |"


def _text(value: Any) -> str:
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return "null" if plain is None else str(plain).lower() if isinstance(plain, bool) else str(plain)


def test_the_reference_is_current(golden: Any):
    golden(REFERENCE, reference())


def test_every_group_and_key_has_a_meaning():
    assert set(docstrings(Experiment)) == set(hints(Experiment))
    assert [key for key in keys() if not meaning_of(key)] == []
