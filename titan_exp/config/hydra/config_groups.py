"""Config groups and their options, from the package and from folders added by the user."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from titan_exp.config.command_line.hydra_args import Arguments
from titan_exp.config.hydra.compose import CONF_DIR, CONFIG_NAME, HYDRA_VERSION


class Groups:
    """Config groups of a Hydra loader, with a `hydra.searchpath` override for added folders."""

    def __init__(self, loader: ConfigLoader, searchpath: Sequence[str], config_name: str) -> None:
        self.loader, self.searchpath, self.config_name = loader, list(searchpath), config_name

    def compose(self, overrides: Sequence[str] = ()) -> DictConfig:
        """Compose the configuration, including Hydra's own node."""
        return hydra_compose(self.config_name, [*self.searchpath, *overrides], return_hydra_config=True)

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
        # Without a config_name, Hydra does not re-read that file in each call.
        return self.loader.get_group_options(group, results_filter=kind, overrides=self.searchpath)


@contextmanager
def groups_for(arguments: Arguments) -> Iterator[Groups]:
    """Groups from the package, `--config-dir` and `hydra.searchpath`."""
    added = arguments.value_of("--config-dir", "-cd")
    folders = [f"file://{Path(added).absolute()}"] if added else []
    for override in arguments.overrides:
        if override.startswith("hydra.searchpath="):
            with suppress(HydraException):
                folders += _folders(override)
    searchpath = [f"hydra.searchpath=[{','.join(repr(folder) for folder in folders)}]"] if folders else []
    main = Path(arguments.value_of("--config-path", "-cp") or CONF_DIR).absolute()
    name = arguments.value_of("--config-name", "-cn") or CONFIG_NAME
    with initialize_config_dir(str(main), **HYDRA_VERSION):
        yield Groups(GlobalHydra.instance().config_loader(), searchpath, name)


def _folders(override: str) -> list[str]:
    value = OverridesParser.create().parse_override(override).value()
    return [str(folder) for folder in value] if isinstance(value, list) else []


def _naturally(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
