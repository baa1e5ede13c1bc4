"""Dispatch mode that records the memory, FLOPs and messages of every operator, on real or fake tensors."""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, UnsupportedOperatorException
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from titan_exp.ops.matmul_flops import GROUPED, matmul_flops
from titan_exp.parallel.mesh import Mesh, group_named
from titan_exp.plan.caching_allocator import GRAPH
from titan_exp.plan.trace import op_costs
from titan_exp.plan.trace.memory_tracker import MemoryTracker
from titan_exp.plan.trace.torch_patches import AXIS, TO_GPU, TO_HOST, WAITED_FOR, CachedOp, OpCache, replaced_attributes

WORLD = "world"  # name of the group of all ranks, if no mesh axis contains them all
_DEVICE = torch.ops.prim.device.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_WITHOUT_FAKE = (torch.ops.aten._scaled_mm.out, torch.ops.aten.addmm.dtype_out)
_OP_CACHE = OpCache()  # op cache shared by all traces of the process


@dataclass(kw_only=True)
class OpCosts:
    """FLOPs, memory traffic and messages of a part of a step."""

    flops: int = 0
    fp8_flops: int = 0
    bytes_moved: int = 0  # bytes read and written by all other operators
    host_bytes: int = 0
    """Bytes read and written by operators on the host (clipping and optimizer), with offloaded parameters."""
    messages: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """Bytes and number of messages by mesh axis and kind."""
    operators: int = 0
    """Number of operators that the host launches: those that compute, move bytes or send messages; views are none."""
    kernels: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """Counts by `KERNEL_CLASSES` and `MEASURES`; FLOPs that overlap with a message also count under its kind."""
    unknown: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Calls by name of operators whose FLOPs, messages and memory within a call are missing here."""


class CostMode(TorchDispatchMode):
    """Records memory, FLOPs and messages of every operator. `workspaces` returns sizes that a call allocates and frees
    beyond its tensors. The matmul library keeps `matmul_workspace` from its first call in each thread on."""

    def __init__(
        self,
        tracker: MemoryTracker,
        mesh: Mesh,
        workspaces: Callable[[Any, tuple[Any, ...]], Sequence[int]] | None = None,
        matmul_workspace: int = 0,
    ) -> None:
        super().__init__()
        self._matmul_workspace, self._threads = matmul_workspace, set[bool]()
        self.tracker, self.costs, self._workspaces = tracker, OpCosts(), workspaces
        self._axes, self._paused = axes_by_group(mesh), 0
        self._sole_owner: tuple[int, ...] | None = None
        self._filled = 1.0
        self._stack, self._depth = ExitStack(), 0

    def __enter__(self) -> "CostMode":
        # Custom operators re-enter the mode.
        if self._depth == 0:
            resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

            def resized(storage: torch.UntypedStorage, size: int) -> Any:
                result = resize(storage, size)
                self.tracker.resize(storage)
                return result

            def unrecorded(*args: Any, **kwargs: Any) -> Any:
                # DTensor's sharding propagation runs operators on global shapes.
                self._paused += 1
                try:
                    return propagate(*args, **kwargs)
                finally:
                    self._paused -= 1

            replacements = (
                (torch.UntypedStorage, "resize_", resized),
                (ShardingPropagator, "_propagate_tensor_meta_non_cached", unrecorded),
                # Selective checkpointing counts the profiler's operators, some of which FSDP2 calls in one pass only.
                (torch.autograd.profiler.record_function, "__enter__", lambda record: record),
                (torch.autograd.profiler.record_function, "__exit__", lambda record, *_: None),
            )
            self._stack.enter_context(replaced_attributes(*replacements))
            with _disable_current_modes():
                self._sole_owner = _sole_owner_counts()
        self._depth += 1
        super().__enter__()
        return self

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, so that compiled code is recorded when it runs, not when it is compiled."""
        return True

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self._depth -= 1
        if self._depth == 0:
            self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the operator and record its costs."""
        kwargs = kwargs or {}
        # For tensor subclasses (DTensor, float8), the operators on their inner tensors are recorded.
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        if self._paused or func.namespace in ("prim", "profiler"):
            return args[0].device if func is _DEVICE and type(args[0]) is FakeTensor else func(*args, **kwargs)
        exchanged = op_costs.exchanged_rows(func, args)
        body = _python_body(func) if exchanged is None else None
        if body is not None:
            # Custom operators are opaque to the compiler; here we record the operators inside.
            costs, before = self.costs, (self.costs.bytes_moved, self.costs.flops)
            with self, torch.no_grad():
                out = body(*args, **kwargs)
            if before == (costs.bytes_moved, costs.flops):
                # On fake tensors, kernels that torch does not have only allocate their results.
                if flops := matmul_flops(func, args, kwargs, out):
                    self._count(func, flops, 0, on_host=False)
                else:
                    tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
                    self.kernel(op_costs.count_bytes(func, args, kwargs, tensors))
            return out
        if func is torch.ops.aten._local_scalar_dense.default and self.tracker.category == "optimizer":
            # Optimizers read their step count; no size depends on it.
            return func(*args) if type(args[0]) is Tensor else 2.0
        try:
            # Without a dispatch mode, autograd accumulates in place into a gradient that only it holds.
            alone = self._sole_owner is not None and _summand_counts(func, args) == self._sole_owner
            key = None if alone else _OP_CACHE.key(func, args, kwargs)
            if key is not None and (known := _OP_CACHE.get(key)) is not None:
                return self._replay(func, args, known)
            out = args[0].add_(args[1]) if alone else _call(func, args, kwargs) if exchanged is None else exchanged
        except (UnsupportedOperatorException, DynamicOutputShapeException) as error:
            raise op_costs.unknown_operator(str(func)) from error
        self._filled = op_costs.filled_share(func, args) or self._filled
        flops, bytes_moved, is_copy = self._record(func, args, kwargs, out)
        if key is not None and not is_copy:
            _OP_CACHE.put(key, args, out, flops, bytes_moved)
        self._add_workspace(func, args)
        return out

    def kernel(self, bytes_moved: int) -> None:
        """Record a compiled kernel."""
        self._launch()
        self.costs.bytes_moved += bytes_moved
        self._count_kernel(self.costs, "elementwise", 0, 0, bytes_moved)

    def _replay(self, func: Any, args: tuple[Any, ...], known: CachedOp) -> Any:
        out, made = known.replay(args)
        for tensor, alias in made:
            self.tracker.track(tensor, "other" if alias else None)
        self._first_matmul(func)
        counts = self._filled_counts(func, (args, out), known.flops, known.bytes_moved)
        self._count(func, *counts, on_host=self._is_on_host(args, out))
        self._add_workspace(func, args)
        return out

    def _add_workspace(self, func: Any, args: tuple[Any, ...]) -> None:
        kernel = () if self._workspaces is None else self._workspaces(func, args)
        self._allocate_within(op_costs.decomposed_workspace(func, args), *kernel)

    def _allocate_within(self, *sizes: int) -> None:
        blocks = [self.tracker.allocate(size, self.tracker.category) for size in sizes if size]
        for block in reversed(blocks):
            self.tracker.free(block)

    def _first_matmul(self, func: Any) -> None:
        """Record the workspace that the matmul library allocates at its first call in a thread and keeps."""
        if str(func._overloadpacket) in op_costs.MATMULS:
            # Backward runs in a separate thread.
            thread = torch._C._current_graph_task_id() != -1
            self.tracker.mark_matmul(backward=thread)
            if self._matmul_workspace and thread not in self._threads:
                self._threads.add(thread)
                self.tracker.allocate(self._matmul_workspace, "workspaces")

    def _is_on_host(self, *values: Any) -> bool:
        """True if all tensors among arguments and results are in host memory, beside a device's memory."""
        if self.tracker.device is None:
            return False
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        return bool(tensors) and all(map(self.tracker.is_on_host, tensors))

    def _copy(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[str, int] | None:
        """Direction and bytes of a copy between host and device; None for other calls."""
        tracker = self.tracker
        if tracker.device is None or not inputs or len(outputs) != 1:
            return None
        to_host = tracker.is_on_host(outputs[0])
        if tracker.is_on_host(inputs[-1]) is to_host:
            return None
        kind = TO_HOST if to_host else TO_GPU if tracker.stream() else WAITED_FOR
        return kind, outputs[0].nbytes

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[int, int, bool]:
        """Record an operator's results and messages. Returns its FLOPs, the bytes that it moved, and True if it copies
        between host and device."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        before = {tensor.untyped_storage()._cdata for tensor in inputs}
        copied, on_host = self._copy(inputs, outputs), self._is_on_host(inputs, outputs)
        new = False
        for tensor in outputs:
            alias = tensor.untyped_storage()._cdata in before
            new = new or not alias
            # Python numbers become constants, which are not activations.
            category = "other" if alias or func is torch.ops.aten.lift_fresh.default else None
            # Only gradients are copied to the host.
            offloaded = copied is not None and copied[0] == TO_HOST and not alias
            self.tracker.track(tensor, "gradients" if offloaded else category)
        if copied is not None:
            kind, size = copied
            self.costs.messages[AXIS, kind] += size
            self.costs.calls[AXIS, kind] += 1
        sent = op_costs.message_of(func, args, out)
        if sent is not None:
            at = self._axes.get(sent.group, "itself"), sent.kind
            self.costs.messages[at] += sent.size
            self.costs.calls[at] += 1
            if sent.kind in ("receive", "all-gather", "reduce-scatter"):
                buffers = filter(self.tracker.is_tracked, (*inputs, *outputs))
                self.tracker.set_category(buffers, "communication")
        elif func.namespace == "fsdp":
            self._categorize_fsdp(str(func._overloadpacket), args, kwargs, out)
        flops = op_costs.count_flops(func, args, kwargs, out) if sent is None else sent.flops
        self._first_matmul(func)
        bytes_moved = 0
        grouped = str(func._overloadpacket) in GROUPED
        unbound = not flops and not sent and not copied and not func.is_view
        if grouped or (unbound and (new or func._schema.is_mutable)):
            bytes_moved = op_costs.count_bytes(func, args, kwargs, outputs)
        self._launch(sent is not None or copied is not None)
        if sent is not None and sent.launches:
            self._launch(sent.launches)
            self.kernel(sent.moved)
            self._allocate_within(sent.temporary)
        counts = self._filled_counts(func, (inputs, outputs), flops, bytes_moved)
        self._count(func, *counts, on_host=on_host, beside="" if sent is None else sent.kind)
        return flops, bytes_moved, copied is not None

    def _filled_counts(self, func: Any, tensors: Any, flops: int, bytes_moved: int) -> tuple[int, int]:
        """FLOPs and bytes of a grouped matmul, without rows that symmetric memory has room for but never arrive."""
        if self._filled == 1.0 or str(func._overloadpacket) not in GROUPED:
            return flops, bytes_moved
        stacked = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor) and leaf.dim() == 3]
        weights = sum(weight.nbytes for weight in stacked)
        return round(flops * self._filled), weights + round((bytes_moved - weights) * self._filled)

    def _count(self, func: Any, flops: int, bytes_moved: int, *, on_host: bool, beside: str = "") -> None:
        costs = self.costs
        if not flops and op_costs.is_unknown(func):
            costs.unknown[str(func._overloadpacket)] += 1
        if on_host:
            costs.host_bytes += 0 if flops else bytes_moved
            return
        fp8 = flops if str(func._overloadpacket) in op_costs.SCALED_MATMULS else 0
        costs.flops += flops
        costs.fp8_flops += fp8
        costs.bytes_moved += 0 if flops else bytes_moved
        if flops or bytes_moved:
            self._launch()
            self._count_kernel(costs, op_costs.kernel_kind(func, flops), flops, fp8, bytes_moved)
        for measure, count in zip(op_costs.MEASURES[:2], (flops, fp8), strict=True):
            if count and beside:
                costs.kernels[beside, measure] += count

    def _launch(self, operators: int = 1) -> None:
        """Count operators that the host launches; those of a CUDA graph are not counted."""
        self.costs.operators += 0 if self.tracker.stream() == GRAPH else operators

    def _count_kernel(self, costs: OpCosts, kind: str, *counts: int) -> None:
        name = op_costs.kernel_class(kind, self.tracker.where, self.tracker.outside_passes)
        for measure, count in zip(op_costs.MEASURES, (*counts, 1), strict=True):
            if count:
                costs.kernels[name, measure] += count

    def _categorize_fsdp(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if name.endswith("split_with_sizes_copy"):
            self.tracker.set_category(tree_leaves(kwargs["out"]), "gathered parameters")
        elif name.endswith("all_gather_copy_in"):
            self.tracker.set_category([leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)], "communication")
        elif name.endswith("chunk_cat"):
            self.tracker.set_category(args[0], "gradients")
            self.tracker.set_category([kwargs["out"]], "communication")


def ranks_by_axis(mesh: Mesh) -> dict[str, list[int]]:
    """Ranks of this rank's process group, by mesh axis."""
    return {axis: dist.get_process_group_ranks(group_named(name)) for name, axis in axes_by_group(mesh).items()}


def axes_by_group(mesh: Mesh) -> dict[str, str]:
    """Mesh axis by process group name; names of axes with the same ranks are joined, as in `fsdp=dp_shard`."""
    axes: dict[str, list[str]] = defaultdict(list)
    for table in filter(None, (mesh.world, mesh.sharding, mesh.experts)):
        for axis in table.mesh_dim_names or ():
            if table[axis].size() > 1:
                name = table.get_group(axis).group_name
                axes[name] += [axis] if axis not in axes[name] else []
    # Expert token counts are summed over all ranks; a mesh axis may be that group, too.
    if dist.group.WORLD is not None and dist.group.WORLD.size() > 1:
        axes.setdefault(dist.group.WORLD.group_name, [WORLD])
    return {name: "=".join(names) for name, names in axes.items()}


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # These overloads have no fake kernel, the second in torch 2.11, and return their `out` argument.
    if func in _WITHOUT_FAKE and isinstance(kwargs["out"], FakeTensor):
        return kwargs["out"]
    # Its fake kernel returns another tensor; others return the tensor that is waited for.
    return args[0] if func is _WAIT and type(args[0]) is FakeTensor else func(*args, **kwargs)


def _summand_counts(func: Any, args: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Reference counts of the first gradient if the autograd engine is adding two, else None. They are only comparable
    with the counts of `_sole_owner_counts`."""
    if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return None
    caller: Any = sys._getframe(2)
    while caller.f_code.co_filename != torch.autograd.graph.__file__:
        # Only frames of a dispatch mode lie between the engine and this call.
        if "_dynamo" not in caller.f_code.co_filename and caller.f_code.co_name not in ("_fn", "inner"):
            return None
        caller = caller.f_back
    first, second = args[0], args[1]
    if type(first) is not type(second) or first.shape != second.shape or first.dtype != second.dtype:
        return None
    if not is_non_overlapping_and_dense_or_false(first):
        return None
    storage = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return first._use_count(), sys.getrefcount(first), storage


def _sole_owner_counts() -> tuple[int, ...] | None:
    """Reference counts of a gradient held only by the autograd engine, measured on an example."""
    found: list[tuple[int, ...] | None] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() != -1:
                found.append(_summand_counts(func, args))
            return func(*args, **(kwargs or {}))

    with Look(), torch.enable_grad():
        once = torch.ones(2, requires_grad=True) * 2
        (once.sin() * once.cos()).sum().backward()
    return found[0] if found else None


def _python_body(func: Any) -> Callable[..., Any] | None:
    """Python body of a `titan_exp` custom operator; None if its FLOPs are counted as a whole."""
    if func.namespace != "titan_exp" or str(func._overloadpacket) in GROUPED:
        return None
    definition = OPDEFS.get(f"{func.namespace}::{func._schema.name.partition('::')[2]}")
    if definition is None:
        raise op_costs.unknown_operator(str(func))
    return definition._init_fn
