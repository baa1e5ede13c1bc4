"""Diffusion transformer (FLUX.1): double and single blocks, between embedded inputs and the modulated output."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.extensions.diffusion import spec
from titan_exp.models.blocks.linear import Linear, linear
from titan_exp.models.blocks.transformer import ResultGather, RopeOrder, TokenShard, norm
from titan_exp.models.spec.model_spec import LayerSpec, PipelinePlan
from titan_exp.models.spec.tp_plan import SEQUENCE_PARALLEL, FusedRows, TPStyle
from titan_exp.ops.attention.rope import Frequencies, Rope, RotaryEmbedding, rotate
from titan_exp.ops.attention.sdpa import AttentionBackend, CausalAttention

Hidden = Float[Tensor, "batch seq dim"]
Conditioning = Float[Tensor, "batch dim"]
Heads = Float[Tensor, "batch seq heads width"]


def modulate(x: Hidden, shift: Float[Tensor, "batch 1 dim"], scale: Float[Tensor, "batch 1 dim"], eps: float) -> Hidden:
    """Normalize by a LayerNorm without weights, then compute (1 + scale) · x + shift."""
    return F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift


def modulation(module: nn.Module, conditioning: Conditioning, parts: int) -> tuple[Tensor, ...]:
    """Shifts, scales and gates [batch, 1, dim] of a sequence, in this order, computed from its conditioning."""
    return module(conditioning)[:, None].chunk(parts, dim=-1)


class JointAttention(nn.Module):
    """Full attention over text and image tokens, with RoPE and without linears."""

    def __init__(self, layer: LayerSpec, backend: AttentionBackend) -> None:
        super().__init__()
        assert layer.attention is not None, "the layer has attention"
        self.core = CausalAttention(backend, layer.attention.scale, layer.attention.pattern)

    def forward(self, query: Heads, key: Heads, value: Heads, rope: Rope) -> Heads:
        heads = (rotate(query, *rope), rotate(key, *rope), value)
        return self.core(*(part.transpose(1, 2) for part in heads)).transpose(1, 2)


class _Heads(nn.Module):
    """Fused projection to queries, keys, values and more, by head, with QK norm."""

    def __init__(self, layer: LayerSpec, prefix: str, projection: str, eps: float) -> None:
        super().__init__()
        rows = layer.linear(f"{prefix}{projection}").rows
        assert rows is not None, "the projection is fused"
        self.projection, self.rows = projection, rows
        self.add_module(projection, linear(layer, f"{prefix}{projection}"))
        self.q_norm = norm(layer, f"{prefix}q_norm", eps)
        self.k_norm = norm(layer, f"{prefix}k_norm", eps)

    @property
    def fused_rows(self) -> dict[str, FusedRows]:
        return {self.projection: self.rows}

    def heads(self, x: Hidden) -> list[Float[Tensor, "batch seq heads _"]]:
        """Queries and keys after their norms, values, and all further rows."""
        fused = self.get_submodule(self.projection)(x).unflatten(-1, (-1, self.rows.unit))
        query, key, *others = fused.split([piece.width for piece in self.rows.pieces], dim=-1)
        return [self.q_norm(query), self.k_norm(key), *others]


class Stream(_Heads):
    """Weights of a double block for text or image tokens."""

    def __init__(self, layer: LayerSpec, name: str, eps: float) -> None:
        super().__init__(layer, f"{name}.", "qkv", eps)
        self.eps = eps
        self._plan = layer.tp_plan(name)
        self.modulation = linear(layer, f"{name}.modulation")
        self.out = linear(layer, f"{name}.out")
        self.up = linear(layer, f"{name}.up")
        self.down = linear(layer, f"{name}.down")

    def tp_plan(self) -> dict[str, TPStyle]:
        return self._plan

    def after_attention(
        self, x: Float[Tensor, "batch tokens dim"], attended: Tensor, modulations: tuple[Tensor, ...]
    ) -> Float[Tensor, "batch tokens dim"]:
        """Residual stream after attention's output and the feed-forward."""
        gate, shift, scale, feed_forward_gate = modulations
        x = x + gate * self.out(attended)
        hidden = F.gelu(self.up(modulate(x, shift, scale, self.eps)), approximate="tanh")
        return x + feed_forward_gate * self.down(hidden)


