"""Autograd tools: custom operators, needed gradients, dtype and layout of outputs, unsaved tensors, recomputation."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

_KERNELS = torch.library.Library("titan_exp", "IMPL")
"""Kernels without the layers of `custom_op` for gradients and aliases, which take longer than a small kernel."""


def operator(
    name: str, *, fake: Callable[..., Any] | None = None, mutates_args: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Custom operator `titan_exp::name` without a gradient, for calls by autograd functions. Compilers, the planner and
    selective recomputation look at operators. If none of them is active, the function is called directly, since the
    dispatcher takes longer than a small kernel. The first argument is a tensor; `fake` makes results without data.

    Raises:
        RuntimeError: a call outside an autograd function would lose a gradient. Compiled code is not checked.
    """

    def is_differentiated(*operands: Any) -> bool:
        return torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in operands)

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        defined: Any = torch.library.custom_op(f"titan_exp::{name}", mutates_args=tuple(mutates_args))(function)
        if fake is not None:
            defined.register_fake(fake)
        for device in ("CPU", "CUDA"):
            _KERNELS.impl(name, function, device)
            _KERNELS.impl(name, torch.library.fallthrough_kernel, f"Autograd{device}")
        # Compiled code checks what it calls through at each call, which for an overload is its identity.
        overload = getattr(torch.ops.titan_exp, name).default

        def call(first: Tensor, *others: Any, **options: Any) -> Any:
            is_looked_at = torch.compiler.is_compiling() or torch.is_grad_enabled()
            is_looked_at = is_looked_at or torch._C._len_torch_dispatch_stack() > 0
            if is_looked_at or isinstance(first, FakeTensor) or first.is_meta:
                if not torch.compiler.is_compiling() and is_differentiated(first, *others):
                    raise RuntimeError(f"titan_exp::{name} has no gradient: call it in an autograd function")
                return overload(first, *others, **options)
            return function(first, *others, **options)

        return call

    return define


def needs_input_grad(context: Any, count: int = 2) -> tuple[bool, ...]:
    """True for each of an operator's first `count` inputs whose gradient this backward pass needs. Call it in backward.
    Zero-bubble schedules ask for dX and dW separately, while `ctx.needs_input_grad` covers all backward passes. A
    compiled graph computes both."""
    needed_ever = context.needs_input_grad[:count]
    if torch.compiler.is_compiling():
        return needed_ever
    return tuple(
        needed and _will_run(node[0]) for node, needed in zip(context.next_functions, needed_ever, strict=False)
    )


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch cannot tell for a leaf among the requested inputs
        return True


