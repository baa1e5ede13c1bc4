"""Context parallelism: ranks share a sequence, and exchange what attention needs of each other's parts."""

from typing import Literal, cast

from torch import nn

from titan_exp.models.blocks.block_list import iter_blocks
from titan_exp.ops.attention.attention_with_lse import PartialBackend
from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.parallel.context_parallel.attention import ContextAttention
from titan_exp.parallel.context_parallel.ulysses import UlyssesAttention
from titan_exp.parallel.mesh import Mesh


def apply_context_parallel(model: nn.Module, mesh: Mesh, method: Literal["ring", "allgather", "ulysses"]) -> None:
    """Replace every block's attention core by one that sees the whole sequence from this rank's part, in place.

    Only the core mixes tokens, so nothing else of a block changes. A mesh whose cp axes are 1 leaves the model as it
    is.
    """
    if mesh.sequence_shard.degree == 1:
        return
    across, within = mesh.world["cp_across"], mesh.world["cp_within"]
    for block in iter_blocks(model):
        attention = block.get_submodule("attention")
        core = attention.get_submodule("core")
        assert isinstance(core, CausalAttention), "checked by the rules"
        if across.size() > 1:
            assert method != "ulysses", "then all ranks exchange heads"
            core = ContextAttention(cast("PartialBackend", core.backend), method, across.get_group(), mesh.device)
        attention.core = UlyssesAttention(core, within.get_group()) if within.size() > 1 else core
