"""Activation checkpointing: what backward recomputes instead of keeping (Chen et al. 2016)."""

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from titan_exp.parallel.data import blocks_of


def recompute_blocks(model: nn.Module) -> None:
    """Make every block keep only its input and run forward again in backward, in place.

    Only `forward` is replaced, so parameter names stay as they are; sharding's hooks gather parameters around it.
    """
    for block in blocks_of(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
