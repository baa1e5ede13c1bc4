"""Hydra composition errors: the overrides and option files at fault, with the nearest names."""

import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import get_origin

import hydra
import omegaconf
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import grammar_parser
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

import titan_exp
from titan_exp.config.command_line.options import Arguments, read_arguments
from titan_exp.config.errors.check_names import NameCheck
from titan_exp.config.errors.explain_values import FREE_TEXT, about
from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.foreign_file import read_yaml
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import primary_file
from titan_exp.config.hydra.config_groups import groups_for, option_path
from titan_exp.config.schema.schema import annotation_of, hints, is_number, keys, meaning_of, optional_fields

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
    """Violation of a word that is not an override. `before` is the word typed before it, and `options` are those by
    group."""
    key, equals, value = text.partition("=")
    if not equals:
        return Violation(text, "", "an override is key=value, without spaces", _for_word(text, before, options))
    if not text.startswith(FREE_TEXT) and (" " in key or value.startswith(" ")):
        return Violation(text, "", "an override is key=value, without spaces", f"type {''.join(text.split())}")
    return Violation(key, value, "Hydra cannot read this value", _for_value(key, value))


def unreadable_in_study(overrides: Sequence[str]) -> list[Violation]:
    """Violations of the overrides in a study's file that Hydra cannot read; each remedy is a line of YAML."""
    found = []
    for text in dict.fromkeys(overrides):
        if not _is_readable(text):
            key, _, value = text.partition("=")
            line = f"{key}={_in_double_quotes(value)}".replace("'", "''")
            remedy = f"quote it in the file, once for YAML and once for Hydra: '{line}'"
            found.append(Violation(key, value, "Hydra cannot read this value", remedy))
    return found


def _for_word(text: str, before: str, options: Mapping[str, Sequence[str]]) -> str:
    groups = [f"{group}={text}" for group, names in options.items() if text in names]
    pair = re.fullmatch(r"([\w./]+):\s*(.+)", text)
    name = text.strip("=:+~ ")
    key, equals, value = before.partition("=")
    remedy = "type it as in training.steps=100"
    if pair:
        remedy = f"type {pair[1]}={pair[2]}"
    elif groups:
        remedy = f"type {listed(groups)}"
    elif name in keys():
        remedy = f"give it a value, for example {name}=..., or see its value with titan-exp train --cfg job"
    elif Path(text).suffix in (".yaml", ".yml"):
        remedy = f"to train from a configuration file, type titan-exp train --config-path {text}"
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
            return f"write {key}={values.partition(',')[0]}, or sweep the values: titan-exp train -m {key}={values}"
        plain = {text: "'" not in text and _is_readable(f"key=[{text}]") for text in values.split(",")}
        items = [text if plain[text] else _in_double_quotes(text).replace("'", "'\\''") for text in values.split(",")]
        return f"write {key}='[{','.join(items)}]'"
    if is_number(annotation_of(key)) and stripped and _is_readable(f"{key}={stripped}"):
        return f"write {key}={stripped}"
    return f"quote it, once for the shell and once for Hydra: {_quoted(key, value)}"


def is_text(key: str) -> bool:
    """True if a key takes text, so that a value may contain spaces."""
    return annotation_of(key) in (str, str | None)


def _quoted(key: str, value: str) -> str:
    """Override for the shell whose value contains characters of Hydra's grammar."""
    is_list = value.startswith("[") or not is_text(key)
    if is_list and _is_readable(f"{key}={value}") and "'" not in value:
        return f"{key}='{value}'"
    inside = _in_double_quotes(value).replace("'", "'\\''")
    return f"{key}='{inside}'"


def _in_double_quotes(value: str) -> str:
    """Text as Hydra reads it in double quotes; `${` is text where it is not an interpolation."""
    inner = value.strip("'\"").replace("\\", "\\\\").replace('"', '\\"')
    try:
        grammar_parser.parse(value)
    except GrammarParseError:
        inner = inner.replace("${", "\\${")
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


MESSAGE = "Hydra cannot compose these overrides."
UNREADABLE = (HydraException, OmegaConfBaseException, yaml.YAMLError)
"""Exceptions of overrides or YAML that cannot be composed."""
_HYDRA = tuple(str(Path(str(module.__file__)).parent) for module in (hydra, omegaconf))
_OURS = (str(Path(str(titan_exp.__file__)).parent), str(Path("hydra_plugins", "titan_exp_sweeper")))
_NOISE = re.compile(
    r"\s*(full_key:|object_type=|reference_type=|provider=|Config search path|Search path:|Available |$)"
)


def is_composition_error(error: Exception) -> bool:
    """True if an error was caused by overrides or YAML, not by a bug. Hydra passes on whatever a value breaks in it:
    then no code of ours runs below Hydra's."""
    if isinstance(error, UNREADABLE):
        return True
    if isinstance(error, OSError) and error.filename is None:
        return False  # of Hydra's output: a closed pipe, a full disk
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = max((place for place, file in enumerate(files) if any(own in file for own in _OURS)), default=-1)
    return not isinstance(error, UserError) and any(file.startswith(_HYDRA) for file in files[ours + 1 :])


def explain(error: Exception, arguments: Arguments) -> UserError:
    """Convert Hydra's error for these arguments to a UserError that names the overrides or the file at fault."""
    if found := unknown_names(arguments):
        return UserError(MESSAGE, found)
    if lost := re.search(r"path=(?P<path>\S+) is not available", str(error)):
        return UserError(
            f"hydra.searchpath: there is no {lost['path']}. Give a folder (file:///folder), or a package "
            "that is installed, on PYTHONPATH or in the current folder (pkg://package.folder)."
        )
    if found := _set_before(error, arguments.overrides):
        return UserError(MESSAGE, found)
    if found := list(_at_fault(error, arguments)):
        return UserError(MESSAGE, found)
    return UserError(f"Hydra cannot compose the configuration: {_reason(error)}")


