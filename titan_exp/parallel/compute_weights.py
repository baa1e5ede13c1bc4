"""Compute weights: bf16 copies of the fp32 master weights, on one data rank, where nothing is sharded.

Modules keep the masters as parameters, which names, checkpoints and optimizers refer to; during a pass the copies take
their place. Copies stay at the same addresses and change only when the masters do: after an optimizer step or a load.
Numbers equal FSDP2's: weights are rounded to nearest, and gradients of several micro-batches are summed in fp32.

A weight that is only looked up has no copy: its rows are rounded when they are read. A weight that its matmuls keep in
float8 has none either: a placeholder of one number, with the weight's shape and dtype, receives its gradient.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.fsdp import lookup_tables
from titan_exp.parallel.mesh import partial_parameters
from titan_exp.parallel.meta_init import matching_modules

_MakeLeaf = Callable[[nn.Parameter, torch.dtype], nn.Parameter]


class ComputeWeights:
    """Copies in `dtype` of the floating-point parameters of this rank's modules; none if `dtype` is None. Modules that
    match `fp32_modules`, or keep fp32 on their own, compute with their masters. With `accumulate`, gradients of several
    backward passes are summed in the masters' dtype. Without it, gradients of the single pass stay in `dtype`, except
    those that tensor-parallel ranks sum. `fixed` keeps the sums at their addresses. `unread` modules use only the shape
    and dtype of their weight."""

    def __init__(
        self,
        parts: Sequence[nn.Module] = (),
        dtype: torch.dtype | None = None,
        *,
        fp32_modules: tuple[str, ...] = (),
        accumulate: bool = False,
        fixed: bool = False,
        unread: Collection[nn.Module] = (),
    ) -> None:
        self._accumulate, self._fixed = accumulate, fixed
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._leaves: dict[nn.Parameter, nn.Parameter] = {}
        """Leaf parameter of each master: a pass computes with it and leaves the gradient in it."""
        self._dtype = dtype
        self._uses: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._partial: set[nn.Parameter] = set()
        if dtype is None:
            return
        for part in parts:
            matching = matching_modules(part, fp32_modules)
            keeping = [module for module in part.modules() if getattr(module, "keeps_fp32", False)]
            in_fp32 = {parameter for module in (*matching, *keeping) for parameter in module.parameters()}
            for module in matching:
                _compute_in_fp32(module, dtype)
            tables = {module for module in lookup_tables(part) if in_fp32.isdisjoint(module.parameters())}
            for module in tables:
                module.row_dtype = dtype  # type: ignore[assignment]  # a plain attribute
            # The modules that read their parameters come first, because a tied weight has one leaf.
            for module in sorted(part.modules(), key=lambda module: module in unread):
                make = None if module in tables else _placeholder if module in unread else _copy
                self._add(module, dtype, in_fp32, make)
        self.refresh()

    @property
    def copies(self) -> Mapping[nn.Parameter, Tensor]:
        """Compute weights by master; a tied weight has a single one, lookup tables and placeholders none."""
        return self._copies

    def gradient_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Dtype of a parameter's gradient after a step's backward passes."""
        in_place = parameter not in self._leaves or self._accumulate or parameter in self._partial
        return parameter.dtype if in_place or self._dtype is None else self._dtype

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into their copies; call it after every change of the masters."""
        if self._copies:
            masters = [local_tensor(master) for master in self._copies]
            torch._foreach_copy_([local_tensor(copy) for copy in self._copies.values()], masters)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute with copies and placeholders in the `with` block."""
        for module, name, master in self._uses:
            module._parameters[name] = self._leaves[master]
        try:
            yield
        finally:
            for module, name, master in self._uses:
                module._parameters[name] = master

    @contextmanager
    def training(self) -> Iterator[None]:
        """Compute with the copies, recomputation included, then assign the step's gradients to the masters."""
        if not self._fixed:
            self._sums.clear()
        elif self._sums:
            torch._foreach_zero_([local_tensor(total) for total in self._sums.values()])
        with self.in_use():
            yield
        for master, leaf in self._leaves.items():
            gradient, leaf.grad = self._sums.get(leaf, leaf.grad), None
            master.grad = gradient
        if not self._fixed:
            self._sums.clear()

    def _add(self, module: nn.Module, dtype: torch.dtype, in_fp32: set[nn.Parameter], make: _MakeLeaf | None) -> None:
        for name, master in module.named_parameters(recurse=False, remove_duplicate=False):
            if master in in_fp32 or master.dtype == dtype or not master.is_floating_point():
                continue
            if master not in self._leaves:
                leaf = self._leaves[master] = master if make is None else make(master, dtype)
                if make is _copy:
                    self._copies[master] = leaf
                if self._accumulate and leaf.requires_grad:
                    leaf.register_post_accumulate_grad_hook(self._add_gradient)
                # The gradient may have the compute dtype.
                master.grad_dtype = None  # type: ignore[attr-defined]  # torch's stubs lack it
            self._uses.append((module, name, master))
            # Tensor-parallel ranks sum these gradients, in fp32 as after FSDP's reduction.
            if master not in self._partial and any(master is partial for partial in partial_parameters(module)):
                self._partial.add(master)
                if not self._accumulate and self._leaves[master].requires_grad:
                    self._leaves[master].register_post_accumulate_grad_hook(self._add_gradient)

    @torch.no_grad()
    def _add_gradient(self, leaf: Any) -> None:
        """Add a micro-batch's gradient to the sum in fp32, and free it."""
        gradient, leaf.grad = leaf.grad, None
        if leaf in self._sums:
            local_tensor(self._sums[leaf]).add_(local_tensor(gradient))
        else:
            self._sums[leaf] = gradient.to(torch.float32)


def _copy(master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(master, dtype=dtype), master.requires_grad)


def _placeholder(master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Tensor of a master's shape with the memory of one number, NaN, so that reading it shows."""
    local = local_tensor(master)
    found = local.new_full((), torch.nan, dtype=dtype).expand(local.shape)
    if isinstance(master, DTensor):
        whole: dict[str, Any] = {"shape": master.shape, "stride": master.stride()}
        found = DTensor.from_local(found, master.device_mesh, master.placements, run_check=False, **whole)
    return nn.Parameter(found, master.requires_grad)


def _compute_in_fp32(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's inputs to fp32 and its outputs to `dtype`, as FSDP2's mixed-precision policy does."""

    def cast(values: Any, to: torch.dtype) -> Any:
        return tree_map_only(Tensor, lambda value: value.to(to) if value.is_floating_point() else value, values)

    module.register_forward_pre_hook(
        lambda _, args, kwargs: cast((args, kwargs), torch.float32), prepend=True, with_kwargs=True
    )
    module.register_forward_hook(lambda _, args, output: cast(output, dtype))
