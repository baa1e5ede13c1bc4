"""Config groups and their option files, of the package and of folders added by the user, with faults in the files."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from titan_exp.config.command_line.options import Arguments
from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean, listed
from titan_exp.config.extension import CONF_DIR, shipped_folders, shipped_options
from titan_exp.config.foreign_file import read_yaml
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import HYDRA_VERSION, primary_file
from titan_exp.config.hydra.nondefault import OptionValues
from titan_exp.config.schema.component import config_class
from titan_exp.config.schema.schema import hints, optional_fields, own_keys


class Groups:
    """Config groups of a Hydra loader, with a `hydra.searchpath` override for added folders."""

    def __init__(self, loader: ConfigLoader, searchpath: Sequence[str], primary: Path, folders: Sequence[Path]) -> None:
        self.loader, self.searchpath, self.config_name = loader, list(searchpath), primary.stem
        self.values = OptionValues(primary, searchpath)
        """Values of options, where the primary configuration has no groups."""
        self.folders = tuple(folders)
        """Folders of the groups, in Hydra's order; an earlier one wins."""
        self._listed: dict[tuple[str, ObjectType], list[str]] = {}

    def compose(self, overrides: Sequence[str] = ()) -> DictConfig:
        """Compose the configuration, including Hydra's own node."""
        words = [*self.searchpath, *self.values(overrides)]
        return hydra_compose(self.config_name, words, return_hydra_config=True)

    def names(self, parent: str = "") -> list[str]:
        """Names of groups, nested ones with a slash, without Hydra's own."""
        found = []
        for path in self.inside(parent):
            found += [path] if self.options(path) else []
            found += self.names(path)
        return found

    def inside(self, parent: str = "") -> list[str]:
        """Subfolders of a folder, without Hydra's own."""
        prefix = f"{parent}/" if parent else ""
        return [f"{prefix}{name}" for name in self._list(parent, ObjectType.GROUP) if f"{prefix}{name}" != "hydra"]

    def options(self, group: str) -> list[str]:
        """Options of a group in natural order; empty if the group does not exist."""

        def naturally(name: str) -> list[tuple[int, str]]:
            return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

        return sorted(self._list(group, ObjectType.CONFIG), key=naturally)

    def _list(self, group: str, kind: ObjectType) -> list[str]:
        if (group, kind) not in self._listed:
            # The loader copies its search path in each call, for folders that overrides add.
            repository = None if self.searchpath else getattr(self.loader, "repository", None)
            if repository is not None:
                found = repository.get_group_options(group, results_filter=kind)
            else:
                found = self.loader.get_group_options(group, results_filter=kind, overrides=self.searchpath)
            self._listed[group, kind] = found
        return self._listed[group, kind]


@contextmanager
def groups_for(arguments: Arguments) -> Iterator[Groups]:
    """Groups from the package, `--config-dir` and `hydra.searchpath`; beside a file without groups, such as a run's,
    those of the package too."""
    folders, primary = _added_folders(arguments), primary_file(arguments)
    if option_values(arguments).groups:
        folders += [f"file://{folder}" for folder in shipped_folders()]
    with initialize_config_dir(str(primary.parent), **HYDRA_VERSION):
        shipped = shipped_folders() if primary.parent == CONF_DIR else [primary.parent]
        paths = [*shipped, *(path for folder in folders if (path := _path(folder)) is not None)]
        yield Groups(GlobalHydra.instance().config_loader(), _searchpath(folders), primary, paths)


def option_values(arguments: Arguments) -> OptionValues:
    """Values of options, for the primary configuration of these arguments."""
    return OptionValues(primary_file(arguments), _searchpath(_added_folders(arguments)))


def _added_folders(arguments: Arguments) -> list[str]:
    added = arguments.value_of("--config-dir", "-cd")
    folders = [f"file://{Path(added).absolute()}"] if added else []
    for override in arguments.overrides:
        if override.startswith("hydra.searchpath="):
            with suppress(HydraException):
                value = OverridesParser.create().parse_override(override).value()
                folders += map(str, value) if isinstance(value, list) else []
    return folders


