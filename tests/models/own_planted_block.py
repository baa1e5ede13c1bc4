"""Blocks of `own_planted`: what users write in a layer, wrong in some layouts, or right in all of them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.models.blocks.feed_forward import FeedForward
from titan_exp.models.blocks.linear import InitSpec
from titan_exp.models.blocks.transformer import Attention, TransformerBlock
from titan_exp.models.decoder import Decoder
from titan_exp.models.spec.tp_plan import SEQUENCE_PARALLEL, HeadParallel
from titan_exp.ops.attention.rope import split_rotated
from titan_exp.ops.moe.routing import attach_loss
from titan_exp.ops.swiglu import swiglu

SHARED: dict[str, Tensor] = {}
"""What blocks keep for later ones outside of their hidden states."""


class Gain(nn.Module):
    """A learned factor."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.tp_style: Any = None

    def init_spec(self) -> dict[str, InitSpec]:
        """Ones."""
        return {"weight": InitSpec("ones")}

    def forward(self, x: Tensor) -> Tensor:
        """x · gain."""
        return x * self.weight


# Functions of the residual stream [rows, tokens, dim].


def token_shift(x: Tensor) -> Tensor:
    """Each token sees the one before."""
    return x + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1]


def causal_conv(x: Tensor) -> Tensor:
    """A convolution over three tokens."""
    before = F.pad(x, (0, 0, 2, 0))
    return x + 0.3 * before[:, 1:-1] + 0.2 * before[:, :-2]


def running_sum(x: Tensor) -> Tensor:
    """A cumulative mean over tokens."""
    return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def token_mean(x: Tensor) -> Tensor:
    """A mean over the tokens of a sequence."""
    return x - 0.5 * x.mean(1, keepdim=True)


def sequence_norm(x: Tensor) -> Tensor:
    """A norm over tokens and features."""
    return x / (x.pow(2).mean((1, 2), keepdim=True).sqrt() + 1e-3)


def first_token(x: Tensor) -> Tensor:
    """The first token is a register that all tokens read."""
    return x + 0.3 * x[:, :1]


def last_token(x: Tensor) -> Tensor:
    """All tokens read the last one."""
    return x + 0.3 * x[:, -1:]


def sinusoids(x: Tensor) -> Tensor:
    """Positions counted from the first token that is here."""
    places = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.arange(1, x.shape[2] + 1) / 50
    return x + 0.3 * places.sin()


def batch_norm(x: Tensor) -> Tensor:
    """Statistics over rows and tokens."""
    return (x - x.mean((0, 1))) / (x.var((0, 1), correction=0) + 1e-3).sqrt()


def row_mean(x: Tensor) -> Tensor:
    """Rows are centred around their mean."""
    return x - 0.3 * x.mean(0, keepdim=True)


def by_rows(x: Tensor) -> Tensor:
    """A factor by the number of rows."""
    return x + 0.1 * torch.tanh(x) / x.shape[0]


def stochastic_depth(x: Tensor) -> Tensor:
    """A branch that is left out at random."""
    return x + torch.tanh(x) * (torch.rand(()) < 0.5)


def noise(x: Tensor) -> Tensor:
    """Noise on hidden states."""
    return x + 0.01 * torch.randn_like(x)


def mean_penalty(x: Tensor) -> Tensor:
    """A penalty averaged over the tokens that are here."""
    return attach_loss(x, 1e-2 * x.pow(2).mean())


def expert_choice(x: Tensor) -> Tensor:
    """Each of two directions chooses a quarter of the tokens that are here."""
    tokens = x.flatten(0, 1)
    chosen = tokens[:, :2].topk(len(tokens) // 4, dim=0).indices
    mask = torch.zeros(len(tokens), 2, dtype=x.dtype).scatter(0, chosen, 1.0)
    return (tokens + 0.5 * torch.tanh(tokens) * mask.sum(1, keepdim=True)).view_as(x)


def clipped_by_largest(x: Tensor) -> Tensor:
    """Hidden states are divided by the largest number that is here."""
    return x / x.detach().abs().max()


RESIDUAL: dict[str, Callable[[Tensor], Tensor]] = {
    function.__name__: function
    for function in (token_shift, causal_conv, running_sum, token_mean, sequence_norm, first_token, last_token)
}
RESIDUAL |= {
    function.__name__: function
    for function in (sinusoids, batch_norm, row_mean, by_rows, stochastic_depth, noise, mean_penalty, expert_choice)
}
RESIDUAL |= {"clipped_by_largest": clipped_by_largest}


# Functions of attention's heads [rows, tokens, heads, head_dim], of which a rank has some.


def head_softmax(heads: Tensor) -> Tensor:
    """Heads compete."""
    return heads * heads.mean(-1, keepdim=True).softmax(2)


def head_count(heads: Tensor) -> Tensor:
    """A factor by the number of heads."""
    return heads / heads.shape[2] ** 0.5


def head_slopes(heads: Tensor) -> Tensor:
    """A factor by the head's number."""
    return heads * (0.5 ** torch.arange(heads.shape[2], dtype=heads.dtype))[:, None]


def talking_heads(heads: Tensor) -> Tensor:
    """Each head reads its neighbour."""
    return heads + 0.3 * heads.roll(1, 2)


HEADS = {function.__name__: function for function in (head_softmax, head_count, head_slopes, talking_heads)}


# Functions of the feed-forward's channels [rows, tokens, channels], of which a rank has some.


def channel_norm(hidden: Tensor) -> Tensor:
    """A norm over channels."""
    return hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()


def channel_top(hidden: Tensor) -> Tensor:
    """Only the largest half of the channels is kept."""
    least = hidden.abs().topk(hidden.shape[-1] // 2, -1).values[..., -1:]
    return hidden * (hidden.abs() >= least)


def half_rotated(hidden: Tensor) -> Tensor:
    """The second half of the channels comes first."""
    return hidden + 0.3 * torch.cat(hidden.chunk(2, -1)[::-1], -1)


CHANNELS = {function.__name__: function for function in (channel_norm, channel_top, half_rotated)}


class PlantedAttention(Attention):
    """Attention with code between its kernel and its output."""

    def __init__(self, layer: Any, eps: float, backend: Any, heads: Callable[[Tensor], Tensor]) -> None:
        super().__init__(layer, eps, backend)
        self.heads_code = [heads]

    def forward(self, x: Tensor, rope: Any, mask: Any) -> Tensor:
        """As a Llama's."""
        groups = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.head_dim))
        query, key, value = (heads.transpose(1, 2) for heads in split_rotated(groups, *rope[:2]))
        heads = self.core(query, key, value, mask).transpose(1, 2)
        return self.out(self.heads_code[0](heads).flatten(2))


