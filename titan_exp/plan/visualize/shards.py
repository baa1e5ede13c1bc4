"""What a pretended rank holds: its place in the mesh, and how each of its weights is cut out of the whole."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_exp.models.blocks.block_list import iter_numbered_blocks
from titan_exp.plan.trace.fake_world import FakeRank


@dataclass(frozen=True)
class ShardedWeight:
    """A weight of one stage, with its likes in the stage's other blocks."""

    stage: int
    """The stage it belongs to."""
    name: str
    """Its name, for a block's weight within the block."""
    layers: tuple[int, ...]
    """Blocks that have one; none for what is in no block."""
    shape: tuple[int, ...]
    """Of the whole weight."""
    itemsize: int
    """Bytes of a number, as it is kept."""
    cuts: tuple[tuple[str, int], ...]
    """Mesh axes that divide it and the dim that each divides, in this order: into as many pieces as the axis has ranks,
    of a size that is rounded up, so that the last may be smaller or empty. No other axis divides it."""


@dataclass(frozen=True)
class RankShards:
    """What was seen of a rank."""

    axes: dict[str, int]
    """Axes of the mesh and their degrees, from the slowest to the fastest in the order of ranks."""
    sharding: dict[str, tuple[str, ...]]
    """For every axis that weights are cut along, those of `axes` that it is made of, the slowest first."""
    weights: tuple[ShardedWeight, ...]
    """Of this rank's stages."""


def read_shards(rank: FakeRank) -> RankShards:
    """See what a pretended rank holds, before or after its step."""
    mesh, pipeline = rank.state.mesh, rank.state.built.pipeline
    names, shape = mesh.world.mesh_dim_names or (), mesh.world.shape
    stages = [(0, rank.state.built.module)] if pipeline is None else [(it.number, it.module) for it in pipeline.stages]
    folded = {"fsdp": ("dp_shard", "cp_across", "cp_within")}
    return RankShards(
        dict(zip(names, shape, strict=True)),
        {axis: folded.get(axis, (axis,)) for axis in mesh.sharding.mesh_dim_names or ()},
        tuple(weight for number, module in stages for weight in _weights(number, module)),
    )


def _weights(stage: int, module: nn.Module) -> Iterator[ShardedWeight]:
    """A stage's weights, like ones of its blocks once."""
    in_blocks = {
        id(weight): (number, name)
        for number, block in iter_numbered_blocks(module)
        for name, weight in block.named_parameters()
    }
    layers: dict[tuple[str, tuple[int, ...], int, tuple[tuple[str, int], ...]], list[int]] = {}
    for full_name, weight in module.named_parameters():
        number, name = in_blocks.get(id(weight), (None, full_name))
        like = (_plain(name), tuple(weight.shape), weight.element_size(), sharded_dims(weight))
        layers.setdefault(like, []).extend([] if number is None else [number])
    for (name, shape, itemsize, cuts), numbers in layers.items():
        yield ShardedWeight(stage, name, tuple(numbers), shape, itemsize, cuts)


def sharded_dims(weight: Tensor) -> tuple[tuple[str, int], ...]:
    """Mesh axes of more than one rank that divide a weight, and the dim that each divides, in the order of cutting."""
    if not isinstance(weight, DTensor):
        return ()
    mesh, first, then = weight.device_mesh, list[tuple[str, int]](), list[tuple[str, int]]()
    for axis, placement in zip(mesh.mesh_dim_names or (), weight.placements, strict=True):
        if mesh.size(list(mesh.mesh_dim_names or ()).index(axis)) == 1:
            continue
        # A strided shard is cut out of what the axes behind it have left.
        if isinstance(placement, _StridedShard):
            then.append((axis, placement.dim))
        elif isinstance(placement, Shard):
            first.append((axis, placement.dim))
    return (*first, *then)


def _plain(name: str) -> str:
    """Without what wraps a module around another."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
