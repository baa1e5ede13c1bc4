"""Device mesh with the axes of `config.layout.axes.AXES`. Unused axes have size 1, so no code asks which are in use.

Meshes cover the same ranks in the same order: `world` has every axis; in `sharding`, on which parameters live, the axes
that FSDP shards over are folded into one, `fsdp`; on `experts`, with the axes `EXPERT_AXES`, live those of experts.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.layout.axes import AXES, EXPERT_AXES, regroups_experts
from titan_exp.models.blocks.linear import InitSpec, ShardSpec, init_shard_
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.collectives import give_run_timeout, run_timeout
from titan_exp.parallel.context_parallel.load_balance import SequenceShard, ShardedSequence


@dataclass(frozen=True)
class Mesh:
    """Device mesh and process groups of this rank.

    Derived values are cached: indexing a DeviceMesh builds a new one, which takes 0.1 ms.
    """

    world: DeviceMesh
    """All axes; tp varies fastest, so that its ranks are neighbours."""
    sharding: DeviceMesh
    """Axes pp, dp_replicate, fsdp, tp over the same ranks."""
    experts: DeviceMesh | None
    """Axes pp, dp_replicate, efsdp, ep, etp over the same ranks; None if experts are sharded like other weights."""
    device: torch.device
    """Device of this process."""
    cpu_group: dist.ProcessGroup
    """All ranks over gloo: token counts and flags that must not wait for the device."""
    sequence_shard: ShardedSequence
    """Tokens of each sequence that this rank computes."""

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
        """Ranks among which linear layers are split; None without tensor parallelism."""
        return self.sharding.get_group("tp") if self.sharding["tp"].size() > 1 else None

    @cached_property
    def shard_groups(self) -> list[dist.ProcessGroup]:
        """Groups of ranks with other shards of the same weights."""
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

    `experts` says that the model has some, `cuts` where segments of context-parallel sequences end, and `causal` that
    later tokens are more work.
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


BufferPlace = tuple[nn.Module, str]
"""Module and name of a buffer in it."""


def buffer_places(model: nn.Module) -> dict[str, BufferPlace]:
    """Modules of a model's buffers by the buffers' names, which wrappers would change."""
    return {
        f"{path}.{name}" if path else name: (module, name)
        for path, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False)
    }


def materialize_parameters(
    model: nn.Module, device: torch.device, *, cpu_offload: bool = False
) -> Collection[BufferPlace]:
    """Allocate the parameters of a sharded meta model, unfilled, and compute its buffers.

    Offloaded parameters go to the CPU, everything else to `device`. Returns the buffers that no module's
    `reset_buffers` computed.
    """
    places = _places(model)
    model.to_empty(device="cpu" if cpu_offload else device)
    for (owner, attribute), *others in places:
        for module, name in others:  # `to_empty` unties weights that leave the meta device
            setattr(module, name, getattr(owner, attribute))
    if cpu_offload:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(
                    name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set
                )
    unfilled = {place: _buffer(place) for place in buffer_places(model).values()}
    versions = {place: buffer._version for place, buffer in unfilled.items()}
    for module in model.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()  # type: ignore[operator]  # a method, not a submodule
    return [
        place for place, buffer in unfilled.items() if _buffer(place) is buffer and buffer._version == versions[place]
    ]


def _buffer(place: BufferPlace) -> Tensor:
    module, name = place
    return module.get_buffer(name)


def _places(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Modules and names of each parameter; a tied weight has several."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places[parameter].append((module, name))
    return list(places.values())


def every_weight(name: str) -> bool:
    """Selection of all weights, by full name."""
    return True


@torch.no_grad()
def init_weights(
    model: nn.Module, table: Mapping[str, InitSpec], seed: int, selected: Callable[[str], bool] = every_weight
) -> None:
    """Fill selected parameters from their initial distributions, identically in every layout and on every device,
    without communication."""
    for name, parameter in model.named_parameters():
        if selected(name):
            init_shard_(local_tensor(parameter), seed, name, table[name], local_shard(parameter))


@torch.no_grad()
def init_buffers(
    places: Mapping[str, BufferPlace], unfilled: Collection[BufferPlace], build: Callable[[], nn.Module], seed: int
) -> None:
    """Fill the unfilled ones of a model's own buffers, `places` of the model before it was sharded, from a whole model
    built on the CPU under the seed."""
    names = [name for name, place in places.items() if place in unfilled]
    if not names:
        return
    whole = _build_whole(build, seed)
    for name in names:
        _buffer(places[name]).copy_(whole.get_buffer(name))


@torch.no_grad()
def copy_initial_weights(
    model: nn.Module, build: Callable[[], nn.Module], seed: int, selected: Callable[[str], bool] = every_weight
) -> None:
    """Fill selected parameters from a whole model built on the CPU under the seed.

    For models that do not declare their initial weights; each rank temporarily holds the whole model in memory.
    """
    targets = {name: parameter for name, parameter in model.named_parameters() if selected(name)}
    if not targets:
        return
    whole = _build_whole(build, seed).state_dict()
    for name, target in targets.items():
        if name not in whole:
            continue
        part = local_shard(target)
        window = tuple(slice(first, first + size) for first, size in zip(part.start, part.size, strict=True))
        local_tensor(target).copy_(whole[name][window])


def _build_whole(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def local_shard(tensor: Tensor) -> ShardSpec:
    """Local shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return ShardSpec.whole(tuple(tensor.shape))
    size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return ShardSpec(tuple(tensor.shape), tuple(start), tuple(size))
