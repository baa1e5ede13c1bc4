"""Skeleton of a diffusion transformer: embedded inputs, a family's blocks, modulated output.

Blocks are keyed by their number in the whole model, as those of a decoder.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.models.blocks.diffusion import modulate, modulation
from titan_exp.models.blocks.linear import Linear
from titan_exp.models.blocks.token_order import ResultGather, TokenShard
from titan_exp.models.spec.diffusion import (
    TIME_FEATURES,
    DiffusionConfig,
    diffusion_spec,
    end_linears,
    modulation_style,
)
from titan_exp.models.spec.pp_plan import PipelinePlan
from titan_exp.models.spec.tp_plan import SEQUENCE_PARALLEL, TPStyle
from titan_exp.ops.attention.axial_rope import AxialRotaryEmbedding

TIME_FACTOR = 1000.0
"""Factor of times and guidance scales before they are embedded."""


class DiffusionTransformer(nn.Module):
    """Velocity of a noisy latent image, given its time, its text, and where the model reads it the guidance scale.

    `seq_len` is the longest sequence of text and image tokens.
    """

    def __init__(self, config: DiffusionConfig, blocks: Mapping[int, nn.Module], *, seq_len: int) -> None:
        super().__init__()
        self.spec = diffusion_spec(config)
        linears = {
            linear.name: Linear(linear.inputs, linear.outputs, linear.std, linear.bias_std, quantizable=False)
            for linear in end_linears(config)
        }
        self.shard = TokenShard()
        self.inputs: Inputs | None = Inputs(linears)
        self.blocks = nn.ModuleDict({str(layer): block for layer, block in blocks.items()})
        self.output: Output | None = Output(linears, modulation_style(config), config.norm_eps)
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
        """Predicted velocity of every patch.

        Pipeline stages send each other hidden states, then the conditioning as one token more: a later stage
        gets them as `image`, and all but the last one return them.

        `times` are 0 for data and 1 for noise, in fp32 as `guidance`. `positions` are those of text and image tokens,
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
        """Children that only the first or the last stage holds."""
        return self.spec.pipeline

    def reset_buffers(self) -> None:
        """Compute the RoPE caches, once memory is real."""
        self.rope.reset()

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of a training step per token, as executed."""
        return self.spec.flops_per_token(seq_len)


class Embedder(nn.Module):
    """Linear, SiLU, linear: features of a sequence to a part of its conditioning."""

    def __init__(self, linears: Mapping[str, Linear], name: str) -> None:
        super().__init__()
        self.hidden, self.out = linears[f"{name}.hidden"], linears[f"{name}.out"]

    def tp_plan(self) -> dict[str, TPStyle]:
        """Replicated linears; the conditioning modulates this rank's tokens."""
        return {"hidden": SEQUENCE_PARALLEL, "out": SEQUENCE_PARALLEL}

    def forward(self, x: Float[Tensor, "batch features"]) -> Float[Tensor, "batch dim"]:
        """Embedding, in the dtype of the weights."""
        return self.out(F.silu(self.hidden(x.to(self.hidden.weight.dtype))))


class Inputs(nn.Module):
    """First hidden states of text and image tokens, and the conditioning of their sequence."""

    def __init__(self, linears: Mapping[str, Linear]) -> None:
        super().__init__()
        self.image, self.text = linears["inputs.image"], linears["inputs.text"]
        self.time, self.pooled = Embedder(linears, "inputs.time"), Embedder(linears, "inputs.pooled")
        self.guidance = Embedder(linears, "inputs.guidance") if "inputs.guidance.out" in linears else None

    def tp_plan(self) -> dict[str, TPStyle]:
        """Replicated linears over this rank's tokens."""
        return {"image": SEQUENCE_PARALLEL, "text": SEQUENCE_PARALLEL}

    def forward(
        self, image: Tensor, text: Tensor, pooled: Tensor, times: Tensor, guidance: Tensor | None
    ) -> tuple[Float[Tensor, "batch seq dim"], Float[Tensor, "batch dim"]]:
        """Text tokens, then image tokens, and SiLU of the conditioning, which every modulation reads.

        Raises:
            ValueError: a guidance scale is missing, or given to a model that reads none.
        """
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
    """Modulated norm and linear to the numbers of a patch."""

    def __init__(self, linears: Mapping[str, Linear], style: TPStyle, eps: float) -> None:
        super().__init__()
        self.modulation, self.linear = linears["output.modulation"], linears["output.linear"]
        self.gather = ResultGather()
        self.eps, self._style = eps, style

    def tp_plan(self) -> dict[str, TPStyle]:
        """Sharded modulation, and a replicated linear over this rank's tokens."""
        return {"modulation": self._style, "linear": SEQUENCE_PARALLEL}

    def forward(
        self, x: Float[Tensor, "batch patches dim"], conditioning: Float[Tensor, "batch dim"]
    ) -> Float[Tensor, "batch patches patch_dim"]:
        """Velocity of the patches."""
        shift, scale = modulation(self.modulation, conditioning, 2)
        return self.gather(self.linear(modulate(x, shift, scale, self.eps)))


def sinusoid(x: Float[Tensor, " batch"]) -> Float[Tensor, "batch features"]:
    """Cosines, then sines of x at `TIME_FEATURES / 2` frequencies from 1 down to almost 1 / 10,000, in fp32."""
    half = TIME_FEATURES // 2
    exponent = -math.log(10_000) * torch.arange(half, dtype=torch.float32, device=x.device) / half
    angles = x.float()[:, None] * exponent.exp()
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
