"""A batch on its way into the model: on the device, and cut to this rank's part of every sequence."""

from dataclasses import replace

from titan_exp.data.batch import Batch
from titan_exp.parallel.mesh import Mesh


def shard_batch(batch: Batch, mesh: Mesh) -> Batch:
    """The tokens of a CPU batch that this rank computes, on its device.

    Everything about a token is cut together, and where sequences are shared or hidden states come from another stage
    its position is always given: its index in what is there no longer says it.
    """
    whole = batch.to(mesh.device)
    if mesh.sequence_shard.degree == 1 and mesh.pp_group is None:
        return whole
    part = whole.map(mesh.sequence_shard.take)
    return part if part.positions is not None else replace(part, positions=mesh.sequence_shard.positions(whole.tokens))
