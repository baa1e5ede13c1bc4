"""SwiGLU (Shazeer 2020) on a fused gate and up projection."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

GROUP = 32
"""Gate and up columns alternate in groups of this many, so that tensor-parallel slices hold matching halves of both."""


def swiglu(gate_up: Float[Tensor, "batch seq two_ffn"], group: int = GROUP) -> Float[Tensor, "batch seq ffn"]:
    """silu(gate) · up, where `gate_up` alternates `group` gate columns and `group` up columns."""
    groups = gate_up.unflatten(-1, (-1, 2, group))
    return (F.silu(groups[..., 0, :]) * groups[..., 1, :]).flatten(-2)
