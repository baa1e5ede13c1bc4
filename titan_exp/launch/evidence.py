"""Sequential evidence from paired runs: planned looks, anytime-valid e-values, verdicts, false discoveries, and the
standing of a registered question.

The unit of evidence is a pair of runs, A and B, with one seed for initial weights and data order. Its difference is
positive where A is better, and infinite where one arm alone diverged: see `paired_differences`.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, cast

import numpy as np
import scipy  # submodules are imported at their first use

from titan_exp.config.errors.user_error import listed
from titan_exp.config.study.study import FEWEST_PAIRS as FEWEST
from titan_exp.config.study.study import MOST_PAIRS as MOST
from titan_exp.launch.ledger import LARGEST_E, Outcome, Question, Registration
from titan_exp.tracking.display import format_count, format_items

Array = np.ndarray[Any, np.dtype[Any]]

Why = Literal["evidence", "futility", "withheld", "last look", "a look to come"]
"""`withheld`: the arm that the evidence favours diverged alone in more pairs than the other."""

CELLS = 500  # cells of the null distribution in `nominal_level`, whose error falls with their square


@dataclass(frozen=True)
class Rule:
    """Rule by which pairs become a verdict, fixed before the first run."""

    alpha: float = 0.05
    """Chance of a wrong verdict, at most: of any among `tries`, and in either direction if there are two sides."""
    looks: tuple[int, ...] | None = None
    """Numbers of pairs after which the paired t-test is looked at; None for an e-value, looked at after every pair."""
    futility: bool = True  # True to stop at a look where A is not ahead. It saves runs and adds no false verdict.
    sides: Literal[1, 2] = 2
    """2 if the verdict may be `worse` too, which halves the level of each; with 1 all of it is spent on `better`."""
    prior: float = 10.0
    """Prior variance of the effect in units of the variance of a pair: 4 to 10 expects effects of 2 to 3 sd."""
    tries: int = 1
    """Questions that share alpha equally (Bonferroni). A discovery among many takes an e-value of tries/alpha."""
    most: int = 8  # pairs after which an e-value is given up; planned looks end with their last

    def __post_init__(self) -> None:
        """Raises ValueError about a rule that has no level; a study's keys are checked where it is read."""
        looks = (self.most,) if self.looks is None else self.looks
        rising = bool(looks) and list(looks) == sorted(set(looks)) and FEWEST <= looks[0] <= looks[-1] <= MOST
        if not (rising and 0 < self.alpha < 0.5 and self.prior > 0 and self.tries >= 1):
            raise ValueError(f"{self}: pairs rise from {FEWEST} to {MOST}, 0 < alpha < 0.5, prior > 0, tries >= 1")

    @property
    def last(self) -> int:
        """Number of pairs that the rule takes at most."""
        return self.most if self.looks is None else self.looks[-1]

    @property
    def per_side(self) -> float:
        """Chance of a wrong verdict in one direction and one try."""
        return self.alpha / (self.sides * self.tries)

    @property
    def nominal(self) -> float:
        """Bound of the one-sided p-value at each planned look, or of 1/e."""
        return self.per_side if self.looks is None else nominal_level(self.looks, self.per_side)

    def next_look(self, pairs: int) -> int | None:
        """First look after so many pairs; None after the last."""
        looks = range(FEWEST, self.most + 1) if self.looks is None else self.looks
        return next((look for look in looks if look > pairs), None)


