"""Model of a checkpoint for inference, whole on one device or sharded by tensor, expert and context parallelism."""

import torch
from torch import nn

from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint
from titan_exp.parallel.context_parallel.apply import apply_context_parallel
from titan_exp.parallel.expert_parallel.apply import apply_expert_parallel
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.tensor_parallel.apply import apply_tensor_parallel, drop_unused_rows
from titan_exp.trainer.load_model import Rows, load_source

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes of weights and compute by option."""


def load_sharded(source: OpenCheckpoint, *, seq_len: int, dtype: torch.dtype, mesh: Mesh | None) -> nn.Module:
    """Load the model of a source; all ranks of a `mesh` must call it, None is one device.

    `seq_len` is the longest sequence in tokens.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if mesh is None else mesh.device

    def shard(model: nn.Module) -> Rows:
        assert mesh is not None
        # Decoding feeds one token at a time, so sequence parallelism does not apply.
        apply_tensor_parallel(model, mesh, sequence_parallel=False, loss_parallel=False)
        apply_expert_parallel(model, mesh, sequence_parallel=False)
        apply_context_parallel(model, mesh, "ring")
        return drop_unused_rows(model)

    parts = mesh is not None and mesh.sequence_shard.degree > 1
    divide = None if mesh is None else shard
    return load_source(source, device, seq_len=seq_len, dtype=dtype, divide=divide, parts=parts)
