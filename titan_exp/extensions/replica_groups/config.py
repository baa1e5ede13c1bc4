"""Fragments."""

from collections.abc import Iterable

from titan_exp.config.groups.semi_sync import SemiSyncConfig

__all__ = ["SemiSyncConfig"]


def fragments_of(names: Iterable[str], config: SemiSyncConfig, blocks: int) -> dict[str, int]:
    """Fragment of streaming DiLoCo of each parameter of a model, whose full names come in the model's order and whose
    blocks are `blocks.NUMBER`."""
    block, found = 0, {}
    for name in names:
        first, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        if first == "blocks" and number.isdecimal():
            block = int(number)
        found[name] = fragment_of_block(block, config, blocks)
    return found


def fragment_of_block(block: int, config: SemiSyncConfig, blocks: int) -> int:
    """Fragment of a block."""
    if config.fragment_pattern == "strided":
        return block % config.fragments
    return block * config.fragments // max(1, blocks)
