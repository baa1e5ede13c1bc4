"""Compiled autograd functions have their gradients on every torch: outputs end in no operator without effect."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import titan_exp
from tests.parity.runs import train
from tests.ranks import run_ranks
from titan_exp.ops.autograd import dense, in_type
from titan_exp.ops.moe.permutation import copy_tokens

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
    # The one is called for another dtype only, the other not by a compiler.
    allowed = ["autograd.py: _RoundedRows", "linear_attention.py: _ShortConvolution"]
    assert [place for place, value in outputs if _may_do_nothing(value)] == allowed


class _Unchanged(TorchFunctionMode):
    """Remembers arguments that an operator has returned: a conversion without effect, or one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and any(result is arg for arg in args):
            self.tensors.append(result)
        return result


def watch_outputs() -> None:
    """Check outputs of this package's autograd functions in this process, whichever helpers return them.

    Forward passes take the operators of compiled blocks.
    """
    unchanged = _Unchanged()
    checked = set[type]()

    def watched(function: Any, *args: Any) -> Any:
        if function.__module__.startswith("titan_exp") and function not in checked:
            checked.add(function)
            function.forward = staticmethod(_checked(function.forward, unchanged, function.__qualname__))
        return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]  # of the C++ class

    torch.autograd.Function.apply = classmethod(watched)  # type: ignore[assignment]
    unchanged.__enter__()  # as long as the process lives


def _checked(plain: Callable[..., Any], unchanged: _Unchanged, name: str) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        unchanged.tensors.clear()
        with patch.object(torch.compiler, "is_compiling", lambda: True):
            outputs = plain(*args)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            assert all(output is not tensor for tensor in unchanged.tensors), (
                f"{name} returns the argument of its last operator"
            )
        return outputs

    return forward


@pytest.mark.parametrize(
    "words",
    [
        "model=llama_debug parallelism.tp=2",
        "model=llama_debug parallelism.tp=2 training.mixed_precision=bf16 quantization=float8_rowwise",
        "model=qwen3_moe_debug parallelism.dp_shard=2 parallelism.ep=2",
        "model=gpt_oss_debug parallelism.tp=2",
        "model=llama4_debug parallelism.tp=2",
        "model=deepseek_debug parallelism.cp=2",
    ],
)
def test_outputs_in_runs_end_in_an_operator_with_effect(tmp_path: Path, words: str):
    train(tmp_path, "training.steps=1", *words.split(), mutate=watch_outputs)


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


def test_an_operator_without_a_gradient_refuses_to_lose_one():
    x, inverse = torch.ones(2, 3), torch.tensor([[0], [1]])
    assert torch.equal(copy_tokens(x, inverse, None), x)
    with pytest.raises(RuntimeError, match="titan_exp::copy_tokens has no gradient"):
        copy_tokens(x.requires_grad_(), inverse, None)
