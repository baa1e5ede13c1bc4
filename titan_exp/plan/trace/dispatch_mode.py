"""Watching a rank's step operator by operator: memory, operations and messages, on real tensors or pretended ones."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, UnsupportedOperatorException
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.process_groups import group_named
from titan_exp.plan.trace.memory_tracker import MemoryTracker
from titan_exp.plan.trace.op_cache import CachedOp, OpCache
from titan_exp.plan.trace.op_costs import (
    GROUPED,
    MATMULS,
    SCALED_MATMULS,
    hidden_memory,
    message,
    operations,
    unknown_operator,
)

_DEVICE = torch.ops.prim.device.default
_MEMO = OpCache()
"""Of all traces of this process."""


@dataclass(kw_only=True)
class OpCosts:
    """What a part of a step computes and sends."""

    flops: int = 0
    """Floating-point operations of matmuls and attention."""
    fp8_flops: int = 0
    """Those of them that are matmuls of float8 numbers."""
    bytes_moved: int = 0
    """Bytes that all operators but those read and write."""
    messages: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """Bytes by mesh axis and kind of message."""
    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """How many messages those are."""
    operators: int = 0
    """Operators that were called."""


class CostMode(TorchDispatchMode):
    """While it is entered, enters into its books what every operator makes, computes and sends.

    Args:
        ledger: where memory is entered.
        mesh: whose groups have the axes' names.
        workspace: bytes that a call takes for a moment beyond what its tensors hold.
        matmul_workspace: bytes that the library of matmuls takes on its first call in each thread, and keeps.
    """

    def __init__(
        self,
        ledger: MemoryTracker,
        mesh: Mesh,
        workspace: Callable[[Any, tuple[Any, ...]], int] | None = None,
        matmul_workspace: int = 0,
    ) -> None:
        super().__init__()
        self._matmul_workspace, self._threads = matmul_workspace, set[bool]()
        self.ledger, self.costs, self._workspace = ledger, OpCosts(), workspace
        self.work_elsewhere = OpCosts()
        """Of operators that neither take nor make anything of the memory that the ledger is of."""
        self._axes, self._paused = axes_by_group(mesh), 0
        self._owners: tuple[int, ...] | None = None
        self._stack, self._depth = ExitStack(), 0

    def __enter__(self) -> "CostMode":
        # Entered anew inside operators of ours.
        if self._depth == 0:
            self._stack.enter_context(patch.object(torch.UntypedStorage, "resize_", self._resizing()))
            self._stack.enter_context(self._blind_to_layouts())
            with _disable_current_modes():
                self._owners = _owners_where_alone()
        self._depth += 1
        super().__enter__()
        return self

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is watched when it runs, not while it is made."""
        return True

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self._depth -= 1
        if self._depth == 0:
            self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the operator, and note what it did."""
        kwargs = kwargs or {}
        # Of tensors made of tensors, the operators on their parts are what counts.
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        if self._paused or func.namespace in ("prim", "profiler"):
            return args[0].device if func is _DEVICE and type(args[0]) is FakeTensor else func(*args, **kwargs)
        body = _body(func)
        if body is not None:
            # Opaque to the compiler, but not to us: what is inside counts.
            with self, torch.no_grad():
                return body(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and self.ledger.category == "optimizer":
            # An optimizer reads how many steps it has made, which no size depends on.
            return func(*args) if type(args[0]) is Tensor else 2.0
        try:
            # Summing gradients the engine writes into one that nobody else has, unless a mode like this one looks on.
            alone = self._owners is not None and _owners_of_summand(func, args) == self._owners
            # What lies in which of two memories is asked of every call.
            key = None if alone or not self.ledger.alone else _MEMO.key(func, args, kwargs)
            if key is not None and (known := _MEMO.recall(key)) is not None:
                return self._note_again(func, args, known)
            out = args[0].add_(args[1]) if alone else _call(func, args, kwargs)
        except (UnsupportedOperatorException, DynamicOutputShapeException) as error:
            raise unknown_operator(str(func)) from error
        flops, bytes_moved = self._note(func, args, kwargs, out)
        if key is not None:
            _MEMO.remember(key, args, out, flops, bytes_moved)
        self._press(func, args)
        return out

    def kernel(self, args: tuple[Any, ...]) -> None:
        """Enter a compiled kernel that reads and writes these tensors, among other arguments."""
        self.costs.bytes_moved += sum(it.numel() * it.element_size() for it in args if isinstance(it, Tensor))

    def _note_again(self, func: Any, args: tuple[Any, ...], known: CachedOp) -> Any:
        """Make and enter what an operator is known to make."""
        out, made = known.again(args)
        for tensor, alias in made:
            self.ledger.see(tensor, "other" if alias else None)
        self._first_matmul(func)
        self._count(self.costs, func, known.flops, known.bytes_moved)
        self._press(func, args)
        return out

    def _press(self, func: Any, args: tuple[Any, ...]) -> None:
        size = hidden_memory(func, args) + (0 if self._workspace is None else self._workspace(func, args))
        if size:
            self.ledger.pressure(size, self.ledger.category)

    def _first_matmul(self, func: Any) -> None:
        """Enter what the matmuls' library keeps from its first call in a thread on."""
        if str(func._overloadpacket) in MATMULS:
            # The backward pass has a thread of its own.
            thread = torch._C._current_graph_task_id() != -1
            self.ledger.matmul(backward=thread)
            if self._matmul_workspace and thread not in self._threads:
                self._threads.add(thread)
                self.ledger.hold(self._matmul_workspace, "workspaces")

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[int, int]:
        """Enter what an operator has made and sent; returns its operations, and the bytes that it moved."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        before = {tensor.untyped_storage()._cdata for tensor in given}
        copied = self.ledger.copied(given, made)
        its = [*given, *made]
        work = self.work_elsewhere if its and all(self.ledger.elsewhere(tensor) for tensor in its) else self.costs
        new = False
        for tensor in made:
            alias = tensor.untyped_storage()._cdata in before
            new = new or not alias
            # What Python makes of a number is a constant, not part of what is being computed.
            category = "other" if alias or func is torch.ops.aten.lift_fresh.default else None
            # What is offloaded is asked back as gradients alone.
            back = copied is not None and self.ledger.elsewhere(tensor) and not alias
            self.ledger.see(tensor, "gradients" if back else category)
        if copied is not None:
            axis, kind, size = copied
            self.costs.messages[axis, kind] += size
            self.costs.calls[axis, kind] += 1
        sent = message(func, args, out)
        if sent is not None:
            kind, group, size = sent
            axis = self._axes.get(group, "itself")
            self.costs.messages[axis, kind] += size
            self.costs.calls[axis, kind] += 1
            self.ledger.is_for([tensor for tensor in (*given, *made) if self._is_buffer(kind, tensor)], "communication")
        elif func.namespace == "fsdp":
            self._note_sharding(str(func._overloadpacket), args, kwargs, out)
        flops = operations(func, args, kwargs, out)
        self._first_matmul(func)
        bytes_moved = 0
        if not flops and not sent and not copied and not func.is_view and (new or func._schema.is_mutable):
            bytes_moved = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *made))
        self._count(work, func, flops, bytes_moved)
        return flops, bytes_moved

    @staticmethod
    def _count(work: OpCosts, func: Any, flops: int, bytes_moved: int) -> None:
        work.operators += 1
        work.flops += flops
        work.fp8_flops += flops if str(func._overloadpacket) in SCALED_MATMULS else 0
        work.bytes_moved += bytes_moved

    def _is_buffer(self, kind: str, tensor: Tensor) -> bool:
        return kind in ("receive", "all-gather", "reduce-scatter") and self.ledger.know(tensor)

    def _note_sharding(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Of FSDP2's own operators: what goes into messages and what comes out of them."""
        if name.endswith("split_with_sizes_copy"):
            self.ledger.is_for(tree_leaves(kwargs["out"]), "gathered parameters")
        elif name.endswith("all_gather_copy_in"):
            self.ledger.is_for([leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)], "communication")
        elif name.endswith("chunk_cat"):
            self.ledger.is_for(args[0], "gradients")
            self.ledger.is_for([kwargs["out"]], "communication")

    def _resizing(self) -> Callable[..., Any]:
        resize, ledger = torch.UntypedStorage.resize_, self.ledger

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            ledger.resize(storage)
            return result

        return resized

    @contextmanager
    def _blind_to_layouts(self) -> Iterator[None]:
        """Torch asks what an operator makes of whole tensors to see how its result is divided: nothing is computed."""
        ask = ShardingPropagator._propagate_tensor_meta_non_cached

        def asked(*args: Any, **kwargs: Any) -> Any:
            self._paused += 1
            try:
                return ask(*args, **kwargs)
            finally:
                self._paused -= 1

        with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", asked):
            yield


