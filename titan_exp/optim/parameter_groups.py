"""Parameters with their names and roles, and their groups for torch optimizers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from titan_exp.config.groups.optimizer import OptimizerConfig, Role
from titan_exp.models.spec.fused_rows import FusedRows


@dataclass(frozen=True)
class NamedParameter:
    """A parameter to optimize."""

    name: str
    """Full name in the whole model."""
    parameter: nn.Parameter
    """Plain tensor or DTensor."""
    role: Role
    """Kind of parameter: the `parameter_role` of its module, else by its dimensions."""
    rows: FusedRows | None = None
    """Projections or heads in its rows; None is one matrix."""

    @property
    def is_matrix(self) -> bool:
        """True for the weight of a linear layer, or the stacked weights of experts' linear layers."""
        return self.parameter.dim() == {"matrix": 2, "expert": 3}.get(self.role)


def named_parameters(parts: Iterable[nn.Module]) -> list[NamedParameter]:
    """Trainable parameters of this rank's modules, in the modules' order; a tied weight once."""
    found = []
    for part in parts:
        modules = dict(part.named_modules())
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                module = name.rpartition(".")[0]
                role, rows = _role(modules[module], parameter), _fused_rows(modules, name)
                found.append(NamedParameter(name, parameter, role, rows))
    return found


def parameter_groups(
    parameters: Sequence[NamedParameter], config: OptimizerConfig, *, by_role: bool = False
) -> list[dict[str, Any]]:
    """Parameter groups with and without weight decay, for every mesh, and for every `role` if `by_role` or if the
    configuration has values by role."""
    by_role = by_role or bool(config.lr_scales or config.weight_decays)
    # Fused and foreach kernels take tensors of one mesh at a time.
    groups: dict[tuple[bool, object, Role | None], list[nn.Parameter]] = defaultdict(list)
    for named in parameters:
        parameter = named.parameter
        decayed = parameter.dim() >= 2 or config.decay_vectors
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups[decayed, mesh, named.role if by_role else None].append(parameter)
    return [
        {"params": group, **_options(role, config.weight_decay if decayed else 0.0, config)}
        for (decayed, _, role), group in sorted(groups.items(), key=lambda item: not item[0][0])
    ]


def _options(role: Role | None, weight_decay: float, config: OptimizerConfig) -> dict[str, Any]:
    if role is None:
        return {"weight_decay": weight_decay}
    options = {"weight_decay": config.weight_decays.get(role, weight_decay), "role": role}
    return options | ({"lr_scale": config.lr_scales[role]} if role in config.lr_scales else {})


def _fused_rows(modules: Mapping[str, nn.Module], name: str) -> FusedRows | None:
    """Row layout of a weight, which the module around its linear declares."""
    linear, _, kind = name.rpartition(".")
    around, _, child = linear.rpartition(".")
    fused: Mapping[str, FusedRows] = getattr(modules[around], "fused_rows", {})
    return fused.get(child) if kind == "weight" else None


def _role(module: nn.Module, parameter: nn.Parameter) -> Role:
    declared: Role | None = getattr(module, "parameter_role", None)
    if parameter.dim() < 2:
        return "vector"
    if declared is not None:
        return declared
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "expert" if parameter.dim() > 2 else "matrix"
