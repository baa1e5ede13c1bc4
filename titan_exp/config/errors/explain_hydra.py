"""Hydra composition errors: all unreadable overrides and unknown keys, groups and options, with the nearest names."""

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
from titan_exp.config.schema.config_diff import flatten
from titan_exp.config.schema.schema import annotation_of, value_keys

MESSAGE = "These overrides cannot be composed."
UNREADABLE = (HydraException, OmegaConfBaseException, yaml.YAMLError)
"""Exceptions of overrides or YAML that cannot be composed."""


def is_composition_error(error: Exception) -> bool:
    """True if an error was caused by overrides or YAML, not by a bug."""
    if isinstance(error, UNREADABLE):
        return True
    # Hydra also raises plain ValueErrors and warnings.
    raised_in = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1:]
    folders = tuple(str(Path(str(module.__file__)).parent) for module in (hydra, omegaconf))
    return isinstance(error, ValueError | UserWarning) and any(name.startswith(folders) for name in raised_in)


def explain(error: Exception, arguments: Arguments) -> UserError:
    """Convert Hydra's error for these arguments to a UserError; keeps Hydra's message if all names are known."""
    found = unknown_names(arguments)
    if found:
        return UserError(MESSAGE, found)
    lost = re.search(r"path=(?P<path>\S+) is not available", str(error))
    if lost:
        return UserError(
            f"hydra.searchpath: {lost['path']} cannot be found. It takes folders (file:///folder) and packages that "
            "are installed, on PYTHONPATH or in the current directory (pkg://package.folder)."
        )
    texts = [str(error), str(error.__cause__ or "")]
    lines = [line for text in texts for line in text.splitlines() if line.strip() and "hydra.cc" not in line]
    return UserError("\n".join(dict.fromkeys(lines)) or type(error).__name__)


def unknown_names(arguments: Arguments) -> list[Violation]:
    """Violations of unreadable overrides, and of overrides with unknown keys, groups or options."""
    parsed: list[Override] = []
    found: list[Violation] = []
    for text in _joined(arguments.overrides):
        if text not in arguments.overrides:
            found.append(_unreadable(text))
            continue
        try:
            parsed.append(OverridesParser.create().parse_override(text))
        except HydraException:
            found.append(_unreadable(text))
    if not found:
        with suppress(*UNREADABLE, OSError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hydra has already warned about its search path
            with groups_for(arguments) as groups:
                names = _Names(groups)
                names.choose(parsed)
                found = [violation for override in parsed for violation in names.check(override)]
    return found


class _Names:
    """Groups, options and keys of a configuration, for checking overrides."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.names = groups.names()
        composed = groups.compose()
        self.chosen = _chosen(composed)
        """Option of each group in the defaults list."""
        self.tree = _tree(composed)
        """Configuration with these options."""

    def choose(self, parsed: Sequence[Override]) -> None:
        """Add the keys of the existing options among the overrides."""
        options = [
            str(override.input_line)
            for override in parsed
            if override.key_or_group in self.names
            and not override.is_sweep_override()
            and not any(self.check(override))
        ]
        with suppress(*UNREADABLE):
            composed = self.groups.compose(options)
            chosen = _chosen(composed)
            self.tree, self.chosen = _tree(composed), {group: chosen[group] for group in self.chosen}

    def check(self, override: Override) -> Iterator[Violation]:
        """Violations of one override."""
        key = override.key_or_group
        if override.is_hydra_override():
            return
        if key in self.names:
            options = self.groups.options(key)
            for option in _values(override):
                if option not in options and not isinstance(override.value(), dict):
                    yield _unknown_option(key, option, options)
                elif key in self.chosen and override.is_add():
                    reason = "this group has its option already"
                    yield Violation(f"+{key}", option, reason, f"leave the plus out: {key}={option}")
        elif not (override.is_add() or override.is_force_add()):
            yield from self._check_key(key, override)

    def _check_key(self, key: str, override: Override) -> Iterator[Violation]:
        *parents, name = key.split(".")
        parent, node = ".".join(parents), self.tree
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        # Hydra suggests the `+` that adds a key to keyword arguments.
        if (isinstance(node, dict) and name in node) or str(annotation_of(parent)).startswith("dict"):
            return
        value = "" if override.is_delete() else str(override.input_line).partition("=")[2]
        if not parents and isinstance(override.value(), str) and (groups := nearest(key, self.names)):
            offers = listed([f"{group}={value}" for group in groups])
            yield Violation(key, value, "unknown group", f"did you mean {offers}?")
            return
        leaves = flatten(self.tree)
        found = nearest(key, dict.fromkeys([*leaves, *value_keys()]))
        homes = listed(self._options_with(found[0])) if found and found[0] not in leaves else ""
        if homes and found[0] == key:
            reason = f"{parent}={self.chosen[parent]} does not have this key"
            yield Violation(key, value, reason, f"it comes with {homes}")
            return
        offer = f"did you mean {found[0]}? It comes with {homes}." if homes else did_you_mean(key, found)
        inside = f"{parent} has {listed(node, 'and')}" if parents and isinstance(node, dict) else ""
        yield Violation(key, value, "unknown key", offer or inside or "titan-exp train --cfg job prints every key")

    def _options_with(self, key: str) -> list[str]:
        """Options of a key's group that have the key: `cluster=slurm`."""
        group, _, name = key.rpartition(".")
        found = []
        for option in self.groups.options(group) if group in self.chosen else ():
            with suppress(*UNREADABLE):
                if name in (_tree(self.groups.compose([f"{group}={option}"])).get(group) or {}):
                    found.append(f"{group}={option}")
        return found


def _unknown_option(group: str, option: Any, options: Sequence[str]) -> Violation:
    offer = did_you_mean(str(option), options)
    remedy = f"{offer} The options are {listed(options, 'and')}." if offer else f"choose {listed(options)}"
    if group == "experiment":
        remedy += f" (the run's name is experiment.name={option})"
    return Violation(group, option, "this group has no such option", remedy)


def _joined(overrides: Sequence[str]) -> Iterator[str]:
    """Overrides; one that was typed with spaces around its equals sign is a single text."""
    rest = list(overrides)
    while rest:
        text = rest.pop(0)
        if rest and "=" not in text and rest[0].startswith("="):
            text = f"{text} {rest.pop(0)}"
        if rest and text.endswith("=") and "=" not in rest[0]:
            text = f"{text} {rest.pop(0)}"
        yield text


def _unreadable(text: str) -> Violation:
    key, equals, value = text.partition("=")
    if not equals or " " in key or value.startswith(" "):
        colon = re.fullmatch(r"([\w.]+):(.+)", text)
        meant = f"{colon[1]}={colon[2]}" if colon else "".join(text.split())
        remedy = f"type {meant}" if "=" in meant else f"for example {text}=... or training.steps=100"
        return Violation(text, "", "an override is key=value, without spaces", remedy)
    remedy = f"quote it, once for the shell and once for Hydra: {key}='\"{value}\"'"
    return Violation(key, value, "this value cannot be read", remedy)


def _values(override: Override) -> list[Any]:
    if override.is_sweep_override():
        with suppress(HydraException):
            return list(override.sweep_iterator())
        return []
    value = override.value()
    return list(value) if isinstance(value, list) else [value]


def _tree(cfg: DictConfig) -> dict[str, Any]:
    tree: Any = OmegaConf.to_container(cfg, resolve=False)
    tree.pop("hydra", None)
    return tree


def _chosen(cfg: DictConfig) -> dict[str, str]:
    return {str(key).partition("@")[0]: str(option) for key, option in cfg.hydra.runtime.choices.items()}