def _searchpath(folders: Sequence[str]) -> list[str]:
    return [f"hydra.searchpath=[{','.join(repr(folder) for folder in folders)}]"] if folders else []


def check_places(arguments: Arguments) -> None:
    """Raise UserError if a folder or file of `--config-dir`, `--config-path` or `--config-name` does not exist."""
    added = arguments.value_of("--config-dir", "-cd")
    if added is not None and not Path(added).is_dir():
        remedy = f"Give one that holds groups, as {CONF_DIR} does."
        raise UserError(f"--config-dir {added}: there is no such folder. {remedy}")
    folder, name = arguments.value_of("--config-path", "-cp"), arguments.value_of("--config-name", "-cn")
    path = primary_file(arguments)
    if folder is not None and "://" in folder:
        return
    typed = f"--config-path {folder}"
    if not path.parent.is_dir():
        raise UserError(f"{typed}: there is no such folder or file. Give a run's folder, or its config.yaml.")
    if not path.is_file():
        if runs := sorted(path.parent.glob(f"*/{path.name}")):
            offers = listed([f"--config-path {Path(folder or '', run.parent.name)}" for run in runs[:3]])
            raise UserError(f"{typed}: this folder holds {len(runs)} runs. Name one, for example {offers}.")
        known = listed(sorted(other.stem for other in path.parent.glob("*.yaml")) or ["none"], "and")
        raise UserError(
            f"{typed if name is None else f'--config-name {name}'}: {path.parent} has no file {path.name}. It has "
            f"{known}. To use a configuration elsewhere, type --config-path FOLDER/FILE.yaml."
        )


def has_own_folders(arguments: Arguments) -> bool:
    """True if groups may come from the user's folders."""
    searches = any(override.startswith("hydra.searchpath=") for override in arguments.overrides)
    return searches or arguments.has("--config-dir", "-cd", "--config-path", "-cp")


def _path(folder: str) -> Path | None:
    """Path of `file:///folder` or `pkg://package.folder`; None if it cannot be found."""
    kind, _, place = folder.rpartition("://")
    if kind != "pkg":
        return Path(place).absolute()
    with suppress(ImportError, AttributeError, ValueError):
        spec = find_spec(place)
        return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
    return None


GLOBAL = "# @package _global_"
"""First line of a file whose keys are written with their groups."""


def check_option_file(groups: Groups, group: str, option: str, tree: Mapping[str, Any] | None) -> Iterator[Violation]:
    """Violation of a user's option file, or of one in its defaults list; shipped files have none. `tree` is the
    configuration composed with the option, for missing keys; None leaves them out."""
    path = option_path(groups, group, option)
    if path is None:
        return
    content: dict[Any, Any] = {}
    begins_well = False
    try:
        content = read_yaml(path, "an option")
        _check_defaults(groups, group, path, content, (path,))
        problem = "" if tree is None else _explain_missing(path, group, content, tree)
    except UserError as error:
        problem = str(error)  # of a file that cannot be read, or of an entry of its defaults list
        begins_well = error.__cause__ is not None or isinstance(content.get("defaults"), list)
    if problem:
        own = own_keys(group, (tree or {}).get(group))
        remedy = "give each a value in the file, in a line `key: value`" if own else file_remedy(groups, group)
        remedy = "correct this file" if begins_well else remedy
        yield Violation(f"{group}={option}", "", problem, remedy)


def file_remedy(groups: Groups, group: str) -> str:
    """First line of an option file of a group, as in the shipped ones."""
    for option in groups.options(group):
        if option_path(groups, group, option) is None:
            if shipped_options(group)[option].read_text(encoding="utf-8").startswith(GLOBAL):
                return f"begin the file with the line {GLOBAL}, then write defaults, and keys with their groups"
            return f"begin the file with defaults: [{option}, _self_], then set keys of {group}"
    return "write a defaults list into the file, and lines of `key: value`"


