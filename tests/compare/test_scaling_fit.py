"""Scaling fits of known surfaces: what they recover, what they refuse, and how often their intervals hold."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from titan_exp.compare import statistics
from titan_exp.compare.statistics import Rung, ScalingLaw, compute_multiplier, fit, hold_out
from titan_exp.config.errors.user_error import UserError

SIZES = (1e7, 3e7, 1e8, 3e8)
PER_PARAMETER = (10, 20, 40)
COMPUTE = (1.0, 4.0, 16.0, 64.0)


def surface(parameters: float, tokens: float) -> float:
    """Between the published fits of Chinchilla's surface."""
    return 1.8 + 400 * parameters**-0.34 + 410 * tokens**-0.28


def power(compute: float) -> float:
    return 1.8 + 1.2 * compute**-0.12


def ladder(seed: int, sd: float = 0.004, seeds: int = 3, sizes: tuple[float, ...] = SIZES) -> list[Rung]:
    draw = np.random.default_rng(seed)
    return [
        Rung((n, d * n), tuple(surface(n, d * n) + sd * draw.standard_normal(seeds)))
        for n in sizes
        for d in PER_PARAMETER
    ]


def climb(seed: int, seeds: int = 3, compute: tuple[float, ...] = COMPUTE, sd: float = 0.004) -> list[Rung]:
    draw = np.random.default_rng(seed)
    return [Rung((c,), tuple(power(c) + sd * c**-0.15 * draw.standard_normal(seeds))) for c in compute]


@pytest.fixture(scope="module")
def law() -> ScalingLaw:
    return fit(ladder(0))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer refits, where many fits are made."""
    monkeypatch.setattr(statistics, "DRAWS", 120)


def test_a_surface_without_noise_is_recovered():
    found = fit(ladder(1, sd=1e-7))
    assert found.exponents == pytest.approx([0.34, 0.28], rel=1e-3)
    assert found.irreducible == pytest.approx(1.8, abs=1e-3)
    assert found.coefficients == pytest.approx([400, 410], rel=1e-2)
    assert found.loss(1e9, 2e10) == pytest.approx(surface(1e9, 2e10), abs=1e-4)
    # Parameters and tokens growing alike: each as the square root of compute.
    step = (surface(1e8, 2e9) - surface(1e8 * math.exp(1e-4), 2e9 * math.exp(1e-4))) / 2e-4
    assert found.slope(1e8, 2e9) == pytest.approx(step, rel=1e-3)


def test_a_power_of_compute_is_recovered():
    found = fit(climb(2, sd=1e-7))
    assert (found.irreducible, *found.coefficients, *found.exponents) == pytest.approx([1.8, 1.2, 0.12], rel=2e-3)
    assert found.slope(16.0) == pytest.approx(0.12 * 1.2 * 16**-0.12, rel=1e-3)


def test_the_fit_is_the_least_sum_of_squares(law: ScalingLaw):
    """Against scipy's minimiser in all five parameters, from the truth and from the fit; runs count, not rungs."""
    rungs = ladder(0)
    rungs[3] = Rung(rungs[3].at, rungs[3].losses[:1])
    rows = [(*rung.at, loss) for rung in rungs for loss in rung.losses]
    n, d, losses = np.array(rows).T

    def squares(values: np.ndarray) -> float:
        return float(
            (
                (values[0] + values[1] * (n / 1e8) ** -values[3] + values[2] * (d / 2e9) ** -values[4] - losses) ** 2
            ).sum()
        )

    found = fit(rungs)
    scaled = [scale**-exponent for scale, exponent in zip((1e8, 2e9), found.exponents, strict=True)]
    ours = [found.irreducible, *np.multiply(found.coefficients, scaled), *found.exponents]
    best = min(
        optimize.minimize(
            squares, start, method="Nelder-Mead", options={"maxiter": 4000, "xatol": 1e-9, "fatol": 1e-14}
        ).fun
        for start in (ours, [1.8, 400 * 1e8**-0.34, 410 * 2e9**-0.28, 0.34, 0.28])
    )
    assert squares(np.array(ours)) <= best * (1 + 1e-4)


def test_terms_are_not_negative():
    """Against scipy's non-negative least squares, where some terms would be below 0."""
    draw, at = np.random.default_rng(3), np.exp(np.random.default_rng(4).normal(size=(8, 2)))
    losses, weights = draw.normal(size=(6, 8)), np.sqrt(draw.integers(1, 4, 8))
    exponents = draw.uniform(0.1, 1.5, (6, 5, 2))
    terms, errors = statistics._project(exponents, at, losses, weights)
    zeros = 0
    for row in range(6):
        for place in range(5):
            columns = np.column_stack([np.ones(8), *(at ** -exponents[row, place]).T]) * weights[:, None]
            expected, norm = optimize.nnls(columns, losses[row] * weights)
            assert terms[row, place] == pytest.approx(expected, abs=1e-6)
            if norm < np.linalg.norm(losses[row] * weights) * (1 - 1e-9):
                assert errors[row, place] == pytest.approx(norm**2)
            zeros += (expected == 0).sum()
    assert zeros > 10


