"""Mutations of Triton kernels, each of which the comparison with torch's operators must notice.

python -m pytest tests/parity/kernel_mutations.py
"""

import importlib
import importlib.util
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interpreted import needs_triton, run_kernels
from tests.ops import test_moe_kernels as of_experts

pytestmark = needs_triton

cast_test = of_experts.test_tokens_are_cast_as_torchao_casts_their_rows
sums_test = of_experts.test_copies_sums_and_their_gradients_are_those_of_torch
MUTATIONS: dict[str, tuple[Callable[[str], None], tuple[str, str], str, str]] = {
    "scales keep a bit of their mantissa": (
        cast_test,
        ("titan_exp.ops.float8", "cast_tokens_kernel"),
        "0x7F800000",
        "0x7FC00000",
    ),
    "the amax is that of the last columns": (
        cast_test,
        ("titan_exp.ops.float8", "cast_tokens_kernel"),
        "tl.maximum(sizes, size)",
        "size",
    ),
    "sums forget the weights": (
        sums_test,
        ("titan_exp.ops.moe.permutation", "sum_rows_kernel"),
        "numbers *= tl.load",
        "_ = numbers * tl.load",
    ),
}
"""Test that notices it, module and name of the kernel, and its text before and after."""


def mutated(device: str, kernel: tuple[str, str], before: str, after: str, job: tuple[str, str]) -> Any:
    """Result of a kernel test's job, with a text of a kernel replaced."""
    ours, name = importlib.import_module(kernel[0]), kernel[1]
    text = inspect.getsource(vars(ours)[name].fn)
    assert text.count(before) == 1, "the kernel has changed"
    with tempfile.TemporaryDirectory() as folder:
        # The interpreter reads the source.
        path = Path(folder) / "kernel.py"
        path.write_text(text.replace(before, after))
        spec = importlib.util.spec_from_file_location("mutated_kernel", path)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        vars(made).update({key: value for key, value in vars(ours).items() if not key.startswith("__")})
        spec.loader.exec_module(made)
        setattr(ours, name, vars(made)[name])
        return getattr(importlib.import_module(job[0]), job[1])(device)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str):
    test, *change = MUTATIONS[name]

    def run(world: int, device: str, job: Callable[..., Any]) -> list[Any]:
        return run_kernels(world, device, mutated, *change, (job.__module__, job.__name__))

    monkeypatch.setattr(of_experts, "run_kernels", run)
    with pytest.raises(AssertionError) as noticed:
        test("cpu")
    assert "failed:" not in str(noticed.value), "the mutated kernel itself fails"
