"""Hydra's sources of option files, read by our one loader of YAML."""

from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins import file_config_source, importlib_resources_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import added_groups, added_keys
from titan_exp.config.paths.foreign_file import StrictLoader, load_node, read_file, switch_words


class _OwnLoader(ConfigSource):
    def _load(self, file: Any, config_path: str) -> ConfigResult:
        if not file.is_file():
            raise ConfigLoadError(f"Config not found : {file}")
        try:
            text = (read_file(file) if isinstance(file, Path) else file.read_bytes()).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise yaml.YAMLError("not UTF-8 text") from error
        header = ConfigSource._get_header_dict(text[:512])
        node, values = load_node(text, StrictLoader)
        if values is not None and not isinstance(values, (dict, list, str)):
            raise OSError(f"{file} holds the single value {values}")
        if node is not None:
            is_global = header.get("package") == "_global_" or "/" not in config_path
            _refuse_untyped(file, node, "" if is_global else config_path.rpartition("/")[0].replace("/", "."))
        values = {} if values is None else values
        if isinstance(values, dict) and header.get("package") != "_global_":
            values = _with_extensions(file, config_path, values)
        config: Any = OmegaConf.create(values)
        return ConfigResult(config=config, path=self.full_path(), provider=self.provider, header=header)


class FileConfigSource(_OwnLoader, file_config_source.FileConfigSource):
    """Files in a folder."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read an option file."""
        return self._load(Path(self.path, self._normalize_file_name(config_path)), config_path)


class ImportlibResourcesConfigSource(_OwnLoader, importlib_resources_config_source.ImportlibResourcesConfigSource):
    """Files in a package."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read an option file."""
        place = resources.files(self.path).joinpath(self._normalize_file_name(config_path))
        return self._load(place, config_path)


def use_own_loader() -> None:
    """Make Hydra read files through these classes; idempotent. Hydra keeps a class that has the name of its own."""
    SourcesRegistry.instance().types.update(file=FileConfigSource, pkg=ImportlibResourcesConfigSource)


def _with_extensions(file: Any, config_path: str, values: dict[str, Any]) -> dict[str, Any]:
    """Values of an option with the keys that extensions add to its group, and the primary configuration with a line for
    each group of theirs. An option that begins with another has those of that one."""
    from titan_exp.config.extension import CONF_DIR, CONFIG_NAME, shipped_options

    group = config_path.rpartition("/")[0]
    if group or file != CONF_DIR / f"{CONFIG_NAME}.yaml":
        return values if "defaults" in values else {**values, **added_keys(group), **values}
    lines = values["defaults"]
    known = {*values, *(name for line in lines if isinstance(line, dict) for name in line)}
    options = {name: shipped_options(name) for name in added_groups() if name not in known}
    plain = {name: added_keys(name) for name, found in options.items() if not found}
    chosen = [{name: "none" if "none" in found else "default"} for name, found in options.items() if found]
    at = lines.index("_self_")
    return {**values, **plain, "defaults": [*lines[:at], *chosen, *lines[at:]]}


def _refuse_untyped(file: Any, node: yaml.Node, group: str) -> None:
    """Raise UserError at `on`, `off`, `yes` and `no` as the value of a key without a type: YAML 1.1 reads booleans,
    YAML 1.2 and the command line read text."""
    for path, word in switch_words(node):
        from titan_exp.config.schema.schema import annotation_of

        key = ".".join(filter(None, [group, *path]))
        if key.partition(".")[0] != "hydra" and annotation_of(key) is None:
            line, meant = word.start_mark.line + 1, str(word.value.lower() in ("on", "yes")).lower()
            raise UserError(
                f"{file}, line {line}: {path[-1] if path else ''}: {word.value} is a boolean to YAML 1.1, and text to "
                f"YAML 1.2 and the command line. Write {meant}, or '{word.value}' in quotes for the text."
            )
