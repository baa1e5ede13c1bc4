"""Error rates and power of the code that decides, by simulation; e-values against numerical integration."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from titan_exp.launch.evidence import (
    Rule,
    decide,
    e_bh,
    e_lond,
    falls_behind,
    gather,
    half_width,
    nominal_level,
    paired_differences,
    stops,
)

STUDIES = 4000
LOOKS = Rule(looks=(3, 5, 8), futility=False)
ANYTIME = Rule(futility=False)
INF = math.inf
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def within(rate: float, studies: int = STUDIES) -> float:
    """Four standard errors of a rate."""
    return 4 * math.sqrt(max(rate * (1 - rate), 1e-4) / studies)


def rates(rule: Rule, differences: np.ndarray) -> tuple[float, float, float]:
    """Rates of better and of worse, and mean number of pairs."""
    _, at, outcome, _ = stops(differences, rule)
    return float((outcome == "better").mean()), float((outcome == "worse").mean()), float((at + 1).mean())


def normal(seed: int, pairs: int = 8, studies: int = STUDIES) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((studies, pairs))


def one_noisier(draw: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Arms whose noise differs tenfold, and a noise that differs between pairs."""
    return draw.standard_normal(shape) - 10 * draw.standard_normal(shape) * draw.choice([1.0, 3.0], shape)


NULLS: dict[str, Draw] = {
    "normal": lambda draw, shape: draw.standard_normal(shape),
    "heavy tails": lambda draw, shape: draw.standard_t(4, shape),
    "unequal variances": one_noisier,
    "noise of a study": lambda draw, shape: draw.standard_normal(shape) * draw.lognormal(0, 2, (shape[0], 1)),
}


@pytest.mark.parametrize(
    ("looks", "level"),
    [
        ((3, 5), 0.0294),
        ((3, 4, 5), 0.0247),
        ((2, 3, 4, 5), 0.0177),
        ((3, 5, 8), 0.0212),
        (tuple(range(3, 9)), 0.0160),
        (tuple(range(2, 9)), 0.0126),
        ((6,), 0.05),
    ],
)
def test_levels_equal_those_of_a_long_simulation(looks: tuple[int, ...], level: float):
    """400,000 studies of scipy's paired t-test, to four digits."""
    assert nominal_level(looks, 0.05) == pytest.approx(level, abs=1.2e-4)


def test_levels_of_small_errors_and_many_looks():
    for looks, alpha in (((3, 5, 8), 0.05 / 80), (tuple(range(3, 17)), 0.025), ((20, 26), 0.01)):
        assert alpha / len(looks) <= nominal_level(looks, alpha) < alpha


@pytest.mark.parametrize("null", NULLS)
@pytest.mark.parametrize("rule", [LOOKS, Rule(looks=(3, 4, 5)), ANYTIME, Rule(), Rule(sides=1, prior=4)], ids=repr)
def test_false_verdicts_are_as_rare_as_stated(rule: Rule, null: str):
    differences = NULLS[null](np.random.default_rng(1), (STUDIES, 8))
    better, worse, _ = rates(rule, differences)
    assert better + worse <= 0.05 + within(0.05)
    assert (worse == 0) == (rule.sides == 1)
    naive = gather(differences, rule.prior).p_values[0][:, 1:].min(-1) < 0.05
    assert naive.mean() > 0.09, "peeking costs nothing here: this test shows nothing"
    if null == "normal" and not rule.futility and rule.looks:
        assert better == pytest.approx(0.025, abs=within(0.025))
        assert worse == pytest.approx(0.025, abs=within(0.025))


def test_an_e_value_may_be_looked_at_for_ever():
    """Chances of ever reaching 20 in 8 and in 40 pairs, from a simulation of its own, and with A worse by 0.2 sd."""
    for most, rate in ((8, 0.019), (40, 0.028)):
        rule = Rule(sides=1, prior=4, most=most, futility=False)
        assert rates(rule, normal(2, most))[0] == pytest.approx(rate, abs=within(rate))
    assert rates(rule, normal(2, most, 2000) - 0.2)[0] <= 0.008 + within(0.008, 2000)


