"""Parameters with their names, roles and scales, and their groups for torch optimizers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_exp.config.groups.optimizer import OptimizerConfig, Role
from titan_exp.models.parametrization.standard import UNSCALED, ParameterScale
from titan_exp.models.spec.lookup import is_vector
from titan_exp.models.spec.tp_plan import FusedRows

_BUILT = "built_param_groups"
"""Attribute of an optimizer that holds the values of its parameter groups at construction."""
_BY_THE_RUN = ("params", "lr")
"""Keys of a group that each run sets: its parameters, and the scheduled learning rate before every step."""


@dataclass(frozen=True)
class NamedParameter:
    """A parameter to optimize."""

    name: str
    parameter: nn.Parameter
    role: Role
    """Kind of parameter: the `parameter_role` of its module, else by its dimensions."""
    rows: FusedRows | None = None
    """Projections or heads in its rows; None if it is one matrix."""
    scale: ParameterScale = UNSCALED
    """Factors that the parametrization gives its hyperparameters."""

    @property
    def is_matrix(self) -> bool:
        """True for the weight of a linear layer, or the stacked weights of experts' linear layers."""
        return self.parameter.dim() == {"matrix": 2, "expert": 3}.get(self.role)


def named_parameters(
    parts: Iterable[nn.Module], scales: Mapping[str, ParameterScale] = {}, *, frozen: bool = False
) -> list[NamedParameter]:
    """Trainable parameters of this rank's modules in order, tied ones once; with `frozen`, all."""
    found = []
    for part in parts:
        modules = dict(part.named_modules())
        for name, parameter in part.named_parameters():
            if parameter.requires_grad or frozen:
                module, _, kind = name.rpartition(".")
                around, _, child = module.rpartition(".")
                # The module around a linear declares the layout of its rows.
                fused: Mapping[str, FusedRows] = getattr(modules[around], "fused_rows", {})
                role, rows = _role(modules[module], parameter), fused.get(child) if kind == "weight" else None
                found.append(NamedParameter(name, parameter, role, rows, scales.get(name, UNSCALED)))
    return found


def freeze(model: nn.Module, config: OptimizerConfig) -> None:
    """Switch off gradients of parameters in frozen groups."""
    for named in named_parameters([model]) if config.groups else ():
        group = config.group_of(named.name, named.role)
        if group is not None and group.frozen:
            named.parameter.requires_grad_(False)


def parameter_groups(
    parameters: Sequence[NamedParameter], config: OptimizerConfig, *, by_role: bool = False
) -> list[dict[str, Any]]:
    """Group parameters by equal hyperparameters and by mesh, groups with weight decay first. `role` splits groups
    further if `by_role`, or if the configuration has values by role."""
    by_role = by_role or bool(config.lr_scales or config.weight_decays)
    # Fused and foreach kernels take tensors of one mesh at a time.
    groups: dict[tuple[bool, object, tuple[tuple[str, Any], ...]], list[nn.Parameter]] = defaultdict(list)
    for named in parameters:
        parameter = named.parameter
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        options = hyperparameters(named, config) | ({"role": named.role} if by_role else {})
        is_decayed = named.role != "vector" or config.decay_vectors
        groups[is_decayed, mesh, tuple(options.items())].append(parameter)
    return [
        {"params": group, **dict(options)}
        for (_, _, options), group in sorted(groups.items(), key=lambda item: not item[0][0])
    ]


def hyperparameters(named: NamedParameter, config: OptimizerConfig) -> dict[str, Any]:
    """Options of a parameter's group: `weight_decay`, and other `lr_scale`, `betas` or `eps` than the optimizer's."""
    group, scale = config.group_of(named.name, named.role), _with_own_lr(named, config)
    usual = config.weight_decay if named.role != "vector" or config.decay_vectors else 0.0
    decay = config.weight_decays.get(named.role, usual)
    factor = config.lr_scales.get(named.role, 1.0)
    options: dict[str, Any] = {}
    if group is not None:
        decay = decay if group.weight_decay is None else group.weight_decay
        factor = factor if group.lr_scale is None else group.lr_scale
        options |= {} if group.betas is None else {"betas": group.betas}
    if scale.eps != 1 and (eps := getattr(config, "eps", None)) is not None:
        options["eps"] = eps * scale.eps
    if factor * scale.lr != 1 or named.role in config.lr_scales:
        options["lr_scale"] = factor * scale.lr
    return {"weight_decay": decay * scale.weight_decay, **options}


def remember_groups(optimizer: torch.optim.Optimizer) -> None:
    """Remember the groups of an optimizer as built; its later changes are state."""
    built = [{key: _copy(value) for key, value in _values(group)} for group in optimizer.param_groups]
    setattr(optimizer, _BUILT, built)


def reset_groups(optimizer: torch.optim.Optimizer) -> None:
    """Reset the groups to the values with which they were built, except the learning rate."""
    remembered: list[dict[str, Any]] = getattr(optimizer, _BUILT, [])
    for group, built in zip(optimizer.param_groups, remembered, strict=False):
        for key, _ in _values(group):
            if key not in built:
                del group[key]
        group.update((key, _copy(value)) for key, value in built.items() if not same_value(group.get(key), value))


def changed_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Values of each group that have changed since `remember_groups`, by key."""
    remembered: list[dict[str, Any]] | None = getattr(optimizer, _BUILT, None)
    if remembered is None:
        return [{} for _ in optimizer.param_groups]
    return [
        {key: value for key, value in _values(group) if key not in built or not same_value(value, built[key])}
        for group, built in zip(optimizer.param_groups, remembered, strict=True)
    ]


def same_value(one: Any, other: Any) -> bool:
    """True if two values of a state or a group are equal: tensors bitwise, other objects by identity."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_value(part, other[key]) for key, part in one.items())
    return type(one) in (bool, int, float, str) and one == other


def _with_own_lr(named: NamedParameter, config: OptimizerConfig) -> ParameterScale:
    """Scale of a parameter for an optimizer whose matrix updates have a known spectral norm. Features change equally at
    every width if that norm grows as sqrt(outputs / inputs) (Yang, Simon and Bernstein 2023, arXiv 2310.17813). Adam's
    norm is proportional to its learning rate and to inputs times that root, so both agree."""
    scale = named.scale
    rows, columns = named.parameter.shape[-2:] if named.is_matrix else (0, 0)
    norm = config.matrix_scale(rows, columns) if named.is_matrix else None
    base = config.matrix_scale(rows / scale.outputs, columns / scale.inputs) if named.is_matrix else None
    if norm is None or base is None or scale.inputs == scale.outputs == 1:
        return scale
    factor = (scale.inputs * scale.outputs) ** 0.5 * base / norm
    return replace(scale, lr=scale.lr * factor, weight_decay=scale.weight_decay / factor)


def _role(module: nn.Module, parameter: nn.Parameter) -> Role:
    declared: Role | None = getattr(module, "parameter_role", None)
    if is_vector(parameter.shape, stacked=declared == "expert"):
        return "vector"
    if declared is not None:
        return declared
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "expert" if parameter.dim() > 2 else "matrix"


def _values(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in group.items() if key not in _BY_THE_RUN]


def _copy(value: Any) -> Any:
    """Copy of a value that may change in place; other objects are returned as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(_copy(part) for part in value)
    return {key: _copy(part) for key, part in value.items()} if type(value) is dict else value
