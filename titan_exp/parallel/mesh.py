"""Device mesh with the axes of `config.layout.axes.AXES`, and collectives: process groups, functional collectives that
the compiler can trace, all-to-all, and partial sums. Unused axes have size 1, so no code asks which are in use. Meshes
cover the same ranks in the same order: `world` has every axis; in `sharding`, on which parameters live, the axes that
FSDP shards over are folded into one, `fsdp`; parameters of experts live on `experts`, with the axes `EXPERT_AXES`."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.layout.axes import AXES, EXPERT_AXES, regroups_experts
from titan_exp.ops.autograd import keep_unsaved, unsaved_tensors
from titan_exp.parallel.context_parallel.load_balance import SequenceShard, ShardedSequence

T = TypeVar("T")


def mark_partial(module: nn.Module, *names: str) -> None:
    """Mark the named parameters of a module, or all of its own, as having gradients to be summed over ranks."""
    module.partial_gradients = names or tuple(name for name, _ in module.named_parameters(recurse=False))  # type: ignore[assignment]


def partial_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The module's own parameters with partial gradients."""
    names: tuple[str, ...] = getattr(module, "partial_gradients", ())
    for name in names:
        yield getattr(module, name)


# Names after torch 2.11; the older names still work with a warning.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sums = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout


LOOPBACK = "127.0.0.1"


def served_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Serve a store, at a free port if `port` is 0. On the loopback address only this machine's processes reach it,
    whereas torch's default listens on all interfaces, whatever the host."""
    options: dict[str, Any] = {"is_master": True, "timeout": timeout, "wait_for_workers": False}
    if host == LOOPBACK:
        listener = socket.create_server((host, port))
        port, options["master_listen_fd"] = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(host, port, **options)


def loopback_store(rank: int, port: int, timeout: timedelta) -> dist.TCPStore:
    """Store for the ranks of one machine; rank 0 serves it."""
    if rank == 0:
        return served_store(LOOPBACK, port, timeout)
    return dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timeout, wait_for_workers=False)


def group_named(name: str) -> dist.ProcessGroup:
    """Process group with this `group_name`."""
    return c10d._resolve_process_group(name)  # type: ignore[arg-type]  # torch has a type of its own for these strings


def _run_timeout() -> timedelta | None:
    """Timeout of the default group's collectives; None if its backend has none. A new group would have torch's timeout
    of 10 or 30 minutes, after which NCCL ends a rank before its stacks are written."""
    group, host = c10d._get_default_group(), torch.device("cpu")
    options = group._get_backend(host).options if host in group._device_types else None
    return getattr(options, "_timeout", None)


def gather_documents(documents: Tensor, group: str) -> Tensor:
    """Gather document numbers [batch, part] of the group's ranks to [degree, batch, part]."""
    ranks = group_named(group)
    gathered = documents.new_empty((ranks.size() * documents.shape[0], documents.shape[1]))
    gather_into(gathered, documents.contiguous(), group=ranks)
    return gathered.unflatten(0, (ranks.size(), -1))


_OPERATORS = torch.ops._c10d_functional


def all_gather(tensor: Tensor, degree: int, group: str) -> Tensor:
    """Concatenate the ranks' tensors [n, ...] to [degree · n, ...]."""
    return _OPERATORS.wait_tensor(_OPERATORS.all_gather_into_tensor(tensor.contiguous(), degree, group))


def reduce_scatter(tensor: Tensor, degree: int, group: str) -> Tensor:
    """This rank's part [n, ...] of the sum of the ranks' tensors [degree · n, ...]."""
    return _OPERATORS.wait_tensor(_OPERATORS.reduce_scatter_tensor(tensor.contiguous(), "sum", degree, group))


def all_reduce(tensor: Tensor, operation: str, group: str) -> Tensor:
    """Reduce the ranks' tensors by `sum` or `max`."""
    return _OPERATORS.wait_tensor(_OPERATORS.all_reduce(tensor.contiguous(), operation, group))


