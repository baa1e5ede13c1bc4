"""Device mesh with the axes of `config.layout.axes.AXES`. Unused axes have size 1, so no code asks which are in use.

Meshes cover the same ranks in the same order: `world` has every axis; in `sharding`, on which parameters live, the axes
that FSDP shards over are folded into one, `fsdp`; parameters of experts live on `experts`, with the axes `EXPERT_AXES`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.layout.axes import AXES, EXPERT_AXES, regroups_experts
from titan_exp.parallel.collectives import give_run_timeout, run_timeout
from titan_exp.parallel.context_parallel.load_balance import SequenceShard, ShardedSequence


@dataclass(frozen=True)
class Mesh:
    """Device mesh and process groups of this rank.

    Derived values are cached: indexing a DeviceMesh builds a new one, which takes 0.1 ms.
    """

    world: DeviceMesh
    """Mesh of all axes; tp varies fastest, so that its ranks are neighbours."""
    sharding: DeviceMesh
    """Mesh with axes pp, dp_replicate, fsdp, tp over the same ranks."""
    experts: DeviceMesh | None
    """Mesh with axes pp, dp_replicate, efsdp, ep, etp over the same ranks; None if experts are sharded like other
    weights."""
    device: torch.device
    """Device of this process."""
    cpu_group: dist.ProcessGroup
    """Group of all ranks over gloo, for token counts and flags that must not wait for the device."""
    sequence_shard: ShardedSequence
    """Shard of each sequence that this rank computes."""

    @cached_property
    def dp_rank(self) -> int:
        """Index of this rank's share of the global batch."""
        shard = self.world["dp_shard"]
        return self.world["dp_replicate"].get_local_rank() * shard.size() + shard.get_local_rank()

    @cached_property
    def dp_degree(self) -> int:
        """Number of shares of the global batch."""
        return self.world["dp_replicate"].size() * self.world["dp_shard"].size()

    @cached_property
    def batch_replicas(self) -> int:
        """Number of ranks that load the same rows; divide sums of row counts over ranks by it."""
        return self.world.size() // self.dp_degree

    @cached_property
    def loss_replicas(self) -> int:
        """Number of ranks that compute the loss of the same tokens; divide sums over ranks by it."""
        # Only the last stage of a pipeline has a loss.
        return self.batch_replicas // self.sequence_shard.degree // self.world["pp"].size()

    @cached_property
    def pp_group(self) -> dist.ProcessGroup | None:
        """Ranks of this rank's pipeline, in order; None without pipeline parallelism."""
        return self.world.get_group("pp") if self.world["pp"].size() > 1 else None

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """Mesh for FSDP2: (dp_replicate, fsdp) for HSDP and DDP, else fsdp."""
        return _data_parallel(self.sharding, "fsdp")

    @cached_property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """Mesh for FSDP2 of experts."""
        return self.fsdp_mesh if self.experts is None else _data_parallel(self.experts, "efsdp")

    @cached_property
    def tp_group(self) -> dist.ProcessGroup | None:
        """Tensor-parallel ranks, among which linear layers are split; None without tensor parallelism."""
        return self.sharding.get_group("tp") if self.sharding["tp"].size() > 1 else None

    @cached_property
    def shard_groups(self) -> list[dist.ProcessGroup]:
        """Groups of ranks that hold different shards of the same weights."""
        return [self.sharding.get_group(axis) for axis in ("fsdp", "tp") if self.sharding[axis].size() > 1]


def build_mesh(
    config: ParallelismConfig,
    device: torch.device,
    *,
    experts: bool = False,
    cuts: tuple[int, ...] = (),
    causal: bool = True,
) -> Mesh:
    """Build the mesh over the default process group; the product of the degrees is the world size.

    `experts` says that the model has experts, `cuts` where segments of context-parallel sequences end, and `causal`
    that later tokens cost more.
    """
    assert config.dp_shard >= 1, "the layout is resolved before launch"
    degrees = {axis.name: axis.degree(config) for axis in AXES}
    folded: dict[str, int] = {}
    for axis in AXES:
        name = "fsdp" if axis.shards_parameters else axis.name
        folded[name] = folded.get(name, 1) * degrees[axis.name]
    world, sharding = _device_mesh(degrees, device), _device_mesh(folded, device)
    regrouped = {axis.name: axis.degree(config) for axis in EXPERT_AXES}
    of_experts = _device_mesh(regrouped, device) if experts and regroups_experts(config) else None
    across = SequenceShard(degrees["cp_across"], world["cp_across"].get_local_rank(), zigzag=causal, cuts=cuts)
    within = SequenceShard(degrees["cp_within"], world["cp_within"].get_local_rank(), zigzag=False)
    return Mesh(world, sharding, of_experts, device, new_cpu_group(), ShardedSequence(across, within))


def _device_mesh(degrees: dict[str, int], device: torch.device) -> DeviceMesh:
    mesh = init_device_mesh(device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    for group in mesh.get_all_groups():
        give_run_timeout(group)
    return mesh


def _data_parallel(mesh: DeviceMesh, shards: str) -> DeviceMesh:
    return mesh["dp_replicate", shards] if mesh["dp_replicate"].size() > 1 else mesh[shards]


def new_cpu_group() -> dist.ProcessGroup:
    """A separate gloo group of all ranks, whose messages cannot be confused with others."""
    # Under a fake process group gloo would wait for other ranks.
    group = dist.new_group(backend="fake" if dist.get_backend() == "fake" else "gloo", timeout=run_timeout())
    assert isinstance(group, dist.ProcessGroup), "every rank belongs to a group of all"
    return group
