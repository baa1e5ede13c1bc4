"""Roles of a model's parameters, by its spec. Imports no torch."""

from titan_exp.config.groups.optimizer import Role
from titan_exp.models.spec.model_spec import ModelSpec


def parameter_roles(spec: ModelSpec) -> dict[str, Role]:
    """Role of every parameter by full name; the same that an optimizer sees."""
    stacked = {f"{name}.{part}" for name, linear in spec.linears() if linear.experts > 1 for part in ("weight", "bias")}
    ends: dict[str, Role] = {"embedding.weight": "embedding", "head.weight": "head"}
    return {
        name: "vector"
        if len(shape) - (name in stacked) < 2
        else ends.get(name, "expert" if name in stacked or len(shape) > 2 else "matrix")
        for name, shape in spec.shapes.items()
    }