def test_skewed_differences_are_the_known_gap():
    """Many small gains and rare large losses of mean 0 pass, as the docstring of `decide` says. A bound that gets
    better or worse here has to be said there."""
    better, _, _ = rates(Rule(looks=(3, 5, 8), sides=1), 1 - np.random.default_rng(3).exponential(size=(STUDIES, 8)))
    assert 0.1 < better < 0.2


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule(looks=(3, 5, 8), sides=1), {-0.5: (0.008, 3.7), 1: (0.69, 6.3), 2: (1.0, 4.5), 4: (1.0, 3.3)}),
        (Rule(prior=4, sides=1), {-0.5: (0.004, 3.5), 1: (0.405, 6.8), 2: (0.949, 5.2), 4: (1.0, 3.7)}),
        (Rule(looks=(5,), sides=1, futility=False), {-0.5: (0.005, 5), 1: (0.559, 5), 2: (0.973, 5), 4: (1.0, 5)}),
    ],
    ids=["looks", "e-value", "one look"],
)
def test_power_and_pairs_used(rule: Rule, expected: dict[float, tuple[float, float]]):
    for effect, (power, pairs) in expected.items():
        better, _, used = rates(rule, normal(4) + effect)
        assert better == pytest.approx(power, abs=0.012 + within(power, 2000))
        assert used == pytest.approx(pairs, abs=0.25)


def test_tries_share_alpha():
    for rule in (Rule(looks=(3, 5, 8), tries=10, futility=False), Rule(tries=10, futility=False)):
        better, worse, _ = rates(rule, normal(5, studies=20_000))
        assert better + worse <= 0.005 + within(0.005, 20_000)
    assert decide([1.0, 1.1, 1.2], Rule(looks=(3,), tries=1)).outcome == "better"
    assert decide([1.0, 1.1, 1.2], Rule(looks=(3,), tries=100)).outcome == "undecided"


@pytest.mark.parametrize("rule", [LOOKS, ANYTIME, Rule(), Rule(looks=(3, 4, 8), sides=1)], ids=repr)
def test_the_verdict_depends_on_pairs_and_not_on_when_it_is_asked(rule: Rule):
    """Asked after every pair, and only at the end with more pairs than a look takes."""
    for row in normal(6, 11, 20) + 0.8:
        differences = row.tolist()
        asked = [decide(differences[:count], rule) for count in range(len(differences) + 1)]
        final = asked[-1]
        assert final.outcome != "continue"
        for count, verdict in enumerate(asked):
            if count >= final.pairs:
                assert verdict == final
            else:
                assert verdict.outcome == "continue"
                assert verdict.pairs == max((look for look in rule.looks or range(3, 9) if look <= count), default=0)
                assert verdict.next_look == min(look for look in rule.looks or range(3, 9) if look > count)


def test_many_at_once_equal_one_by_one():
    for rule in (LOOKS, Rule()):
        differences = normal(7, 8, 50) + 1.0
        _, at, outcome, why = stops(differences, rule)
        for place, row in enumerate(differences.tolist()):
            verdict = decide(row, rule)
            assert (verdict.outcome, verdict.why, verdict.pairs) == (outcome[place], why[place], at[place] + 1)
            t: Any = stats.ttest_1samp(row[: verdict.pairs], 0, alternative="greater")
            assert verdict.p_better == pytest.approx(t.pvalue)
            assert verdict.p_worse == pytest.approx(1 - t.pvalue)


def by_integration(row: list[float], prior: float, side: float) -> float:
    """Likelihood ratio of the t statistic, over effects of one sign."""
    n = len(row)
    tested: Any = stats.ttest_1samp(row, 0)
    t = float(tested.statistic)

    def weighted(effect: float) -> float:
        chance: Any = stats.nct.pdf(t, n - 1, side * effect * math.sqrt(n))
        return 2 * float(stats.norm.pdf(effect, 0, math.sqrt(prior))) * float(chance)

    return integrate.quad(weighted, 0, 8 * math.sqrt(prior), limit=200)[0] / float(stats.t.pdf(t, n - 1))


