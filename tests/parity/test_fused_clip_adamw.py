"""The kernel that clips and updates in one pass, in the trainer: the curve is that of torch's fused AdamW."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interpreted import interpret, needs_triton
from tests.parity.runs import assert_same_curve, train
from tests.patching import patch

CLIPPED = ("training.max_grad_norm=0.3", "training.steps=4")


def use_it() -> None:
    """Triton's interpreter in the place of a GPU, which the configuration's rules ask for."""
    interpret()
    patch(
        "titan_exp.trainer.train_state.build_optimizer",
        lambda build: lambda model, config, *rest: build(model, replace(config, implementation="triton"), *rest),
    )


def use_it_on_bf16() -> None:
    """And every step starts with compute weights that are the rounded masters, and clips bf16 gradients."""
    use_it()

    def checked(step: Any) -> Any:
        def one_step(state: Any, *rest: Any, **options: Any) -> Any:
            model = state.model
            assert model.weights.copies
            for master, copy in model.weights.copies.items():
                assert torch.equal(copy, master.bfloat16())
                assert model.weights.gradient_dtype(master) == torch.bfloat16
            return step(state, *rest, **options)

        return one_step

    patch("titan_exp.trainer.trainer.train_step", checked)


@needs_triton
@pytest.mark.parametrize(
    "layout",
    [
        "",
        "parallelism.dp_shard=2",
        pytest.param("model=qwen3_moe_debug parallelism.dp_shard=2 parallelism.ep=2", marks=pytest.mark.night),
    ],
)
def test_the_curve_is_that_of_the_fused_one(tmp_path: Path, layout: str):
    expected = train(tmp_path / "fused", *CLIPPED, *layout.split())
    assert min(expected.grad_norm) > 0.3, "nothing is clipped"
    found = train(tmp_path / "one_pass", *CLIPPED, *layout.split(), mutate=use_it)
    assert_same_curve(found, expected)
    assert found.weights["head.weight"].ne(expected.weights["head.weight"]).any(), "it was not used"


@pytest.mark.night
@needs_triton
@pytest.mark.day
def test_on_one_data_rank_it_writes_the_compute_weights(tmp_path: Path):
    words = [*CLIPPED, "training.mixed_precision=bf16", "model.tied_embeddings=true"]
    expected = train(tmp_path / "fused", *words)
    found = train(tmp_path / "one_pass", *words, mutate=use_it_on_bf16)
    # The kernel's last bit of a weight flips roundings to bf16 now and then.
    assert found.grad_norm[0] == expected.grad_norm[0]
    assert found.loss == pytest.approx(expected.loss, rel=2e-5)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)


@pytest.mark.night
@needs_triton
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_clipping_by_parameter_is_done_before_the_pass(tmp_path: Path, precision: str):
    words = ["training.steps=4", "grad_clip=adagc", "grad_clip.warmup_steps=1", "grad_clip.relative=0.5"]
    words.append(f"training.mixed_precision={precision}")
    expected = train(tmp_path / "fused", *words)
    assert max(row["clip/factor"] for row in expected.rows[1:]) < 0.8, "nothing is clipped"
    found = train(tmp_path / "one_pass", *words, mutate=use_it)
    if precision == "fp32":
        assert_same_curve(found, expected)
    assert found.grad_norm[0] == expected.grad_norm[0]
    assert found.loss == pytest.approx(expected.loss, rel=2e-5)
    factors = [[row["clip/factor"] for row in curve.rows] for curve in (found, expected)]
    assert factors[0] == pytest.approx(factors[1], rel=1e-3)
