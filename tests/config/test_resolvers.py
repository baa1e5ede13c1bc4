import pytest
from omegaconf import OmegaConf

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose, quotient, register_resolvers, rest_of, share_of
from titan_exp.config.schema.typed_config import to_experiment


@pytest.mark.parametrize(
    ("fraction", "whole", "share"),
    [(0.05, 600, 30), (0.05, 3, 1), (0.0, 600, 0), (0.5, 0, 0), (1.0, 7, 7), (0.35, 1e6, 350_000)],
)
def test_share_of(fraction: float, whole: float, share: int):
    assert (share_of(fraction, whole), type(share_of(fraction, whole))) == (share, int)


def test_digits_that_are_text_count_as_for_the_key_itself():
    run = to_experiment(compose(["training.steps=010", "lr_schedule.decay_steps=003"]))
    assert (run.training.steps, run.lr_schedule.warmup_steps, run.lr_schedule.decay_steps) == (10, 1, 3)
    with pytest.raises(UserError, match=r"training\.steps=ten: must be a whole number"):
        to_experiment(compose(["training.steps=ten"]))


def test_rest_of():
    assert [rest_of(600, 30), rest_of(1, 3), rest_of(1e6, 1)] == [570, 0, 999_999]


def test_quotient():
    assert quotient(4096, 32) == 128
    for divisor in (0, 3):
        with pytest.raises(ValueError, match=rf"{divisor} does not divide 4096 \(nearest: "):
            quotient(4096, divisor)


def test_registering_twice_changes_nothing():
    register_resolvers()
    register_resolvers()
    assert OmegaConf.create({"a": "${share_of:0.5,8}"}).a == 4


def test_no_version_of_omegaconf_warns(recwarn: pytest.WarningsRecorder):
    register_resolvers()
    assert [str(warning.message) for warning in recwarn] == []
