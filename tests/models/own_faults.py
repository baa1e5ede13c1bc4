"""A user's plain class with a fault of choice, and other user code that does not fit."""

from typing import Any

import torch
from torch import Tensor, nn

from titan_exp.config.groups.experiment import ModelConfig


class Faulty(nn.Module):
    """Embedding, one linear layer per block, tied head; `fault` names the statement that fails."""

    def __init__(self, config: ModelConfig, fault: str = "", blocks: bool = True) -> None:
        super().__init__()
        self.fault = fault
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        layers = {str(layer): nn.Linear(config.dim, config.dim) for layer in range(config.layers)}
        setattr(self, "blocks" if blocks else "layers", nn.ModuleDict(layers))
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if fault == "tied across groups":
            self.blocks["1"].weight = self.blocks["0"].weight  # type: ignore[index, union-attr]  # a ModuleDict
        else:
            self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        if fault == "tensor":
            self.frequencies = torch.arange(4.0)
        if fault == "constructor":
            torch.zeros(3).view(2)

    def forward(self, tokens: Tensor, positions: Any = None, documents: Any = None) -> Tensor:
        """Logits."""
        x = self.embedding(tokens)
        for layer in getattr(self, "blocks", getattr(self, "layers", {})).values():
            x = x + layer(x)
        match self.fault:
            case "shape":
                x = x @ torch.zeros(7, 3)
            case "key":
                {}["gone"]
            case "value":
                x.sum().item()
            case "numpy":
                x.detach().numpy()
        return self.head(x) * self.scale


class TokensOnly(nn.Module):
    """A forward pass of tokens alone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        return self.table(tokens)


class Optimizer(torch.optim.SGD):
    """An optimizer with an option of its own, required."""

    def __init__(self, params: Any, lr: float, *, rho: float) -> None:
        super().__init__(params, lr=lr)
        self.rho = rho


class DuckTypedOptimizer:
    """An optimizer's methods in a class that extends no optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        self.inner = torch.optim.SGD(params, lr=lr)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.step, self.zero_grad = self.inner.step, self.inner.zero_grad
        self.state_dict, self.load_state_dict = self.inner.state_dict, self.inner.load_state_dict


class Corpus:
    """A source without documents."""

    def __init__(self, config: Any, folder: str = "") -> None:
        self.folder = folder


def too_large(progress: float) -> float:
    """A decay that grows."""
    return 1 + progress


def without_progress() -> float:
    """A decay of nothing."""
    return 1.0