@pytest.mark.parametrize("prior", [4.0, 10.0])
def test_e_values_equal_numerical_integration(prior: float):
    for n, effect in itertools.product((2, 3, 5, 8), (-0.5, 1.0)):
        row = (np.random.default_rng(n).standard_normal(n) + effect) * 0.01
        better, worse = gather(row, prior).e_values
        assert better[-1] == pytest.approx(by_integration(row.tolist(), prior, 1), rel=1e-4)
        assert worse[-1] == pytest.approx(by_integration(row.tolist(), prior, -1), rel=1e-4)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_e_values_average_1_under_the_null(n: int):
    """Exactly, by integration over t; with a mean below 0 less."""
    shape = np.linspace(-1, 1, n)
    shape /= math.sqrt(shape @ shape / (n - 1))

    def at(t: float, side: int) -> float:
        return float(gather(shape + t / math.sqrt(n), 10.0).e_values[side][-1])

    for side in (0, 1):
        ends = [(-INF, -3), (-3, 3), (3, INF)]
        mean = sum(integrate.quad(lambda t: at(t, side) * stats.t.pdf(t, n - 1), *end)[0] for end in ends)  # noqa: B023
        assert mean == pytest.approx(1, abs=1e-3)


def test_e_values_of_the_first_pair_know_its_sign_alone():
    better = [gather(np.array([value]), 10.0).e_values[0][0] for value in (-3.0, -0.01, 0.01, 3.0)]
    assert better[0] == pytest.approx(better[1])
    assert better[2] == pytest.approx(better[3])
    assert better[0] + better[3] == pytest.approx(2)


def test_scale_does_not_matter():
    row = normal(8, 8, 1)[0] + 1
    for factor in (1e-6, 1e6):
        for name in ("e_values", "p_values"):
            here, there = (getattr(gather(values, 10.0), name) for values in (row, row * factor))
            assert np.array(here) == pytest.approx(np.array(there))
    # A large mean does not cancel the variance: the same differences, 1e7 sd from 0.
    assert gather(row + 1e7, 10.0).squares[-1] == pytest.approx(gather(row, 10.0).squares[-1], rel=1e-6)


def test_half_widths_as_published():
    """In sd: 95 %, prior 10, from a computation of its own."""
    found = [half_width(n, 1.0, Rule(prior=10)) for n in (3, 4, 5, 8)]
    assert found == pytest.approx([7.6, 3.3, 2.4, 1.6], rel=0.03)
    assert half_width(2, 1.0, Rule(prior=10)) == INF


@pytest.mark.parametrize("rule", [LOOKS, ANYTIME, Rule(sides=1, futility=False)], ids=repr)
def test_intervals_hold_at_all_looks_at_once(rule: Rule):
    found, studies = gather(normal(9), rule.prior), STUDIES
    outside = np.zeros(studies, dtype=bool)
    for look in rule.looks or range(3, 9):
        half = half_width(look, 1.0, rule)
        sd = np.sqrt(found.squares[:, look - 1] / (look - 1))
        outside |= np.abs(found.mean[:, look - 1]) > half * sd
    missed = 2 * rule.per_side
    assert outside.mean() <= missed + within(missed)
    if rule.looks:
        assert outside.mean() == pytest.approx(missed, abs=within(missed))


def test_the_interval_of_a_verdict_excludes_0():
    said = set()
    for effect, rule in itertools.product((-1.5, 1.5), (LOOKS, ANYTIME, Rule(looks=(3, 8), sides=1), Rule(sides=1))):
        for row in normal(10, 8, 25) + effect:
            verdict = decide(row.tolist(), rule)
            assert verdict.low is not None
            assert verdict.high is not None
            assert verdict.low <= (verdict.estimate or 0) <= verdict.high
            said.add(verdict.outcome)
            if verdict.outcome in ("better", "worse"):
                assert verdict.low > 0 if verdict.outcome == "better" else verdict.high < 0
    assert {"better", "worse", "undecided"} <= said


def test_two_pairs_give_no_verdict():
    for differences in ([], [5.0], [5.0, 5.1]):
        for rule in (LOOKS, ANYTIME, Rule(alpha=0.4)):
            verdict = decide(differences, rule)
            assert (verdict.outcome, verdict.pairs, verdict.next_look) == ("continue", 0, 3)
            assert (verdict.estimate, verdict.low, verdict.e_better) == (None, None, 1.0)


def test_equal_runs_are_undecided():
    for rule in (LOOKS, ANYTIME, Rule()):
        verdict = decide([0.0] * 8, rule)
        assert (verdict.outcome, verdict.estimate) == ("undecided", 0.0)
        assert verdict.e_better == verdict.e_worse < 1


def test_a_stop_for_futility_is_no_verdict():
    verdict = decide([-0.1, 0.3, -0.4, 9.0], Rule(looks=(3, 5, 8)))
    assert (verdict.outcome, verdict.why, verdict.pairs) == ("undecided", "futility", 3)
    assert decide([-0.1, 0.3, -0.4, 9.0], LOOKS).outcome == "continue"
    assert "Stopped because muon was not ahead." in verdict.sentence("muon", "adamw")


