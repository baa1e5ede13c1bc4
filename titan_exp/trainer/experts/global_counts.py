"""Tokens per expert of the global batch, from which routers update their balance once per optimizer step."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.models.blocks.router import Router
from titan_exp.parallel.collectives import all_reduce
from titan_exp.parallel.mesh import Mesh


class ExpertLoad:
    """Reduces the counts of all layers in one message, and hands each router its own.

    `model` is the whole model, so that all ranks know all layers; `parts` are the modules of this rank. `sequences` are
    those of the first global batch.
    """

    def __init__(self, model: nn.Module, parts: Sequence[nn.Module], sequences: int, mesh: Mesh) -> None:
        self._sizes = {name: module.moe.experts for name, module in routers_of(model)}
        self._routers = dict(router for part in parts for router in routers_of(part))
        self._device = mesh.device
        self.counts: dict[str, Tensor] = {}
        """Tokens per expert of the last global batch, int64 [experts], by the router's full name; on every rank."""
        self.losses: dict[str, Tensor] = {}
        """This rank's share of a layer's balance loss and z-loss in the last step, fp32 [2], by the router's name."""
        groups = [
            mesh.world.get_group(axis).group_name
            for axis in ("cp_across", "cp_within", "tp")
            if mesh.world[axis].size() > 1
        ]
        ranks = mesh.sequence_shard.degree * mesh.world["tp"].size()
        self._sequences = torch.tensor(float(sequences), device=mesh.device)
        for router in self._routers.values():
            router.set_batch(self._sequences, ranks, partial(_sum, groups=groups) if groups else None)

    def set_sequences(self, sequences: int) -> None:
        """Set the sequences of the next global batch."""
        if self._routers:
            self._sequences.fill_(sequences)

    @property
    def step_sums(self) -> list[Tensor]:
        """This rank's counts and losses of the step so far; equal ranks of replica groups add theirs, in place."""
        return [sums for router in self._routers.values() for sums in (router.counts, router.losses)]

    def discard(self) -> None:
        """Forget the step so far, which is repeated."""
        for sums in self.step_sums:
            sums.zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Finish an optimizer step: reduce the counts over all ranks, and update each router."""
        if not self._sizes:
            return
        own = [
            self._routers[name].counts
            if name in self._routers
            else torch.zeros(size, dtype=torch.int64, device=self._device)
            for name, size in self._sizes.items()
        ]
        flat = torch.cat(own)
        if dist.get_world_size() > 1:
            dist.all_reduce(flat)
        self.counts = dict(zip(self._sizes, flat.split(list(self._sizes.values())), strict=True))
        self.losses = {name: router.losses.clone() for name, router in self._routers.items()}
        for name, router in self._routers.items():
            router.finish_step(self.counts[name])


def routers_of(model: nn.Module) -> list[tuple[str, Router]]:
    """Routers of a module by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Router)]


def _sum(counts: Tensor, groups: Sequence[str]) -> Tensor:
    for group in groups:
        counts = all_reduce(counts, "sum", group)
    return counts