def in_type(out: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the output of an autograd function to `dtype`; returns the output itself if it has the dtype. torch
    2.11's compiler passes a zero gradient after an operator that does nothing."""
    return out if out.dtype == dtype else out.to(dtype)


def dense(out: Tensor) -> Tensor:
    """Make the output of an autograd function contiguous; returns the output itself if it is, as in `in_type`."""
    return out if out.is_contiguous() else out.contiguous()


def keep_unsaved(context: Any, *tensors: Tensor | None) -> None:
    """Keep tensors for backward beside autograd's saved tensors. Activation checkpointing recomputes a block up to its
    last saved tensor, so an operator at the end of a block that keeps its tensors here needs no recomputation.
    Recomputable activations must not be kept here, since their memory is held until backward."""
    context.unsaved = tensors


def unsaved_tensors(context: Any) -> tuple[Any, ...]:
    """Kept tensors, empty if there are none; call it inside backward. They are released when autograd releases saved
    tensors: at once, unless backward is split."""
    tensors = getattr(context, "unsaved", ())
    if not torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
        context.unsaved = ()
    return tensors


def is_recomputing() -> bool:
    """True inside a backward pass, where a module's forward only runs to recompute activations and must not count."""
    return torch._C._current_graph_task_id() != -1


RECOMPUTED_BYTES = 2**23
"""Smallest output, in bytes, that is recomputed. For smaller ones a step waits for the host: a GPU computes them in
less time than a launch takes, and the hooks on saved tensors take as long again."""


def recompute_input(cheap: Callable[[Tensor], Tensor], x: Tensor, consumer: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute `consumer(cheap(x))` so that backward recomputes `cheap(x)` instead of keeping it.

    It serves a norm, SwiGLU or permutation whose own backward keeps `x` and whose output only a matmul keeps. Calls
    nest: if `x` is itself recomputed by a caller, it is not kept either. Compiled code is left as it is:
    `compile_blocks` lets the partitioner recompute. So is code under activation checkpointing, whose hooks must see
    every saved tensor. An output of less than `RECOMPUTED_BYTES` is kept.
    """
    y = cheap(x)
    if torch.compiler.is_compiling() or y.nbytes < RECOMPUTED_BYTES or not torch.is_grad_enabled():
        return consumer(y)
    hooks: Any = _top_saved_tensors_default_hooks(True)
    outer = None if hooks is None else hooks[0]
    if outer is not None and not isinstance(outer, _Pack):
        return consumer(y)
    with torch.autograd.graph.saved_tensors_hooks(_Pack(cheap, x, y, outer), _unpack):
        return consumer(y)


class _Recomputed:
    """Saved tensor that backward recomputes."""

    def __init__(self, cheap: Callable[[Tensor], Tensor], source: "Tensor | _Recomputed", shape: torch.Size) -> None:
        self.cheap, self.source, self.shape = cheap, source, shape


class _Pack:
    """Hook that replaces `cheap(x)` and its views among saved tensors; others go to the hook around it."""

    def __init__(self, cheap: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, outer: "_Pack | None") -> None:
        self._cheap, self._outer = cheap, outer
        self._source = self._by_caller(x.detach())
        self._identity = _identity(y)

    def __call__(self, saved: Tensor) -> Tensor | _Recomputed:
        if _identity(saved) == self._identity:
            return _Recomputed(self._cheap, self._source, saved.shape)
        return self._by_caller(saved)

    def _by_caller(self, saved: Tensor) -> Tensor | _Recomputed:
        if self._outer is not None:
            return self._outer(saved)
        # An operator that saved its output with the graph behind it would keep itself alive.
        return saved if saved.grad_fn is None else saved.detach()


def _unpack(packed: Tensor | _Recomputed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    with torch.no_grad():
        return packed.cheap(_unpack(packed.source)).view(packed.shape)


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Identity that a contiguous tensor shares with its views of other shapes."""
    dense = tensor.layout is torch.strided and tensor.is_contiguous()
    return (dense and tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; a plain tensor is returned as it is. Differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def embedding_rows(
    ids: Int[Tensor, "*any"], weight: Float[Tensor, "rows dim"], dtype: torch.dtype | None = None
) -> Float[Tensor, "*any dim"]:
    """Look up rows of this rank's shard of `weight`, rounded to `dtype`; None means the weight's. Only these rows are
    rounded. The result has the bits of a rounded weight's rows. The gradient has `dtype`, too, so `weight.grad_dtype`
    must allow it."""
    if dtype is None or weight.dtype == dtype:
        return torch.nn.functional.embedding(ids, local_tensor(weight))
    return _RoundedRows.apply(weight, ids, dtype)


class _RoundedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return torch.nn.functional.embedding(ids, local_tensor(weight)).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        rows = local_tensor(weight).shape[0]
        gradient = torch.ops.aten.embedding_dense_backward(gradients[0], ids, rows, -1, False)
        if isinstance(weight, DTensor):
            whole: dict[str, Any] = {"shape": weight.shape, "stride": weight.stride()}
            gradient = DTensor.from_local(gradient, weight.device_mesh, weight.placements, run_check=False, **whole)
        return gradient, None, None
