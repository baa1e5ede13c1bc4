"""Hydra composition errors: the overrides and option files at fault, with the nearest names."""

import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
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
from omegaconf.errors import OmegaConfBaseException

import titan_exp
from titan_exp.config.command_line.hydra_args import Arguments, read_arguments
from titan_exp.config.errors.check_names import NameCheck
from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.explain_values import about
from titan_exp.config.errors.unreadable_overrides import joined_words, unreadable
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import primary_file
from titan_exp.config.hydra.config_groups import Groups, groups_for
from titan_exp.config.hydra.option_files import file_remedy, option_path
from titan_exp.config.paths.yaml_file import read_yaml
from titan_exp.config.schema.schema import annotation_of, hints, meaning_of, optional_fields

MESSAGE = "These overrides cannot be composed."
UNREADABLE = (HydraException, OmegaConfBaseException, yaml.YAMLError)
"""Exceptions of overrides or YAML that cannot be composed."""
_HYDRA = tuple(str(Path(str(module.__file__)).parent) for module in (hydra, omegaconf))
_OURS = (str(Path(str(titan_exp.__file__)).parent), str(Path("hydra_plugins", "titan_exp_sweeper")))
_NOISE = re.compile(
    r"\s*(full_key:|object_type=|reference_type=|provider=|Config search path|Search path:|Available |$)"
)


def is_composition_error(error: Exception) -> bool:
    """True if an error was caused by overrides or YAML, not by a bug.

    Hydra passes on whatever a value breaks in it: then no code of ours runs below Hydra's.
    """
    if isinstance(error, UNREADABLE):
        return True
    if isinstance(error, OSError) and error.filename is None:
        return False  # of Hydra's output: a closed pipe, a full disk
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = max((place for place, file in enumerate(files) if any(own in file for own in _OURS)), default=-1)
    return not isinstance(error, UserError) and any(file.startswith(_HYDRA) for file in files[ours + 1 :])


def explain(error: Exception, arguments: Arguments) -> UserError:
    """Convert Hydra's error for these arguments to a UserError that names the overrides or the file at fault."""
    found = unknown_names(arguments)
    if found:
        return UserError(MESSAGE, found)
    lost = re.search(r"path=(?P<path>\S+) is not available", str(error))
    if lost:
        return UserError(
            f"hydra.searchpath: {lost['path']} cannot be found. It takes folders (file:///folder) and packages that "
            "are installed, on PYTHONPATH or in the current directory (pkg://package.folder)."
        )
    if found := _set_before(error, arguments.overrides):
        return UserError(MESSAGE, found)
    found = list(_at_fault(error, arguments))
    return (
        UserError(MESSAGE, found) if found else UserError(f"Hydra cannot compose the configuration: {_reason(error)}")
    )


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
    reason, remedy = "another option has set this key already", f"leave out the plus: {key}="
    return [Violation(f"+{key}", value, reason, f"{remedy}{value}") for value in values if not value.startswith("{")]


def unknown_names(arguments: Arguments) -> list[Violation]:
    """Violations of unreadable overrides, of unknown keys, groups and options, and of option files."""
    words = list(joined_words(arguments.overrides))
    parsed: list[Override] = []
    found = _main_file(arguments)
    if found:
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
    remedy = "a run's config.yaml is complete; for some keys of your own write an option file, and use --config-dir"
    try:
        content = read_yaml(path, "a configuration")
    except UserError as error:
        return [Violation(f"--config-path {folder}", "", str(error), remedy)]
    missing = [name for name in hints(Experiment) if name not in content and name not in optional_fields(Experiment)]
    if "defaults" in content or not missing:
        return []
    return [Violation(f"--config-path {folder}", "", f"{path} lacks {listed(missing, 'and')}", remedy)]


def _at_fault(error: Exception, arguments: Arguments) -> Iterator[Violation]:
    """Violation of every override that fails alone; if none does, of those of Hydra's own keys."""
    alone: dict[str, Exception] = {}
    files: dict[str, tuple[str, str]] = {}
    with suppress(*UNREADABLE, OSError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with groups_for(arguments) as groups:
            alone = {text: failure for text in arguments.overrides if (failure := _failure(groups, text)) is not None}
            for text in alone:
                group, _, option = text.lstrip("+").partition("=")
                if option_path(groups, group, option) is not None:
                    files[text] = (f"{option_path(groups, group, option)}: ", file_remedy(groups, group))
    if not alone:
        alone = {text: error for text in arguments.overrides if text.lstrip("+~").startswith("hydra")}
    for text, failure in alone.items():
        key, _, value = text.partition("=")
        of_hydra = key.lstrip("+~").startswith("hydra")
        meaning = meaning_of(key.lstrip("+~"))
        remedy = "titan-exp train --cfg hydra prints Hydra's keys" if of_hydra else "leave it out, or correct it"
        if value.startswith("{") and get_origin(annotation_of(key)) is dict:
            remedy, meaning = f"new names take a plus: +{key}='{value}'", ""
        path, remedy = files.get(text, ("", about(key.lstrip("+~"), meaning) if meaning else remedy))
        yield Violation(key, value, f"{path}{_reason(failure)}", remedy)


def _failure(groups: Groups, text: str) -> Exception | None:
    try:
        if not OverridesParser.create().parse_override(text).is_sweep_override():
            groups.compose([text])
    except Exception as error:
        return error
    return None


def _reason(error: Exception) -> str:
    """First line of an error of Hydra that says more than where it was raised."""
    for source in (error.__cause__, error):
        lines = [line.strip() for line in str(source or "").splitlines() if not _NOISE.match(line)]
        lines = [line for line in lines if "hydra.cc" not in line and not line.startswith("Error merging")]
        if lines and isinstance(source, (*UNREADABLE, UserWarning, ValueError)):
            return _in_words(lines[0].rstrip("."))
    return "Hydra cannot use this value" + (f": {error}" if isinstance(error, KeyError | TypeError) else "")


def _in_words(text: str) -> str:
    text = text.replace("is not in struct", "does not exist").replace("NoneType", "null")
    text = re.sub(r" not in '\w+'$", " does not exist", text)
    return text[:1].lower() + text[1:]
