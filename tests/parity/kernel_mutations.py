"""Mutations of Triton kernels, each of which the comparison with torch's operators must notice.

python -m pytest tests/parity/kernel_mutations.py
"""

import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interpreted import needs_triton, run_kernels
from tests.ops import test_block_kernels as of_blocks
from tests.ops import test_moe_kernels as of_experts

pytestmark = needs_triton

SWIGLU, WEIGHTED = "titan_exp.ops.swiglu_kernels", "titan_exp.ops.moe.weighted_swiglu_kernels"
BIAS, FLOAT8 = "titan_exp.ops.moe.expert_bias_kernels", "titan_exp.ops.float8.kernels"
swiglu_test = of_blocks.test_swiglu_and_its_gradient_are_those_of_torch
weighted_test = of_experts.test_weighted_swiglu_and_its_gradients_are_those_of_torch
bias_test = of_experts.test_biases_of_experts_and_their_gradients_are_those_of_torch
cast_test = of_experts.test_tokens_are_cast_as_torchao_casts_their_rows
MUTATIONS: dict[str, tuple[Callable[[str], None], str, str, str]] = {
    "the gate is limited on both sides": (
        swiglu_test,
        SWIGLU,
        "gate > limit, limit, gate",
        "tl.abs(gate) > limit, limit, gate",
    ),
    "gradients of ups pass the lower limit": (swiglu_test, SWIGLU, "tl.abs(up) > limit", "up > limit"),
    "the gate's sharpness is missing in its gradient": (weighted_test, SWIGLU, "1 + alpha * within", "1 + within"),
    "the output that backward writes has no offset": (
        weighted_test,
        WEIGHTED,
        "product = swish * shifted",
        "product = swish * up",
    ),
    "an expert's first row gets the bias before": (bias_test, BIAS, "<= row)", "< row)"),
    "a last row alone is left out": (bias_test, BIAS, "range(first, last, side)", "range(first, last - 1, side)"),
    "weights are forgotten in a bias's gradient": (bias_test, BIAS, "upstream *= tl.load", "_ = upstream * tl.load"),
    "scales keep a bit of their mantissa": (cast_test, FLOAT8, "0x7F800000", "0x7FC00000"),
    "the amax is that of the last columns": (cast_test, FLOAT8, "tl.maximum(sizes, size)", "size"),
}
"""Test that notices it, module of the kernel, and its text before and after."""


def mutated(device: str, kernels: str, before: str, after: str, job: tuple[str, str]) -> Any:
    """Result of a kernel test's job, with a text of a module of kernels replaced."""
    found = importlib.util.find_spec(kernels)
    assert found is not None
    assert found.origin is not None
    text = Path(found.origin).read_text()
    assert text.count(before) == 1, "the kernel has changed"
    with tempfile.TemporaryDirectory() as folder:
        # The interpreter reads the source.
        path = Path(folder) / "kernels.py"
        path.write_text(text.replace(before, after))
        spec = importlib.util.spec_from_file_location(kernels, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[kernels] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[kernels])
        return getattr(importlib.import_module(job[0]), job[1])(device)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str):
    test, *change = MUTATIONS[name]

    def run(world: int, device: str, job: Callable[..., Any]) -> list[Any]:
        return run_kernels(world, device, mutated, *change, (job.__module__, job.__name__))

    for module in (of_blocks, of_experts):
        monkeypatch.setattr(module, "run_kernels", run)
    with pytest.raises(AssertionError) as noticed:
        test("cpu")
    assert "failed:" not in str(noticed.value), "the mutated kernel itself fails"
