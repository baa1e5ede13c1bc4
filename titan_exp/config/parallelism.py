"""Group `parallelism`: the degrees of the device mesh."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Predicate

from titan_exp.config.bounds import PositiveInt


def minus_one_or_positive(degree: int) -> bool:
    """-1 or at least 1."""
    return degree == -1 or degree >= 1


Degree = PositiveInt
ShardDegree = Annotated[int, Predicate(minus_one_or_positive)]


@dataclass(frozen=True)
class ParallelismConfig:
    """Degrees of the mesh; their product is the number of processes. None of them changes what is computed."""

    dp_replicate: Degree
    """Copies of the (sharded) model, each on its own data; with dp_shard=1 this is DDP, else HSDP."""
    dp_shard: ShardDegree
    """Ranks that parameters, gradients and optimizer state are sharded over (FSDP2); -1 takes every device left."""
    tp: Degree
    """Tensor-parallel degree."""
    pp: Degree
    """Pipeline-parallel degree."""
    cp: Degree
    """Context-parallel degree."""
    ep: Degree
    """Expert-parallel degree."""
    etp: Degree
    """Tensor-parallel degree inside experts."""
    cpu_offload: bool
    """Keep parameters, gradients and optimizer state in the CPU's memory and bring a block's parameters to the GPU
    when it computes: the least GPU memory, at the speed of the link between the two."""
    prefetch_blocks: PositiveInt
    """Blocks whose parameters are gathered ahead of the one that computes; more hide slow links and cost memory."""
    reshard_after_forward: Literal["always", "never", "all_but_last"]
    """When a block frees its gathered parameters: after each forward pass, never before backward, or after each
    one but the last block's, which backward needs next."""
