"""Plain classes of kinds that users bring: layers that are shared, a recurrence, and a mix of tokens by a transform."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.config.groups.experiment import ModelConfig


class Kind(nn.Module):
    """Embedding, learned places, blocks and head."""

    def __init__(self, config: ModelConfig, *, local_places: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(config.vocab_size, config.dim), nn.Embedding(config.context, config.dim)
        one = self.block(config.dim)
        blocks = (one if shared or layer == 0 else self.block(config.dim) for layer in range(config.layers))
        self.blocks = nn.ModuleDict({str(layer): block for layer, block in enumerate(blocks)})
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.local_places = local_places

    def block(self, dim: int) -> nn.Module:
        """One layer."""
        return Gated(dim)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits."""
        here = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.table(tokens) + self.places(here if positions is None or self.local_places else positions)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


class Gated(nn.Module):
    """A gated linear layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x plus the layer."""
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Shared(Kind):
    """All layers are one module, as in ALBERT (Lan et al. 2019)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, shared=True)


class Recurrent(Kind):
    """Layers are LSTMs."""

    def block(self, dim: int) -> nn.Module:
        """An LSTM with a residual connection."""
        return Cell(dim)


class Cell(nn.Module):
    """An LSTM with a residual connection."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """x plus the LSTM's states."""
        return x + self.cell(x)[0]


class Transformed(Kind):
    """Tokens are mixed by a Fourier transform (Lee-Thorp et al. 2021)."""

    def block(self, dim: int) -> nn.Module:
        """A transform over tokens, and a gated layer."""
        return nn.Sequential(Fourier(), Gated(dim))


class Fourier(nn.Module):
    """A Fourier transform over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """x plus its transform."""
        return x + torch.fft.fft(x, dim=1).real / x.shape[1]
