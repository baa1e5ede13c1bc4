"""Selective activation checkpointing: calls whose results are kept, such as attention, routing and matmuls."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops import inductor_compiled_code
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.parallelism import AutomaticSave
from titan_exp.ops.matmul_flops import matmul_flops

FLEX_ATTENTION = "flex_attention"  # name of FlexAttention in the trace of a block, where it is not compiled
Kept = tuple[Sequence[Any], Sequence[int | None]]
"""Results of a call; for each, the index of the argument that it is, or None."""


def with_attention_cache(contexts: Sequence[AbstractContextManager[Any]]) -> tuple[AbstractContextManager[Any], ...]:
    """Contexts of a block's forward pass and recomputation that also keep and return results of compiled code."""
    kept: list[Kept] = []
    forward, recomputation = contexts
    return _both(forward, _Cache(kept, _keep)), _both(recomputation, _Cache(kept, _restore))


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class _CompiledCodeMode(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, so that compiled code runs under this mode instead of being skipped."""
        return True


class _Cache(_CompiledCodeMode):
    def __init__(self, kept: list[Kept], call: Callable[..., Any]) -> None:
        super().__init__()
        self._kept, self._call = kept, call

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the operator; for compiled code, keep or return its results."""
        call = partial(self._call, self._kept) if func is inductor_compiled_code else func
        return call(*args, **(kwargs or {}))


def _keep(kept: list[Kept], code: Callable[..., Any], arguments: list[Any], **name: Any) -> Any:
    numbers = {id(argument): number for number, argument in enumerate(arguments) if isinstance(argument, Tensor)}
    alive = [*arguments]  # compiled code empties the list
    results = inductor_compiled_code(code, arguments, **name)
    origins = [numbers.get(id(result)) for result in results]
    del alive
    own = [result if origin is None else None for result, origin in zip(results, origins, strict=True)]
    kept.append((_detached(own), origins))
    return results


def _restore(kept: list[Kept], code: Callable[..., Any], arguments: list[Any], **_: Any) -> Any:
    results, origins = kept.pop(0)
    found = [result if origin is None else arguments[origin] for result, origin in zip(results, origins, strict=True)]
    arguments.clear()
    return found


def _detached(results: Any) -> Any:
    # Autograd makes a result a part of the graph, which holds the cache.
    return tree_map_only(Tensor, Tensor.detach, results)


ROUTING = (
    "titan_exp.topk_lowest_index",
    "titan_exp.start_count_exchange",
    "titan_exp.finish_count_exchange",
    "titan_exp.all_to_all_rows",
    "titan_exp.symmetric_dispatch",
)
"""Operators for the choice of experts and the exchange of tokens, which no mode of activation checkpointing repeats."""


def routing_cache() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts that keep routing results in a block's forward pass and return them in its recomputations."""
    results: list[Any] = []
    return _RoutingMode(results, keeps=True), _RoutingMode(results, keeps=False)


class _RoutingMode(_CompiledCodeMode):
    def __init__(self, results: list[Any], *, keeps: bool) -> None:
        super().__init__()
        self._results, self._keeps = results, keeps

    def __enter__(self) -> "_RoutingMode":
        self._left = iter(self._results)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the operator; keep or return results of routing."""
        is_routing = str(getattr(func, "overloadpacket", "")) in ROUTING
        if is_routing and not self._keeps:
            return _detached(next(self._left))
        result = func(*args, **(kwargs or {}))
        if is_routing:
            self._results.append(_detached(result))
        return result


Call = tuple[str, int]  # operator call: name with overload, and index among the block's calls of this operator


def call_name(operator: str, index: int) -> str:
    """One-word name of a call. To the compiler, a separate index would be a dynamic size."""
    return f"{operator}#{index}"


@dataclass(frozen=True)
class TracedCall:
    """Operator call whose output may be saved."""

    call: Call
    module: str  # path of the calling module in the block
    bytes: int
    flops: int
    always: bool  # True if it is never recomputed: attention, collectives that do not grow their input, top-k routing
    reached: bool
    """True if backward without a compiler repeats the call: it precedes the last tensor that backward reads."""
    read: bool  # True if backward with a compiler repeats the call: a tensor that backward reads comes from its output


@dataclass(frozen=True)
class SavedCalls:
    """Calls of a block whose outputs are saved, within a budget."""

    traced: tuple[TracedCall, ...]
    automatic: AutomaticSave  # share of blocks that save one call more than the others
    budget: float  # bytes of saved matmuls as a share of all that backward needs
    compiled: bool  # True if a compiler drops calls whose results nothing reads

    @cached_property
    def always(self) -> tuple[TracedCall, ...]:
        """Calls that are never recomputed."""
        return tuple(call for call in self.traced if call.always and call.reached)

    @cached_property
    def ranked(self) -> tuple[TracedCall, ...]:
        """Matmuls that would be repeated, by bytes per FLOP; ties go to the smaller one."""
        matmuls = [call for call in self.traced if (call.read if self.compiled else call.reached) and not call.always]
        return tuple(sorted(matmuls, key=lambda call: (call.bytes / call.flops, call.bytes)))

    @cached_property
    def _room(self) -> float:
        return self.budget * sum(call.bytes for call in self.traced if call.read and not call.always)

    @cached_property
    def _prefix(self) -> int:
        """Number of ranked calls that fit into the budget of every block."""
        size = 0
        for count, call in enumerate(self.ranked):
            size += call.bytes
            if size > self._room:
                return count
        return len(self.ranked)

    @property
    def matmuls(self) -> tuple[TracedCall, ...]:
        """Matmuls that every block saves."""
        return self.ranked[: self._prefix]

    @property
    def more(self) -> TracedCall | None:
        """Matmul that every n-th block saves in addition; None if the budget of n blocks has no room for it."""
        every, rest = self.automatic.every, self.ranked[self._prefix :]
        if every == 1 or not rest:
            return None
        size = every * sum(call.bytes for call in self.matmuls) + rest[0].bytes
        return rest[0] if size <= every * self._room else None

    def of_block(self, number: int) -> tuple[str, ...]:
        """Calls saved in the block of this layer number, by `call_name`."""
        saved = [*self.always, *self.matmuls]
        more, turn = self.automatic.more, (number + 1) % self.automatic.every == 0
        if self.more is not None and (turn if more is None else more):
            saved.append(self.more)
        return tuple(call_name(*call.call) for call in saved)

    @property
    def bytes(self) -> float:
        """Mean bytes saved per block, without its input."""
        more = 0.0 if self.more is None else self.more.bytes / self.automatic.every
        return sum(call.bytes for call in (*self.always, *self.matmuls)) + more

    @property
    def recomputed(self) -> float:
        """Mean share of a forward pass's matmul FLOPs that backward recomputes."""
        saved = sum(call.flops for call in self.matmuls)
        saved += 0 if self.more is None else self.more.flops / self.automatic.every
        return (sum(call.flops for call in self.ranked) - saved) / max(1, sum(call.flops for call in self.traced))

    def __str__(self) -> str:
        sizes: Counter[str] = Counter()
        for call in self.always + self.matmuls:
            sizes[call.module] += call.bytes
        saved = ", ".join(f"{name} {size / 2**20:,.4g} MiB" for name, size in sizes.items())
        if self.more is not None:
            every = {2: "second", 3: "third"}.get(self.automatic.every, f"{self.automatic.every}th")
            more = f"{self.more.module} {self.more.bytes / 2**20:,.4g} MiB"
            saved += f"{', and ' if saved else ''}in every {every} block also {more}"
        return (
            f"selective activation checkpointing saves {self.bytes / 2**20:,.4g} MiB per block besides its input "
            f"({saved or 'nothing'}) and recomputes {self.recomputed:.0%} of its matmul FLOPs"
        )


def trace_block(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[TracedCall, ...]:
    """Trace a block's forward pass on fake tensors, unseen by the module. Raises UserError if it cannot be traced."""
    for module in block.modules():
        # Nested FSDP units (training.fp32_modules) are gathered once per step, here a little earlier.
        if module is not block and isinstance(module, FSDPModule):
            module.unshard()
    example = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    if isinstance(example, FakeTensor):
        mode = example.fake_mode
    else:
        mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    recorder = _Recorder()
    # Dispatch modes of a caller, such as the planner's, do not see this trace.
    with _disable_current_modes(), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        fakes: dict[int, Tensor] = {}

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(example, FakeTensor):
                return value
            if id(value) not in fakes:
                fakes[id(value)] = mode.from_tensor(value.detach(), static_shapes=True)
                fakes[id(value)].requires_grad_(value.requires_grad)
            return fakes[id(value)]

        copy = _fake_copy(block, fake, recorder, {})
        args, kwargs = tree_map(fake, (args, dict(kwargs)))
        hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda packed: packed)
        try:
            with mode, hooks, recorder, warnings.catch_warnings():
                # On fake tensors the kernel holds no scores.
                warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
                type(block).forward(copy, *args, **kwargs)
        except RuntimeError as error:
            reason = f"to choose from its operators we trace {type(block).__name__} without data, and that failed: "
            reason += str(error).splitlines()[0]
            remedy = "list operators yourself, as in activation_checkpoint.save='[aten.mm/2]', or use "
            violation = Violation("activation_checkpoint.save", "[auto]", reason, f"{remedy}activation_checkpoint=full")
            raise UserError("This run cannot choose what it recomputes.", [violation]) from error
        finally:
            # The graph holds the recorder's hook. That is a cycle, and no garbage is collected during a step.
            recorder.tensors.clear()
    return recorder.calls()


class _Recorder(TorchDispatchMode):
    """Records calls that may be saved, and the last call before backward's last saved tensor."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[tuple[str, bool]] = []
        """Paths of the running modules, each with True if it has parameters of its own."""
        self._calls: list[TracedCall] = []
        self._counts: Counter[str] = Counter()
        self._sources: dict[int, frozenset[int]] = {}
        """Indices of the matmuls that a storage is computed from, up to calls that are always saved."""
        self.tensors: list[Any] = []
        """Traced tensors, so that no storage's address is used twice."""
        self._reached, self._read = 0, set[int]()
        self._made, self._changed = dict[int, int](), set[int]()
        """Index of the call that made a storage, and of calls whose outputs are written to later."""

    def pack(self, tensor: Tensor) -> None:
        """Hook on a tensor that autograd saves. Returns nothing: a saved output would hold its own graph."""
        self._reached = len(self._calls)
        self._read |= self._sources_of(tensor)

    def calls(self) -> tuple[TracedCall, ...]:
        """Recorded calls."""
        return tuple(
            replace(call, reached=index < self._reached, read=index in self._read)
            for index, call in enumerate(self._calls)
            if index not in self._changed  # what is saved must be what the call has returned
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the operator and record it if its output may be saved."""
        out = func(*args, **(kwargs or {}))
        name, sources = str(func), self._sources_of((args, kwargs))
        self._changed |= {self._made[storage] for storage in _written(func, args) if storage in self._made}
        # Collectives whose result is no larger than their input; an all-gather is not, so backward repeats it.
        is_collective = name.startswith("_c10d_functional.") or "all_to_all" in name
        reduces = is_collective and "wait_tensor" not in name and _bytes(out) <= _bytes(args)
        always = is_attention(name) or "topk" in name or name.startswith(ROUTING) or reduces
        flops = 0 if always else matmul_flops(func, args, kwargs or {}, out) or 0
        if always or flops:
            call = (name, self._counts[name])
            sources = frozenset() if always else sources | {len(self._calls)}
            self._made |= dict.fromkeys(_storages(out), len(self._calls))
            # The innermost module with parameters of its own, else the innermost module, else the operator.
            paths = [path for path, has_parameters in self.modules if has_parameters] or [
                path for path, _ in self.modules
            ]
            module = paths[-1] if paths else name
            self._calls.append(TracedCall(call, module, _bytes(out), flops, always, True, True))
        self._counts[name] += 1
        self.tensors.append(out)
        # An output may be an input that the call has written to, or a view of one.
        self._sources |= dict.fromkeys(_storages(out), sources)
        return out

    def _sources_of(self, values: Any) -> frozenset[int]:
        return frozenset().union(*(self._sources.get(storage, ()) for storage in _storages(values)))


def is_attention(name: str) -> bool:
    """True for an operator that computes attention."""
    return "attention" in name


def _written(func: Any, args: tuple[Any, ...]) -> Iterator[int]:
    """Storages that a call writes to."""
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    for value, argument in zip(args, schema.arguments if schema is not None else (), strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _storages(value)


def _storages(values: Any) -> Iterator[int]:
    for leaf in tree_leaves(values):
        if is_traceable_wrapper_subclass(leaf):
            yield from _storages([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor):
            yield leaf.untyped_storage()._cdata


def _bytes(values: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _fake_copy(
    module: nn.Module, fake: Callable[[Any], Any], recorder: _Recorder, copies: dict[int, nn.Module], path: str = ""
) -> nn.Module:
    """Copy of a module with fake parameters and buffers, whose forward leaves the module's attributes as they are."""
    if id(module) in copies:
        return copies[id(module)]
    copy = copies[id(module)] = object.__new__(type(module))
    vars(copy).update(vars(module))
    parameters = {name: fake(parameter) for name, parameter in module._parameters.items()}
    buffers = {name: fake(buffer) for name, buffer in module._buffers.items()}
    children = {
        name: child and _fake_copy(child, fake, recorder, copies, f"{path}.{name}" if path else name)
        for name, child in module._modules.items()
    }
    vars(copy).update(_parameters=parameters, _buffers=buffers, _modules=children)
    if not path:
        return copy
    before: dict[int, Any] = {} if isinstance(module, FSDPModule) else dict(module._forward_pre_hooks)
    after: dict[int, Any] = {} if isinstance(module, FSDPModule) else dict(module._forward_hooks)
    vars(copy).update(_forward_pre_hooks=before, _forward_hooks=after)
    if isinstance(module, FSDPModule):
        _cast_like_fsdp(copy, module)
    has_parameters = any(parameter is not None for parameter in parameters.values())
    before[-1] = lambda *_: recorder.modules.append((path, has_parameters))
    after[-1] = lambda *_: recorder.modules.pop() and None
    return copy


def _cast_like_fsdp(copy: nn.Module, module: FSDPModule) -> None:
    """Cast inputs and outputs of a nested FSDP unit as its hooks do."""
    policy = module._get_fsdp_state()._mp_policy

    def cast(values: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None:
            return values
        return tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, values)

    if policy.cast_forward_inputs:
        copy._forward_pre_hooks[-2] = lambda _, args: cast(args, policy.param_dtype)
    copy._forward_hooks[-2] = lambda _, args, out: cast(out, policy.output_dtype)