WINS = [0.11, 0.12, 0.1, 0.13, 0.11, 0.12, 0.1, 0.14]


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("rule", [Rule(looks=(8,)), Rule(looks=(3, 5, 8), futility=False), ANYTIME], ids=repr)
def test_a_diverged_run_withholds_better(rule: Rule, place: int):
    """Whatever the others are. Dropped, seven wins of equal size would be more than enough."""
    assert decide(WINS[:place] + WINS[place + 1 :], rule if rule.looks != (8,) else ANYTIME).outcome == "better"
    differences = [*WINS[:place], -INF, *WINS[place + 1 :]]
    verdict = decide(differences, rule)
    if verdict.pairs > place:
        assert (verdict.outcome, verdict.diverged) == ("undecided", (1, 0, 0))
        assert "diverged: muon alone in 1" in verdict.sentence("muon", "adamw")
    mirrored = decide([-value for value in differences], rule)
    assert mirrored.outcome == {"better": "worse"}.get(verdict.outcome, verdict.outcome)


def test_withheld_is_said():
    verdict = decide([-INF, *WINS[1:], *[0.1 + place / 1000 for place in range(12)]], Rule(looks=(20,)))
    assert (verdict.outcome, verdict.why) == ("undecided", "withheld")
    assert "favours the arm that diverged more often" in verdict.sentence("muon", "adamw")
    # Once B diverges as often, the signs decide.
    assert decide([-INF, INF, *WINS[1:], *[0.1] * 11], Rule(looks=(20,))).outcome == "better"


def test_a_baseline_that_always_diverges_loses():
    for rule, pairs in ((LOOKS, 8), (ANYTIME, 8), (Rule(sides=1), 7)):
        verdict = decide([INF] * 8, rule)
        assert (verdict.outcome, verdict.diverged, verdict.estimate) == ("better", (0, pairs, 0), None)
        assert verdict.low is None
    for rule in (LOOKS, ANYTIME):
        verdict = decide([math.nan] * 8, rule)
        assert (verdict.outcome, verdict.pairs, verdict.diverged) == ("undecided", 8, (0, 0, 8))


@pytest.mark.parametrize("chance", [0.05, 0.3])
@pytest.mark.parametrize("rule", [LOOKS, Rule(looks=tuple(range(3, 9))), ANYTIME, Rule(most=30)], ids=repr)
def test_divergences_of_equal_arms_make_no_verdict(rule: Rule, chance: float):
    draw, shape = np.random.default_rng(11), (STUDIES, rule.last)
    arms = [np.where(draw.random(shape) < chance, INF, draw.standard_normal(shape)) for _ in range(2)]
    with np.errstate(invalid="ignore"):
        differences = arms[1] - arms[0]
    better, worse, _ = rates(rule, differences)
    assert better + worse <= 0.05 + within(0.05)
    # An arm that diverges and is otherwise a little better is not called better more often than without.
    with np.errstate(invalid="ignore"):
        risky = np.where(draw.random(shape) < chance, -INF, draw.standard_normal(shape) + 0.2)
    assert rates(rule, risky)[0] <= 0.06


def test_sign_evidence_averages_1():
    """Over all signs of six pairs in which one arm diverged."""
    rows = np.array(list(itertools.product((-INF, INF), repeat=6)))
    better, worse = gather(rows, 10.0).e_values
    assert better.mean(0) == pytest.approx(np.ones(6))
    assert worse.mean(0) == pytest.approx(np.ones(6))
    assert better[-1, -1] == worse[0, -1] == pytest.approx(2**7 / 7 * (1 - 2**-7))
    assert better[0, -1] == worse[-1, -1] == pytest.approx(1 / 7)
    with_wins = gather(np.array([INF, 0.1, 0.1, 0.2, 0.1, -0.1]), 10.0).p_values[0][-1]
    assert with_wins == pytest.approx(stats.binomtest(5, 6, alternative="greater").pvalue)


