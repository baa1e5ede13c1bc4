"""Option files of a user's config groups: syntax, defaults list and missing keys, each file as one violation."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean, listed
from titan_exp.config.extension import shipped_folders, shipped_options
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.config_groups import Groups
from titan_exp.config.paths.foreign_file import read_yaml
from titan_exp.config.schema.component import config_class
from titan_exp.config.schema.schema import hints, optional_fields, own_keys

GLOBAL = "# @package _global_"
"""First line of a file whose keys are written with their groups."""


def check_option_file(groups: Groups, group: str, option: str, tree: Mapping[str, Any] | None) -> Iterator[Violation]:
    """Violation of a user's option file, or of one in its defaults list; shipped files have none.

    `tree` is the configuration composed with the option, for missing keys; None leaves them out.
    """
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
        return (
            f"{path} has no defaults list, so {listed(missing, 'and')} {'is' if len(missing) == 1 else 'are'} missing"
        )
    return f"{path} and its defaults list lack {listed(missing, 'and')}"


def _check_defaults(
    groups: Groups, group: str, path: Path, content: Mapping[Any, Any], parents: tuple[Path, ...]
) -> None:
    """Check the defaults list of a file, and the user's files in it. Raises UserError."""
    entries = content.get("defaults", [])
    if not isinstance(entries, list):
        raise UserError(f"{path}: defaults must be a list, such as [adamw, _self_], not {entries!r}")
    for entry in entries:
        pair: tuple[Any, Any] = (None, entry)
        if isinstance(entry, dict) and len(entry) == 1:
            pair = next(iter(entry.items()))
        if not isinstance(pair[0], str | None) or not isinstance(
            pair[1], str if pair[0] is None else str | list | None
        ):
            raise UserError(f"{path}: the entry {entry!r} of defaults is neither an option nor `group: option`")
        for name, option in _targets(group, *pair):
            below = option_path(groups, name, option)
            if below is not None and below in parents:
                raise UserError(f"{path}: its defaults list leads back to {below.name}")
            if below is not None:
                _check_defaults(groups, name, below, read_yaml(below, "an option"), (*parents, below))
            elif name not in groups.names():
                offer = did_you_mean(name, groups.names()) or f"the groups are {listed(groups.names(), 'and')}"
                raise UserError(f"{path}: defaults name {name}={option}, and there is no such group ({offer})")
            elif option not in groups.options(name):
                offer = (
                    did_you_mean(option, groups.options(name)) or f"{name} has {listed(groups.options(name), 'and')}"
                )
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
