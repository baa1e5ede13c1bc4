"""Kernels of a block's elementwise operators in the trainer: the curve is that of torch's operators."""

from pathlib import Path

import pytest

from tests.interpreted import interpret, needs_triton
from tests.parity.runs import assert_same_curve, train
from tests.patching import patch

SMALL = ("training.steps=2", "training.seq_len=16", "training.global_batch_size=4")
LAYOUTS = ["", "activation_checkpoint=full", "parallelism.tp=2", "parallelism.cp=2"]


def interpret_kernels() -> None:
    """Triton's interpreter in the place of a GPU."""
    interpret()
    for module in ("swiglu", "attention.rope"):
        patch(f"titan_exp.ops.{module}.runs_kernel", lambda _: lambda _: True)


def turn_gradients_on() -> None:
    """The rotation of the gradient is not the opposite one."""
    interpret_kernels()
    patch(
        "titan_exp.ops.attention.rope._split_rotated_backward",
        lambda original: lambda query, key, value, cos, sin: original(query, key, value, cos, -sin),
    )


@needs_triton
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_curve_is_that_of_torchs_operators(tmp_path: Path, layout: str):
    words = [*SMALL, *layout.split()]
    expected = train(tmp_path / "torch", *words)
    assert_same_curve(train(tmp_path / "kernels", *words, mutate=interpret_kernels), expected)
    if not layout:
        wrong = train(tmp_path / "wrong", *words, mutate=turn_gradients_on)
        with pytest.raises(AssertionError):
            assert_same_curve(wrong, expected)