class DoubleBlock(nn.Module):
    """Double block: text and image tokens attend together, between separate linears and feed-forwards."""

    def __init__(self, layer: LayerSpec, eps: float, backend: AttentionBackend) -> None:
        super().__init__()
        self.text, self.image = Stream(layer, "text", eps), Stream(layer, "image", eps)
        self.attention = JointAttention(layer, backend)

    def forward(self, x: Hidden, conditioning: Conditioning, rope: Rope, text_tokens: int) -> Hidden:
        streams, lengths = (self.text, self.image), (text_tokens, x.shape[1] - text_tokens)
        parts = x.split(lengths, dim=1)
        modulations = [modulation(stream.modulation, conditioning, 6) for stream in streams]
        heads = [
            stream.heads(modulate(part, shift, scale, stream.eps))
            for stream, part, (shift, scale, *_) in zip(streams, parts, modulations, strict=True)
        ]
        query, key, value = (torch.cat(pair, dim=1) for pair in zip(*heads, strict=True))
        gathered = [stream_query.shape[1] for stream_query, *_ in heads]
        attended = self.attention(query, key, value, rope).flatten(2).split(gathered, dim=1)
        outputs = [
            stream.after_attention(part, of_part, found[2:])
            for stream, part, of_part, found in zip(streams, parts, attended, modulations, strict=True)
        ]
        return torch.cat(outputs, dim=1)


class SingleBlock(_Heads):
    """Single block: attention and feed-forward of all tokens run side by side, between one linear before and one after.
    Both linears keep a head's attention beside its feed-forward channels, so that heads can be divided."""

    def __init__(self, layer: LayerSpec, eps: float, backend: AttentionBackend) -> None:
        super().__init__(layer, "", "qkv_up", eps)
        self.eps, self._plan = eps, layer.tp_plan("")
        self.modulation = linear(layer, "modulation")
        self.rope_order = RopeOrder()
        self.attention = JointAttention(layer, backend)
        self.out = linear(layer, "out")

    def tp_plan(self) -> dict[str, TPStyle]:
        return self._plan

    def forward(self, x: Hidden, conditioning: Conditioning, rope: Rope, text_tokens: int) -> Hidden:
        shift, scale, gate = modulation(self.modulation, conditioning, 3)
        query, key, value, up = self.heads(modulate(x, shift, scale, self.eps))
        rope = self.rope_order(rope, text_tokens)
        hidden = torch.cat((self.attention(query, key, value, rope), F.gelu(up, approximate="tanh")), dim=-1)
        return x + gate * self.out(hidden.flatten(2))


TIME_FACTOR = 1000.0  # factor of times and guidance scales before they are embedded


