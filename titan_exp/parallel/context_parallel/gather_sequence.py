"""All-gather of whole sequences from the parts of context-parallel ranks, without gradients."""

from dataclasses import replace

import torch
from torch import Tensor

from titan_exp.parallel.functional_collectives import all_gather
from titan_exp.parallel.mesh import Mesh


def gather_sequence(part: Tensor, mesh: Mesh) -> Tensor:
    """Sequences [rows, seq, ...] of which every rank has its part [rows, seq / cp, ...]; the inverse of
    `ShardedSequence.take`. All ranks that share the sequences must call it."""
    shards = mesh.sequence_shard
    # A part is a piece of the group's, which is a piece of the sequence.
    for shard, axis in ((shards.within, "cp_within"), (shards.across, "cp_across")):
        if shard.degree == 1:
            continue
        length = part.shape[1] * shard.degree
        positions = torch.arange(length)[None]
        order = torch.cat([replace(shard, rank=rank).take(positions)[0] for rank in range(shard.degree)])
        parts = all_gather(part.movedim(1, 0), shard.degree, mesh.world[axis].get_group().group_name)
        part = parts[order.argsort().to(part.device)].movedim(0, 1)
    return part