@dataclass(frozen=True)
class Verdict:
    """Verdict over the pairs of one question."""

    outcome: Outcome
    why: Why
    pairs: int  # complete pairs at the look that the numbers below are of; pairs after it are not looked at
    next_look: int | None
    estimate: float | None
    """Mean difference over pairs that both arms finished, positive if A is better; exaggerated after an early stop."""
    low: float | None  # bounds of an interval that holds at all looks at once; None with fewer than two finished pairs
    high: float | None
    coverage: float  # chance that the interval holds the truth at every look
    e_better: float  # e-value against A being no better. It averages 1 at most if so, wherever the rule stops.
    e_worse: float
    p_better: float  # one-sided p-value at this number of pairs, not corrected for looks
    p_worse: float
    diverged: tuple[int, int, int]  # number of pairs in which A alone, B alone, and both diverged
    rule: Rule

    def sentence(self, a: str, b: str, metric: str = "the metric", *, lower: bool = True, rate: bool = True) -> str:
        """Sentences for A and B by name, with the size of the gain or loss; without a verdict, with the metric of A
        minus that of B. `lower` is True if lower is better. Without `rate` they state no chance of error."""
        said = {
            "better": f"{a} is better than {b}",
            "worse": f"{a} is worse than {b}",
            "undecided": f"Undecided between {a} and {b}",
            "continue": f"No verdict on {a} against {b} yet",
        }[self.outcome]
        sentences = [f"{said} after {format_items(self.pairs, 'pair')}"]
        if self.estimate is not None:
            decided = self.outcome in ("better", "worse")
            negate, form = self.outcome == "worse" or (not decided and lower), ".3g" if decided else "+.3g"
            found = [value for value in (self.estimate, self.low, self.high) if value is not None]
            estimate, *bounds = (-value if negate else value for value in found)
            size = f"{estimate:{form}}"
            if bounds:
                size += f" [{min(bounds):{form}}, {max(bounds):{form}}] ({100 * self.coverage:g} %, at every look)"
            size = size.replace("-", "\u2212")
            sentences[0] += f", by {size} in {metric}" if decided else f": {metric} differs by {size}"
        if self.next_look is not None:
            sentences.append(f"The next look is after {self.next_look}")
        if self.outcome in ("better", "worse") and rate:
            tries = "" if self.rule.tries == 1 else f" in any of {self.rule.tries} tries"
            sentences.append(f"The chance of a wrong verdict{tries} is at most {100 * self.rule.alpha:g} %")
        elif self.why == "futility":
            sentences.append(f"Stopped because {a} was not ahead")
        alone = zip((f"{a} alone", f"{b} alone", "both"), self.diverged, strict=True)
        if any(self.diverged):
            named = listed([f"{who} in {count}" for who, count in alone if count], "and")
            sentences.append(f"Of {format_items(self.pairs, 'pair')}, diverged: {named}; the size is of the others")
        if self.why == "withheld":
            sentences.append("The evidence favours the arm that diverged more often, so nothing is said")
        return ". ".join(sentences) + "."


def paired_differences(
    a: Mapping[Any, float | None], b: Mapping[Any, float | None], seeds: Sequence[Any], better: str = "min"
) -> list[float]:
    """Differences of the pairs in their registered order, up to the first that is not complete (absent or None).

    A difference is positive if A is better. A run that is not finite diverged: the pair is -inf if A alone did, inf if
    B alone did, NaN if both did. A pair that ends late may not be passed over, since slow runs are not random ones.
    """
    found = []
    for seed in seeds:
        one, other = a.get(seed), b.get(seed)
        if one is None or other is None:
            break
        # A diverged loss is infinitely bad, so that the difference is as well: -inf, inf, or NaN.
        worst = math.inf if better == "min" else -math.inf
        one, other = (loss if math.isfinite(loss) else worst for loss in (one, other))
        found.append(other - one if better == "min" else one - other)
    return found


@dataclass(frozen=True)
class Evidence:
    """Evidence after each pair; arrays of the shape of the differences, whose last axis is the pairs."""

    finished: Array
    mean: Array
    squares: Array  # sum of squares around the mean
    won: Array  # number of pairs in which B alone diverged
    lost: Array  # number of pairs in which A alone diverged
    both: Array
    ahead: Array  # True if A is ahead: in the mean, or in won pairs once an arm alone diverged
    e_values: tuple[Array, Array]  # for A being better, and worse
    p_values: tuple[Array, Array]  # one-sided, for A being better, and worse


