"""Activation checkpointing: what backward recomputes instead of keeping (Chen et al. 2016)."""

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper


def recompute_blocks(model: nn.Module) -> None:
    """Replace every block by one that keeps only its input and runs forward again in backward, in place."""
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, nn.ModuleDict):
        for name, block in blocks.items():
            blocks[name] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
