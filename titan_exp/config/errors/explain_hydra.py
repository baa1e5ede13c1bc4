"""Explain composition errors: every unknown key, group and option at once, with its nearest neighbours."""

import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
import omegaconf
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titan_exp.config.command_line.hydra_args import Arguments
from titan_exp.config.errors.did_you_mean import did_you_mean, listed, nearest
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.hydra.config_groups import Groups, groups_for
from titan_exp.config.schema.schema import annotation_of, value_keys

MESSAGE = "These overrides cannot be composed."
UNREADABLE = (HydraException, OmegaConfBaseException, yaml.YAMLError)
"""Exceptions of text that cannot be composed."""


def is_about_words(error: Exception) -> bool:
    """True if an error is about overrides or YAML, and not a bug."""
    if isinstance(error, UNREADABLE):
        return True
    # Hydra raises plain ValueErrors and warnings as well.
    raised_in = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1:]
    folders = tuple(str(Path(str(module.__file__)).parent) for module in (hydra, omegaconf))
    return isinstance(error, ValueError | UserWarning) and any(name.startswith(folders) for name in raised_in)


def explain(error: Exception, arguments: Arguments) -> UserError:
    """Say what Hydra's error means; where nothing better is found, its own words.

    Args:
        error: what Hydra raised while it composed.
        arguments: what was typed.
    """
    found = misspelt(arguments)
    if found:
        return UserError(MESSAGE, found)
    lost = re.search(r"path=(?P<place>\S+) is not available", str(error))
    if lost:
        return UserError(
            f"hydra.searchpath: {lost['place']} cannot be found. It takes folders (file:///place) and packages that "
            "are installed, on PYTHONPATH or in the current directory (pkg://package.folder)."
        )
    return UserError(_plainly(error))