@torch.library.custom_op("titan_exp::all_to_all", mutates_args=())
def all_to_all(parts: Tensor, group: str) -> Tensor:
    """Send `parts[r]` of [degree, ...] to rank r and receive its part for this rank at index r."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts.contiguous(), group=group_named(group))
    return received


@all_to_all.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts)


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    _, ctx.group = inputs


all_to_all.register_autograd(
    lambda ctx, gradient: (all_to_all(gradient.contiguous(), ctx.group), None), setup_context=_save
)


_PENDING: dict[int, tuple[Callable[[], Any], Tensor]] = {}
"""Functions that wait for count exchanges, and the counts that these still read, by address of the sums."""


@torch.library.custom_op("titan_exp::start_count_exchange", mutates_args=())
def start_count_exchange(counts: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Start to send `counts[r]` of int64 [degree, n] to rank r; `finish_count_exchange` must take both results. The
    first result holds the received counts by rank, the second the sums [2, degree] of the counts sent to and received
    from each rank. The sums are on the CPU, because NCCL takes numbers of rows from the host. On CUDA the exchange has
    its own stream, so that the host waits for it alone, not for kernels queued later."""
    received, sums = _empty_counts(counts, group)
    if isinstance(counts, FakeTensor):
        dist.all_to_all_single(received, counts.contiguous(), group=group_named(group))
        return received, sums
    counts = counts.contiguous()
    if not counts.is_cuda:
        work = dist.all_to_all_single(received, counts, group=group_named(group), async_op=True)
        assert work is not None, "asked for one"
        _PENDING[sums.data_ptr()] = (lambda: (work.wait(), sums.copy_(_sums(counts, received)))), counts
        return received, sums
    sums = sums.pin_memory()
    stream = _stream_beside(counts.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        dist.all_to_all_single(received, counts, group=group_named(group))
        sums.copy_(_sums(counts, received), non_blocking=True)
        done = stream.record_event()
    _PENDING[sums.data_ptr()] = (lambda: (done.synchronize(), done.wait())), counts
    return received, sums


@start_count_exchange.register_fake
def _empty_counts(counts: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(counts), counts.new_empty(2, counts.shape[0], device="cpu")


@torch.library.custom_op("titan_exp::finish_count_exchange", mutates_args=())
def finish_count_exchange(received: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Wait for the results of `start_count_exchange`; synchronizes with the host."""
    if not isinstance(received, FakeTensor):
        wait, _ = _PENDING.pop(sums.data_ptr())
        wait()
    return received.clone(), sums.clone()


@finish_count_exchange.register_fake
def _(received: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(received), torch.empty_like(sums)


def _sums(sent: Tensor, received: Tensor) -> Tensor:
    return torch.stack([sent.sum(1), received.sum(1)])


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@torch.library.custom_op("titan_exp::all_to_all_rows", mutates_args=())
def all_to_all_rows(rows: Tensor, sent: Tensor, received: Tensor, size: int | None, group: str) -> Tensor:
    """Send the first `sent[0]` rows to rank 0, the next `sent[1]` to rank 1, and so on; receive by rank. `sent` and
    `received` are counts on the CPU. `size` is the sum of `received`, or None if unknown."""
    counts = received.tolist()
    found = rows.new_empty((sum(counts), *rows.shape[1:]))
    dist.all_to_all_single(found, rows.contiguous(), counts, sent.tolist(), group=group_named(group))
    return found


@torch.library.custom_op("titan_exp::return_rows", mutates_args=())
def return_rows(rows: Tensor, sent: Tensor, received: Tensor, size: int | None, group: str) -> Tensor:
    """`all_to_all_rows` for rows that no backward pass reads, so that activation checkpointing does not keep them."""
    return all_to_all_rows._init_fn(rows, sent, received, size, group)


@return_rows.register_fake
@all_to_all_rows.register_fake
def _(rows: Tensor, sent: Tensor, received: Tensor, size: int | None, group: str) -> Tensor:
    if size is None:
        # The compiler gets an unknown number; where sizes are plain numbers, as many as are sent stand for it.
        symbolic = isinstance(rows, FakeTensor) and rows.fake_mode.shape_env is not None
        size = torch.library.get_ctx().new_dynamic_size() if symbolic else rows.shape[0]  # type: ignore[assignment]
    return rows.new_empty((size, *rows.shape[1:]))  # type: ignore[arg-type]


def _save_rows(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int | None, str], output: Tensor) -> None:
    rows, sent, received, _, ctx.group = inputs
    ctx.size = rows.shape[0]
    ctx.save_for_backward(sent, received)


def _backward_rows(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    sent, received = ctx.saved_tensors or unsaved_tensors(ctx)
    return all_to_all_rows(gradient.contiguous(), received, sent, ctx.size, ctx.group), None, None, None, None


def _set_rows(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int | None, str], output: Tensor) -> None:
    rows, *counts, _, ctx.group = inputs
    keep_unsaved(ctx, *counts)
    ctx.size = rows.shape[0]


all_to_all_rows.register_autograd(_backward_rows, setup_context=_save_rows)
return_rows.register_autograd(_backward_rows, setup_context=_set_rows)


@dataclass(frozen=True)
class Mesh:
    """Device mesh and process groups of this rank. Values are cached: indexing a DeviceMesh takes 0.1 ms."""

    world: DeviceMesh  # mesh of all axes; tp varies fastest, so that its ranks are neighbours
    sharding: DeviceMesh  # mesh with axes pp, dp_replicate, fsdp, tp over the same ranks
    experts: DeviceMesh | None
    """Mesh with axes pp, dp_replicate, efsdp, ep, etp; None if experts are sharded like other weights."""
    device: torch.device
    cpu_group: dist.ProcessGroup
    """Group of all ranks over gloo, for token counts and flags that must not wait for the device."""
    sequence_shard: ShardedSequence  # shard of each sequence that this rank computes

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
    def pp_rank(self) -> int:
        """Index of this rank in its pipeline."""
        return self.world.get_local_rank("pp")

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
    """Build the mesh over the default process group; the product of the degrees is the world size. `cuts` are where
    segments of context-parallel sequences end; `causal` says that later tokens cost more."""
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
    if (timeout := _run_timeout()) is not None:
        for group in mesh.get_all_groups():
            _set_timeout(timeout, group)  # on each of its backends
    return mesh


def _data_parallel(mesh: DeviceMesh, shards: str) -> DeviceMesh:
    return mesh["dp_replicate", shards] if mesh["dp_replicate"].size() > 1 else mesh[shards]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Values of all ranks of a group, in their order."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def from_rank_0(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Rank 0's value on all ranks of a group."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def new_cpu_group() -> dist.ProcessGroup:
    """A separate gloo group of all ranks, whose messages cannot be confused with others."""
    # Under a fake process group gloo would wait for other ranks.
    group = dist.new_group(backend="fake" if dist.get_backend() == "fake" else "gloo", timeout=_run_timeout())
    assert isinstance(group, dist.ProcessGroup), "every rank belongs to a group of all"
    return group