class PlantedFeedForward(FeedForward):
    """SwiGLU with code before the down projection."""

    def __init__(self, layer: Any, channels: Callable[[Tensor], Tensor]) -> None:
        super().__init__(layer)
        self.channels_code = [channels]

    def forward(self, x: Tensor) -> Tensor:
        """As a Llama's."""
        return self.down(self.channels_code[0](swiglu(self.gate_up(x), self.group, self.variant)))


class PlantedBlock(TransformerBlock):
    """A Llama's block with planted code."""

    seen: Tensor

    def __init__(self, layer: Any, config: Any, number: int, backend: Any) -> None:
        planted = self.planted = config.planted
        gain = None
        if planted.endswith("gain"):
            gain = Gain(1 if planted == "one_gain" else config.head_dim if "head" in planted else config.dim)
            if planted.startswith("honest"):
                gain.tp_style = HeadParallel() if planted.endswith("head_gain") else SEQUENCE_PARALLEL
            if planted == "wrong_style_head_gain":
                gain.tp_style = SEQUENCE_PARALLEL
        code = HEADS.get(planted, gain if planted.endswith("head_gain") or planted == "one_gain" else None)
        attention = None if code is None else PlantedAttention(layer, config.norm_eps, backend, code)
        super().__init__(layer, config.norm_eps, backend, attention)
        self.number, self.calls, self.gain = number, 0, gain
        self.on_stream = gain is not None and code is None
        if planted in CHANNELS:
            self.feed_forward = PlantedFeedForward(layer, CHANNELS[planted])
        if planted == "dropout":
            self.drop = nn.Dropout(0.1)
        if planted in ("running_mean", "token_counter"):
            self.register_buffer("seen", torch.zeros(config.dim if planted == "running_mean" else 1))

    def forward(self, x: Tensor, rope: Any, mask: Any) -> Tensor:
        """One layer."""
        if self.planted == "value_residual":
            x = x + 0.3 * SHARED.get("first", torch.zeros_like(x)) if self.number else SHARED.setdefault("first", x)
        if self.planted == "every_call":
            self.calls += 1
            x = x * (1 + 0.1 * (self.calls % 3))
        if self.planted == "last_seen":
            kept, SHARED[f"last {self.number}"] = SHARED.get(f"last {self.number}"), x.detach().mean((0, 1))
            x = x if kept is None else x + 0.1 * kept
        if self.planted == "running_mean":
            x = x - self.seen
            self.seen.lerp_(x.detach().mean((0, 1)), 0.1)
        if self.planted == "token_counter":
            self.seen.add_(x.shape[0] * x.shape[1])
            x = x * (1 + 1 / (1 + self.seen))
        x = super().forward(x, rope, mask)
        if self.on_stream and self.gain is not None:
            x = self.gain(x)
        if self.planted == "dropout":
            x = self.drop(x)
        code = RESIDUAL.get(self.planted)
        return x if code is None else code(x)


class PlantedDecoder(Decoder):
    """A decoder with planted code."""

    def __init__(self, *args: Any, seq_len: int, planted: str) -> None:
        super().__init__(*args, seq_len=seq_len)
        self.planted = planted

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As a Llama's."""
        SHARED.pop("first", None)
        return super().forward(x, *args, **kwargs)

    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding, divided by the number of blocks that are here for `block_count`."""
        x = super().embed(tokens)
        return x / len(self.blocks) ** 0.5 if self.planted == "block_count" else x


class PlantedClass(nn.Module):
    """A plain class with planted code, or none."""

    def __init__(self, config: ModelConfig, planted: str = "") -> None:
        super().__init__()
        self.planted = planted
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleDict({str(layer): PlainBlock(config.dim, planted) for layer in range(config.layers)})
        self.head = nn.Linear(config.dim, config.vocab_size)

    def forward(self, tokens: Tensor, positions: Any = None, documents: Any = None) -> Tensor:
        """Logits."""
        x = self.embedding(tokens)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


class PlainBlock(nn.Module):
    """A convolution over four tokens and a linear layer."""

    def __init__(self, dim: int, planted: str) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim) if planted == "batch_norm_module" else nn.LayerNorm(dim)
        self.conv, self.out = nn.Conv1d(dim, dim, 4, groups=dim), nn.Linear(dim, dim)
        self.planted = planted
        self.drop = nn.Dropout(0.1 if planted == "dropout_module" else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        channels = self.norm(x.mT) if self.planted == "batch_norm_module" else self.norm(x).mT
        hidden = F.silu(self.conv(F.pad(channels, (3, 0)))).mT
        if self.planted == "batch_softmax":
            hidden = hidden * hidden.mean((1, 2), keepdim=True).softmax(0)
        return x + self.drop(self.out(hidden))
