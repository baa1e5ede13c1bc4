"""Statistics: paired and unpaired t-tests, a moving average, and scaling laws of a ladder by variable projection."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Any, Literal

import numpy as np
import scipy  # submodules are imported at their first use

from titan_exp.config.errors.user_error import UserError, listed

LEVEL = 0.95
Pairing = Literal["paired", "unpaired", "single"]
"""Pairing: `paired` compares equal seeds, `unpaired` compares means (Welch), `single` one number with another."""


@dataclass(frozen=True)
class Estimate:
    """Mean of a metric over the seeds with a known value."""

    mean: float
    low: float | None
    """Bounds of the confidence interval; None with one seed."""
    high: float | None
    n: int


@dataclass(frozen=True)
class Delta:
    """Difference from the baseline: row minus baseline."""

    difference: float
    """Difference of means; over common seeds if paired."""
    low: float | None
    """Bounds of the confidence interval, not Holm-corrected; None without an interval."""
    high: float | None
    n: int
    """Number of pairs; the smaller number of seeds if unpaired."""
    pairing: Pairing
    p: float | None = None
    """Two-sided p-value; None without an interval."""
    p_holm: float | None = None
    """Holm-corrected p-value over all comparisons of this metric (Holm 1979)."""

    @property
    def is_distinguishable(self) -> bool | None:
        """True if it differs from 0 after Holm correction; None without an interval."""
        p = self.p if self.p_holm is None else self.p_holm
        return None if p is None else p < 1 - LEVEL

    @property
    def holds_zero(self) -> bool | None:
        """True if the interval contains 0; None without one."""
        return None if self.low is None or self.high is None else self.low <= 0 <= self.high


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean of values with its confidence interval; None without values."""
    if not values:
        return None
    if len(values) == 1:
        return Estimate(fmean(values), None, None, 1)
    found = _delta("single", fmean(values), len(values), values)
    return Estimate(found.difference, found.low, found.high, found.n)


def difference(values: Mapping[object, float], baseline: Mapping[object, float]) -> Delta | None:
    """Difference between values and the baseline's, both by seed; None if either is empty. Common seeds are paired,
    which cancels the effect of initial weights and data order; other seeds are left out. With fewer than two common
    seeds and at least two on both sides, means are compared (Welch 1947)."""
    common = [seed for seed in values if seed in baseline]
    if not values or not baseline:
        return None
    if len(common) > 1:
        differences = [values[seed] - baseline[seed] for seed in common]
        return _delta("paired", fmean(differences), len(common), differences)
    mean = fmean(values.values()) - fmean(baseline.values())
    if (n := min(len(values), len(baseline))) > 1:
        return _delta("unpaired", mean, n, list(values.values()), list(baseline.values()))
    mean = values[common[0]] - baseline[common[0]] if common else mean
    return Delta(mean, None, None, 1, "single")


def holm(deltas: Sequence[Delta | None]) -> list[Delta | None]:
    """Set `p_holm` by Holm's step-down correction: the smallest of m p-values times m, the next times m - 1, ..."""
    known = sorted((delta.p, index) for index, delta in enumerate(deltas) if delta is not None and delta.p is not None)
    found, largest = list(deltas), 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - rank)))
        delta = deltas[index]
        assert delta is not None
        found[index] = replace(delta, p_holm=largest)
    return found


def differences(rows: Sequence[Mapping[object, float] | None], baseline: int) -> list[Delta | None]:
    """Difference of each row from the baseline row, corrected together; None for that one, and for rows of None."""
    base = rows[baseline] or {}
    return holm([None if row is None or place == baseline else difference(row, base) for place, row in enumerate(rows)])


def _delta(pairing: Pairing, mean: float, n: int, *samples: Sequence[float]) -> Delta:
    if all(min(values) == max(values) for values in samples):  # scipy would divide by zero
        return Delta(mean, mean, mean, n, pairing, 1.0 if mean == 0 else 0.0)
    test = _student(*samples)
    interval = test.confidence_interval(LEVEL)
    return Delta(mean, float(interval.low), float(interval.high), n, pairing, float(test.pvalue))


