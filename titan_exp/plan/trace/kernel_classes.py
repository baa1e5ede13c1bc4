"""Kernel classes: the part of a step to which a GPU kernel belongs, for estimates by class."""

from typing import Any

from titan_exp.ops.matmul_flops import GROUPED

BLOCK_MATMULS, EXPERT_MATMULS = "matmuls in blocks", "matmuls of experts"
HEAD_MATMULS = "matmuls of the head"
ATTENTION, ATTENTION_BACKWARD = "attention, forward", "attention, backward"
BLOCKS, BLOCKS_BACKWARD = "elementwise in blocks, forward", "elementwise in blocks, backward"
LOSS, EMBEDDING = "loss", "embedding"
COMPUTE_WEIGHTS, GRADIENTS = "compute weights", "gradients"
NORM, OPTIMIZER = "norm and clip", "optimizer"
KERNEL_CLASSES = (
    BLOCK_MATMULS,
    EXPERT_MATMULS,
    HEAD_MATMULS,
    ATTENTION,
    ATTENTION_BACKWARD,
    BLOCKS,
    BLOCKS_BACKWARD,
    LOSS,
    EMBEDDING,
    COMPUTE_WEIGHTS,
    GRADIENTS,
    NORM,
    OPTIMIZER,
)
"""Classes in order. Forward passes are those of recomputation too. `compute weights` are copies of weights in another
dtype or gathered; `gradients` are casts and sums after backward, and copies for their reduction. Experts' matmuls count
FLOPs and bytes, since few rows per expert are bound by reading its weights."""
STREAMS = (COMPUTE_WEIGHTS, GRADIENTS, NORM, OPTIMIZER)
"""Classes of kernels that stream over all weights or gradients, as a copy does."""
MEASURES = ("flops", "fp8_flops", "bytes", "launches")
"""Measures of a class; float8 matmuls count in `flops` too. A multi-tensor operator is one launch."""

_FSDP = {"all_gather_copy_in": COMPUTE_WEIGHTS, "split_with_sizes_copy": COMPUTE_WEIGHTS, "chunk_cat": GRADIENTS}
"""Classes of FSDP2's own operators."""


def kernel_kind(operator: Any, flops: int) -> str:
    """Kind of an operator: `matmul`, `cast` or `elementwise`, or the only class in which it occurs."""
    name = operator._schema.name.partition("::")[2]
    if "attention" in name:
        return ATTENTION_BACKWARD if "backward" in name else ATTENTION
    if "embedding" in name:
        return EMBEDDING
    if operator.namespace == "fsdp":
        return next((found for part, found in _FSDP.items() if part in name), "elementwise")
    if str(operator._overloadpacket) in GROUPED:
        return EXPERT_MATMULS
    if flops:
        return "matmul"
    return "cast" if name == "_to_copy" else "elementwise"


def kernel_class(kind: str, where: str, outside_passes: str) -> str:
    """Class of a kernel of a kind in a phase of the step.

    `outside_passes` is the class of elementwise kernels outside forward and backward passes, else empty.
    """
    in_block = ", block" in where
    if kind in KERNEL_CLASSES:
        found = kind
    elif kind == "matmul":
        found = BLOCK_MATMULS if in_block else HEAD_MATMULS
    elif outside_passes:
        found = GRADIENTS if kind == "cast" and outside_passes == NORM else outside_passes
    elif where.startswith("backward"):
        # After the first block, gradients of weights that are used twice are summed.
        found = BLOCKS_BACKWARD if in_block else GRADIENTS
    elif in_block:
        found = BLOCKS
    else:
        found = LOSS if where.startswith("forward") and "embedding" not in where else EMBEDDING
    return found
