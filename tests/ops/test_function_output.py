"""Compiled autograd functions have their gradients on every torch: outputs end in no operator without effect."""

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor

import titan_exp
from tests.ranks import run_ranks
from titan_exp.ops.function_output import dense, in_type

MAY_DO_NOTHING = ("to", "contiguous", "float", "double", "bfloat16", "half", "type_as")


def _outputs() -> list[tuple[str, ast.expr]]:
    """Returned expressions of all forward methods of autograd functions, with their places."""
    found = []
    for path in sorted(Path(titan_exp.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any("autograd.Function" in ast.unparse(base) for base in node.bases):
                (forward,) = (part for part in node.body if getattr(part, "name", "") == "forward")
                returns = (part for part in ast.walk(forward) if isinstance(part, ast.Return))
                found += [(f"{path.name}: {node.name}", part.value) for part in returns if part.value is not None]
    return found


def _may_do_nothing(value: ast.expr) -> bool:
    values = value.elts if isinstance(value, ast.Tuple) else [value]
    return any(
        isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in MAY_DO_NOTHING
        for part in values
    )


def test_outputs_end_in_an_operator_with_effect():
    """Torch 2.11's compiler passes a zero gradient to a function whose output a conversion returns as it is."""
    outputs = _outputs()
    assert len(outputs) > 30
    # Called for another dtype only.
    assert [place for place, value in outputs if _may_do_nothing(value)] == ["embedding.py: _RoundedRows"]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, how: str) -> Tensor:
        total = x[:, :2] + x[:, 2:]
        return in_type(total, x.dtype) if how == "type" else dense(total)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].repeat(1, 2) * 2, None


def compiled_gradient(how: str) -> Tensor:
    """Gradient of a compiled function, from a process of its own."""
    x = torch.ones(3, 4, requires_grad=True)
    compiled = torch.compile(lambda x: _Doubled.apply(x, how), backend="eager", fullgraph=True)
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
    return gradient


@pytest.mark.parametrize("how", ["type", "dense"])
def test_a_compiled_function_has_its_gradient(how: str):
    assert run_ranks(1, compiled_gradient, how) == [pytest.approx(2 * torch.ones(3, 4))]
