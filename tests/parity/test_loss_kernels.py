"""Triton kernels of the loss, in the trainer: the curve is that of torch's operators."""

from pathlib import Path

import pytest

from tests.interpreted import interpret, needs_triton
from tests.ops.test_loss_kernels import use_kernels
from tests.parity.runs import LINES, assert_same_curve, train


def use_loss_kernels() -> None:
    """Triton's interpreter in the place of a GPU."""
    interpret()
    use_kernels()


@needs_triton
@pytest.mark.night
@pytest.mark.parametrize(
    "layout",
    [
        "training.loss_chunk_tokens=16384",
        "training.micro_batch_size=1",
        "parallelism.tp=2 parallelism.dp_shard=2 training.loss_chunk_tokens=37",
    ],
)
def test_the_curve_is_that_of_torchs_operators(tmp_path: Path, layout: str):
    words = [*LINES, "training.z_loss=0.01", "training.steps=3"]
    expected = train(tmp_path / "torch", *words)
    assert_same_curve(train(tmp_path / "kernels", *words, *layout.split(), mutate=use_loss_kernels), expected)
