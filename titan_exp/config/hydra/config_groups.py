"""Config groups and their options, from the package and from folders added by the user."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from titan_exp.config.command_line.options import Arguments
from titan_exp.config.errors.user_error import UserError, listed
from titan_exp.config.extension import CONF_DIR, shipped_folders
from titan_exp.config.hydra.compose import HYDRA_VERSION, primary_file
from titan_exp.config.hydra.presets import OptionValues


class Groups:
    """Config groups of a Hydra loader, with a `hydra.searchpath` override for added folders."""

    def __init__(
        self, loader: ConfigLoader, searchpath: Sequence[str], primary: Path, folders: Sequence[Path] = ()
    ) -> None:
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
        return sorted(self._list(group, ObjectType.CONFIG), key=_naturally)

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
                folders += _folders(override)
    return folders


def _searchpath(folders: Sequence[str]) -> list[str]:
    return [f"hydra.searchpath=[{','.join(repr(folder) for folder in folders)}]"] if folders else []


def check_places(arguments: Arguments) -> None:
    """Raise UserError if a folder or file of `--config-dir`, `--config-path` or `--config-name` does not exist."""
    added = arguments.value_of("--config-dir", "-cd")
    if added is not None and not Path(added).is_dir():
        raise UserError(
            f"--config-dir {added}: there is no such folder. Give one that holds groups, as {CONF_DIR} does."
        )
    folder, name = arguments.value_of("--config-path", "-cp"), arguments.value_of("--config-name", "-cn")
    path = primary_file(arguments)
    if folder is not None and "://" in folder:
        return
    if not path.parent.is_dir():
        raise UserError(
            f"--config-path {folder}: there is no such folder or file. Give a run's folder, or its config.yaml."
        )
    if not path.is_file():
        option = f"--config-name {name}" if name is not None else f"--config-path {folder}"
        if runs := sorted(path.parent.glob(f"*/{path.name}")):
            offers = listed([f"--config-path {Path(folder or '', run.parent.name)}" for run in runs[:3]])
            raise UserError(
                f"--config-path {folder}: this folder holds {len(runs)} runs. Name one, for example {offers}."
            )
        known = sorted(other.stem for other in path.parent.glob("*.yaml"))
        raise UserError(
            f"{option}: {path.parent} has no file {path.name}. It has {listed(known or ['none'], 'and')}. To "
            "use a configuration elsewhere, type --config-path FOLDER/FILE.yaml."
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


def _folders(override: str) -> list[str]:
    value = OverridesParser.create().parse_override(override).value()
    return [str(folder) for folder in value] if isinstance(value, list) else []


def _naturally(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
