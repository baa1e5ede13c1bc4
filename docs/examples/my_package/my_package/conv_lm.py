"""A plain class: a language model of causal convolutions, without a spec."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titan_exp.config.groups.experiment import ModelConfig


class ConvLM(nn.Module):
    """Called as `ConvLM(config, **model.options)`, with the keys of the group `model`."""

    def __init__(self, config: ModelConfig, kernel: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        # A ModuleDict named `blocks`, keyed by layer number, is sharded, recomputed and compiled block by block.
        self.blocks = nn.ModuleDict({str(layer): ConvBlock(config.dim, kernel) for layer in range(config.layers)})
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        # Models are built without memory first: a tensor that is not a parameter must be a buffer.
        self.register_buffer("logit_scale", torch.tensor(1.0), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits [batch, seq, vocab]; `positions` and `documents` are None unless the group `data` asks for them."""
        x = self.embedding(tokens)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) * self.logit_scale


class ConvBlock(nn.Module):
    """Depthwise convolution over earlier tokens, then a gated feed-forward."""

    def __init__(self, dim: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Conv1d(dim, dim, kernel, groups=dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        history = F.pad(self.norm(x).transpose(1, 2), (self.mix.kernel_size[0] - 1, 0))
        gate, up = self.up(self.mix(history).transpose(1, 2)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)