def misspelt(arguments: Arguments) -> list[Violation]:
    """Every override that cannot be read, or names a key, a group or an option that is not there."""
    parsed: list[Override] = []
    found: list[Violation] = []
    for text in arguments.overrides:
        try:
            parsed.append(OverridesParser.create().parse_override(text))
        except HydraException:
            found.append(_unreadable(text))
    if not found:
        with suppress(*UNREADABLE, OSError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hydra's warnings about its search path have been raised once
            found += _look_closer(parsed, arguments)
    return found


def _look_closer(parsed: Sequence[Override], arguments: Arguments) -> list[Violation]:
    with groups_for(arguments) as groups:
        reader = _Reader(groups, sweeping=arguments.has("--multirun", "-m"))
        reader.choose(parsed)
        return [violation for override in parsed for violation in reader.read(override)]


class _Reader:
    """Reads overrides against the groups there are and the keys of the configuration as it is without overrides."""

    def __init__(self, groups: Groups, *, sweeping: bool) -> None:
        self.groups, self.sweeping = groups, sweeping
        self.names = groups.names()
        composed = groups.compose()
        self.chosen = _chosen(composed)
        """The option of every group that has one without overrides."""
        self.tree = _tree(composed)

    def choose(self, parsed: Sequence[Override]) -> None:
        """Take the keys that the options add which are chosen rightly."""
        rightly = [
            str(override.input_line)
            for override in parsed
            if override.key_or_group in self.names and not override.is_sweep_override() and not any(self.read(override))
        ]
        with suppress(*UNREADABLE):
            composed = self.groups.compose(rightly)
            options = _chosen(composed)
            self.tree = _tree(composed)
            self.chosen = {group: options[group] for group in self.chosen}

    def read(self, override: Override) -> Iterator[Violation]:
        """Violations of one override."""
        key, text = override.key_or_group, str(override.input_line)
        if override.is_hydra_override():
            return
        if override.is_sweep_override() and not self.sweeping:
            given = text.partition("=")[2]
            yield Violation(
                key,
                given,
                "a comma separates the values of a sweep",
                f"to run one after the other add -m; for a list write {key}='[{given}]'",
            )
        elif key in self.names:
            yield from self._group(override)
        elif not (override.is_add() or override.is_force_add()):
            yield from self._key(key, override)

    def _group(self, override: Override) -> Iterator[Violation]:
        name, options = override.key_or_group, self.groups.options(override.key_or_group)
        for choice in _choices(override):
            if choice is None or not isinstance(choice, str):
                yield Violation(name, choice, "an option of this group is meant", f"choose {listed(options)}")
            elif choice not in options and not isinstance(override.value(), dict):
                yield from self._option(name, choice, options)
            elif name not in self.chosen and not override.is_add():
                yield Violation(name, choice, "this group is laid on top", f"put a plus before it: +{name}={choice}")
            elif name in self.chosen and override.is_add():
                yield Violation(
                    f"+{name}", choice, "this group has its option already", f"leave the plus out: {name}={choice}"
                )

    def _option(self, name: str, choice: str, options: list[str]) -> Iterator[Violation]:
        offer = did_you_mean(choice, options)
        remedy = f"{offer} The options are {listed(options, 'and')}." if offer else f"choose {listed(options)}"
        if name == "experiment":
            remedy += f" (the run's name is experiment.name={choice})"
        yield Violation(name, choice, "this group has no such option", remedy)

    def _key(self, key: str, override: Override) -> Iterator[Violation]:
        *parents, name = key.split(".")
        node: Any = self.tree
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and name in node:
            return
        parent = ".".join(parents)
        value = "" if override.is_delete() else _value(override)
        if str(annotation_of(parent)).startswith("dict"):
            yield Violation(key, value, "this key is not there yet", f"put a plus before it: +{override.input_line}")
        elif not parents and isinstance(override.value(), str) and nearest(key, self.names):
            offers = [f"{name}={value}" for name in nearest(key, self.names)]
            yield Violation(key, value, "there is no such group", f"did you mean {listed(offers)}?")
        else:
            inside = f"{parent} has {listed(node, 'and')}" if parents and isinstance(node, dict) else ""
            general = "titan-exp train --cfg job prints every key"
            found = nearest(key, dict.fromkeys([*_leaves(self.tree), *value_keys()]))
            homes = self._homes(found[0]) if found and found[0] not in _leaves(self.tree) else []
            if homes and found[0] == key:
                group, chosen = parents[0], self.chosen[parents[0]]
                yield Violation(
                    key, value, f"{group}={chosen} does not have this key", f"it comes with {listed(homes)}"
                )
                return
            offer = f"did you mean {found[0]}? It comes with {listed(homes)}." if homes else did_you_mean(key, found)
            yield Violation(key, value, "there is no such key", offer or inside or general)

    def _homes(self, key: str) -> list[str]:
        """The options of a key's group that have the key, where the chosen one does not: `cluster=slurm`."""
        group, _, name = key.rpartition(".")
        if group not in self.chosen:
            return []
        found = []
        for option in self.groups.options(group):
            with suppress(*UNREADABLE):
                if name in (_tree(self.groups.compose([f"{group}={option}"])).get(group) or {}):
                    found.append(f"{group}={option}")
        return found


def _unreadable(text: str) -> Violation:
    key, equals, value = text.partition("=")
    if not equals:
        return Violation(
            text, "", "an override is key=value, without spaces", f"for example {text}=... or training.steps=100"
        )
    if not value:
        return Violation(
            key, "", "there is nothing after the equals sign", f"{key}=null, or {key}='\"\"' for empty text"
        )
    return Violation(
        key, value, "this value cannot be read", f"quote it, once for the shell and once for Hydra: {key}='\"{value}\"'"
    )


def _choices(override: Override) -> list[Any]:
    if override.is_sweep_override():
        with suppress(HydraException):
            return list(override.sweep_iterator())
        return []
    value = override.value()
    return list(value) if isinstance(value, list) else [value]


def _value(override: Override) -> str:
    return str(override.input_line).partition("=")[2]


def _tree(cfg: DictConfig) -> dict[str, Any]:
    tree: Any = OmegaConf.to_container(cfg, resolve=False)
    tree.pop("hydra", None)
    return tree


def _chosen(cfg: DictConfig) -> dict[str, str]:
    """The option of every group."""
    return {str(key).partition("@")[0]: str(option) for key, option in cfg.hydra.runtime.choices.items()}


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _plainly(error: Exception) -> str:
    said = [str(error), str(error.__cause__ or "")]
    lines = [line for text in said for line in text.splitlines() if line.strip() and "hydra.cc" not in line]
    return "\n".join(dict.fromkeys(lines)) or type(error).__name__
