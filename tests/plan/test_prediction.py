"""What is predicted without any rank is what real ranks do, byte by byte."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plan.layouts import LAYOUTS, experiment_of, measured, predicted

BY_NIGHT = (
    "hsdp 2x2",
    "tp 2, no sequence parallelism, bf16",
    "pp 2 x fsdp 2, ZBV",
    "cp 2, all-gather, document mask",
)
"""Layouts that are compared where slow tests are asked for."""

ALLOCATOR = ("one device", "fsdp 4, bf16, full recompute", "fsdp 2, chunked loss", "pp 2, 1F1B")
"""Layouts of which torch's own allocator is asked too. Gloo's threads allocate copies of what tensor and context
parallelism send, at times of their own."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in BY_NIGHT else []) for name in LAYOUTS]
)
def test_prediction_is_what_ranks_do(name: str, tmp_path: Path):
    experiment = experiment_of(LAYOUTS[name])
    foretold = predicted(experiment, tmp_path / "plan")
    found = measured(experiment, tmp_path / "run")
    assert len(foretold) == len(found) == experiment.parallelism.pp
    for guess, fact in zip(foretold, found, strict=True):
        assert guess.parameters == fact.parameters > 0
        assert guess.gradients == fact.gradients > 0
        assert guess.optimizer == fact.optimizer > 0
        assert guess.messages == fact.messages
        assert guess.flops == fact.flops > 0
        # All are a few scalars apart; what is asked for is 2 %.
        assert guess.passing == pytest.approx(fact.passing, rel=2e-4)
        if name in ALLOCATOR:
            assert guess.passing - guess.standing == pytest.approx(fact.allocated, rel=0.02)


def every_block_keeps_a_copy_of_its_feed_forward() -> None:
    """A change of the trainer that the planner has never heard of."""
    from titan_exp.models import blocks

    original = blocks.swiglu
    blocks.swiglu = lambda gate_up: original(gate_up.sigmoid() * gate_up)  # type: ignore[assignment]


def test_a_change_of_the_trainer_changes_the_prediction(tmp_path: Path):
    experiment = experiment_of("parallelism.dp_shard=2")
    (before,) = predicted(experiment, tmp_path / "before")
    (guess,) = predicted(experiment, tmp_path / "plan", every_block_keeps_a_copy_of_its_feed_forward)
    (fact,) = measured(experiment, tmp_path / "run", every_block_keeps_a_copy_of_its_feed_forward)
    layers, width, tokens = experiment.model.layers, 2 * experiment.model.ffn_dim, 4 * 64
    # Sigmoid's result is kept by its own backward pass and by that of the product, whose result is kept by swiglu.
    assert guess.passing - before.passing == layers * 2 * width * tokens * 4
    assert guess.passing == pytest.approx(fact.passing, rel=2e-4)


def an_operator_of_another_library_comes_in() -> None:
    import torch

    from titan_exp.models import blocks

    @torch.library.custom_op("fast_kernels::gate", mutates_args=())
    def gate(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    gate.register_fake(torch.empty_like)
    gate.register_autograd(lambda ctx, gradient: gradient)
    original = blocks.swiglu
    blocks.swiglu = lambda gate_up: gate(original(gate_up))  # type: ignore[assignment]


def sizes_depend_on_data() -> None:
    from titan_exp.models import blocks

    original = blocks.swiglu
    blocks.swiglu = lambda gate_up: original(gate_up) + original(gate_up).nonzero().shape[0]  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("mutation", "operator"),
    [(an_operator_of_another_library_comes_in, "fast_kernels.gate"), (sizes_depend_on_data, "aten.nonzero")],
)
def test_an_operator_that_is_not_known_is_refused(mutation: Callable[[], None], operator: str, tmp_path: Path):
    with pytest.raises(AssertionError, match=rf"UserError: plan: the step calls {operator}"):
        predicted(experiment_of(""), tmp_path, mutation)
