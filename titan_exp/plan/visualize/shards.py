"""Shards of a fake rank: mesh coordinates, and mesh axes that divide each weight."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_exp.config.layout.axes import AXES
from titan_exp.models.blocks.transformer import iter_numbered_blocks
from titan_exp.plan.trace.fake_world import FakeRank


@dataclass(frozen=True)
class ShardedWeight:
    """Weight of one stage, listed once for all of its blocks."""

    stage: int
    name: str
    """Name of the weight, within its block."""
    layers: tuple[int, ...]
    """Blocks with this weight; empty for a weight outside blocks."""
    shape: tuple[int, ...]
    """Shape of the whole weight."""
    itemsize: int
    cuts: tuple[tuple[str, int], ...]
    """Mesh axes that divide the weight, each with its dim, in the order of division: one piece per rank of the axis,
    with sizes rounded up, so that the last may be smaller or empty."""


@dataclass(frozen=True)
class RankShards:
    """Shards of a rank."""

    axes: dict[str, int]
    """Degrees of the mesh axes, outermost first."""
    experts: dict[str, int]
    """Degrees of the axes of the experts' mesh, outermost first; empty if experts are sharded like other weights."""
    sharding: dict[str, tuple[str, ...]]
    """Mesh axes behind every axis that divides weights, outermost first."""
    weights: tuple[ShardedWeight, ...]


def read_shards(rank: FakeRank) -> RankShards:
    """Read the shards of a fake rank, before or after its step."""
    mesh, pipeline = rank.state.mesh, rank.state.built.pipeline
    stages = (
        [(0, rank.state.built.module)] if pipeline is None else [(part.number, part.module) for part in pipeline.stages]
    )
    folded = {"fsdp": tuple(axis.name for axis in AXES if axis.shards_parameters)}
    experts = {} if mesh.experts is None else _degrees(mesh.experts)
    sharding = {axis: folded.get(axis, (axis,)) for axis in (*_degrees(mesh.sharding), *experts)}
    weights = tuple(weight for number, module in stages for weight in _weights(number, module))
    return RankShards(_degrees(mesh.world), experts, sharding, weights)


def _degrees(mesh: DeviceMesh) -> dict[str, int]:
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def _weights(stage: int, module: nn.Module) -> Iterator[ShardedWeight]:
    """Weights of a stage; equal weights of its blocks are listed once."""
    in_blocks = {
        id(weight): (number, name)
        for number, block in iter_numbered_blocks(module)
        for name, weight in block.named_parameters()
    }
    layers: dict[tuple[str, tuple[int, ...], int, tuple[tuple[str, int], ...]], list[int]] = {}
    for full_name, weight in module.named_parameters():
        number, name = in_blocks.get(id(weight), (None, full_name))
        key = (_unwrapped(name), tuple(weight.shape), weight.element_size(), sharded_dims(weight))
        layers.setdefault(key, []).extend([] if number is None else [number])
    for (name, shape, itemsize, cuts), numbers in layers.items():
        yield ShardedWeight(stage, name, tuple(numbers), shape, itemsize, cuts)


def sharded_dims(weight: Tensor) -> tuple[tuple[str, int], ...]:
    """Mesh axes larger than 1 that divide a weight, each with its dim, in the order of division."""
    if not isinstance(weight, DTensor):
        return ()
    mesh = weight.device_mesh
    divided = [
        (axis, placement)
        for axis, size, placement in zip(mesh.mesh_dim_names or (), mesh.shape, weight.placements, strict=True)
        if size > 1 and isinstance(placement, Shard | _StridedShard)
    ]
    # A strided shard divides the shards of the axes behind it.
    divided.sort(key=lambda division: isinstance(division[1], _StridedShard))
    return tuple((axis, placement.dim) for axis, placement in divided)


def _unwrapped(name: str) -> str:
    """Parameter name without wrapper modules."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
