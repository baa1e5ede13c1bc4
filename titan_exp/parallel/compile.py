"""torch.compile, one block at a time: identical blocks share one graph, so depth does not cost compile time."""

import torch
from torch import nn

from titan_exp.models.blocks.block_list import iter_blocks


def compile_blocks(model: nn.Module, backend: str) -> None:
    """Compile each block's forward in place; parameter names stay as they are."""
    for block in iter_blocks(model):
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
