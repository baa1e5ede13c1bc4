"""Roles of a model's parameters, by its spec. Imports no torch."""

from collections.abc import Sequence

from titan_exp.config.groups.optimizer import Role
from titan_exp.models.spec.model_spec import ModelSpec


def parameter_roles(spec: ModelSpec) -> dict[str, Role]:
    """Role of every parameter by full name; the same that an optimizer sees."""
    stacked = {f"{name}.{part}" for name, linear in spec.linears() if linear.experts > 1 for part in ("weight", "bias")}
    ends: dict[str, Role] = {"embedding.weight": "embedding", "head.weight": "head"}
    return {
        name: "vector"
        if is_vector(shape, stacked=name in stacked)
        else ends.get(name, "expert" if name in stacked or len(shape) > 2 else "matrix")
        for name, shape in spec.shapes.items()
    }


def is_vector(shape: Sequence[int], *, stacked: bool) -> bool:
    """True for one vector, for a stack of one per expert, and for numbers per head that broadcast, as [1, 1, heads, 1].

    Of two dims, one of size 1 is a matrix all the same: a linear layer with one output.
    """
    return len(shape) - stacked < 2 or (len(shape) > 2 and sum(size > 1 for size in shape) < 2)
