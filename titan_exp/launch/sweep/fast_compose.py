"""Cached Hydra composition: each choice of groups is composed once, and plain values are set in copies.

One Hydra composition takes tens of milliseconds, nearly all of it for groups that points share.
"""

import pickle
from collections.abc import Callable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

Compose = Callable[[list[str]], DictConfig]


class FastCompose:
    """Caching equivalent of `compose`."""

    def __init__(self, compose: Compose, parser: OverridesParser) -> None:
        self._compose, self._parser = compose, parser
        self._composed: dict[tuple[str, ...], bytes] = {}
        self._parsed: dict[str, Override] = {}
        self._failures: dict[tuple[str, ...], HydraException] = {}

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """Compose overrides. Raises HydraException if a key or option does not exist."""
        parsed = [self._parse(text) for text in overrides]
        later = [override for override in parsed if _is_plain_value(override)]
        first = [override for override in parsed if not _is_plain_value(override)]
        if _overlap(first, later):
            return self._compose(list(overrides))
        chosen = tuple(str(override.input_line) for override in first)
        if chosen not in self._composed:
            self._composed[chosen] = pickle.dumps(self._compose(list(chosen)))
        cfg: DictConfig = pickle.loads(self._composed[chosen])  # trusted bytes; five times as fast as deepcopy
        for override in later:
            try:
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
            except OmegaConfBaseException:
                return self._compose_again(overrides, (*chosen, str(override.input_line)))
        return cfg

    def _compose_again(self, overrides: Sequence[str], cause: tuple[str, ...]) -> DictConfig:
        """Compose overrides of which one fails, with Hydra's better message; once for all points of the same cause."""
        if cause in self._failures:
            raise self._failures[cause]
        try:
            return self._compose(list(overrides))
        except HydraException as error:
            self._failures[cause] = error
            raise

    def _parse(self, text: str) -> Override:
        if text not in self._parsed:
            self._parsed[text] = self._parser.parse_override(text)
        return self._parsed[text]


def _is_plain_value(override: Override) -> bool:
    """True if an override sets one key to one value, such as `optimizer.lr=1e-3`."""
    key = override.key_or_group
    changes = override.is_add() or override.is_force_add() or override.is_delete() or override.is_hydra_override()
    return not changes and override.package is None and "." in key and not isinstance(override.value(), dict)


def _overlap(first: Sequence[Override], later: Sequence[Override]) -> bool:
    """True if both kinds set the same key, so that their order could matter."""
    set_first = {override.key_or_group for override in first if "." in override.key_or_group}
    set_first |= {override.key_or_group for override in first if isinstance(override.value(), dict)}
    return any(
        key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
        for key in (override.key_or_group for override in later)
        for other in set_first
    )
