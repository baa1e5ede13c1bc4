"""A model of a user's own with experts: a router, two experts for each token, and their SwiGLU feed-forwards."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.models.blocks.linear import GroupedLinear, InitSpec
from titan_exp.models.blocks.transformer import Embedding, Head, RMSNorm
from titan_exp.models.llama import Config
from titan_exp.ops.swiglu import swiglu

CHOSEN = 2
"""Experts of each token."""


class Experts(nn.Module):
    """Feed-forward of the experts that a router chooses."""

    def __init__(self, dim: int, ffn_dim: int, experts: int, std: float) -> None:
        super().__init__()
        self.router, self.std = nn.Parameter(torch.empty(experts, dim)), std
        self.gate_up = GroupedLinear(experts, dim, 2 * ffn_dim, std)
        self.down = GroupedLinear(experts, ffn_dim, dim, std)

    def init_spec(self) -> dict[str, InitSpec]:
        """Initialization of the router."""
        return {"router": InitSpec("normal", self.std)}

    def forward(self, x: Tensor) -> Tensor:
        """Each token's experts, weighted by the router's scores."""
        tokens = x.flatten(0, 1)
        scores = F.linear(tokens.float(), self.router.float()).softmax(-1)
        share, expert = scores.topk(CHOSEN)
        share = (share / share.sum(-1, keepdim=True)).flatten()
        order = expert.flatten().argsort(stable=True)
        experts = torch.arange(len(self.router), device=x.device)
        ends = (expert.flatten()[:, None] == experts).sum(0).cumsum(0, dtype=torch.int32)
        rows = tokens.index_select(0, order // CHOSEN)
        found = self.down(swiglu(self.gate_up(rows, ends)[None])[0], ends)
        found = (found * share.index_select(0, order)[:, None]).to(x.dtype)
        return torch.zeros_like(tokens).index_add(0, order // CHOSEN, found).view_as(x)


class Block(nn.Module):
    """A shift of tokens, and experts."""

    def __init__(self, config: Config, experts: int) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.experts = Experts(config.dim, config.ffn_dim, experts, config.init_std)

    def forward(self, x: Tensor) -> Tensor:
        """One layer: a token sees itself and the one before."""
        x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.experts(self.norm(x))


class Mixture(nn.Module):
    """A language model of blocks with experts.

    Args:
        config: width, feed-forward width of each expert, layers, words.
        experts: of each block.
    """

    def __init__(self, config: Config, experts: int = 4) -> None:
        super().__init__()
        self.embedding = Embedding(config.vocab_size, config.dim, config.init_std)
        self.blocks = nn.ModuleDict({str(layer): Block(config, experts) for layer in range(config.layers)})
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = Head(config.dim, config.vocab_size, config.init_std, tied=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits of the next token."""
        x = self.embedding(tokens)
        for block in self.blocks.values():
            x = block(x)
        logits = self.head(self.norm(x))
        assert isinstance(logits, Tensor), "no loss was asked for"
        return logits
