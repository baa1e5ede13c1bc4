"""Predictions equal measurements of real ranks, byte by byte."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patching import patch
from tests.plan.layouts import COMPILED, LAYOUTS, allocated_peaks, experiment_of, measured, predicted
from tests.proofs import proves
from titan_exp.models.spec.lookup import model_spec

BY_DAY = ("fsdp 2, float8 tensorwise",)
"""Layouts that are compared in every run of the tests; the others by `make night`."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[proves(words, "plan"), *([] if name in BY_DAY else [pytest.mark.night])])
        for name, words in LAYOUTS.items()
    ],
)
def test_prediction_is_what_ranks_do(name: str, tmp_path: Path):
    assert_predicted(LAYOUTS[name], tmp_path)


def assert_predicted(words: str, tmp_path: Path) -> None:
    experiment = experiment_of(words)
    guesses = predicted(experiment, tmp_path / "plan")
    found = measured(experiment, tmp_path / "run")
    allocated = allocated_peaks(experiment, tmp_path / "alone")
    assert len(guesses) == len(found) == len(allocated) == experiment.parallelism.pp
    for guess, fact, most in zip(guesses, found, allocated, strict=True):
        assert guess.parameters == fact.parameters > 0
        assert guess.gradients == fact.gradients > 0
        assert guess.optimizer == fact.optimizer > 0
        assert guess.messages == fact.messages
        assert guess.flops == fact.flops > 0
        # All are a few scalars apart, unless one of gloo's threads has held something for longer.
        assert guess.passing <= fact.passing <= 1.02 * guess.passing
        # In bf16 the CPU's matmuls take memory for a moment, as much as activations of a model as small as this.
        if experiment.training.mixed_precision == "fp32":
            assert guess.passing - guess.between_steps == pytest.approx(most, rel=0.02)


@pytest.mark.night  # the compiler takes a minute or more
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_is_predicted_without_a_compiler(name: str, tmp_path: Path):
    experiment = experiment_of(COMPILED[name])
    guesses = predicted(experiment, tmp_path / "plan", no_compiler_is_there)
    found = allocated_peaks(experiment, tmp_path / "alone")
    assert len(guesses) == len(found) == experiment.parallelism.pp
    for guess, most in zip(guesses, found, strict=True):
        # Seen were equal bytes, but where attention's kernel takes some for a moment.
        assert guess.passing - guess.between_steps == pytest.approx(most, rel=0.02)


def no_compiler_is_there() -> None:
    os.environ["PATH"] = os.environ["CXX"] = "/nowhere"


@pytest.mark.night
def test_every_step_of_soap_is_predicted_as_its_costliest(tmp_path: Path):
    words = "parallelism.dp_shard=2 optimizer=soap optimizer.precondition_every"
    few, every = (predicted(experiment_of(f"{words}={steps}"), tmp_path / str(steps)) for steps in (10, 1))
    assert few == every


def every_block_keeps_a_copy_of_its_feed_forward() -> None:
    """A change of the trainer, unknown to the planner."""
    patch(
        "titan_exp.models.blocks.feed_forward.swiglu",
        lambda original: lambda gate_up, *rest: original(gate_up.sigmoid() * gate_up, *rest),
    )


def test_a_change_of_the_trainer_changes_the_prediction(tmp_path: Path):
    experiment = experiment_of("parallelism.dp_shard=2")
    (before,) = predicted(experiment, tmp_path / "before")
    (guess,) = predicted(experiment, tmp_path / "plan", every_block_keeps_a_copy_of_its_feed_forward)
    (fact,) = measured(experiment, tmp_path / "run", every_block_keeps_a_copy_of_its_feed_forward)
    spec = model_spec(experiment.model)
    assert spec is not None
    layers, width, tokens = len(spec.layers), spec.layers[0].linear("feed_forward.gate_up").outputs, 4 * 64
    # Sigmoid's result is kept by its own backward pass and by that of the product, whose result is kept by swiglu.
    assert guess.passing - before.passing == layers * 2 * width * tokens * 4
    assert guess.passing <= fact.passing <= 1.02 * guess.passing


def an_operator_of_another_library_comes_in() -> None:
    import torch

    from titan_exp.models.blocks import feed_forward as blocks

    @torch.library.custom_op("fast_kernels::gate", mutates_args=())
    def gate(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    gate.register_fake(torch.empty_like)
    gate.register_autograd(lambda ctx, gradient: gradient)
    original = blocks.swiglu
    blocks.swiglu = lambda gate_up, *rest: gate(original(gate_up, *rest))  # type: ignore[assignment]


def sizes_depend_on_data() -> None:
    from titan_exp.models.blocks import feed_forward as blocks

    original = blocks.swiglu
    blocks.swiglu = lambda gate_up, *_: original(gate_up) + original(gate_up).nonzero().shape[0]  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("mutation", "operator"),
    [(an_operator_of_another_library_comes_in, "fast_kernels.gate"), (sizes_depend_on_data, "aten.nonzero")],
)
def test_an_operator_that_is_not_known_is_refused(mutation: Callable[[], None], operator: str, tmp_path: Path):
    with pytest.raises(AssertionError, match=rf"UserError: plan: the step calls {operator}"):
        predicted(experiment_of(""), tmp_path, mutation)
