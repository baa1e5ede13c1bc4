"""QK-Clip (Kimi Team 2025): scales queries and keys of a head down if its logits grow too large."""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.config.errors.user_error import UserError
from titan_exp.models.spec.mixers import AttentionSpec
from titan_exp.ops.attention.attention_with_lse import MaxLogits
from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.context_parallel.apply import UlyssesAttention
from titan_exp.parallel.context_parallel.attention import ContextAttention
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.meta_init import local_shard


class ClippableAttention(Protocol):
    """Attention whose projections QK-Clip scales."""

    spec: AttentionSpec  # heads of the whole layer
    core: CausalAttention | ContextAttention | UlyssesAttention
    """Module that computes the scores: this rank's heads, its queries, or a part of its heads (Ulysses)."""

    def clip_factors(self, factors: Tensor) -> Mapping[str, Tensor]:
        """Row factors [rows] of whole projections, by path, that multiply query heads' logits by `factors`."""
        ...

    def get_submodule(self, target: str) -> nn.Module:
        """Look up a module by path, as `nn.Module` does."""
        ...


class QKClip:
    """Limits the logits of every head to `limit`, judged by the largest logit in the step's global batch. `model` is
    the whole model, so that all ranks know all layers; `parts` are the modules of this rank. Attention modules give the
    factor of each row by `clip_factors`; without any such module, UserError is raised. A step costs one all-reduce of a
    number per head and layer."""

    def __init__(self, model: nn.Module, parts: list[nn.Module], limit: float, mesh: Mesh) -> None:
        self._limit, self._device = limit, mesh.device
        self._heads = {name: track_logits(name, module, mesh) for name, module in _attentions(model)}
        if not self._heads:
            raise UserError(
                f"optimizer.qk_clip={limit:g} scales heads through `spec`, `core` and `clip_factors` of an attention, "
                f"and no attention of {type(model).__name__} has all three. Add them as "
                "titan_exp/models/blocks/transformer.py does, or use optimizer.qk_clip=null."
            )
        self._own = dict(attention for part in parts for attention in _attentions(part))
        for name, module in self._own.items():
            track_logits(name, module, mesh)
        axes = [mesh.world["tp"], mesh.world["cp_within"]]
        # Ulysses divides the heads of a tensor-parallel rank further.
        self._rank, self._degree = 0, 1
        for axis in axes:
            self._rank = self._rank * axis.size() + axis.get_local_rank()
            self._degree *= axis.size()

    @property
    def largest(self) -> list[Tensor]:
        """Largest logits of the step so far, by layer of this rank; worlds raise them in place to their maximum."""
        return [self._tracked(module).largest for module in self._own.values()]

    @torch.no_grad()
    def clip(self) -> None:
        """Scale this rank's shards; all ranks call it after the update."""
        largest = torch.full((sum(self._heads.values()),), -torch.inf, device=self._device)
        by_layer = dict(zip(self._heads, largest.split(list(self._heads.values())), strict=True))
        for name, module in self._own.items():
            part = self._heads[name] // self._degree
            by_layer[name][self._rank * part :][:part] = self._tracked(module).largest
        if dist.get_world_size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        for name, module in self._own.items():
            logits = by_layer[name]
            factors = torch.where(logits > self._limit, self._limit / logits, 1.0)
            for linear, rows in module.clip_factors(factors).items():
                for parameter in module.get_submodule(linear).parameters(recurse=False):
                    if parameter.requires_grad:
                        part, local = local_shard(parameter), local_tensor(parameter)
                        own = rows[part.start[0] :][: part.size[0]].to(local.device)
                        local.mul_(own.view(-1, *[1] * (local.ndim - 1)))

    @staticmethod
    def _tracked(module: ClippableAttention) -> MaxLogits:
        tracked = scoring_module(module).max_logits
        assert tracked is not None, "tracked from the start"
        return tracked


def _attentions(module: nn.Module) -> list[tuple[str, ClippableAttention]]:
    # From Python 3.12 on, `isinstance` of a protocol does not find submodules, which are not attributes.
    members = ("spec", "core", "clip_factors")
    return [(name, part) for name, part in module.named_modules() if all(hasattr(part, word) for word in members)]  # type: ignore[misc]


def is_scoring(module: nn.Module) -> bool:
    """True for an attention module whose scores can be tracked."""
    core = getattr(module, "core", None)
    return hasattr(module, "spec") and isinstance(core, CausalAttention | ContextAttention | UlyssesAttention)


def track_logits(name: str, attention: ClippableAttention, mesh: Mesh) -> int:
    """Let a layer track its logits; returns its number of heads over all ranks."""
    heads = attention.spec.heads
    layer = name.removesuffix(".attention").rpartition(".")[2]
    shards = mesh.world["tp"].size() * mesh.world["cp_within"].size()
    scoring_module(attention).max_logits = MaxLogits(heads // shards, layer, mesh.device)
    return heads


def scoring_module(attention: ClippableAttention) -> CausalAttention | ContextAttention:
    """Module that computes the scores."""
    return attention.core.core if isinstance(attention.core, UlyssesAttention) else attention.core
