"""Move a batch to the device and take this rank's context-parallel shard."""

from titan_exp.data.batch import MicroBatch
from titan_exp.parallel.mesh import Mesh


def shard_batch(batch: MicroBatch, mesh: Mesh) -> MicroBatch:
    """Move a CPU batch of whole rows to the device and take this rank's tokens.

    Positions are explicit under context or pipeline parallelism: a token's index in the shard is not its position.
    """
    whole = batch.to(mesh.device)
    if mesh.sequence_shard.degree == 1 and mesh.pp_group is None:
        return whole
    return whole.sharded(mesh.sequence_shard)