def gather(differences: Array, prior: float) -> Evidence:
    """Evidence after each pair.

    Finished pairs are taken as normal with an unknown variance. Pairs in which an arm alone diverged have a sign only:
    they multiply the e-value by a sign test's, and turn the t-test into a sign test over all pairs. Both hold while
    the two arms are equally likely to diverge, given that one does.
    """
    given, infinite = np.asarray(differences, dtype=float), np.isinf(differences)
    finite = np.isfinite(given)
    n = np.cumsum(finite, -1)
    total = np.cumsum(np.where(finite, given, 0.0), -1)
    mean = total / np.maximum(n, 1)
    # Around the first finished pair, so that a large mean does not cancel its small variance.
    first = np.take_along_axis(given, np.argmax(finite, -1)[..., None], -1)
    apart = np.where(finite, given - np.where(np.isfinite(first), first, 0.0), 0.0)
    squares = np.maximum(np.cumsum(apart**2, -1) - np.cumsum(apart, -1) ** 2 / np.maximum(n, 1), 0.0)
    lost, won = np.cumsum(infinite & (given < 0), -1), np.cumsum(infinite & (given > 0), -1)
    wins, losses = np.cumsum(given > 0, -1), np.cumsum(given < 0, -1)
    better, worse = _t_mixture(n, mean, squares, prior)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(mean == 0, 0.0, mean * np.sqrt(n * np.maximum(n - 1, 0) / squares))
    below, above = (np.where(n < 2, 1.0, scipy.special.stdtr(np.maximum(n - 1, 1), side)) for side in (-t, t))
    signs = won + lost > 0
    return Evidence(
        finished=n,
        mean=mean,
        squares=squares,
        won=won,
        lost=lost,
        both=np.cumsum(np.isnan(given), -1),
        ahead=np.where(signs, (wins > losses) & (won >= lost), mean > 0),
        e_values=(better * _sign_mixture(won, lost), worse * _sign_mixture(lost, won)),
        p_values=(np.where(signs, _sign_test(wins, losses), below), np.where(signs, _sign_test(losses, wins), above)),
    )


def _t_mixture(n: Array, mean: Array, squares: Array, prior: float) -> tuple[Array, Array]:
    """E-values for a positive and for a negative mean of normal differences of unknown variance.

    Likelihood ratio of effects mean/sd ~ N(0, prior), cut to one sign, with a right-Haar prior on the sd (Lai 1976;
    Perez-Ortiz et al. 2024; Wang and Ramdas 2023). Each averages 1 if the mean is 0, at any time of stopping that
    depends on signs and ratios of the differences. It rises with t, so that a mean of the other sign only lowers it.
    """
    around_zero = squares + n * mean**2
    around_posterior = squares + n * mean**2 / (1 + n * prior)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratio = np.where(around_zero > 0, np.log(around_zero) - np.log(around_posterior), 0.0)
        # Posterior mean over its scale: Student's t with n degrees of freedom.
        t = np.where(around_zero > 0, mean * n / np.sqrt(around_posterior * (1 + 1 / (n * prior))), 0.0)
    two_sided = np.where(n > 0, np.exp(n / 2 * log_ratio - np.log1p(n * prior) / 2), 1.0)
    better, worse = (
        2 * two_sided * np.where(n > 0, scipy.special.stdtr(np.maximum(n, 1), side), 0.5) for side in (t, -t)
    )
    return better, worse


def _sign_mixture(wins: Array, losses: Array) -> Array:
    """E-value for wins being likelier than losses: binomial, mixed uniformly over chances from 1/2 to 1."""
    n = wins + losses
    return 2.0 ** (n + 1) * scipy.special.beta(wins + 1, losses + 1) * scipy.special.betainc(losses + 1, wins + 1, 0.5)


def _sign_test(wins: Array, losses: Array) -> Array:
    """One-sided p-value: chance of at least so many wins of a fair coin."""
    return np.where(wins > 0, scipy.special.betainc(np.maximum(wins, 1), losses + 1, 0.5), 1.0)


