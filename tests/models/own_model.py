"""A model as a user would bring it: plain torch, no declarations."""

import torch
from torch import Tensor, nn

from titan_exp.config.groups.experiment import ModelConfig


class Bigram(nn.Module):
    """Logits of the next token from the current one alone."""

    def __init__(self, config: ModelConfig, scale: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.dim)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(config.dim, config.vocab_size)
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits."""
        return self.head(self.dropout(self.table(tokens))) * self.scale