class DiffusionTransformer(nn.Module):
    """Diffusion transformer: predicts the velocity of a noisy latent image from its time, its text, and the guidance
    scale if the model reads one. `seq_len` is the longest sequence of text and image tokens."""

    def __init__(self, config: spec.DiffusionConfig, blocks: Mapping[int, nn.Module], *, seq_len: int) -> None:
        super().__init__()
        self.spec = spec.diffusion_spec(config)
        linears = {
            linear.name: Linear(linear.inputs, linear.outputs, linear.std, linear.bias_std, quantizable=False)
            for linear in spec.end_linears(config)
        }
        self.shard = TokenShard()
        self.inputs: Inputs | None = Inputs(linears)
        self.blocks = nn.ModuleDict({str(layer): block for layer, block in blocks.items()})
        self.output: Output | None = Output(linears, spec.modulation_style(config), config.norm_eps)
        self.rope = AxialRotaryEmbedding(config.rope_axes, seq_len, config.rope_theta)

    def forward(
        self,
        image: Float[Tensor, "batch patches patch_dim"] | Float[Tensor, "batch seq_and_conditioning dim"],
        text: Float[Tensor, "batch text_tokens text_dim"],
        *,
        pooled: Float[Tensor, "batch pooled_dim"],
        times: Float[Tensor, " batch"],
        positions: Int[Tensor, "batch_or_1 seq 3"],
        guidance: Float[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch patches patch_dim"] | Float[Tensor, "batch seq_and_conditioning dim"]:
        """Predict the velocity of every patch.

        Pipeline stages send each other hidden states followed by the conditioning as one more token. A later stage gets
        them as `image`, and all but the last stage return them.

        `times` are 0 for data and 1 for noise, in fp32 like `guidance`. `positions` are those of text and image tokens;
        see `grid_positions`.
        """
        text = self.shard(text)
        if self.inputs is None:
            x, conditioning = image[:, :-1], image[:, -1]
        else:
            x, conditioning = self.inputs(self.shard(image), text, pooled, times, guidance)
        rope = self.rope(positions)
        for block in self.blocks.values():
            x = block(x, conditioning, rope, text.shape[1])
        if self.output is None:
            return torch.cat((x, conditioning[:, None]), dim=1)
        return self.output(x[:, text.shape[1] :], conditioning)

    def pp_plan(self) -> PipelinePlan:
        return self.spec.pipeline

    def reset_buffers(self) -> None:
        self.rope.reset()

    def flops_per_token(self, seq_len: int) -> float:
        return self.spec.flops_per_token(seq_len)


class Embedder(nn.Module):
    """Embedder (linear, SiLU, linear) of a sequence's features into a part of its conditioning."""

    def __init__(self, linears: Mapping[str, Linear], name: str) -> None:
        super().__init__()
        self.hidden, self.out = linears[f"{name}.hidden"], linears[f"{name}.out"]

    def tp_plan(self) -> dict[str, TPStyle]:
        return {"hidden": SEQUENCE_PARALLEL, "out": SEQUENCE_PARALLEL}

    def forward(self, x: Float[Tensor, "batch features"]) -> Conditioning:
        """Embed the features, in the dtype of the weights."""
        return self.out(F.silu(self.hidden(x.to(self.hidden.weight.dtype))))


class Inputs(nn.Module):
    """Embeds text and image tokens as the first hidden states, and computes the conditioning of their sequence."""

    def __init__(self, linears: Mapping[str, Linear]) -> None:
        super().__init__()
        self.image, self.text = linears["inputs.image"], linears["inputs.text"]
        self.time, self.pooled = Embedder(linears, "inputs.time"), Embedder(linears, "inputs.pooled")
        self.guidance = Embedder(linears, "inputs.guidance") if "inputs.guidance.out" in linears else None

    def tp_plan(self) -> dict[str, TPStyle]:
        return {"image": SEQUENCE_PARALLEL, "text": SEQUENCE_PARALLEL}

    def forward(
        self, image: Tensor, text: Tensor, pooled: Tensor, times: Tensor, guidance: Tensor | None
    ) -> tuple[Hidden, Conditioning]:
        """Return text tokens followed by image tokens, and SiLU of the conditioning, which every modulation reads.
        Raises ValueError if a guidance scale is missing, or given to a model that reads none."""
        if (guidance is None) != (self.guidance is None):
            raise ValueError(f"the model reads {'no' if self.guidance is None else 'a'} guidance scale")
        conditioning = self.time(sinusoid(times * TIME_FACTOR))
        if self.guidance is not None and guidance is not None:
            conditioning = conditioning + self.guidance(sinusoid(guidance * TIME_FACTOR))
        conditioning = conditioning + self.pooled(pooled)
        dtype = self.image.weight.dtype
        x = torch.cat((self.text(text.to(dtype)), self.image(image.to(dtype))), dim=1)
        return x, F.silu(conditioning)


class Output(nn.Module):
    """Output layer: modulated norm, then a linear to the elements of a patch."""

    def __init__(self, linears: Mapping[str, Linear], style: TPStyle, eps: float) -> None:
        super().__init__()
        self.modulation, self.linear = linears["output.modulation"], linears["output.linear"]
        self.gather = ResultGather()
        self.eps, self._style = eps, style

    def tp_plan(self) -> dict[str, TPStyle]:
        return {"modulation": self._style, "linear": SEQUENCE_PARALLEL}

    def forward(
        self, x: Float[Tensor, "batch patches dim"], conditioning: Conditioning
    ) -> Float[Tensor, "batch patches patch_dim"]:
        shift, scale = modulation(self.modulation, conditioning, 2)
        return self.gather(self.linear(modulate(x, shift, scale, self.eps)))


def sinusoid(x: Float[Tensor, " batch"]) -> Float[Tensor, "batch features"]:
    """Cosines, then sines, of x at `TIME_FEATURES / 2` frequencies from 1 down to almost 1 / 10,000, in fp32."""
    half = spec.TIME_FEATURES // 2
    exponent = -math.log(10_000) * torch.arange(half, dtype=torch.float32, device=x.device) / half
    angles = x.float()[:, None] * exponent.exp()
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class AxialRotaryEmbedding(nn.Module):
    """RoPE caches of several axes, `widths` features of a head each, for coordinates below `length`."""

    def __init__(self, widths: Sequence[int], length: int, theta: float) -> None:
        super().__init__()
        self.axes = nn.ModuleList(RotaryEmbedding(width, length, Frequencies(theta)) for width in widths)

    def reset(self) -> None:
        for axis in self.axes:
            axis.reset()  # type: ignore[operator]  # a cache's method

    def forward(self, positions: Int[Tensor, "batch_or_1 seq axes"]) -> Rope:
        pairs = [axis(positions.shape[1], column) for axis, column in zip(self.axes, positions.unbind(-1), strict=True)]
        cos, sin = (torch.cat(parts, dim=-1) for parts in zip(*pairs, strict=True))
        return cos, sin