def ranks_by_axis(mesh: Mesh) -> dict[str, list[int]]:
    """The ranks of this rank's group along every axis that messages are booked on."""
    return {axis: dist.get_process_group_ranks(group_named(name)) for name, axis in axes_by_group(mesh).items()}


def axes_by_group(mesh: Mesh) -> dict[str, str]:
    """The mesh axis of every process group, by the group's name; axes that share all their ranks are named together."""
    axes: dict[str, list[str]] = defaultdict(list)
    for table in (mesh.world, mesh.sharding):
        for axis in table.mesh_dim_names or ():
            if table[axis].size() > 1:
                name = table.get_group(axis).group_name
                axes[name] += [axis] if axis not in axes[name] else []
    return {name: "=".join(its) for name, its in axes.items()}


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Of this one torch does not know on shapes alone that it returns what it is handed, and would compute it.
    if func is torch.ops.aten._scaled_mm.out and isinstance(kwargs["out"], FakeTensor):
        return kwargs["out"]
    return func(*args, **kwargs)


def _owners_of_summand(func: Any, args: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Where the autograd engine sums two gradients: who holds the first, in counts that mean nothing by themselves.

    None of any other call, and of a tensor that is not written into.
    """
    if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return None
    caller: Any = sys._getframe(2)
    while caller.f_code.co_filename != torch.autograd.graph.__file__:
        # Between the engine and here there is nothing but how a mode is called.
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


def _owners_where_alone() -> tuple[int, ...] | None:
    """What those counts are where the engine alone holds the tensor: of a case in which it does."""
    found: list[tuple[int, ...] | None] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() != -1:
                found.append(_owners_of_summand(func, args))
            return func(*args, **(kwargs or {}))

    with Look(), torch.enable_grad():
        once = torch.ones(2, requires_grad=True) * 2
        (once.sin() * once.cos()).sum().backward()
    return found[0] if found else None


def _body(func: Any) -> Callable[..., Any] | None:
    """What an operator of ours does, where it is written in Python; None where its work is known by itself."""
    if func.namespace != "titan_exp" or str(func._overloadpacket) in GROUPED:
        return None
    definition = OPDEFS.get(f"{func.namespace}::{func._schema.name.partition('::')[2]}")
    if definition is None:
        raise unknown_operator(str(func))
    return definition._init_fn
