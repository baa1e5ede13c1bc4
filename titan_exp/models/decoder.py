"""Skeleton of a decoder-only language model: embedding, a family's blocks, final norm, LM head.

Blocks are keyed by their layer number in the whole model, and every part may be absent, so that a pipeline stage is
the same class with the same parameter names.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.models.blocks.transformer import Embedding, Head, LogitsLoss, RMSNorm
from titan_exp.models.spec.model_spec import ModelSpec, PipelinePlan
from titan_exp.ops.attention.mask_pattern import CAUSAL
from titan_exp.ops.attention.rope import Frequencies, RotaryEmbedding, TemperatureTable
from titan_exp.ops.cross_entropy import LossSum

Ids = Int[Tensor, "batch seq"]
Hidden = Float[Tensor, "batch part dim"]


class Decoder(nn.Module):
    """Decoder: the spec's embedding, norm and head around a family's blocks, which are called as `block(x, rope,
    mask)`. `seq_len` is the longest sequence in tokens. Modules of multi-token prediction are the last blocks, called
    as `block(x, rope, mask, embedded)` after the final norm."""

    def __init__(self, spec: ModelSpec, blocks: Mapping[int, nn.Module], *, seq_len: int) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = Embedding(spec.vocab_size, spec.dim, spec.embedding_std)
        self.blocks = nn.ModuleDict({str(layer): block for layer, block in blocks.items()})
        self.norm = RMSNorm(spec.dim, spec.norm_eps, zero_centered=spec.zero_centered_norm)
        # A tied head is called through the embedding, so that the parameter has one name and FSDP gathers it.
        self.head = Head(spec.dim, spec.vocab_size, spec.embedding_std, tied=spec.tied)
        self.rope = None
        if spec.rope is not None:
            self.rope = RotaryEmbedding(spec.rope_dim, seq_len, Frequencies(**spec.rope.frequencies))
        temperature = spec.temperature
        self.temperature = None
        if temperature is not None:
            self.temperature = TemperatureTable(seq_len, temperature.coefficient, temperature.floor_scale)
        self.positions_restart = True
        """True if `positions` may restart within a sequence, False if they count through it."""

    def forward(
        self,
        x: Ids | Hidden,
        positions: Ids | None = None,
        documents: Ids | None = None,
        loss: LogitsLoss | None = None,
        further: Int[Tensor, "depth batch seq"] | None = None,
    ) -> Float[Tensor, "depths_and_batch seq vocab"] | Hidden | LossSum | tuple[LossSum, ...]:
        """Logits of the next token, or their loss; hidden states if another stage has the head.

        `x` are token ids, or the previous pipeline stage's hidden states (with sequence parallelism, of this rank's
        tokens). `positions` default to 0 .. seq - 1. With `documents`, tokens see only their own document. `loss` is
        called with the last hidden states and the head's weight inside `forward`, where a sharded weight is gathered.
        `further` are the ids of the tokens 1, 2, ... places ahead. They run the modules of multi-token prediction,
        whose logits, or hidden states for `loss`, follow the model's along the batch dim, depth by depth.
        """
        seq = x.shape[1] if positions is None else positions.shape[1]
        rope = None if self.rope is None else self.rope(seq, positions)
        if rope is not None and self.temperature is not None:
            rope = (*rope, self.temperature(seq, positions))
        masks = self._masks(documents, positions if self.positions_restart else None, seq, x.device)
        layers = len(self.spec.layers)
        embedded: Sequence[Tensor] = ()
        # The last stage of a tied model holds the embedding too, for its head.
        if further is not None and not x.is_floating_point():
            # A single lookup, so that FSDP gathers the weight once.
            x, *embedded = self.embed(torch.cat((x, *further))).chunk(1 + len(further))
        elif further is not None:
            embedded = self.embed(further.flatten(0, 1)).chunk(len(further))
        elif not x.is_floating_point():
            x = self.embed(x)
        for number, block in self.blocks.items():
            if int(number) < layers:
                x = block(x, rope, masks[number])
        if self.norm is None:
            return x
        x = self.norm(x)
        if embedded:
            depths = [x]
            mtp = [number for number in self.blocks if int(number) >= layers]
            for number, following in zip(mtp, embedded, strict=True):
                depths.append(self.blocks[number](depths[-1], rope, masks[number], following))
            # A single call of the head, so that FSDP gathers its weight once.
            x = torch.cat(depths)
        return self.embedding(x, self.head, loss) if self.spec.tied else self.head(x, loss=loss)

    def embed(self, tokens: Ids) -> Hidden:
        """Compute the first hidden states; subclasses may scale them or add to them."""
        return self.embedding(tokens)

    def pp_plan(self) -> PipelinePlan:
        return self.spec.pipeline

    def reset_buffers(self) -> None:
        for table in (self.rope, self.temperature):
            if table is not None:
                table.reset()

    def flops_per_token(self, seq_len: int) -> float:
        return self.spec.flops_per_token(seq_len)

    def _masks(self, documents: Ids | None, positions: Ids | None, seq: int, device: Any) -> dict[str, Any]:
        """Mask of each block, None without one; masks of the same pattern are built once."""
        cores = {number: _core(block) for number, block in self.blocks.items()}
        masks = {
            pattern: None if core is None else core.mask(documents, positions, seq=seq, device=device)  # type: ignore[operator]  # its method
            for pattern, core in dict(cores.values()).items()
        }
        return {number: masks[pattern] for number, (pattern, _) in cores.items()}


def _core(block: nn.Module) -> tuple[Hashable, nn.Module | None]:
    """Mask pattern of a block's mixer, and the module that builds its mask: the mixer itself or its core; None for a
    block without."""
    attention = getattr(block, "attention", None)
    core = attention if hasattr(type(attention), "mask") else getattr(attention, "core", None)
    return (None, None) if core is None else (getattr(core, "pattern", CAUSAL), core)
