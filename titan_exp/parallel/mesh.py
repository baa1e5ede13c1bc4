"""The device mesh: every axis is always there, most of them of size 1, so that nothing asks which ones are in use.

Two meshes cover the same ranks in the same order. `world` tells what a rank computes (its data, its part of a
sequence); `sharding` is what parameters live on, with dp_shard and cp folded into the one axis `fsdp`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.parallel.context_parallel.load_balance import SequenceShard, ShardedSequence


@dataclass(frozen=True)
class Mesh:
    """Device mesh: this process's coordinates and groups.

    What every step asks is found out once: taking an axis out of a mesh makes a new one, in a tenth of a millisecond.
    """

    world: DeviceMesh
    """Axes pp, dp_replicate, dp_shard, cp_across, cp_within, tp; tp varies fastest, so that its ranks are neighbours.
    Of the ranks that share a sequence, those of cp_within exchange heads, those of cp_across keys and values."""
    sharding: DeviceMesh
    """Axes pp, dp_replicate, fsdp, tp over the same ranks."""
    device: torch.device
    """Device of this process."""
    cpu_group: dist.ProcessGroup
    """All ranks, on the CPU: token counts and decisions that must not wait for the device."""
    sequence_shard: ShardedSequence
    """Which tokens of its sequences this rank computes."""

    @cached_property
    def dp_rank(self) -> int:
        """Index of this rank's share of the global batch."""
        shard = self.world["dp_shard"]
        return self.world["dp_replicate"].get_local_rank() * shard.size() + shard.get_local_rank()

    @cached_property
    def dp_degree(self) -> int:
        """Into how many shares a global batch is divided."""
        return self.world["dp_replicate"].size() * self.world["dp_shard"].size()

    @cached_property
    def batch_replicas(self) -> int:
        """Number of ranks that load the same rows: a sum of row counts over ranks is too large by it."""
        return self.world.size() // self.dp_degree

    @cached_property
    def loss_replicas(self) -> int:
        """Number of ranks that compute the loss of the same tokens: a sum over ranks is too large by it."""
        # Of a pipeline's ranks only one has the last stage; the others have no loss.
        return self.batch_replicas // self.sequence_shard.degree // self.world["pp"].size()

    @cached_property
    def pp_group(self) -> dist.ProcessGroup | None:
        """The ranks of this rank's pipeline, in order; None where there is no pipeline."""
        return self.world.get_group("pp") if self.world["pp"].size() > 1 else None

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh that FSDP2 takes: (dp_replicate, fsdp) for HSDP and DDP, fsdp alone otherwise."""
        if self.sharding["dp_replicate"].size() > 1:
            return self.sharding["dp_replicate", "fsdp"]
        return self.sharding["fsdp"]

    @cached_property
    def tp_group(self) -> dist.ProcessGroup | None:
        """Ranks that share this rank's matrices; None without tensor parallelism."""
        return self.sharding.get_group("tp") if self.sharding["tp"].size() > 1 else None

    @cached_property
    def shard_groups(self) -> list[dist.ProcessGroup]:
        """The ranks that have other parts of the same weights, group by group."""
        return [self.sharding.get_group(axis) for axis in ("fsdp", "tp") if self.sharding[axis].size() > 1]


def build_mesh(config: ParallelismConfig, device: torch.device) -> Mesh:
    """Lay the axes over the default process group.

    Args:
        config: degrees whose product is the world size.
        device: device of this process.
    """
    assert config.dp_shard >= 1, "the layout is resolved before anything is launched"
    kind, within = device.type, config.ulysses_degree
    world = init_device_mesh(
        kind,
        (config.pp, config.dp_replicate, config.dp_shard, config.cp // within, within, config.tp),
        mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp_across", "cp_within", "tp"),
    )
    sharding = init_device_mesh(
        kind,
        (config.pp, config.dp_replicate, config.dp_shard * config.cp, config.tp),
        mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"),
    )
    across = SequenceShard(config.cp // within, world["cp_across"].get_local_rank(), zigzag=True)
    part = ShardedSequence(across, SequenceShard(within, world["cp_within"].get_local_rank(), zigzag=False))
    return Mesh(world, sharding, device, new_cpu_group(), part)


def new_cpu_group() -> dist.ProcessGroup:
    """A group of all ranks over gloo, apart from every other, so that its messages cannot meet theirs."""
    # A fake process group does not answer over gloo.
    group = dist.new_group(backend="fake" if dist.get_backend() == "fake" else "gloo")
    assert isinstance(group, dist.ProcessGroup), "every rank belongs to a group of all"
    return group