def stops(differences: Array, rule: Rule) -> tuple[Evidence, Array, Array, Array]:
    """Evidence; index of the look at which the rule stops, outcome and reason there; over the last axis.

    Where it does not stop, the outcome is `continue` and the index is that of the last look, -1 before the first.
    """
    found, pairs = gather(differences, rule.prior), np.arange(1, differences.shape[-1] + 1)
    look = (np.isin(pairs, rule.looks) if rule.looks else pairs >= FEWEST) & (pairs <= rule.last)
    enough = look & (found.finished + found.won + found.lost >= FEWEST)
    if rule.looks:
        better, worse = (enough & (p <= rule.nominal) for p in found.p_values)
    else:
        better, worse = (enough & (e * rule.nominal >= 1) for e in found.e_values)
    worse &= rule.sides == 2
    withheld = (better & (found.lost > found.won)) | (worse & (found.won > found.lost))
    futile = look & ~found.ahead & rule.futility
    ends = ((better | worse) & ~withheld) | futile | (look & (pairs == rule.last))
    at = np.where(ends.any(-1), np.argmax(ends, -1), np.max(np.where(look, pairs, 0)) - 1)
    here = np.maximum(at, 0)[..., None]
    said = [np.take_along_axis(each, here, -1)[..., 0] for each in (~ends, withheld, better, worse, futile)]
    outcome = np.select(said, ["continue", "undecided", "better", "worse", "undecided"], "undecided")
    why = np.select(said, ["a look to come", "withheld", "evidence", "evidence", "futility"], "last look")
    return found, at, outcome, why


def decide(differences: Sequence[float], rule: Rule) -> Verdict:
    """Verdict over the complete pairs of a question, in their registered order (`paired_differences`).

    The answer depends on the pairs alone, not on when or how often it is asked: looks are taken in order, each over
    the pairs up to it, and the first that decides ends the question.

    Differences are taken as near normal. Heavy tails and unequal variances only lower the rates, but rare large losses
    among frequent small gains do not show in few pairs: exponential ones make "better" wrong in up to 20 %.

    "Better" is withheld if A alone diverged in more pairs than B alone, since no small number of pairs can weigh a
    small gain against a rare disaster; likewise "worse".
    """
    found, index, outcome, why = stops(np.array(differences or [0.0], dtype=float), rule)
    at = int(index) if differences else -1
    if at < 0:
        # Nothing is looked at before the first look.
        found = replace(gather(np.full(1, math.nan), rule.prior), both=np.zeros(1))
    n, mean, squares = (column[at].item() for column in (found.finished, found.mean, found.squares))
    half = half_width(n, math.sqrt(squares / (n - 1)), rule) if n > 1 else None
    e_better, e_worse, p_better, p_worse = (column[at].item() for column in (*found.e_values, *found.p_values))
    return Verdict(
        outcome=cast(Outcome, str(outcome)),
        why=cast(Why, str(why)),
        pairs=at + 1,
        next_look=rule.next_look(at + 1) if outcome == "continue" else None,
        estimate=mean if n else None,
        low=None if half is None else mean - half,
        high=None if half is None else mean + half,
        coverage=1 - 2 * rule.per_side,
        e_better=e_better,
        e_worse=e_worse,
        p_better=p_better,
        p_worse=p_worse,
        diverged=(int(found.lost[at]), int(found.won[at]), int(found.both[at])),
        rule=rule,
    )


def half_width(n: int, sd: float, rule: Rule) -> float:
    """Half-width of the interval of a mean difference that holds at all looks of the rule at once.

    Planned looks: Student's t at the nominal level (repeated intervals, Jennison and Turnbull 1989). E-value: all means
    that the two-sided mixture does not reject (Wang and Ramdas 2023); infinite while it can reject none.
    """
    if rule.looks is not None:
        return sd / math.sqrt(n) * float(-scipy.special.stdtrit(n - 1, rule.nominal))
    spread = 1 + n * rule.prior
    r = (2 * rule.per_side) ** (-2 / n) * spread ** (1 / n)
    return math.inf if r >= spread else sd * math.sqrt((n - 1) * (r - 1) / (1 - r / spread) / n)