def test_pairs_are_those_of_one_seed_in_order():
    a = {0: 2.0, 1: 2.1, 2: math.nan, 3: 2.3, 4: INF, 6: 1.0}
    b = {1: 2.2, 0: 2.5, 2: 2.4, 3: math.nan, 4: INF, 5: 9.0, 6: 9.0}
    found = paired_differences(a, b, range(7))
    assert found[:4] == pytest.approx([0.5, 0.1, -INF, INF])
    assert math.isnan(found[4])
    assert len(found) == 5, "seed 5 has no run of A yet, and 6 may not overtake it"
    assert paired_differences(a, b, [1, 0]) == pytest.approx([0.1, 0.5])
    assert paired_differences({0: 1.0, 1: None}, {0: 3.0, 1: 2.0}, [0, 1], "max") == [-2.0]
    assert paired_differences({0: math.nan}, {0: 3.0}, [0], "max") == [-INF]


@pytest.mark.parametrize(
    "values",
    [
        {"alpha": 0.0},
        {"looks": (2, 5)},
        {"looks": (5, 3)},
        {"looks": ()},
        {"looks": (3, 101)},
        {"most": 2},
        {"prior": 0.0},
        {"tries": 0},
    ],
)
def test_rules_that_are_none(values: dict):
    with pytest.raises(ValueError, match="pairs rise from 3 to 100"):
        Rule(**values)


def test_sentences():
    better = decide([0.02, 0.023, 0.021], Rule(looks=(3, 5)))
    assert better.sentence("muon", "adamw", "loss") == (
        "muon is better than adamw after 3 pairs, by 0.0213 [0.0162, 0.0265] (95 %, at every look) in loss. The chance "
        "of a wrong verdict is at most 5 %."
    )
    open_ = decide([0.02, -0.03, 0.09], Rule(looks=(3, 5)))
    for lower, size in ((True, "\N{MINUS SIGN}0.0267 [\N{MINUS SIGN}0."), (False, "+0.0267 [\N{MINUS SIGN}0.")):
        said = open_.sentence("muon", "adamw", "loss", lower=lower)
        assert said.startswith(f"No verdict on muon against adamw yet after 3 pairs: loss differs by {size}"), said
    worse = decide([-0.02, -0.023, -0.021], Rule(looks=(3, 5), tries=4, alpha=0.2))
    assert worse.sentence("muon", "adamw").startswith("muon is worse than adamw after 3 pairs, by 0.0213 [0.0162, ")
    assert "in any of 4 tries is at most 20 %" in worse.sentence("muon", "adamw")
    assert (
        decide([0.1], Rule()).sentence("a", "b")
        == "No verdict on a against b yet after 0 pairs. The next look is after 3."
    )


# Designs over scales, many tries, halving.


def climbs(gains: tuple[float, ...], rule: Rule, studies: int, seed: int) -> float:
    """Rate of "better" of the design: three pairs at each smaller scale, a drop if A falls behind, then the rule at
    the largest. Gains in sd of a pair."""
    draw = np.random.default_rng(seed)
    kept = np.ones(studies, dtype=bool)
    for gain in gains[:-1]:
        rows = draw.standard_normal((studies, 3)) + gain
        kept &= ~falls_behind(rows)
    outcome = stops(draw.standard_normal((studies, rule.last)) + gains[-1], rule)[2]
    return float((kept & (outcome == "better")).mean())


@pytest.mark.parametrize(
    ("gains", "rate"),
    [
        ((0, 0, 0, 0), 0.019),
        ((2, 2, 2, 0), 0.057),
        ((3.9, 2.6, 1.3, 0), 0.047),
        ((3, 2, 0, -2.5), 0.0),
        ((-1.2, -1.2, -1.2, -1.2), 0.0),
        ((2, 2, 2, 2), 0.99),
        ((0, 0.67, 1.33, 2), 0.71),
    ],
    ids=["none", "vanishes", "fades", "turns", "worse", "constant", "appears"],
)
def test_effects_that_change_with_scale(gains: tuple[float, ...], rate: float):
    """Only pairs at the largest scale make a verdict, so that an effect that vanishes below it is not a false one."""
    studies = 1000
    found = climbs(gains, Rule(looks=(3, 5, 8), sides=1), studies, 12)
    assert found == pytest.approx(rate, abs=0.01 + within(rate, studies))
    if gains[-1] <= 0:
        assert found <= 0.05 + within(0.05, studies)


def test_falling_behind():
    rows = np.array([[-0.3, -0.2, -0.4], [-0.3, 0.5, -0.4], [0.3, 0.2, -INF], [0.3, INF, -INF], [-INF, -0.1, INF]])
    assert falls_behind(rows).tolist() == [True, False, True, False, False]
    assert not falls_behind(np.array([-1.0]))


