"""Hydra composition for a verb: one task call per composed configuration."""

import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError

PRIMARY = ("--config-path", "-cp", "--config-name", "-cn")  # flags that name a primary configuration of yours
LIST_OF_OPTIONS = re.compile(r"\+*[\w/]+=\[")  # first characters of an override that lists options of a group
Task = Callable[[Any, Sequence[str]], int]
"""Function called with a composed configuration and the typed overrides; returns an exit code."""


def run_with_hydra(
    argv: Sequence[str], task: Task, *, nested: Sequence[str] = (), where: str = "", trust: bool = True
) -> int:
    """Compose configurations from `argv` and call the task with each; returns the highest exit code.

    `nested` are overrides that Hydra sees only per point of a study. `where` is the study file, for error messages.
    `trust` is False for a verb that does not train: its `--config-path` may be another user's run.
    """
    from titan_exp.config.command_line.options import read_arguments

    arguments = read_arguments(argv)  # before slow imports
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from titan_exp.config.errors.explain_hydra import MESSAGE, explain, is_composition_error, unknown_names
    from titan_exp.config.extension import CONF_DIR, CONFIG_NAME
    from titan_exp.config.hydra import compose
    from titan_exp.config.hydra.config_groups import check_places, has_own_folders, option_values
    from titan_exp.config.schema.component import search_current_directory
    from titan_exp.launch.rank.rank_env import environment

    _require_plain_file(arguments, trust)
    always = compose.OWN_FILE if arguments.has(*PRIMARY) else compose.default_overrides()
    codes: list[int] = []
    failures: list[Exception] = []

    def job(cfg: Any) -> None:
        # Exceptions bypass Hydra, which would add its own text.
        try:
            # As typed: an interpolation in an override refers to the composed configuration, not to Hydra's.
            overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
            typed = [override for override in overrides if override not in always]
            codes.append(task(cfg, arguments.overrides if typed == values else typed))
        except Exception as error:
            failures.append(error)

    check_places(arguments)
    search_current_directory()
    compose.register_resolvers()
    values = option_values(arguments)(arguments.overrides) if arguments.has(*PRIMARY) else list(arguments.overrides)
    before, sys.argv = sys.argv, [command_name(), *arguments.flags, *always, *values]
    try:
        if arguments.has("--help", "-h"):
            from titan_exp.config.command_line.help import train_help

            print(train_help(arguments), end="")
            return 0
        _check_names(replace(arguments, overrides=(*nested, *arguments.overrides)), where)
        # Hydra raises errors instead of printing them and exiting.
        with environment({"HYDRA_FULL_ERROR": "1"}), warnings.catch_warnings():
            warnings.filterwarnings("error", "provider=.* is not available", UserWarning)
            hydra.main(config_path=str(CONF_DIR), config_name=CONFIG_NAME, **compose.HYDRA_VERSION)(job)()
    except Exception as error:
        if not is_composition_error(error):
            raise
        raise _with_other_faults(explain(error, arguments), arguments) from error
    finally:
        sys.argv = before
    if failures:
        first = failures[0]
        # A file of yours may be the cause of many wrong or missing keys.
        if isinstance(first, UserError) and first.violations and has_own_folders(arguments):
            files = unknown_names(arguments)
            first = _with_other_faults(UserError(MESSAGE, files), arguments) if files else first
        raise first
    return max(codes, default=0)


def run_sweep_with_hydra(args: Any, task: Task) -> int:
    """Call `run_with_hydra` for `SweepArgs`; the sweep options bypass Hydra."""
    from titan_exp.launch.sweep.sweep_args import use_sweep_options

    if args.written:
        from titan_exp.config.errors.explain_hydra import MESSAGE, unreadable_in_study

        if found := unreadable_in_study(args.written):
            raise UserError(f"{MESSAGE} They are in {args.where}.", found)

    with use_sweep_options(args.options):
        return run_with_hydra(args.argv, task, nested=args.nested, where=args.where)


def _check_names(arguments: Any, where: str) -> None:
    """Check the names of a sweep once, not per point; also lists of options, which Hydra would merge silently."""
    from titan_exp.config.errors.explain_hydra import MESSAGE, unknown_names

    checked = arguments.has("--multirun", "-m") or any(map(LIST_OF_OPTIONS.match, arguments.overrides))
    if checked and (found := unknown_names(arguments)):
        message = f"{MESSAGE} Look at what you typed and at {where}." if where else MESSAGE
        raise _with_other_faults(UserError(message, found), arguments)


def _with_other_faults(error: UserError, arguments: Any) -> UserError:
    from titan_exp.rules.composed import with_other_faults

    return with_other_faults(error, arguments)


def _require_plain_file(arguments: Any, trust: bool) -> None:
    from titan_exp.config.hydra.compose import primary_file
    from titan_exp.config.schema.foreign_code import require_plain

    folder = arguments.value_of("--config-path", "-cp")
    if not trust and folder is not None and "://" not in folder:
        require_plain(primary_file(arguments))


def command_name() -> str:
    """Name of this command as typed."""
    name = os.path.basename(sys.argv[0])
    return "titan-exp" if name.endswith(".py") else name


class OutputFile:
    """File given by an option such as `--html`, whose folder is created at once, since a prediction may take minutes.
    `name` is an example of a file name. Raises UserError if the file cannot be written."""

    def __init__(self, option: str, path: str | Path, name: str) -> None:
        self.path, self._option = Path(path).expanduser(), option
        if self.path.is_dir():
            raise UserError(f"{option} {path} is a folder. Name a file, as in {option} {self.path / name}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._write_error(error) from error

    def write(self, text: str) -> None:
        """Write the file, atomically. Raises UserError if it cannot be written."""
        from titan_exp.tracking.run_folder.files import write_atomically

        try:
            if self.path.exists() and not self.path.is_file():
                self.path.write_text(text, encoding="utf-8")  # a device or pipe must not be replaced by a file
            else:
                write_atomically(self.path, text)
        except OSError as error:
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> UserError:
        why = error.strerror or error
        return UserError(f"{self._option}: cannot write {self.path} ({why}). Name another file, or free disk space.")