def option_path(groups: Groups, group: str, option: str) -> Path | None:
    """File of an option in a folder of the user's; None for a shipped one."""
    for folder in groups.folders:
        path = folder / group / f"{option.removesuffix('.yaml')}.yaml"
        if path.exists():
            return None if folder in shipped_folders() and group != "local" else path
    return None


def _explain_missing(path: Path, group: str, content: Mapping[Any, Any], tree: Mapping[str, Any]) -> str:
    """Reason why keys without a default are missing in a composed group; empty if none is."""
    values = tree.get(group)
    present = values if isinstance(values, Mapping) else {}
    try:
        kind = config_class(group, values)
    except (UserError, KeyError):
        return ""  # reported where the configuration is read
    lost = [name for name in present if name not in hints(kind) and name in hints(Experiment)]
    if lost:
        return f"{path} does not begin with {GLOBAL}, so {listed(lost, 'and')} would be in the group {group}"
    missing = [name for name in hints(kind) if name not in present and name not in optional_fields(kind)]
    if not missing:
        return ""
    header = path.read_text(encoding="utf-8-sig").partition("\n")[0]
    if header.startswith("# @package"):
        return f"{path} begins with {header}, so its keys are not in the group {group}"
    if "defaults" not in content:
        are = "is" if len(missing) == 1 else "are"
        return f"{path} has no defaults list, so {listed(missing, 'and')} {are} missing"
    return f"{path} and its defaults list lack {listed(missing, 'and')}"


def _check_defaults(
    groups: Groups, group: str, path: Path, content: Mapping[Any, Any], parents: tuple[Path, ...]
) -> None:
    """Check the defaults list of a file, and the user's files in it. Raises UserError."""
    entries = content.get("defaults", [])
    if not isinstance(entries, list):
        raise UserError(f"{path}: defaults must be a list, such as [adamw, _self_], not {entries!r}")
    for entry in entries:
        is_pair = isinstance(entry, dict) and len(entry) == 1
        key, value = next(iter(entry.items())) if is_pair else (None, entry)
        if not isinstance(key, str | None) or not isinstance(value, str if key is None else str | list | None):
            raise UserError(f"{path}: the entry {entry!r} of defaults is neither an option nor `group: option`")
        for name, option in _targets(group, key, value):
            below = option_path(groups, name, option)
            if below is not None and below in parents:
                raise UserError(f"{path}: its defaults list leads back to {below.name}")
            if below is not None:
                _check_defaults(groups, name, below, read_yaml(below, "an option"), (*parents, below))
            elif name not in (known := groups.names()):
                offer = did_you_mean(name, known) or f"the groups are {listed(known, 'and')}"
                raise UserError(f"{path}: defaults name {name}={option}, and there is no such group ({offer})")
            elif option not in (known := groups.options(name)):
                offer = did_you_mean(option, known) or f"{name} has {listed(known, 'and')}"
                raise UserError(f"{path}: defaults name {option}, and {name} has no such option ({offer})")


def _targets(group: str, key: str | None, value: str | list[Any] | None) -> Iterator[tuple[str, str]]:
    """Group and option of each entry that must exist."""
    words = ("" if key is None else key).split()
    if "optional" in words or value is None:
        return
    name = words[-1].partition("@")[0] if words else ""
    home = name[1:] if name.startswith("/") else "/".join(part for part in (group, name) if part)
    for option in value if isinstance(value, list) else [value]:
        if not isinstance(option, str) or "${" in option or option == "_self_":
            continue
        folder, _, last = option.rpartition("/")
        if option.startswith("/"):
            yield folder[1:], last.partition("@")[0]
        else:
            yield "/".join(part for part in (home, folder) if part), last.partition("@")[0]
