"""Name check of overrides: unknown keys, groups and options, with the nearest names, and files of options."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titan_exp.config.errors.user_error import Violation, did_you_mean, listed, nearest
from titan_exp.config.extension import lacking
from titan_exp.config.hydra.config_groups import Groups, check_option_file
from titan_exp.config.schema.component import one_value
from titan_exp.config.schema.identity_keys import flatten
from titan_exp.config.schema.schema import annotation_of, is_list, other_names, own_keys, value_keys

_FAILS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, RecursionError, OSError)
"""Exceptions of Hydra for an option that cannot be composed."""
_CLASSES = {"optimizer": "name", "data": "source"}
"""Key that takes the import path of a class of the user's own, by group."""


class NameCheck:
    """Groups, options and keys of a configuration, for checking overrides."""

    def __init__(self, groups: Groups, *, is_sweep: bool) -> None:
        self.groups, self.is_sweep = groups, is_sweep
        self.names = groups.names()
        composed = groups.compose()
        with_values = [name for name in self.names if name in groups.values.groups and name != "experiment"]
        self.chosen = dict.fromkeys(with_values, "(the file's)") | _chosen(composed)
        """Option of each group in the defaults list, or of which a file without one has the values."""
        self.tree: dict[str, Any] | None = _tree(composed)
        """Configuration with these options; None if they cannot be composed."""
        self._swept: list[list[str]] = []
        """Options among the overrides, with one option of a sweep each."""

    def choose(self, parsed: Sequence[Override]) -> None:
        """Add the keys of the existing options among the overrides."""
        of_groups = [override for override in parsed if override.key_or_group in self.names]
        swept = [override for override in of_groups if override.is_sweep_override()]
        others = [override for override in of_groups if not override.is_sweep_override()]
        options = [str(override.input_line) for override in others if not any(self._check_option(override))]
        self._swept = [
            [*options, f"{override.key_or_group}={value}"] for override in swept for value in _values(override)
        ]
        if not options:
            return
        try:
            composed = self.groups.compose(options)
        except _FAILS:
            self.tree = None
            return
        chosen = _chosen(composed)
        self.tree = _tree(composed)
        self.chosen = {group: chosen.get(group, option) for group, option in self.chosen.items()}

    def check(self, override: Override) -> Iterator[Violation]:
        """Violations of one override."""
        key = override.key_or_group
        if override.is_hydra_override():
            return
        if override.is_sweep_override() and not self.is_sweep:
            yield _one_value(override, is_group=key in self.names)
        elif key in self.names:
            yield from self._check_option(override)
            for option in _values(override):
                if isinstance(option, str) and option in self.groups.options(key):
                    yield from check_option_file(self.groups, key, option, self.tree)
        elif not (override.is_add() or override.is_force_add()) and self.tree is not None:
            yield from self._check_key(key, override, self.tree)

    def _check_option(self, override: Override) -> Iterator[Violation]:
        key, options = override.key_or_group, self.groups.options(override.key_or_group)
        if override.is_delete():
            chosen = self.chosen.get(key)
            if override.value() not in (None, chosen):
                reason = f"the option of this group is {chosen or 'not chosen'}"
                yield Violation(f"~{key}", override.value(), reason, f"to replace it, type {key}=OPTION")
            return
        if isinstance(override.value(), dict):
            yield from self._check_values(key, override)
            return
        listing = isinstance(override.value(), list) and key != "experiment"
        if listing and all(option in options for option in _values(override)):
            yield Violation(key, override.value(), "one run takes one option", one_value(key, _values(override)))
        for option in _values(override):
            if not isinstance(option, str) or option.removesuffix(".yaml") not in options:
                yield self._unknown_option(key, option, options)
            elif override.is_force_add():
                remedy = f"leave them out: {key}={option}"
                yield Violation(f"++{key}", option, "plus signs add keys, not options", remedy)
            elif override.is_add() and key in self.chosen and override.package is None:
                reason = "this group already has an option"
                yield Violation(f"+{key}", option, reason, f"leave the plus out: {key}={option}")
            elif key not in self.chosen and self.groups.values.groups:
                reason = "this chooses an option, and your file holds values in place of options"
                remedy = f"begin from the defaults instead: titan-exp train +{key}={option}"
                yield Violation(override.get_key_element(), option, reason, remedy)
            elif not override.is_add() and key not in self.chosen:
                reason = "this group has no option yet, so there is none to replace"
                remedy = f"add it with a plus: +{key}={option}"
                if parent := key.rpartition("/")[0]:
                    reason = f"each option of {parent} chooses it for you"
                    remedy = f"choose one of those: {parent}=OPTION"
                yield Violation(key, option, reason, remedy)

    def _check_values(self, key: str, override: Override) -> Iterator[Violation]:
        """Violations of `group={key:value}`, which sets keys."""
        node, values = (self.tree or {}).get(key), override.value()
        if not isinstance(node, dict) or not isinstance(values, dict) or override.is_add():
            return
        for name in values:
            if name not in node:
                offer = did_you_mean(str(name), node) or f"{key} has {listed(node, 'and')}"
                yield Violation(f"{key}.{name}", "", "unknown key", offer)

    def _check_key(self, key: str, override: Override, tree: Mapping[str, Any]) -> Iterator[Violation]:
        *parents, name = key.split(".")
        parent, node = ".".join(parents), _node(tree, parents)
        if (isinstance(node, dict) and name in node) or any(name in found for found in self._swept_nodes(parents)):
            return
        value = "" if override.is_delete() else str(override.input_line).partition("=")[2]
        if str(annotation_of(parent)).startswith("dict"):
            remedy = f"add it with a plus: +{key}={value}"
            if override.is_delete():
                remedy = f"leave it out, since {parent} has no such key"
            if isinstance(node, dict) and (offer := did_you_mean(name, [str(other) for other in node])):
                remedy = f"{offer} Otherwise {remedy}"
            yield Violation(key, value, "no argument has this name yet", remedy)
            return
        if name in own_keys(parent, node):
            reason = f"{parent}={self.chosen[parent]} leaves it at its default"
            remedy = f"add it with a plus: +{key}={value}, or write it into the file of the option"
            yield Violation(key, value, reason, remedy)
            return
        meant = other_names(key)
        if not parents and not meant and isinstance(override.value(), str) and (groups := nearest(key, self.names)):
            offers = listed([f"{group}={value}" for group in groups])
            yield Violation(key, value, "unknown group", f"did you mean {offers}?")
            return
        leaves = flatten(tree)
        found = meant or nearest(key, dict.fromkeys([*leaves, *value_keys()]))
        group, options = self._options_with(found[0]) if found and found[0] not in leaves else ("", [])
        homes = listed(options)
        if options and found[0] == key:
            reason = f"{group}={self.chosen[group]} does not have this key"
            yield Violation(key, value, reason, f"use it with {homes}")
            return
        offer = f"did you mean {found[0]}? It comes with {homes}." if options else ""
        offer = offer or (f"did you mean {listed(found)}?" if found else "")
        inside = f"{parent} has {listed(node, 'and')}" if parents and isinstance(node, dict) else ""
        remedy = offer or inside or "type titan-exp train --cfg job to see every key"
        yield Violation(key, value, lacking(key) or "unknown key", remedy)

    def _swept_nodes(self, parents: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Parent of a key under each option of a sweep, composed when asked for."""
        for options in self._swept:
            with suppress(*_FAILS):
                node = _node(_tree(self.groups.compose(options)), parents)
                if isinstance(node, dict):
                    yield node

    def _options_with(self, key: str) -> tuple[str, list[str]]:
        """Group that a key is in, and its options that have the key: `cluster=slurm`."""
        *parents, name = key.split(".")
        depth = next((depth for depth in range(len(parents), 0, -1) if "/".join(parents[:depth]) in self.chosen), 0)
        group, inside = "/".join(parents[:depth]), parents[depth:]
        options = self.groups.options(group) if group else []
        # One composition of all options, each in a place of its own, is as fast as one of a single option.
        places = {f"option{number}": option for number, option in enumerate(options)}
        nodes: dict[str, Any] = {}
        with suppress(*_FAILS):
            tree = _tree(self.groups.compose([f"+{group}@{place}={option}" for place, option in places.items()]))
            nodes = {option: _node(tree, [place, *inside]) for place, option in places.items()}
        return group, [f"{group}={option}" for option, node in nodes.items() if isinstance(node, dict) and name in node]

    def _unknown_option(self, group: str, option: Any, options: Sequence[str]) -> Violation:
        offer = did_you_mean(str(option), options)
        remedy = f"{offer} The options are {listed(options, 'and')}." if offer else f"choose {listed(options)}"
        if group == "experiment":
            remedy += f" (to name the run, type experiment.name={option})"
        text = str(option)
        if group in _CLASSES and re.fullmatch(r"[A-Za-z_]\w{,99}", text) and Path(f"{text}.py").is_file():
            remedy += f"; for a class of your own in {text}.py, type {group}.{_CLASSES[group]}={text}.CLASS"
        elif group == "data" and ("/" in text or Path(text[:255]).exists()):
            remedy = f"to read files of your own, type data=text data.paths='[{text}]'"
        folders = [path for folder in self.groups.folders if (path := folder / group / f"{text[:200]}.yaml").is_dir()]
        if folders:
            return Violation(group, option, f"{folders[0]} is a folder", "give the name of a YAML file")
        return Violation(group, option, lacking(f"{group}={option}") or "this group has no such option", remedy)


def _one_value(override: Override, *, is_group: bool) -> Violation:
    """Violation of a sweep without `-m`."""
    key, _, value = str(override.input_line).partition("=")
    several = f"start a run with each: titan-exp train -m {key}={value}"
    if is_list(annotation_of(key)):
        return Violation(key, value, "a list needs brackets", f"write {key}='[{value}]'")
    if not is_group and annotation_of(key) in (str, str | None):
        several = f"write it as one text: {key}='\"{value}\"', or {several}"
    return Violation(key, value, "one run takes one value", several)


def _values(override: Override) -> list[Any]:
    if override.is_delete():
        return []
    if override.is_sweep_override():
        with suppress(HydraException):
            return list(override.sweep_iterator())
        return []
    value = override.value()
    return list(value) if isinstance(value, list) else [value]


def _node(tree: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Node of a configuration by its path; None if there is none."""
    node: Any = tree
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _tree(cfg: DictConfig) -> dict[str, Any]:
    tree: Any = OmegaConf.to_container(cfg, resolve=False)
    tree.pop("hydra", None)
    return tree


def _chosen(cfg: DictConfig) -> dict[str, str]:
    return {str(key).partition("@")[0]: str(option) for key, option in cfg.hydra.runtime.choices.items()}