def test_noise_is_pooled_within_rungs(law: ScalingLaw):
    rungs = ladder(0)
    deviations = [loss - float(np.mean(rung.losses)) for rung in rungs for loss in rung.losses]
    assert law.freedom == 24
    assert law.noise == pytest.approx(math.sqrt(np.square(deviations).sum() / 24))
    # Refits know it from as many runs: a chi-square over its degrees of freedom.
    for found in (law, fit(climb(0, seeds=2))):
        spread = (found.noise / found.drawn_noise) ** 2
        assert spread.mean() == pytest.approx(1, abs=0.15)
        assert spread.std() == pytest.approx(math.sqrt(2 / found.freedom), rel=0.2)


def test_a_new_run_has_its_noise(law: ScalingLaw):
    """Inside the ladder the law is known well, so that an interval is one of the noise."""
    for seeds in (1, 4):
        low, high = law.interval(1e8, 2e9, seeds=seeds)
        expected = 2 * stats.t.ppf(0.975, law.freedom) * law.noise / math.sqrt(seeds)
        assert high - low == pytest.approx(expected, rel=0.3)
        assert law.interval(1e8, 2e9)[1] - law.interval(1e8, 2e9)[0] < high - low


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("seeds", [2, 3])
def test_intervals_of_extrapolation_hold(seeds: int):
    """95 % intervals four times beyond the largest rung, over 40 studies; of one new run as well."""
    studies, truth, held, held_new = 40, power(256.0), 0, 0
    low = high = 0.0
    draw = np.random.default_rng(5)
    for seed in range(studies):
        found = fit(climb(100 + seed, seeds, sd=0.002))
        low, high = found.interval(256.0)
        held += low <= truth <= high
        low, high = found.interval(256.0, seeds=1)
        held_new += low <= truth + 0.002 * 256**-0.15 * draw.standard_normal() <= high
    assert held / studies >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / studies)
    assert held_new / studies >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / studies)
    assert high - low < 0.05, "an interval so wide shows nothing"


@pytest.mark.night
@pytest.mark.usefixtures("few")
def test_intervals_of_exponents_hold():
    studies, held = 100, np.zeros(2)
    for seed in range(studies):
        intervals = fit(ladder(200 + seed, sd=0.01)).exponent_intervals()
        held += [low <= exponent <= high for (low, high), exponent in zip(intervals, (0.34, 0.28), strict=True)]
    assert (held / studies >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / studies)).all()


REFUSED = {
    "two sizes": ([rung for rung in ladder(0) if rung.at[0] < 1e8], "at least 3 different numbers of parameters"),
    "two budgets": (climb(0, compute=(1.0, 4.0)), "at least 3 different numbers of FLOPs"),
    "four rungs": (
        [Rung((n, d), (surface(n, d),) * 2) for n, d in ((1e7, 1e8), (3e7, 1e9), (1e8, 1e9), (1e7, 1e10))],
        "5 different rungs",
    ),
    "lockstep": (
        [Rung((n, 20 * n), tuple(surface(n, 20 * n) + 1e-3 * k for k in range(2))) for n in (1e7, 2e7, 4e7, 8e7, 1e8)],
        "Tokens per parameter are the same",
    ),
    "one seed": (ladder(0, seeds=1), "No rung has two seeds"),
    "diverged": ([*ladder(0), Rung((1e9, 1e10), (2.7, math.nan))], "diverged run"),
    "no loss": ([*ladder(0), Rung((1e9, 1e10), ())], "no loss"),
    "a straight line": (
        [Rung((c,), (3 - 0.1 * math.log(c) ** 2, 3.001 - 0.1 * math.log(c) ** 2)) for c in COMPUTE],
        "at a bound",
    ),
    "a rising loss": ([Rung((c,), (3 + c / 100, 3.001 + c / 100)) for c in COMPUTE], "at a bound"),
    "nothing but noise": (climb(9, sd=1.0), "at a bound|holds 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str):
    rungs, words = REFUSED[name]
    with pytest.raises(UserError, match=words):
        fit(rungs)


@pytest.mark.usefixtures("few")
def test_an_exponent_that_may_be_0_is_refused():
    """Noise as large as the fall of the loss: fits inside the bounds, of which the refits say little."""
    refused = 0
    for seed in range(30):
        try:
            low, _ = fit(climb(700 + seed, sd=0.4)).exponent_intervals()[0]
        except UserError as error:
            refused += "holds 0" in str(error)
        else:
            assert low > 0
    assert refused > 1


@pytest.mark.usefixtures("few")
def test_the_hold_out_test_holds_for_a_true_law():
    studies = 40
    held = sum(hold_out(climb(300 + seed, 3, (1.0, 4.0, 16.0, 64.0, 256.0))).holds for seed in range(studies))
    assert held / studies >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / studies)


@pytest.mark.usefixtures("few")
def test_the_hold_out_test_notices_a_law_that_bends():
    """A loss that stops falling at the largest size, by 20 sd of a run."""
    rungs = climb(6, 3, (1.0, 4.0, 16.0, 64.0, 256.0), sd=0.001)
    assert hold_out(rungs).holds
    bent = [*rungs[:-1], Rung(rungs[-1].at, tuple(loss + 0.02 for loss in rungs[-1].losses))]
    found = hold_out(bent)
    assert not found.holds
    assert found.measured - found.predicted == pytest.approx(0.02, abs=0.01)
    assert "does not extrapolate" in found.refusal


@pytest.mark.usefixtures("few")
def test_the_largest_size_is_held_out_as_a_whole():
    """Its other budgets would tell the answer."""
    found = hold_out(ladder(7, sd=0.001))
    assert found.rung.at == (3e8, 40 * 3e8)
    assert found.holds
    changed = [Rung(r.at, tuple(np.array(r.losses) + 1)) if r.at[0] == 3e8 else r for r in ladder(7, sd=0.001)]
    assert hold_out(changed).predicted == found.predicted
    assert not hold_out(changed).holds
    with pytest.raises(UserError, match="Without the largest size there is no law to test"):
        hold_out(ladder(7, sizes=SIZES[:3]))


# The compute multiplier.


def pairs(multiplier: float, seed: int, count: int, sd: float = 0.004) -> list[tuple[tuple[float, ...], list[float]]]:
    """Differences of a variant that needs so much less compute."""
    draw = np.random.default_rng(seed)
    return [
        ((c,), (power(c) - power(c * multiplier) + sd * c**-0.15 * draw.standard_normal(count)).tolist())
        for c in COMPUTE
    ]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("multiplier", [1.0, 1.1])
def test_intervals_of_the_compute_multiplier_hold(multiplier: float):
    studies, held, alone, widths = 40, 0, np.zeros(4), []
    for seed in range(studies):
        found = compute_multiplier(fit(climb(400 + seed, 5)), pairs(multiplier, 500 + seed, 5))
        held += found.low <= multiplier <= found.high
        alone += [low <= multiplier <= high for _, low, high in found.by_rung]
        widths.append(math.log(found.high / found.low) / 2)
    assert held / studies >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / studies)
    assert alone.sum() / studies / 4 >= 0.93
    assert np.mean(widths) < 0.03


