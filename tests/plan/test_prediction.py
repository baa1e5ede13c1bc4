"""What is predicted without any rank is what real ranks do, byte by byte."""

from pathlib import Path

import pytest

from tests.plan.layouts import LAYOUTS, experiment_of, measured, predicted


@pytest.mark.parametrize("name", LAYOUTS)
def test_prediction_is_what_ranks_do(name: str, tmp_path: Path):
    experiment = experiment_of(LAYOUTS[name])
    foretold, found = predicted(experiment), measured(experiment, tmp_path / "run")
    assert len(foretold) == len(found) == experiment.parallelism.pp
    for guess, fact in zip(foretold, found, strict=True):
        assert guess.parameters == fact.parameters > 0
        assert guess.gradients == fact.gradients > 0
        assert guess.optimizer == fact.optimizer > 0
        assert guess.messages == fact.messages
        assert guess.flops == fact.flops > 0
        # All are a few scalars apart; what is asked for is 2 %.
        assert guess.passing == pytest.approx(fact.passing, rel=2e-4)
