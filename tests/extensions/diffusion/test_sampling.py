"""Euler sampler: against that of diffusers step by step, and guidance against its formula."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.extensions.diffusion.flux_shapes import needs_diffusers
from titan_exp.extensions.diffusion import rectified_flow as module
from titan_exp.extensions.diffusion.encoders import HashedWords
from titan_exp.extensions.diffusion.rectified_flow import (
    Conditions,
    conditions,
    euler,
    guided_velocity,
    sampling_noise,
    sampling_times,
    velocity,
)
from titan_exp.extensions.diffusion.samples import LatentBatch

STEPS, IMAGE_TOKENS = 7, 1024


def model(batch: LatentBatch) -> Tensor:
    """Velocity that depends on everything."""
    assert batch.times is not None
    scale = 0 if batch.guidance is None else batch.guidance[:, None, None]
    given = batch.text.mean((1, 2)) + 2 * batch.pooled.mean(1) + batch.positions.float().mean((1, 2))
    return batch.latents.sin() * batch.times[:, None, None] + given[:, None, None] + scale


def given(*prompts: str) -> Conditions:
    return conditions(HashedWords(3, 4, 5, seed=0), prompts, 2, 2)


@needs_diffusers
@pytest.mark.parametrize("shift", [False, True])
def test_steps_are_those_of_diffusers(shift: bool):
    from diffusers import FlowMatchEulerDiscreteScheduler

    theirs: Any = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=shift)
    mu = 0.5 + (1.15 - 0.5) * (IMAGE_TOKENS - 256) / (4096 - 256)
    sigmas = torch.linspace(1, 1 / STEPS, STEPS).tolist()  # as FluxPipeline gives them
    theirs.set_timesteps(sigmas=sigmas, mu=mu if shift else None)
    times = sampling_times(STEPS, IMAGE_TOKENS, shift=shift)
    assert times == pytest.approx(theirs.sigmas.tolist(), abs=1e-6)
    predict = velocity(model, given("a b", "c"))
    expected = noise = sampling_noise(3, [0, 1], 4, 6)
    for number, time in enumerate(theirs.timesteps):
        expected = theirs.step(predict(expected, float(time) / 1000), time, expected, return_dict=False)[0]
        torch.testing.assert_close(euler(predict, noise, times[: number + 2]), expected, rtol=1e-5, atol=1e-5)


def assert_guidance_moves_away_from_the_empty_text() -> None:
    prompts, empty, noise = given("a b", "c"), given(""), sampling_noise(0, [0, 1], 4, 6)
    of_prompt = velocity(model, prompts)(noise, 0.3)
    of_empty = velocity(model, given("", ""))(noise, 0.3)
    for scale in (0.0, 1.0, 1.0 + 1e-9, 4.0):
        found = guided_velocity(model, prompts, empty, scale)(noise, 0.3)
        torch.testing.assert_close(found, of_empty + scale * (of_prompt - of_empty))
    assert torch.equal(guided_velocity(model, prompts, empty, 1.0)(noise, 0.3), of_prompt)
    assert not torch.allclose(of_prompt, of_empty)


def test_guidance_moves_away_from_the_empty_text():
    assert_guidance_moves_away_from_the_empty_text()


def swapped_halves(original: Callable[..., module.Velocity]) -> Callable[..., module.Velocity]:
    return lambda model, given, empty, scale: original(model, given, empty, 1 - scale)


@pytest.mark.parametrize("mutate", [swapped_halves])
def test_exchanged_conditions_are_noticed(mutate: Callable[..., object], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "guided_velocity", mutate(guided_velocity))
    with pytest.raises(AssertionError):
        assert_guidance_moves_away_from_the_empty_text()


def test_noise_is_that_of_its_sample_alone():
    some, others = sampling_noise(5, [1, 3], 4, 6), sampling_noise(5, [3, 2], 4, 6)
    assert torch.equal(some[1], others[0])
    rows = [*some, others[1], *sampling_noise(6, [1], 4, 6)]
    assert all(not torch.isclose(one, other).any() for one, other in pairwise(rows))


def test_one_step_of_a_straight_flow_is_exact():
    noise, data = sampling_noise(0, [0], 4, 6), torch.ones(1, 4, 6)
    torch.testing.assert_close(euler(lambda noisy, time: noise - data, noise, sampling_times(1, 4, shift=True)), data)