@cache
def nominal_level(looks: tuple[int, ...], alpha: float) -> float:
    """Level of the one-sided paired t-test at each look at which the chance to reject at any of them is alpha.

    With R = sum d / sqrt(n sum d^2) and normal d of mean 0, the next pair has d / sqrt(sum d^2) = tan(phi), where phi
    has a density proportional to cos(phi)^(n - 1) and does not depend on R so far. So R is a Markov chain, R' =
    (sqrt(n) R cos(phi) + sin(phi)) / sqrt(n + 1), and its distribution below the bounds is carried from look to look
    (as Armitage, McPherson and Rowe 1969 do for known variance). A stop for futility is not counted on.
    """
    steps = [(n, _next_cells(n)) for n in range(looks[0], looks[-1])]

    def rejects(level: float) -> float:
        kept = np.clip((1 - level) * CELLS - np.arange(CELLS), 0, 1)
        mass = kept / CELLS
        for n, following in steps:
            mass = mass @ following
            mass = mass * kept if n + 1 in looks else mass
        return 1 - float(mass.sum())

    low, high = alpha / len(looks), alpha
    while high - low > 1e-7 * alpha:
        middle = (low + high) / 2
        low, high = (low, middle) if rejects(middle) > alpha else (middle, high)
    return low


@cache
def _next_cells(n: int) -> Array:
    """Chances to get from each cell of t after n pairs to each after n + 1; cells are equally likely without bounds."""

    def correlation(pairs: int, quantiles: Array) -> Array:
        t = scipy.special.stdtrit(pairs - 1, quantiles)
        return t / np.sqrt(pairs - 1 + t**2)

    at = correlation(n, (np.arange(CELLS) + 0.5) / CELLS)[:, None]
    edges = np.concatenate([[-1.0], correlation(n + 1, np.arange(1, CELLS) / CELLS), [1.0]])
    angles = np.linspace(-math.pi / 2, math.pi / 2, 20_001)
    below = scipy.special.stdtr(n, math.sqrt(n) * np.tan(angles))
    shift = np.arctan(math.sqrt(n) * at)
    top = np.arcsin(np.clip(math.sqrt(n + 1) * edges / np.sqrt(n * at**2 + 1), -1, 1))
    # sin(phi + shift) is below its bound on two stretches of the circle.
    chances = [np.interp(angle - shift, angles, below) for angle in (top, -math.pi - top, math.pi - top)]
    return np.diff(chances[0] - chances[1] + 1 - chances[2], axis=1)


def e_bh(e_values: Sequence[float], alpha: float = 0.05) -> list[bool]:
    """True for each discovery, at a false discovery rate of at most alpha under any dependence, such as a baseline that
    all share (e-BH, Wang and Ramdas 2022)."""
    falling = sorted(e_values, reverse=True)
    count = max((k for k, e in enumerate(falling, 1) if e * k * alpha >= len(e_values)), default=0)
    return [count > 0 and e >= falling[count - 1] for e in e_values]


def e_lond(e_values: Sequence[float], alpha: float = 0.05) -> list[bool]:
    """True for each discovery in a stream, none of which is revised later, at a false discovery rate of at most alpha
    under any dependence (e-LOND, Xu and Ramdas 2024)."""
    found: list[bool] = []
    for t, e in enumerate(e_values, 1):
        share = t**-1.6 / float(scipy.special.zeta(1.6))
        found.append(e * alpha * share * (sum(found) + 1) >= 1)
    return found


def falls_behind(differences: Array) -> Array:
    """True where A may be dropped on the way, over the last axis: its mean gain is a standard error below 0, or it
    diverged alone more often than B. That prevents runs only, and adds no false "better"."""
    found = gather(np.asarray(differences), 1.0)
    n, mean, squares = found.finished[..., -1], found.mean[..., -1], found.squares[..., -1]
    behind = (n > 1) & (mean < -np.sqrt(squares / np.maximum(n * (n - 1), 1)))
    return behind | (found.lost[..., -1] > found.won[..., -1])


@dataclass(frozen=True)
class PairedRun:
    """Run of a pair."""

    value: float | None  # metric at the end, not finite if the run diverged; None before the end
    tokens: int = 0
    seconds: float | None = None  # wall-clock time times processes, over all attempts; None if unknown


