"""Transformer blocks of a model or pipeline stage, with their layer numbers."""

from collections.abc import Iterator

from torch import nn


def iter_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Transformer blocks in order. Empty for a model without a `blocks` ModuleDict."""
    for _, block in iter_numbered_blocks(model):
        yield block


def iter_numbered_blocks(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Transformer blocks with their layer numbers in the whole model, also for a pipeline stage of it."""
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, nn.ModuleDict):
        for index, (key, block) in enumerate(blocks.items()):
            yield int(key) if key.isdecimal() else index, block
