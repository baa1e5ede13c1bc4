"""Temporary changes of torch, where it has no hook, and a cache of operators on fake tensors.

Code of this package is never patched: it has extension points (`StepObserver`, `P2PTransport`, `Hardware`).

Inductor's wrapper code runs on fake tensors. It allocates, reuses and frees buffers, so saved activations and memory
within a block follow inductor's own decisions for a CPU. On CUDA fusion may differ; the partition into forward and
backward does not. FSDP2's own `CPUOffloadPolicy` code decides by the device of fake tensors what to copy. The fake GPU
is named as a second CPU, because torch without CUDA cannot run backward on CUDA tensors.

Torch's own fake tensor cache spends most of a trace on computing keys. We cache only functions of shapes: aten
operators that are out-of-place or write into their result, and return new tensors, arguments, or views of their only
tensor argument, at an offset from its own.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch._dynamo.config as dynamo
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.utils.flop_counter import flop_registry

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.parallelism import CompileConfig

_ABSENT = object()


@contextmanager
def replaced_attributes(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes of torch's classes and modules in the `with` block, given as (owner, name, replacement)."""
    originals = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, original in reversed(originals):
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@contextmanager
def restored_compiler_settings() -> Iterator[None]:
    """Restore the compiler's settings at the end of the `with` block. They are global, so a run's memory budget or
    rounding would decide how later runs are compiled."""
    modules: list[Any] = [dynamo, functorch, inductor]
    originals = [settings.get_config_copy() for settings in modules]
    try:
        yield
    finally:
        for settings, values in zip(modules, originals, strict=True):
            for name, value in settings.get_config_copy().items():
                if value != values[name]:
                    setattr(settings, name, values[name])


GPU = torch.device("cpu", 1)  # device of the fake GPU
AXIS = "host"  # axis name of copies between host and GPU
TO_GPU, WAITED_FOR, TO_HOST = "to the GPU", "to the GPU, waited for", "to the host"
"""Kinds of copies. FSDP2 copies parameters and gradients on its own streams; on a single rank, which gathers nothing,
parameters are copied on the compute stream (`WAITED_FOR`)."""
PINNED = ("parameters", "gradients")
"""Categories in pinned host memory: the trainer uses `CPUOffloadPolicy(pin_memory=True)` on CUDA. FSDP2 pins parameters
before the first step (`FSDPParam.reset_sharded_param`); torch pins the target of non-blocking copies of gradients
(`foreach_reduce`, ATen's `_to_copy`). Optimizer state is created like its parameter, but not pinned."""


def gpu_beside_host() -> AbstractContextManager[None]:
    """Let FSDP2 use the fake GPU as its device in the `with` block, so that its copies are traced."""
    plain = _fully_shard._get_device_from_mesh

    def device_of(mesh: Any) -> torch.device:
        return GPU if mesh.device_type == GPU.type else plain(mesh)

    return replaced_attributes((_fully_shard, "_get_device_from_mesh", device_of))


def power_of_two(size: int) -> int:
    """Smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


def uses_inductor(config: CompileConfig) -> bool:
    """True if inductor compiles parts of a run."""
    return config.enabled and config.backend == "inductor"


@contextmanager
def reset_dynamo() -> Iterator[None]:
    """Reset dynamo before and after the `with` block: guards fail on the other device name of offloaded runs."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


