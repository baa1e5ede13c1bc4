"""Gradient norms, and gradient clipping by the global norm, by value, by the norms of parameter groups, or by AdaGC.
Every layout clips as one device does. Squared norms are summed per mesh and placement and reduced over the axes that
shard them, so parameters may live on any mixture of meshes. A replicated tensor counts once."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_exp.config.groups.optimizer import ParameterGroup
from titan_exp.config.groups.training import GradClipConfig
from titan_exp.ops.autograd import local_tensor
from titan_exp.optim.optimizer import ScalesGradients
from titan_exp.optim.parameter_groups import NamedParameter

REST = "rest"  # name of the parameters whose group has no `max_grad_norm`
AVERAGE_NORM = "average_grad_norm"  # key of AdaGC's average norm in a parameter's optimizer state


@torch.no_grad()
def global_grad_norm(parameters: Iterable[Tensor], pp_group: dist.ProcessGroup | None = None) -> Tensor:
    """L2 norm of the model's gradients, fp32, equal on every rank, from this rank's without copies of tied ones."""
    gradients, device = list[Tensor](), torch.device("cpu")
    for parameter in parameters:
        device = parameter.device
        gradients += [] if parameter.grad is None else [parameter.grad]
    squares = []
    for indices in _by_sharding(gradients):
        few = [gradients[index] for index in indices]
        square = torch.stack(_norms([local_tensor(gradient) for gradient in few])).square().sum()
        squares.append(_summed(square, few[0]))
    # Even without gradients, the norm is on the device of the other stages' norms, for a single message.
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    if pp_group is not None:
        dist.all_reduce(total, group=pp_group)
    return total.sqrt()


@torch.no_grad()
def parameter_norms(parameters: Sequence[Tensor]) -> Tensor:
    """L2 norm of each parameter's whole gradient, fp32 [parameters], equal on its ranks; 0 without a gradient."""
    gradients = [parameter.grad for parameter in parameters]
    norms = iter(_norms([local_tensor(gradient) for gradient in gradients if gradient is not None]))
    squares = [
        torch.zeros((), device=parameter.device) if parameter.grad is None else next(norms).square()
        for parameter in parameters
    ]
    return sum_over_shards(squares, parameters).sqrt()


