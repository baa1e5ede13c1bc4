"""The kernel that clips and updates in one pass, in the trainer: the curve is that of torch's fused AdamW."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.interpreted import interpret, needs_triton
from tests.parity.runs import assert_same_curve, train
from tests.patching import patch

CLIPPED = ("training.max_grad_norm=0.3", "training.steps=4")


def use_it() -> None:
    """Triton's interpreter in the place of a GPU, which the configuration's rules ask for."""
    interpret()
    patch(
        "titan_exp.trainer.train_state.build_optimizer",
        lambda build: lambda model, config: build(model, replace(config, implementation="triton")),
    )


@needs_triton
@pytest.mark.parametrize("layout", ["", "parallelism.dp_shard=2 training.mixed_precision=bf16"])
def test_the_curve_is_that_of_the_fused_one(tmp_path: Path, layout: str):
    expected = train(tmp_path / "fused", *CLIPPED, *layout.split())
    assert min(expected.grad_norm) > 0.3, "nothing is clipped"
    found = train(tmp_path / "one_pass", *CLIPPED, *layout.split(), mutate=use_it)
    assert_same_curve(found, expected)
    assert found.weights["head.weight"].ne(expected.weights["head.weight"]).any(), "it was not used"
