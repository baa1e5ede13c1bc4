"""Rectified flow: distributions of times, dropout, and a loss that is a mean over elements."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.optim.updates import experiment_of
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.batch import keyed_generator
from titan_exp.extensions.diffusion import rectified_flow
from titan_exp.extensions.diffusion.config import RectifiedFlowOptions
from titan_exp.extensions.diffusion.rectified_flow import RectifiedFlow, shifted
from titan_exp.extensions.diffusion.samples import LatentBatch

ROWS = 4096


def batch(rows: int = 4, image: int = 6) -> LatentBatch:
    torch.manual_seed(0)
    return LatentBatch(
        latents=torch.randn(rows, image, 3),
        text=torch.randn(rows, 2, 5),
        pooled=torch.randn(rows, 4),
        empty_text=torch.zeros(1, 2, 5),
        empty_pooled=torch.zeros(1, 4),
        positions=torch.zeros(rows, 2 + image, 3, dtype=torch.int64),
        samples=torch.arange(rows),
        weights=torch.ones(rows),
    )


def objective(**options: Any) -> RectifiedFlow:
    return RectifiedFlow(RectifiedFlowOptions(**options), guided=True)


def median_and_tails(times: Tensor) -> list[float]:
    return [float((times < bound).double().mean()) for bound in (0.1, 0.5, 0.9)]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ("uniform", [0.1, 0.5, 0.9]),
        # P(sigmoid(z) < t) = P(z < ln(t / (1 - t)))
        ("logit_normal", [0.5 * (1 + math.erf(z / 2**0.5)) for z in (math.log(1 / 9), 0.0, math.log(9))]),
        # Times fall from 1 to 0 in u, so that P(t < bound) = 1 - u(bound), which bisection solved.
        ("mode", [0.0467, 0.5, 0.9533]),
    ],
)
def test_times_have_their_distribution(times: Any, expected: list[float]):
    drawn = objective(times=times).prepare(batch(ROWS, 1), seed=1).times
    assert drawn is not None
    assert 0 < float(drawn.min()) < float(drawn.max()) < 1
    assert median_and_tails(drawn) == pytest.approx(expected, abs=0.025)


def test_more_image_tokens_shift_times_towards_noise():
    assert shifted(0.5, 256) == pytest.approx(1 / (1 + math.exp(-0.5)))
    assert shifted(0.25, 4096) == pytest.approx(math.exp(1.15) / (math.exp(1.15) + 1 / 0.25 - 1))
    assert [shifted(time, 4096) for time in (0.0, 1.0)] == [0, 1]
    plain, moved = (objective(shift=shift).time(0, 5, 4096) for shift in (False, True))
    assert moved == shifted(plain, 4096)


def test_texts_are_dropped_independently_and_guidance_lies_between_its_bounds():
    given = batch(ROWS, 1)
    found = objective(text_dropout=0.3, pooled_dropout=0.2, guidance=(1.0, 4.0)).prepare(given, seed=1)
    text, pooled = (found.text == 0).flatten(1).all(1), (found.pooled == 0).all(1)
    assert torch.equal(found.text[~text], given.text[~text])
    assert torch.equal(found.pooled[~pooled], given.pooled[~pooled])
    shares = [float(part.double().mean()) for part in (text, pooled, text & pooled)]
    assert shares == pytest.approx([0.3, 0.2, 0.06], abs=0.03)
    assert found.guidance is not None
    assert 1 <= float(found.guidance.min()) < 1.1
    assert 3.9 < float(found.guidance.max()) <= 4
    assert found.noise is not None
    assert float(found.noise.std()) == pytest.approx(1, abs=0.03)


def test_latents_are_drawn_from_their_posterior_anew_for_each_sample():
    given = batch(ROWS, 1)
    found = objective().prepare(replace(given, deviations=torch.full_like(given.latents, 0.1)), seed=1)
    drawn = (found.latents - given.latents) / 0.1
    assert float(drawn.mean()) == pytest.approx(0, abs=0.03)
    assert float(drawn.std()) == pytest.approx(1, abs=0.03)
    assert found.deviations is None
    assert found.noise is not None
    both = torch.stack((drawn.flatten(), found.noise.flatten()))
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.05, "the noise is other than the posterior's"
    again = replace(given, samples=given.samples + ROWS, deviations=torch.full_like(given.latents, 0.1))
    assert not torch.isclose(objective().prepare(again, seed=1).latents, found.latents).all(-1).any()


def test_numbers_depend_on_seed_and_sample_alone():
    given = batch()
    whole = objective().prepare(given, seed=1)
    part = objective().prepare(given.map(lambda tensor: tensor[2:] if len(tensor) == 4 else tensor), seed=1)
    other = objective().prepare(given, seed=2)
    assert all(torch.equal(a[-2:], b[-2:]) for a, b in zip(whole.tensors, part.tensors, strict=True))
    assert whole.noise is not None
    assert other.noise is not None
    assert not torch.isclose(whole.noise, other.noise).any()


class Constant(nn.Module):
    """Velocity of ones, which keeps what it was called with."""

    def forward(self, noisy: Tensor, text: Tensor, **named: Tensor) -> Tensor:
        self.noisy, self.named = noisy, named
        return torch.ones_like(noisy)


def test_the_loss_is_the_mean_squared_error_of_the_velocity_over_all_elements():
    prepared = replace(objective().prepare(batch(), seed=1), weights=torch.tensor([1.0, 1, 1, 0]))
    model = Constant()
    found = objective()(model, prepared)
    assert prepared.noise is not None
    assert prepared.times is not None
    expected = ((1 - (prepared.noise - prepared.latents)) ** 2)[:3].mean()
    assert objective().count(prepared) == 3 * (2 + 6)
    torch.testing.assert_close(found.total / objective().count(prepared), expected)
    times = prepared.times[:, None, None]
    torch.testing.assert_close(model.noisy, prepared.latents + times * (prepared.noise - prepared.latents))
    assert model.named["guidance"] is prepared.guidance


@pytest.mark.parametrize(
    ("options", "message"), [({"times": "cosine"}, "times"), ({"tims": 1}, "times"), ({"text_dropout": 1}, "below 1")]
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        RectifiedFlow.build(None, **options)  # type: ignore[arg-type]  # it reads no other key


def times_are_uniform(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def time(_: RectifiedFlow, seed: int, sample: int, tokens: int) -> float:
        return keyed_generator(seed, sample, "time").random()

    monkeypatch.setattr(RectifiedFlow, "time", time)
    return lambda: test_times_have_their_distribution("logit_normal", [0.014, 0.5, 0.986])


def times_are_not_shifted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.setattr(rectified_flow, "shifted", lambda time, tokens: time)
    return test_more_image_tokens_shift_times_towards_noise


def one_draw_drops_both_texts(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def generator(seed: int, sample: int, purpose: str) -> Any:
        return keyed_generator(seed, sample, purpose.rpartition(" ")[2])

    monkeypatch.setattr(rectified_flow, "keyed_generator", generator)
    return test_texts_are_dropped_independently_and_guidance_lies_between_its_bounds


def numbers_depend_on_the_rank_and_the_order_of_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    shared = np.random.default_rng(0)
    monkeypatch.setattr(rectified_flow, "keyed_generator", lambda *_: shared)
    return test_numbers_depend_on_seed_and_sample_alone


def rows_that_fill_a_batch_up_are_counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    plain = RectifiedFlow.count
    monkeypatch.setattr(
        RectifiedFlow, "count", lambda self, batch: plain(self, replace(batch, weights=torch.ones_like(batch.weights)))
    )
    return test_the_loss_is_the_mean_squared_error_of_the_velocity_over_all_elements


@pytest.mark.parametrize(
    "mutation",
    [
        times_are_uniform,
        times_are_not_shifted,
        one_draw_drops_both_texts,
        numbers_depend_on_the_rank_and_the_order_of_steps,
        rows_that_fill_a_batch_up_are_counted,
    ],
)
def test_mutations_are_noticed(monkeypatch: pytest.MonkeyPatch, mutation: Callable[..., Callable[[], None]]):
    noticing = mutation(monkeypatch)
    with pytest.raises(AssertionError):
        noticing()


def test_a_compiled_loss_is_one_graph_with_the_eager_gradients():
    drawn = objective().prepare(batch(), seed=1)
    velocity = nn.Parameter(torch.randn_like(drawn.latents))

    class Velocity(nn.Module):
        def forward(self, *_: Any, **__: Any) -> Tensor:
            return velocity

    def gradient(backend: str | None) -> Tensor:
        built = RectifiedFlow.build(experiment_of().training, compile_backend=backend)
        return torch.autograd.grad(built(Velocity(), drawn).total, velocity)[0]

    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    assert torch.equal(gradient("aot_eager"), gradient(None))
    assert counters["unique_graphs"] == before + 1