@contextmanager
def skip_inductor_kernels(called: Callable[[int], None], device: torch.device) -> Iterator[None]:
    """Skip inductor's kernels in the `with` block, so that its wrapper code runs on fake tensors. Nothing is cached.
    `called` gets the bytes read and written by each skipped kernel; buffers are on `device`. Raises UserError if
    inductor fails to generate CPU code."""
    from torch._C._dynamo import guards
    from torch._inductor import cpp_builder, cpu_vec_isa
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
    from torch._inductor.exc import InductorError
    from torch._inductor.utils import fresh_cache

    def kernel(_: Any, types: Sequence[str], source: str) -> Callable[..., None]:
        # Buffers that a kernel reads and overwrites are named so in its signature.
        signature = source[source.index("kernel(") :].split(")", 1)[0].split(",")
        uses = [2 if "in_out_ptr" in argument else 1 for argument in signature]
        assert len(uses) == len(types), "one type per argument"

        def skipped(*args: Any) -> None:
            tensors = [(arg, times) for arg, times in zip(args, uses, strict=True) if isinstance(arg, Tensor)]
            called(sum(times * arg.numel() * arg.element_size() for arg, times in tensors))

        return skipped

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def reinterpreted(tensor: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
        # Autograd must not see a view, as in torch: FSDP would warn of blocks that return one.
        with torch._C._ExcludeDispatchKeyGuard(views):
            return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    settings: dict[str, Any] = {"compile_threads": 1, "fx_graph_cache": False}
    replacements = (
        # Skip inductor's detection of compiler and vector instructions, which runs a C++ compiler.
        (cpu_vec_isa, "valid_vec_isa_list", list),
        (cpp_builder, "is_gcc", lambda: True),
        (cpp_builder, "is_msvc_cl", lambda: False),
        (guards, "_empty_strided_cpu", empty),
        (guards, "_reinterpret_tensor", reinterpreted),
        (AsyncCompile, "cpp_pybinding", kernel),
    )
    types = dict(DTYPE_TO_CPP)
    with reset_dynamo(), inductor.patch(settings), fresh_cache(), replaced_attributes(*replacements):
        try:
            # Inductor's C++ code has no type for MXFP8 scales.
            DTYPE_TO_CPP.setdefault(torch.float8_e8m0fnu, "uint8_t")
            yield
        except InductorError as error:
            raise UserError(
                f"plan: we plan compiled parts with inductor's CPU code, and inductor failed to generate it ({error}). "
                "Use compile=none to plan the same run without compilation."
            ) from error
        finally:
            DTYPE_TO_CPP.clear()
            DTYPE_TO_CPP.update(types)


@contextmanager
def compile_as_for_cuda(*, beside: bool) -> Iterator[None]:
    """Compile for a GPU in the `with` block: dynamo takes CUDA's branches. The partitioner takes the CPU's flash
    attention for a GPU's, counts its FLOPs, and does not recompute it at will. Activation functions have no buffers
    that only a CPU needs. `beside` is True if host tensors exist in addition to those of the fake GPU."""
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._functorch import partitioners
    from torch._inductor import ir

    aten, known = torch.ops.aten, partitioners.get_default_op_list()
    on_cpu = aten._scaled_dot_product_flash_attention_for_cpu
    kept = type(known.compute_intensive_ops)([*known.compute_intensive_ops, on_cpu])

    def is_cuda(variable: Any, _: object) -> ConstantVariable:
        return ConstantVariable.create(not beside or variable.device == GPU)

    replacements = (
        (TensorVariable, "method_attr_is_cuda", is_cuda),
        (ir, "is_cpu", lambda _: False),  # on a CPU, exponentials and sigmoids that several operators read get buffers
        (partitioners, "get_default_op_list", lambda: replace(known, compute_intensive_ops=kept)),
    )
    counted = dict(flop_registry)
    try:
        flop_registry[on_cpu] = counted[aten._scaled_dot_product_flash_attention]
        with replaced_attributes(*replacements):
            yield
    finally:
        flop_registry.clear()
        flop_registry.update(counted)


Key = tuple[Hashable, ...]
_VALUE_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Tags of operators that read values or change a tensor's metadata."""
_LISTS = (list, tuple)
_NOTHING = type(None)


@dataclass(frozen=True)
class OpResult:
    """One result of an operator."""

    argument: int
    base: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # offset in the storage, relative to the viewed argument's
    dtype: torch.dtype


@dataclass(frozen=True)
class CachedOp:
    """Results and costs of a call."""

    mode: FakeTensorMode | None  # fake tensor mode of the results; None without results
    device: torch.device | None  # fake device of the results
    results: tuple[OpResult, ...]
    kind: type | None  # type of the returned container, or NoneType; None for a tensor
    flops: int
    bytes_moved: int

    def replay(self, args: Sequence[Any]) -> tuple[Any, list[tuple[Tensor, bool]]]:
        """Results for these arguments: the return value, and each tensor with True if its storage existed before."""
        made = [self._made(result, args) for result in self.results]
        seen = [(tensor, result.argument + result.base > -2) for tensor, result in zip(made, self.results, strict=True)]
        if self.kind is None:
            return made[0], seen
        return (None if self.kind is _NOTHING else self.kind(made)), seen

    def _made(self, result: OpResult, args: Sequence[Any]) -> Tensor:
        if result.argument >= 0:
            return args[result.argument]
        # The guard keeps dispatch modes from seeing the meta tensor inside a fake tensor.
        with torch._C._DisableTorchDispatch():
            inside = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
            if result.base >= 0:
                base = args[result.base]
                offset = base.storage_offset() + result.offset
                inside.set_(base.untyped_storage(), offset, result.shape, result.stride)
        return FakeTensor(self.mode, inside, self.device)


class OpCache(dict[Key, CachedOp | None]):
    """Cached calls by operator, shapes and constants."""

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
        """Cache key of a call; None if it is not cacheable."""
        if not _is_cacheable(func):
            return None
        values: list[Hashable] = [func, *kwargs]
        return tuple(values) if _add_key((*args, *kwargs.values()), values) else None

    def put(self, key: Key, args: tuple[Any, ...], out: Any, flops: int, bytes_moved: int) -> None:
        """Cache a call if its results are a function of its key."""
        if key not in self:
            self[key] = _cached_op(args, out, flops, bytes_moved)


@cache
def _is_cacheable(func: Any) -> bool:
    name = func._schema.name
    if func.namespace != "aten" or any(tag in func.tags for tag in _VALUE_DEPENDENT) or "lift" in name:
        return False
    if "as_strided" in name:  # its offset refers to the storage, not to the argument
        return False
    schema = func._schema
    written = [
        place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    # In-place into the returned first argument (`add_`), or into any while returning nothing (`_fused_adamw_`).
    first = written == [0] and len(schema.returns) == 1 and schema.returns[0].alias_info is not None
    return not written or first or not schema.returns


def _add_key(args: Sequence[Any], values: list[Hashable]) -> bool:
    for arg in args:
        kind = type(arg)
        if kind is FakeTensor:
            if arg.constant is not None or arg.dtype.is_complex:
                return False
            values += (arg.shape, arg.stride(), arg.dtype, arg.fake_device)
        elif kind in _LISTS:
            values += (kind, len(arg))
            if not _add_key(arg, values):
                return False
        elif isinstance(arg, Tensor):
            return False
        else:
            # 1 == 1.0, but the resulting dtypes differ.
            values += (kind, arg)
    return True


def _cached_op(args: tuple[Any, ...], out: Any, flops: int, bytes_moved: int) -> CachedOp | None:
    kind = type(out) if type(out) in (*_LISTS, _NOTHING) else None
    if kind is _NOTHING:
        return CachedOp(None, None, (), kind, flops, bytes_moved)
    made = [out] if kind is None else list(out)
    if not made or any(
        type(tensor) is not FakeTensor or tensor.constant is not None or tensor.requires_grad or tensor.dtype.is_complex
        for tensor in made
    ):
        return None
    if len({(tensor.fake_mode, tensor.fake_device) for tensor in made}) > 1:
        return None
    results = tuple(result for tensor in made if (result := _result(args, tensor)) is not None)
    if len(results) < len(made):
        return None
    own = [tensor.untyped_storage()._cdata for tensor, result in zip(made, results, strict=True) if result.base < 0]
    if len(set(own)) < len(own):
        return None
    return CachedOp(made[0].fake_mode, made[0].fake_device, results, kind, flops, bytes_moved)


def _result(args: tuple[Any, ...], made: FakeTensor) -> OpResult | None:
    shape, stride, offset, dtype = tuple(made.shape), made.stride(), int(made.storage_offset()), made.dtype
    for place, arg in enumerate(args):
        if arg is made:
            return OpResult(place, -1, shape, stride, offset, dtype)
    tensors = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
    storage = made.untyped_storage()
    for place in tensors:
        if args[place].untyped_storage()._cdata == storage._cdata:
            # Offsets count elements, so a view with another dtype multiplies its argument's.
            if len(tensors) > 1 or args[place].dtype != dtype:
                return None
            return OpResult(-1, place, shape, stride, offset - int(args[place].storage_offset()), dtype)
    # Only storages that have exactly the size that the shape needs.
    with torch._C._DisableTorchDispatch():
        dense = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    exact = not offset and dense.untyped_storage().nbytes() == storage.nbytes()
    return OpResult(-1, -1, shape, stride, offset, dtype) if exact else None
