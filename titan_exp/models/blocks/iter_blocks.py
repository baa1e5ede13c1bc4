"""Iterators over the transformer blocks of a model or pipeline stage, with global layer indices."""

from collections.abc import Iterator

from torch import nn


def iter_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Transformer blocks in order. Empty for a model without a `blocks` ModuleDict."""
    for _, block in iter_numbered_blocks(model):
        yield block


def iter_numbered_blocks(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Pairs of layer index in the whole model and block; a pipeline stage yields its own blocks."""
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, nn.ModuleDict):
        for index, (key, block) in enumerate(blocks.items()):
            yield int(key) if key.isdecimal() else index, block
