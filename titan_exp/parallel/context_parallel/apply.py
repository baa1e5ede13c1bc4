"""Context parallelism: ranks hold parts of each sequence; attention exchanges keys and values, or heads."""

from typing import Literal, cast

from torch import nn

from titan_exp.models.blocks.transformer import iter_blocks
from titan_exp.ops.attention.attention_with_lse import PartialBackend
from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.parallel.context_parallel.attention import ContextAttention
from titan_exp.parallel.context_parallel.latents import GatheredLatents
from titan_exp.parallel.context_parallel.ulysses import UlyssesAttention
from titan_exp.parallel.mesh import Mesh


def apply_context_parallel(model: nn.Module, mesh: Mesh, method: Literal["ring", "allgather", "ulysses"]) -> None:
    """Replace every block's attention core by a context-parallel one, in place.

    Only the core mixes tokens, so the rest of a block stays. Does nothing if all cp axes have size 1.
    """
    if mesh.sequence_shard.degree == 1:
        return
    across, within = mesh.world["cp_across"], mesh.world["cp_within"]
    for block in iter_blocks(model):
        attention = block.get_submodule("attention")
        core = attention.get_submodule("core")
        assert isinstance(core, CausalAttention), "checked by the rules"
        if across.size() > 1:
            assert method != "ulysses", "all ranks exchange heads"
            backend, exchange = cast("PartialBackend", core.backend), method
            if method == "allgather" and within.size() == 1 and hasattr(attention, "latent_gather"):
                attention.latent_gather, exchange = GatheredLatents(across.get_group()), "whole"
            group, cuts = across.get_group(), mesh.sequence_shard.across.cuts
            core = ContextAttention(backend, exchange, group, mesh.device, core.scale, core.pattern, cuts)
        attention.core = UlyssesAttention(core, within.get_group()) if within.size() > 1 else core