def sum_over_shards(numbers: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Sum a number per shard over each parameter's shards, [parameters], with one message per mesh and placement."""
    sums = list(numbers)
    for indices in _by_sharding(parameters):
        found = _summed(torch.stack([numbers[index] for index in indices]), parameters[indices[0]])
        for index, total in zip(indices, found.unbind(), strict=True):
            sums[index] = total
    return torch.stack(sums)


def _by_sharding(tensors: Sequence[Tensor]) -> Iterable[list[int]]:
    """Indices of tensors with the same mesh and placements."""
    groups: dict[object, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        is_sharded = isinstance(tensor, DTensor)
        groups[(tensor.device_mesh, tensor.placements) if is_sharded else None].append(index)
    return groups.values()


def _summed(numbers: Tensor, sharded: Tensor) -> Tensor:
    """Sum in place over the ranks that hold other shards of a tensor."""
    if isinstance(sharded, DTensor):
        for axis, placement in enumerate(sharded.placements):
            assert not placement.is_partial(), "gradients are reduced before their norm"
            # A check for Shard would not do: a dim sharded twice has its own placement class.
            if not placement.is_replicate():
                dist.all_reduce(numbers, group=sharded.device_mesh.get_group(axis))
    return numbers


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """fp32 norms of tensors, in their order: multi-tensor kernels take one dtype at a time."""
    norms: dict[int, Tensor] = {}
    for dtype in {gradient.dtype for gradient in gradients}:
        places = [place for place, gradient in enumerate(gradients) if gradient.dtype == dtype]
        found = torch._foreach_norm([gradients[place] for place in places], 2, dtype=torch.float32)
        norms |= zip(places, found, strict=True)
    return [norms[place] for place in range(len(gradients))]


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / norm), a scalar on the device."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by `clip_factor` in place, without a device sync."""
    factor = clip_factor(norm, max_norm)
    gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


class NormClipper:
    """Clips gradients only by their global norm, perhaps inside the optimizer's step; without `max_norm`, never."""

    in_place = False  # True if gradients must have the dtype of their parameters

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], max_norm: float | None) -> None:
        self._scaling = optimizer if isinstance(optimizer, ScalesGradients) else None
        self._parameters, self._max_norm = list(parameters), max_norm

    def clip(self, grad_norm: Tensor, *, step: int) -> Mapping[str, Tensor]:
        """Clip gradients with the global norm `grad_norm`, by the optimizer if it can, else in place. Returns no
        metrics."""
        if self._max_norm is None:
            return {}
        if self._scaling is None:
            scale_gradients(self._parameters, grad_norm, self._max_norm)
        else:
            self._scaling.set_grad_scale(clip_factor(grad_norm, self._max_norm))
        return {}

    def keep(self) -> None:
        """Do nothing: it keeps nothing in the optimizer's state."""

    def state(self) -> dict[str, Any]:
        """Return no state."""
        return {}

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Do nothing: there is no state."""


class GradientClipper:
    """Clips the gradients of this rank's parameters in place, in the dtype of the parameters. `unique` excludes copies
    of tied weights, which another pipeline stage counts; `max_norm` limits parameters without a limit of their own."""

    in_place = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[NamedParameter],
        unique: Iterable[Tensor],
        config: GradClipConfig,
        groups: Mapping[str, ParameterGroup],
        *,
        max_norm: float | None,
        pp_group: dist.ProcessGroup | None,
    ) -> None:
        self._config, self._max_norm, self._pp_group = config, max_norm, pp_group
        self._parameters = [named.parameter for named in parameters]
        own = {name: group for name, group in groups.items() if group.max_grad_norm is not None}
        self._limits = {REST: max_norm, **{name: group.max_grad_norm for name, group in own.items()}}
        self._limit_of = [
            next((name for name, group in own.items() if group.has(named.name, named.role)), REST)
            for named in parameters
        ]
        counted = set(unique)
        self._counted = torch.tensor([float(parameter in counted) for parameter in self._parameters])
        if self._parameters:
            self._counted = self._counted.to(local_tensor(self._parameters[0]).device)
        self._adagc = AdaGC(optimizer, self._parameters, config) if config.mode == "adagc" else None

    @property
    def averages(self) -> Tensor | None:
        """Average gradient norm of each parameter; None without AdaGC."""
        return None if self._adagc is None else self._adagc.averages

    def state(self) -> dict[str, Any]:
        """Step after which AdaGC's averages began, if that was not the run's first."""
        return {"begun": self._adagc.begun} if self._adagc is not None and self._adagc.begun else {}

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Restore AdaGC's averages from the optimizer's state, after a checkpoint of `step` is loaded."""
        if self._adagc is not None:
            self._adagc.restore(None if state is None else state["begun"], step)

    def keep(self) -> None:
        """Keep AdaGC's averages in the optimizer's state; call it after the optimizer's step."""
        if self._adagc is not None:
            self._adagc.keep()

    @torch.no_grad()
    def clip(self, grad_norm: Tensor, *, step: int) -> Mapping[str, Tensor]:
        """Clip gradients with the global norm `grad_norm`. Returns metrics, which are the same on every rank."""
        metrics = {"clip/share": self._clamp()} if self._config.mode == "value" else {}
        norms = parameter_norms(self._parameters)
        if self._adagc is None:
            factors, limited = self._by_limit(norms)
            metrics |= limited
        else:
            factors = self._adagc.factors(norms, step=step, grad_norm=grad_norm, max_norm=self._max_norm)
            metrics["clip/share"] = self._share((factors < 1).float(), torch.ones_like(factors))
        for parameter, factor in zip(self._parameters, factors.unbind(), strict=True):
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(factor)
        smallest = factors.amin()
        if self._pp_group is not None:
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self._pp_group)
        return {**metrics, "clip/factor": smallest}

    def _clamp(self) -> Tensor:
        """Clamp every element of the gradients; returns the share of elements that were beyond the limit."""
        limit, beyond = self._config.max_value, []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                beyond.append(self._counted.new_zeros(()))
                continue
            local = local_tensor(gradient)
            beyond.append((local.abs() > limit).sum(dtype=torch.float32))
            local.clamp_(-limit, limit)
        sizes = [0 if parameter.grad is None else parameter.numel() for parameter in self._parameters]
        return self._share(sum_over_shards(beyond, self._parameters), self._counted.new_tensor(sizes))

    def _by_limit(self, norms: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Factors [parameters] that limit the norm of each group of parameters; with several groups, also metrics."""
        squares = norms.square() * self._counted
        places = {name: [index for index, of in enumerate(self._limit_of) if of == name] for name in self._limits}
        sums = torch.stack([sum((squares[index] for index in of), squares.new_zeros(())) for of in places.values()])
        if self._pp_group is not None:
            dist.all_reduce(sums, group=self._pp_group)
        found = dict(zip(places, sums.sqrt().unbind(), strict=True))
        one = norms.new_ones(())
        factor = {
            name: one if (limit := self._limits[name]) is None else clip_factor(norm, limit)
            for name, norm in found.items()
        }
        metrics = {f"clip/norm/{name}": norm for name, norm in found.items()} if len(found) > 1 else {}
        return torch.stack([factor[name] for name in self._limit_of]), metrics

    def _share(self, numbers: Tensor, of: Tensor) -> Tensor:
        """Ratio of two sums over all parameters of the model."""
        sums = torch.stack([(numbers * self._counted).sum(), (of * self._counted).sum()])
        if self._pp_group is not None:
            dist.all_reduce(sums, group=self._pp_group)
        return sums[0] / sums[1]


class AdaGC:
    """Adaptive gradient clipping (Wang et al. 2025, arXiv 2502.11034): every parameter has a threshold from its average
    gradient norm, which is infinite until it has a gradient. A parameter is a whole tensor, such as a fused projection
    or a stack of experts. Its average norm is a scalar in its optimizer state, so checkpoints of any layout hold it by
    name."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], config: GradClipConfig) -> None:
        self._optimizer, self._parameters, self._config = optimizer, list(parameters), config
        device = local_tensor(self._parameters[0]).device if self._parameters else None
        self.averages = torch.full((len(self._parameters),), torch.inf, device=device)
        self.begun = 0
        """Step after which the averages began; the warm-up counts from it."""

    @torch.no_grad()
    def factors(self, norms: Tensor, *, step: int, grad_norm: Tensor, max_norm: float | None) -> Tensor:
        """Factors [parameters] for gradients with these norms; the clipped norms join the averages. A zero gradient
        sets no threshold, since it would freeze its parameter; a gradient that is not finite sets none either."""
        averages = self.averages
        if step - self.begun <= self._config.warmup_steps:
            factor = torch.ones_like(norms) if max_norm is None else clip_factor(grad_norm, max_norm).expand_as(norms)
            joined = torch.minimum(averages, factor * norms)
        else:
            thresholds = self._config.relative * averages
            factor = torch.where(norms > thresholds, thresholds / norms, 1.0)
            decay, clipped = self._config.decay, factor * norms
            joined = torch.where(averages.isinf(), clipped, decay * averages + (1 - decay) * clipped)
        averages.copy_(torch.where((norms > 0) & norms.isfinite(), joined, averages))
        return factor

    @torch.no_grad()
    def restore(self, begun: int | None, step: int) -> None:
        """Restore the averages that a checkpoint after `step` has put into the optimizer's state. `begun` is None if
        the checkpoint does not say when they began: then they began with the run or, if there are none, begin now."""
        known = False
        for parameter, average in zip(self._parameters, self.averages.unbind(), strict=True):
            state = self._optimizer.state.get(parameter, {})
            if AVERAGE_NORM in state:
                average.copy_(state[AVERAGE_NORM])
                state[AVERAGE_NORM] = average
                known = True
        self.begun = begun if begun is not None else 0 if known else step

    def keep(self) -> None:
        """Keep the averages in the optimizer's state, after the step, which creates its own where there is none."""
        for parameter, average in zip(self._parameters, self.averages.unbind(), strict=True):
            if parameter.grad is not None:
                self._optimizer.state[parameter].setdefault(AVERAGE_NORM, average)