def _student(*samples: Sequence[float]) -> Any:
    """Test of one sample against 0, which for differences is scipy's paired test, or of two (Welch)."""
    from scipy import stats

    with warnings.catch_warnings():
        # Values that differ only by rounding correctly give a narrow interval.
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        one = len(samples) == 1
        return stats.ttest_1samp(*samples, 0.0) if one else stats.ttest_ind(*samples, equal_var=False)


def moving_average(values: list[float]) -> list[float]:
    """Centred moving average over about 4 % of the values. At the end the window is cut off, so that the last value is
    the mean of the last 2 %. At the beginning, where a loss falls fast, a line is fitted to the cut-off window.
    Non-finite values become NaN and do not count in their neighbours' averages."""
    loss = np.array(values)
    known = np.isfinite(loss)
    index, half = np.arange(len(loss)), max(1, len(loss) // 50)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, loss, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    last = np.minimum(index + half + 1, len(loss))
    first = np.maximum(index - half + (index + half >= len(loss)), 0)
    mean = (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
    for place in range(min(half, len(loss) - half)):
        window = index[: place + half + 1][known[: place + half + 1]]
        if len(window) > 1:
            mean[place] = np.polyfit(window - place, loss[window], 1)[1]
    return np.where(known, mean, np.nan).tolist()


Array = np.ndarray[Any, np.dtype[Any]]
EXPONENTS = (0.02, 2.0)  # bounds of the exponents; a fit that reaches one is refused
SIDE = 9  # values of each exponent in a grid; the next grid has 3/8 of its width
ZOOMS = 14  # grids of the fit; half as many of its refits, which differ by far more
DRAWS = 400  # ladders that are simulated for intervals
FURTHER_APART = "Add rungs that lie further apart, or seeds."


@dataclass(frozen=True)
class Rung:
    """Runs of one size and length that differ only in their seed."""

    at: tuple[float, ...]  # non-embedding parameters and tokens, or FLOPs alone
    losses: tuple[float, ...]
    """Final losses by seed. Losses within a decaying run lie above the frontier and bias the law."""


@dataclass(frozen=True)
class ScalingLaw:
    """Law L = E + sum of A_j (x_j / s_j)^-a_j, with as many simulated refits."""

    scale: Array  # geometric means s of the rungs
    terms: Array  # E and A
    exponents: Array
    noise: float  # standard deviation of one run, pooled within rungs
    freedom: int  # degrees of freedom of the noise
    drawn_terms: Array  # of each refit, in rows; a vanished term has the exponent 0
    drawn_exponents: Array
    drawn_noise: Array

    @property
    def irreducible(self) -> float:
        """Loss E of infinitely large rungs."""
        return float(self.terms[0])

    @property
    def coefficients(self) -> tuple[float, ...]:
        """A without the scale: L = E + sum of A_j x_j^-a_j."""
        return tuple((self.terms[1:] * self.scale**self.exponents).tolist())

    def loss(self, *at: float) -> float:
        """Loss at a size."""
        return float(_loss(self.terms, self.exponents, np.array(at) / self.scale))

    def slope(self, *at: float) -> float:
        """Fall of the loss with the logarithm of compute, parameters and tokens growing alike."""
        return float(_slope(self.terms, self.exponents, np.array(at) / self.scale))

    def exponent_intervals(self) -> list[tuple[float, float]]:
        """Interval of each exponent."""
        return [_interval(column) for column in self.drawn_exponents.T]

    def interval(self, *at: float, seeds: int | None = None) -> tuple[float, float]:
        """Interval of the loss at a size, or of the mean over so many new runs."""
        drawn = _loss(self.drawn_terms, self.drawn_exponents, np.array(at) / self.scale)
        if seeds is not None:
            noise = np.random.default_rng(1).standard_normal(len(drawn))
            drawn = drawn + self.drawn_noise * noise / math.sqrt(seeds)
        # Refits lie around the fit as the fit lies around the truth.
        low, high = _interval(drawn)
        return 2 * self.loss(*at) - high, 2 * self.loss(*at) - low


@dataclass(frozen=True)
class Multiplier:
    """Compute that the baseline needs for a loss over what the variant needs; above 1 the variant is better."""

    estimate: float  # pooled over rungs, as if it did not change with scale
    low: float
    high: float
    by_rung: tuple[tuple[float, float, float], ...]  # estimate and bounds at each rung, with noise pooled over rungs
    constancy: float | None  # p-value of its being the same at all rungs; if it is small, the pooled one means nothing


@dataclass(frozen=True)
class HoldOut:
    """Largest rung against the law of the smaller ones."""

    rung: Rung
    predicted: float
    low: float  # bounds for the mean of as many runs as the rung has
    high: float
    measured: float

    @property
    def holds(self) -> bool:
        """True if the measured loss is inside the interval."""
        return self.low <= self.measured <= self.high

    @property
    def refusal(self) -> str:
        """Reason for extrapolating nothing, where the law does not hold."""
        return (
            f"The law of the smaller rungs predicts {self.predicted:.4g} [{self.low:.4g}, {self.high:.4g}] at the "
            f"largest, where {self.measured:.4g} was measured: it does not extrapolate. Run the size in question."
        )


def fit(rungs: Sequence[Rung]) -> ScalingLaw:
    """Fit a law to final losses, by least squares over runs.

    For given exponents the rest is linear, so the exponents are searched on a grid that narrows, with non-negative
    least squares inside (variable projection, arXiv 2603.22339), and nothing depends on a start. Intervals come from
    refits of simulated ladders, whose noise is the variance pooled within rungs over a chi-square draw: two or three
    seeds are too few to resample.

    Raises:
        UserError: the rungs cannot tell the terms apart, no rung has two seeds, or the fit is at a bound.
    """
    at, means, counts = _checked(rungs)
    freedom = int(counts.sum()) - len(rungs)
    noise = math.sqrt(sum(float(np.var(rung.losses)) * len(rung.losses) for rung in rungs) / freedom)
    scale = np.exp(np.log(at).mean(0))
    terms, exponents = (found[0] for found in _search(at / scale, means[None], counts, ZOOMS))
    names = ["E", *(f"A{place}" for place in range(1, len(terms)))]
    at_bound = [name for name, term in zip(names, terms, strict=True) if term <= 0]
    at_bound += [
        f"exponent {place} of {exponent:.3g}"
        for place, exponent in enumerate(exponents, 1)
        if not EXPONENTS[0] * 1.01 < exponent < EXPONENTS[1] / 1.01
    ]
    if at_bound:
        bound = f"The fit is at a bound of {listed(at_bound, 'and')}"
        raise UserError(f"{bound}: the rungs do not show the law's shape. {FURTHER_APART}")
    generator = np.random.default_rng(0)
    drawn_noise = noise * np.sqrt(freedom / generator.chisquare(freedom, DRAWS))
    spread = generator.standard_normal((DRAWS, len(rungs))) / np.sqrt(counts)
    simulated = _loss(terms, exponents, at / scale) + drawn_noise[:, None] * spread
    drawn_terms, drawn_exponents = _search(at / scale, simulated, counts, ZOOMS // 2)
    vanished = (drawn_terms[:, 1:] <= 0) | (drawn_exponents <= EXPONENTS[0] * 1.01)
    drawn_exponents = np.where(vanished, 0.0, drawn_exponents)
    law = ScalingLaw(scale, terms, exponents, noise, freedom, drawn_terms, drawn_exponents, drawn_noise)
    for place, (low, high) in enumerate(law.exponent_intervals(), 1):
        if low <= 0:
            zero = f"The interval of exponent {place}, [{low:.3g}, {high:.3g}], holds 0"
            raise UserError(f"{zero}: the rungs do not show that the loss falls with it. {FURTHER_APART}")
    return law


def _checked(rungs: Sequence[Rung]) -> tuple[Array, Array, Array]:
    """Sizes, mean losses and numbers of runs. Raises UserError if they cannot identify a law."""
    at = np.array([rung.at for rung in rungs], dtype=float).reshape(len(rungs), -1)
    counts = np.array([len(rung.losses) for rung in rungs])
    variables = at.shape[1]
    fewest = min((len(np.unique(column)) for column in at.T), default=0)
    if fewest < 3 or len(np.unique(at, axis=0)) < 2 * variables + 1:
        what = "parameters and of tokens" if variables == 2 else "FLOPs"
        needed = f"at least 3 different numbers of {what}, and {2 * variables + 1} different rungs"
        raise UserError(f"{len(rungs)} rungs: a law with {variables} terms needs {needed}. Add rungs.")
    logs = np.log(at) - np.log(at).mean(0)
    if np.linalg.matrix_rank(logs, tol=1e-6 * np.abs(logs).max()) < variables:
        raise UserError(
            "Tokens per parameter are the same in all rungs, so the terms of parameters and of tokens are one. Vary "
            "them, as branches of one trunk do, or fit over FLOPs alone."
        )
    losses = np.array([loss for rung in rungs for loss in rung.losses])
    if not np.isfinite(losses).all() or counts.min() < 1:
        raise UserError("A rung has no loss, or a diverged run. Leave the rung out; a law says nothing of divergence.")
    if counts.max() < 2:
        raise UserError("No rung has two seeds, so the noise of a run is unknown. Add a seed to at least one rung.")
    return at, np.array([np.mean(rung.losses) for rung in rungs]), counts


def _loss(terms: Array, exponents: Array, at: Array) -> Array:
    """Loss by refit (leading axes of the law), or by rung (leading axes of `at`)."""
    return terms[..., 0] + (terms[..., 1:] * at**-exponents).sum(-1)


def _slope(terms: Array, exponents: Array, at: Array) -> Array:
    return (exponents * terms[..., 1:] * at**-exponents).mean(-1)


def _interval(draws: Array) -> tuple[float, float]:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _search(at: Array, losses: Array, counts: Array, zooms: int) -> tuple[Array, Array]:
    """Terms and exponents of the best fit to each row of losses."""
    variables, rows = at.shape[1], np.arange(len(losses))
    side = np.linspace(-0.5, 0.5, SIDE)
    grid = np.stack(np.meshgrid(*[side] * variables, indexing="ij"), -1).reshape(-1, variables)
    low, high = np.log(EXPONENTS)
    middle, width = np.full((len(losses), variables), (low + high) / 2), high - low
    found = np.zeros((len(losses), variables + 1))
    for _ in range(zooms):
        tried = np.clip(middle[:, None] + width * grid, low, high)
        terms, errors = _project(np.exp(tried), at, losses, np.sqrt(counts))
        best = np.argmin(errors, axis=1)
        middle, width, found = tried[rows, best], width * 3 / (SIDE - 1), terms[rows, best]
    return found, np.exp(middle)


def _project(exponents: Array, at: Array, losses: Array, weights: Array) -> tuple[Array, Array]:
    """Non-negative least squares for each grid point of each row: terms and sum of squares. The best set of positive
    terms is found by trying all sets, of which there are 3 or 7; where all terms together are positive, no other set is
    better."""
    powers = at ** -exponents[..., None, :]
    columns = np.concatenate([np.ones((*powers.shape[:-1], 1)), powers], -1) * weights[:, None]
    shape, width = columns.shape[:2], columns.shape[-1]
    columns = columns.reshape(-1, len(weights), width)
    wanted = np.repeat(losses * weights, shape[1], axis=0)
    terms, errors = np.zeros((len(columns), width)), np.full(len(columns), np.inf)
    rest = np.arange(len(columns))
    for size in range(width, 0, -1):
        for chosen in combinations(range(width), size):
            x, y = columns[rest][..., chosen], wanted[rest]
            # Columns of length 1, and a ridge below rounding, where two of them are alike.
            length = np.linalg.norm(x, axis=1, keepdims=True)
            unit = x / length
            square = unit.transpose(0, 2, 1) @ unit + 1e-13 * np.eye(size)
            found = np.linalg.solve(square, unit.transpose(0, 2, 1) @ y[..., None])
            error = (((unit @ found)[..., 0] - y) ** 2).sum(-1)
            better = (found[..., 0] > 0).all(-1) & (error < errors[rest])
            kept = rest[better]
            errors[kept] = error[better]
            terms[kept] = 0.0
            terms[kept[:, None], chosen] = (found[..., 0] / length[:, 0])[better]
        if size == width:
            rest = rest[~np.isfinite(errors)]
        if not len(rest):
            break
    return terms.reshape(*shape, width), errors.reshape(shape)


def hold_out(rungs: Sequence[Rung]) -> HoldOut:
    """Predict the largest rung from the law of all smaller sizes. All rungs of the largest size are left out, and of
    them that of most tokens is predicted. A measured loss outside the interval is an alarm: the law does not hold, or
    the noise is not that of the smaller rungs. Raises UserError if the smaller rungs give no law."""
    largest = max(rungs, key=lambda rung: rung.at)
    smaller = [rung for rung in rungs if rung.at[0] < largest.at[0]]
    try:
        law = fit(smaller)
    except UserError as error:
        raise UserError(f"Without the largest size there is no law to test. {error}") from None
    low, high = law.interval(*largest.at, seeds=len(largest.losses))
    return HoldOut(largest, law.loss(*largest.at), low, high, float(np.mean(largest.losses)))


def compute_multiplier(law: ScalingLaw, pairs: Sequence[tuple[tuple[float, ...], Sequence[float]]]) -> Multiplier:
    """Compute multiplier of a variant by paired differences of final losses at each rung, positive if it is better.

    A small difference d is a shift of the baseline's `law` by ln CM = d / slope. Over rungs, d = ln CM * slope is a
    line through 0 with noise pooled within rungs, and the F-test of its lack of fit is the test of constancy. Intervals
    add the slope's variance over refits to that of d.

    Raises:
        UserError: a difference is not finite, or no rung has two pairs.
    """
    differences = [np.asarray(found, dtype=float) for _, found in pairs]
    counts = np.array([len(found) for found in differences])
    freedom = int(counts.sum()) - len(counts)
    if freedom < 1 or counts.min() < 1 or not all(np.isfinite(found).all() for found in differences):
        raise UserError(
            "The compute multiplier takes finite differences, at least one at each rung and two at one. Leave out "
            "rungs with a diverged run, and say so."
        )
    within = sum(float(((found - found.mean()) ** 2).sum()) for found in differences)
    variance, means = within / freedom, np.array([found.mean() for found in differences])
    slopes = np.array([law.slope(*at) for at, _ in pairs])
    drawn = np.stack([_slope(law.drawn_terms, law.drawn_exponents, np.array(at) / law.scale) for at, _ in pairs], -1)
    quantile = float(scipy.special.stdtrit(freedom, (1 + LEVEL) / 2))

    def bounds(rungs: Array) -> tuple[float, float, float]:
        weights = counts[rungs] * slopes[rungs]
        log = float(weights @ means[rungs] / (weights @ slopes[rungs]))
        again = (counts * drawn * means)[:, rungs].sum(-1) / (counts * drawn**2)[:, rungs].sum(-1)
        half = quantile * math.sqrt(variance / (weights @ slopes[rungs]) + float(np.var(again)))
        return math.exp(log), math.exp(log - half), math.exp(log + half)

    estimate, low, high = bounds(np.arange(len(counts)))
    by_rung = tuple(bounds(np.array([place])) for place in range(len(counts)))
    constancy, others = None, len(counts) - 1
    if others:
        lack = float(counts @ (means - math.log(estimate) * slopes) ** 2) / others
        constancy = float(scipy.special.fdtrc(others, freedom, lack / max(variance, 1e-300)))
    return Multiplier(estimate, low, high, by_rung, constancy)