@dataclass(frozen=True)
class Standing:
    """State of a registered question."""

    registration: Registration
    verdict: Verdict
    runs: int
    tokens: int
    process_hours: float | None  # hours times processes of all runs, GPU-hours on GPUs; None if unknown
    dropped: str = ""  # reason for ending the question between looks; empty if it goes on, or ended at a look

    @property
    def outcome(self) -> Outcome:
        """Outcome about the candidate; `continue` while the question is open."""
        return "undecided" if self.dropped else self.verdict.outcome

    @property
    def sentence(self) -> str:
        """Outcome, difference, scale, error rate and cost."""
        one, verdict = self.registration, self.verdict
        if self.dropped:
            verdict = replace(verdict, outcome="undecided", next_look=None)
        lower, rate = one.better == "min", not one.changed
        text = verdict.sentence(one.candidate, one.baseline, one.metric, lower=lower, rate=rate)
        when = "between looks" if verdict.pairs else "before the first look"
        if not verdict.pairs and self.dropped:
            text = f"Undecided between {one.candidate} and {one.baseline}."
        if one.changed:
            text += f" It has no error rate, as the question was changed after a look: {'; '.join(one.changed)}."
        if self.dropped:
            text += f" It ended {when}: {self.dropped}."
        return f"{text} At {one.scale}; {self.cost}."

    @property
    def cost(self) -> str:
        """Runs, tokens and hours, and their share of those of all pairs."""
        most = self.registration.looks[-1]
        hours = "" if self.process_hours is None else f", {self.process_hours:.3g} process-hours"
        share = self.tokens / (2 * most * self.registration.tokens)
        spent = f"{format_items(self.runs, 'run')}, {format_count(self.tokens)} tokens{hours}"
        return f"{spent}, {share:.0%} of what all {format_items(most, 'pair')} take"

    def question(self, study: str) -> Question:
        """Row of the ledger, for the study in the folder of that name."""
        one, verdict = self.registration, self.verdict
        return Question(
            id=one.id,
            candidate=one.candidate,
            baseline=one.baseline,
            arms=one.arms,
            metric=one.metric,
            scale=one.scale,
            rule=one.rule,
            changed=one.changed,
            study=study,
            pairs=verdict.pairs,
            outcome=self.outcome,
            why="dropped" if self.dropped else verdict.why,
            e_better=min(verdict.e_better, LARGEST_E),
            p_better=verdict.p_better,
            dropped=self.dropped,
            time=round(time.time(), 3),
        )


def standing_of(registration: Registration, runs: Mapping[tuple[str, int], PairedRun], dropped: str = "") -> Standing:
    """Standing of a question with its runs by variant and seed; `dropped` is a reason to end it between looks."""
    arms, seeds = (registration.candidate, registration.baseline), registration.seeds
    values = [{seed: runs[arm, seed].value for seed in seeds if (arm, seed) in runs} for arm in arms]
    differences = paired_differences(values[0], values[1], seeds, registration.better)
    looks, most = registration.looks, registration.looks[-1]
    one, times = registration, None if registration.anytime else looks
    verdict = decide(differences, Rule(one.alpha, times, one.futility, tries=one.tries, most=most))
    begun = [run for run in runs.values() if run.tokens or run.value is not None]
    seconds = [run.seconds for run in begun if run.seconds is not None]
    return Standing(
        registration,
        verdict,
        runs=len(begun),
        tokens=sum(run.tokens for run in begun),
        process_hours=sum(seconds) / 3600 if seconds and len(seconds) == len(begun) else None,
        dropped=dropped if verdict.outcome == "continue" else "",
    )


def losing(gains: Sequence[float]) -> str:
    """Reason for dropping a candidate between looks, by its gain in pairs that need not be complete; empty if there is
    none. It says only that the candidate is not shown to be better, so that it costs no error."""
    if len(gains) < 2 or not falls_behind(np.array(gains)):
        return ""
    if (lost := gains.count(-math.inf)) > (won := gains.count(math.inf)):
        return f"it diverged alone in {lost} of {len(gains)} pairs, the baseline in {won}"
    return f"over {len(gains)} pairs its mean is more than a standard error worse, at equal steps of both runs"