def explain_point(error: UserError, overrides: Sequence[str]) -> str:
    """Text of a point's error; a composition error names the key at fault. Only after Hydra's last composition."""
    if not isinstance(error.__cause__, HydraException):
        return str(error)
    GlobalHydra.instance().clear()
    arguments = read_arguments(sys.argv[1:])
    together = (*arguments.overrides, *overrides)
    found = unknown_names(replace(arguments, overrides=together)) or _set_before(error.__cause__, together)
    return "\n".join(map(str, found)) or _reason(error)


def _set_before(error: Exception, overrides: Sequence[str]) -> list[Violation]:
    """Violations of values with a plus for a key that has one. Objects are merged, so they are not at fault."""
    present = re.search(r"An item is already at '(?P<key>[^']+)'", str(error))
    key = present["key"] if present else ""
    values = [text.partition("=")[2] for text in dict.fromkeys(overrides) if key and text.startswith(f"+{key}=")]
    reason, remedy = "another option already sets this key", f"leave out the plus: {key}="
    return [Violation(f"+{key}", value, reason, f"{remedy}{value}") for value in values if not value.startswith("{")]


def unknown_names(arguments: Arguments) -> list[Violation]:
    """Violations of unreadable overrides, of unknown keys, groups and options, and of option files."""
    words, parsed = list(joined_words(arguments.overrides)), list[Override]()
    if found := _main_file(arguments):
        return found
    # What breaks here has broken Hydra before, whose message is then shown.
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Hydra has already warned about its search path
        with groups_for(arguments) as groups:
            for place, text in enumerate(words):
                if text in arguments.overrides:
                    with suppress(HydraException):
                        parsed.append(OverridesParser.create().parse_override(text))
                        continue
                before = words[place - 1] if place else ""
                found.append(unreadable(text, before, {group: groups.options(group) for group in groups.names()}))
            if all("." in violation.field for violation in found):  # else a word may have meant an option
                check = NameCheck(groups, is_sweep=arguments.has("--multirun", "-m"))
                check.choose(parsed)
                found += [violation for override in parsed for violation in check.check(override)]
    return found


def _main_file(arguments: Arguments) -> list[Violation]:
    """Violation of the primary configuration file of `--config-path`."""
    folder, path = arguments.value_of("--config-path", "-cp"), primary_file(arguments)
    if folder is None or not path.is_file():
        return []
    own = "keep a few keys of your own in an option file and name its folder with --config-dir"
    remedy = f"give a complete file, such as the config.yaml of a run, or {own}"
    needed = [name for name in hints(Experiment) if name not in optional_fields(Experiment)]
    try:
        content = read_yaml(path, "a configuration")
        missing = [name for name in needed if name not in content and "defaults" not in content]
        reason = f"{path} lacks {listed(missing, 'and')}" if missing else ""
    except UserError as error:
        reason = str(error)
    return [Violation(f"--config-path {folder}", "", reason, remedy)] if reason else []


def _at_fault(error: Exception, arguments: Arguments) -> Iterator[Violation]:
    """Violation of every override that fails alone; if none does, of those of Hydra's own keys."""
    alone: dict[str, Exception] = {}
    files: dict[str, tuple[str, str]] = {}
    with suppress(*UNREADABLE, OSError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with groups_for(arguments) as groups:
            for text in arguments.overrides:
                try:
                    if not OverridesParser.create().parse_override(text).is_sweep_override():
                        groups.compose([text])
                except Exception as failure:
                    alone[text] = failure
            for text in alone:
                group, _, option = text.lstrip("+").partition("=")
                if option_path(groups, group, option) is not None:
                    files[text] = (f"{option_path(groups, group, option)}: ", "correct this file")
    if not alone:
        alone = {text: error for text in arguments.overrides if text.lstrip("+~").startswith("hydra")}
    for text, failure in alone.items():
        key, _, value = text.partition("=")
        of_hydra = key.lstrip("+~").startswith("hydra")
        meaning = meaning_of(key.lstrip("+~"))
        remedy = "type titan-exp train --cfg hydra to see Hydra's keys" if of_hydra else "leave it out, or correct it"
        if value.startswith("{") and get_origin(annotation_of(key)) is dict:
            remedy, meaning = f"add a new name with a plus: +{key}='{value}'", ""
        path, remedy = files.get(text, ("", about(key.lstrip("+~"), meaning) if meaning else remedy))
        yield Violation(key, value, f"{path}{_reason(failure)}", remedy)


def _reason(error: Exception) -> str:
    """First line of an error of Hydra that says more than where it was raised."""
    for source in (error.__cause__, error):
        lines = [line.strip() for line in str(source or "").splitlines() if not _NOISE.match(line)]
        lines = [line for line in lines if "hydra.cc" not in line and not line.startswith("Error merging")]
        if lines and isinstance(source, (*UNREADABLE, UserWarning, ValueError)):
            text = lines[0].rstrip(".").replace("is not in struct", "does not exist").replace("NoneType", "null")
            text = re.sub(r" not in '\w+'$", " does not exist", text)
            return text[:1].lower() + text[1:]
    return "Hydra cannot use this value" + (f": {error}" if isinstance(error, KeyError | TypeError) else "")