def test_the_compute_multiplier_by_hand(law: ScalingLaw):
    at = (1e8, 2e9)
    slope = law.slope(*at)
    differences = [0.01, 0.012, 0.014]
    found = compute_multiplier(law, [(at, differences)])
    assert math.log(found.estimate) == pytest.approx(0.012 / slope)
    assert found.constancy is None
    assert found.by_rung == ((found.estimate, found.low, found.high),)
    interval = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    half = (interval.high - interval.low) / 2 / slope
    assert math.log(found.high / found.estimate) == pytest.approx(half, rel=0.05)
    # Beyond few rungs the slope is known less well, which widens the interval.
    edge = fit(climb(0))
    half = (interval.high - interval.low) / 2 / edge.slope(64.0)
    found = compute_multiplier(edge, [((64.0,), differences)])
    assert math.log(found.high / found.estimate) > 1.005 * half


@pytest.mark.usefixtures("few")
def test_constancy():
    """The F-test has its rate where the multiplier is constant, and notices one that vanishes with scale."""
    baseline, constant, studies = fit(climb(8, 5, sd=0.001)), [], 200
    for seed in range(studies):
        constant.append(compute_multiplier(baseline, pairs(1.1, 600 + seed, 3, sd=0.001)).constancy)
    assert np.mean(np.array(constant) < 0.05) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies) + 0.02
    fading = [
        (at, (np.array(found) * share).tolist())
        for (at, found), share in zip(pairs(1.2, 9, 3), (3, 2, 1, 0), strict=True)
    ]
    found = compute_multiplier(baseline, fading)
    assert found.constancy is not None
    assert found.constancy < 0.01
    assert compute_multiplier(baseline, [(at, [1e-3] * 2) for at, _ in fading]).constancy == 0.0


def test_multipliers_that_are_refused(law: ScalingLaw):
    at = (1e8, 2e9)
    for differences in ([math.inf, 0.1], [0.1], []):
        with pytest.raises(UserError, match="takes finite differences"):
            compute_multiplier(law, [(at, differences)])


@pytest.mark.night
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_extrapolation_at_length(seeds: int):
    """RMS errors and coverage of nominal 95 % at four times the largest rung, over 300 studies, as measured by another
    program."""
    truth, found = power(256.0), []
    for seed in range(300):
        try:
            found.append(fit(climb(1000 + seed, seeds)))
        except UserError:
            continue
    held = np.mean([low <= truth <= high for low, high in (law.interval(256.0) for law in found)])
    rms = math.sqrt(np.mean([(law.loss(256.0) - truth) ** 2 for law in found]))
    assert len(found) > 200
    assert held >= 0.93
    assert rms == pytest.approx({2: 0.0040, 3: 0.0036, 5: 0.0026}[seeds], abs=0.0006)
