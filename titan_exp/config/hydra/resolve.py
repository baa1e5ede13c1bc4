"""Interpolation of a composed configuration, key by key, so that all failures are reported."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titan_exp.config.errors.user_error import Violation, listed
from titan_exp.config.schema.identity_keys import is_among

_MISSING = object()


class UnreadableSourceError(ValueError):
    """Failure of a resolver that its first key explains, such as the path of a file that it reads."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy
        """Values that would work."""


@dataclass(frozen=True)
class Uncomputed:
    """Key whose value could not be computed."""

    violation: Violation
    """Violation to report."""
    cause: Violation | None = None
    """Violation of a key that its interpolation reads, to report instead."""


def resolve(cfg: DictConfig) -> tuple[dict[str, Any], list[Uncomputed]]:
    """Plain values of a configuration without Hydra's own node, and the keys whose values could not be computed."""
    uncomputed: list[Uncomputed] = []
    keys = [key for key in cfg if key != "hydra"]
    pairs = [(str(key), _value(cfg, key, str(key), uncomputed)) for key in keys]
    return {key: value for key, value in pairs if value is not _MISSING}, uncomputed


def consequences(cfg: DictConfig, faults: Collection[str]) -> set[str]:
    """Keys whose interpolations read a key or a group with a fault, also by way of others."""
    sources = dict(_interpolated(cfg, ""))
    found: set[str] = set()
    while (
        more := {key for key, read in sources.items() if any(is_among(one, {*faults, *found}) for one in read)} - found
    ):
        found |= more
    return found


def _interpolated(node: Any, group: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Keys with an interpolation, and the keys that it reads."""
    for key in node:
        field = f"{group}.{key}" if group else str(key)
        if OmegaConf.is_interpolation(node, key):
            yield field, tuple(_sources(str(node._get_node(key)._value()), group))
        elif not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig) and field != "hydra":
            yield from _interpolated(node[key], field)


def _value(node: Any, key: Any, field: str, uncomputed: list[Uncomputed]) -> Any:
    if OmegaConf.is_missing(node, key):
        uncomputed.append(Uncomputed(Violation(field, "???", "this key has no value yet", f"give it one: {field}=...")))
        return _MISSING
    try:
        value = node[key]
    except OmegaConfBaseException as error:
        uncomputed.append(_failure(node, key, field, error))
        return _MISSING
    if isinstance(value, DictConfig):
        pairs = [(str(inner), _value(value, inner, f"{field}.{inner}", uncomputed)) for inner in value]
        return {inner: part for inner, part in pairs if part is not _MISSING}
    if isinstance(value, ListConfig):
        parts = [_value(value, index, f"{field}[{index}]", uncomputed) for index in range(len(value))]
        return [part for part in parts if part is not _MISSING]
    return value


def _failure(node: Any, key: Any, field: str, error: Exception) -> Uncomputed:
    raw = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index, call-overload]
    message = str(error).splitlines()[0].partition("while resolving interpolation: ")
    sources = tuple(_sources(str(raw), field.rpartition(".")[0]))
    remedy = f"give {field} a value of its own" + (f", or change {listed(sources)}" if sources else "")
    violation = Violation(field, raw, f"Hydra cannot compute it: {message[2] or message[0]}", remedy)
    unreadable: BaseException | None = error  # OmegaConf raises others around the resolver's own
    while unreadable is not None and not isinstance(unreadable, UnreadableSourceError):
        unreadable = unreadable.__context__
    if unreadable is None:
        return Uncomputed(violation)
    value = OmegaConf.to_container(node, resolve=False)[sources[0].rpartition(".")[2]]  # type: ignore[index, call-overload]
    return Uncomputed(violation, Violation(sources[0], value, str(unreadable), unreadable.remedy))


def _sources(text: str, group: str) -> Iterator[str]:
    for name in re.findall(r"\$\{(\.?\w[\w.]*)\}", text):
        yield f"{group}{name}" if name.startswith(".") else name