def ledger(rule: Rule, studies: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """E-values where the rule stops, and effects, of 40 tries per study: 8 better, 16 of none, 16 worse by 1 sd."""
    effects = np.random.default_rng(seed).permuted(np.tile([2.0] * 8 + [0.0] * 16 + [-1.0] * 16, (studies, 1)), axis=1)
    differences = np.random.default_rng(seed + 1).standard_normal((studies, 40, 8)) + effects[..., None]
    found, at, _, _ = stops(differences, rule)
    return np.take_along_axis(found.e_values[0], at[..., None], -1)[..., 0], effects


Method = Callable[[list[float]], list[bool]]


def discoveries(method: Method, rule: Rule, studies: int = 100) -> tuple[float, float]:
    """False discovery rate and power."""
    e_values, effects = ledger(rule, studies, 13)
    false = right = 0.0
    for row, truth in zip(e_values.tolist(), effects, strict=True):
        found = np.array(method(row))
        false += (found & (truth <= 0)).sum() / max(found.sum(), 1) / studies
        right += (found & (truth > 0)).sum() / 8 / studies
    return float(false), float(right)


@pytest.mark.parametrize(("method", "power"), [(e_bh, 0.63), (e_lond, 0.18)], ids=["e-BH", "e-LOND"])
def test_false_discoveries_are_as_rare_as_stated(method: Method, power: float):
    """Power as of another program, whose e-values stop for futility alone, and of a rule that knows its tries."""
    false, right = discoveries(method, Rule(prior=4, sides=1, alpha=1e-9))
    assert false <= 0.02
    assert right == pytest.approx(power, abs=0.06)
    false, right = discoveries(method, Rule(prior=4, sides=1, tries=40))
    assert false <= 0.02
    assert right > 0.6 * power
    assert discoveries(method, Rule(prior=4, sides=1), 20)[1] < 0.02, "a question that stops at 1/alpha says too little"


def test_discoveries_that_share_a_baseline():
    """One sample of a baseline in all forty null tries: rates hold under any dependence."""
    draw, any_found = np.random.default_rng(15), np.zeros(2)
    for _ in range(150):
        differences = draw.standard_normal((1, 8)) * 3 + draw.standard_normal((40, 8)) * 0.3
        found, at, _, _ = stops(differences, Rule(prior=4, sides=1))
        row = np.take_along_axis(found.e_values[0], at[:, None], -1)[:, 0].tolist()
        any_found += [any(e_bh(row)), any(e_lond(row))]
    assert (any_found / 150 <= 0.05 + within(0.05, 150)).all()


def test_discoveries_by_hand():
    # 5 e-values at 10 %: the k-th largest must reach 50 / k.
    assert e_bh([60.0, 1.0, 26.0, 17.0, 12.0], 0.1) == [True, False, True, True, False]
    assert e_bh([49.0, 24.0, 16.0, 12.0, 9.9], 0.1) == [False] * 5
    assert e_bh([49.0, 24.0, 16.0, 12.5, 9.9], 0.1) == [True, True, True, True, False]
    assert e_bh([10.0] * 5, 0.1) == [True] * 5
    assert (e_bh([]), e_lond([])) == ([], [])
    # zeta(1.6) = 2.285766: the first must reach 45.72, the second 45.72 * 2^1.6 / 2 after a discovery.
    assert e_lond([45.71]) == [False]
    assert e_lond([45.72, 69.2]) == [True, False]
    assert e_lond([45.72, 69.4]) == [True, True]
    assert e_lond([1.0, 138.0]) == [False, False]
    assert e_lond([1.0, 138.7]) == [False, True]


@pytest.mark.night
@pytest.mark.parametrize("null", NULLS)
@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("looks", [(3, 5), (3, 5, 8), tuple(range(3, 21)), None], ids=repr)
def test_false_verdicts_at_length(looks: tuple[int, ...] | None, sides: int, null: str):
    rule = Rule(looks=looks, sides=sides, futility=False, most=40)  # type: ignore[arg-type]
    studies = 100_000 if looks else 30_000
    better, worse, _ = rates(rule, NULLS[null](np.random.default_rng(17), (studies, rule.last)))
    assert better + worse <= 0.05 + within(0.05, studies)
    if looks and null in ("normal", "noise of a study"):
        assert better + worse == pytest.approx(0.05, abs=within(0.05, studies))
