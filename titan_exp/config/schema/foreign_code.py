"""Foreign configurations: code that they name is not imported unless the user trusts them (`--trust`)."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.paths.foreign_file import read_file
from titan_exp.config.schema.import_path_keys import IMPORT_PATH_KEYS, import_paths_in
from titan_exp.config.schema.run_signature import SIGNATURE_FILE, is_own

Trust = bool | Collection[str]
"""True trusts a configuration; import paths in a collection are trusted, as those that the user has typed."""

WHY = "it would be imported and run with your rights"
_HYDRA = "it would change how Hydra composes, which can import and call anything"
_READS = "it would be computed from your environment and files"


class Untrusted(UserError):
    """Refusal of a foreign configuration, which `--trust` lifts."""


def require_trust(
    path: Path,
    text: bytes,
    config: Mapping[str, Any],
    trust: Trust = False,
    imports: Collection[str] = IMPORT_PATH_KEYS,
) -> None:
    """Raise Untrusted if a configuration that this user did not launch names code.

    `text` is the content of the file at `path`, `config` its values, and `imports` the keys whose code is imported.
    """
    known = () if isinstance(trust, bool) else trust
    names = {key: name for key, name in import_paths_in(config, imports).items() if name not in known}
    if trust is True or not names or is_own(text, path.with_name(SIGNATURE_FILE)):
        return
    raise _refusal(path, [Violation(key, name, WHY, _remedy(name)) for key, name in names.items()])


def require_plain(path: Path) -> None:
    """Raise Untrusted if composing a configuration that this user did not launch could do more than set values: by
    import paths, interpolations, a defaults list, or settings of Hydra."""
    from titan_exp.config.paths.yaml_file import read_yaml

    try:
        text = read_file(path)
    except FileNotFoundError:
        return  # Hydra says so
    values = read_yaml(path, "a configuration", content=text)
    if is_own(text, path.with_name(SIGNATURE_FILE)):
        return
    found = [Violation(key, name, WHY, _remedy(name)) for key, name in import_paths_in(values).items()]
    found += [Violation(key, "", _HYDRA, "a run's config.yaml has no such key") for key in _composing(text, values)]
    remedy = "the config.yaml of a run holds values; replace it by the value"
    found += [Violation(key, value, _READS, remedy) for key, value in _interpolations(values)]
    if found:
        raise _refusal(path, found)


def _refusal(path: Path, violations: list[Violation]) -> Untrusted:
    return Untrusted(
        f"{path.parent}: you did not launch this run, or its {path.name} has changed since. It is not trusted with:",
        violations,
    )


def _remedy(name: str) -> str:
    return f"look at {name.partition('.')[0]}, and add --trust if you trust that folder"


def _composing(text: bytes, values: Mapping[Any, Any]) -> list[str]:
    package = ["@package"] if b"@package" in text else []
    return [*package, *(key for key in values if isinstance(key, str) and key.split("@")[0] in ("hydra", "defaults"))]


def _interpolations(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _interpolations(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _interpolations(part, f"{key}[{index}]")
    elif isinstance(value, str) and "${" in value:
        yield key, value
