"""Scores by hand, their standard errors, and the false-positive rate of comparisons."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from titan_exp.data.tokenizers import ByteTokenizer
from titan_exp.extensions.tasks.compare import crossed
from titan_exp.extensions.tasks.encoding import encode
from titan_exp.extensions.tasks.formats import Item, Kind, Task
from titan_exp.extensions.tasks.scores import TaskScores, metrics_of, score, values_of

BIT = math.log(2)


def scored(
    answers: list[list[str]],
    log_likelihoods: list[list[float]],
    *,
    gold: list[tuple[int, ...]] | None = None,
    neutral: list[list[float]] | None = None,
    greedy: list[bool] | None = None,
    kind: Kind = "choice",
    primary: str = "acc",
) -> TaskScores:
    """Scores of answers after `Q` and a space; the first choice is gold."""
    context, delimiter = ("", "") if kind == "rolling" else ("Q", " ")
    items = tuple(
        Item(
            tuple((context, delimiter + answer) for answer in each),
            gold[index] if gold else (0,),
            "N" if neutral else None,
            id=str(index),
        )
        for index, each in enumerate(answers)
    )
    encoded = encode(Task("t", kind, items, 0.5, primary, "whole", delimiter, "file"), ByteTokenizer(), 64)
    width = max(map(len, answers))
    padded = [[*row, *[0.0] * (width - len(row))] for row in log_likelihoods]
    hits = None if greedy is None else np.array(greedy)[:, None]
    return score(encoded, np.array(padded), hits, None if neutral is None else np.array(neutral))


def values(found: TaskScores) -> dict[str, float]:
    return {name: one.value for name, one in found.metrics.items()}


def test_characters_are_not_bytes():
    """`é0` has two characters and three bytes: each norm has its own winner."""
    found = values(scored([["é0", "abc"]], [[-4.0, -4.5]]))
    assert [found[name] for name in ("acc", "acc_per_char", "acc_per_byte", "acc_per_token")] == [1, 0, 1, 1]
    assert found["bits_per_byte"] == pytest.approx(4 / BIT / 4)
    assert found["gold_probability"] == pytest.approx(1 / (1 + math.exp(-0.5)))


def test_lengths_leave_the_delimiter_out():
    """-1 / 1 against -1.8 / 2; with the space, -1 / 2 would win over -1.8 / 3."""
    found = values(scored([["a", "bc"]], [[-1.0, -1.8]]))
    assert [found[name] for name in ("acc", "acc_per_char", "acc_per_byte", "acc_per_token")] == [1, 0, 0, 1]


def test_pmi_is_a_difference():
    """-1 gains 4 and -9 gains 1; their quotients, 0.2 and 0.9, say the opposite."""
    found = values(scored([["a", "b"]], [[-1.0, -9.0]], neutral=[[-5.0, -10.0]]))
    assert found["acc_pmi"] == 1
    assert "acc_pmi" not in values(scored([["a", "b"]], [[-1.0, -9.0]]))


def test_the_first_of_equal_choices_wins_and_ties_are_counted():
    found = scored([["a", "b"]] * 3, [[-1.0, -1.0], [-2.0, -1.0], [-1.0, -1.0]], gold=[(0,), (1,), (1,)]).metrics["acc"]
    assert (found.items.tolist(), found.ties) == ([1, 1, 0], 2)


def test_items_with_fewer_choices_and_several_gold_ones():
    found = scored([["a", "b", "c"], ["a", "b"]], [[-3.0, -1.0, -2.0], [-1.0, -2.0]], gold=[(0, 1), (1,)])
    assert found.metrics["acc"].items.tolist() == [1, 0]
    assert found.metrics["bits_per_byte"].items == pytest.approx([1 / BIT / 2, 2 / BIT / 2])
    weights = np.exp([-3.0, -1.0, -2.0])
    probability = (weights[0] + weights[1]) / weights.sum()
    assert found.metrics["gold_probability"].items == pytest.approx([probability, 1 / (1 + math.e)])


def test_bits_per_byte_come_first():
    assert [
        next(iter(scored([["ab"]], [[-1.0]], kind=kind).metrics)) for kind in ("choice", "continuation", "rolling")
    ] == ["bits_per_byte"] * 3


def test_continuations_count_greedy_hits():
    found = scored([["ab"], ["c"]], [[-2.0], [-4.0]], greedy=[True, False], kind="continuation")
    assert values(found) == pytest.approx(
        {"bits_per_byte": (2 / 3 + 4 / 2) / 2 / BIT, "acc": 0.5, "perplexity": math.exp(3)}
    )
    assert "acc" not in values(scored([["ab"]], [[-2.0]], kind="continuation"))


def test_documents_are_ratios_of_sums():
    """4 bits in 2 bytes and 6 in 6: 10 / 8, while the mean of the ratios is 1.5."""
    found = scored([["a "], ["b c  d"]], [[-4 * BIT], [-6 * BIT]], kind="rolling")
    assert values(found) == pytest.approx(
        {"bits_per_byte": 1.25, "byte_perplexity": 2**1.25, "word_perplexity": 2 ** (10 / 5)}
    )
    assert found.metrics["bits_per_byte"].error == pytest.approx(0.375)  # sqrt(2 / 1 (1.5^2 + 1.5^2)) / 8
    assert found.metrics["byte_perplexity"].error == pytest.approx(0.375 * BIT * 2**1.25)


def test_standard_errors():
    likelihoods = [[-1.0, -2.0], [-2.0, -1.0], [-2.0, -1.0], [-1.0, -2.0]]
    found = scored([["a", "b"]] * 4, likelihoods).metrics["acc"]
    assert (found.value, found.error) == pytest.approx((0.5, math.sqrt(1 / 3 / 4)))
    assert math.isnan(scored([["a", "b"]], [[-1.0, -2.0]]).metrics["acc"].error)


def test_the_error_of_a_ratio_is_its_spread():
    """Against the standard deviation over samples of documents."""
    generator = np.random.default_rng(0)
    found, errors = [], []
    for _ in range(200):
        lengths = generator.integers(1, 40, 30)
        bits = lengths * generator.normal(1, 0.2, 30)
        one = scored([["a" * length] for length in lengths], [[-each * BIT] for each in bits], kind="rolling")
        found.append(one.metrics["bits_per_byte"].value)
        errors.append(one.metrics["bits_per_byte"].error)
    assert np.mean(errors) == pytest.approx(np.std(found), rel=0.2)


def test_long_continuations_have_an_infinite_perplexity():
    found = scored([["a"]] * 2, [[-1000.0], [-1000.0]], kind="continuation").metrics
    assert (found["perplexity"].value, found["bits_per_byte"].value) == (math.inf, pytest.approx(500 / BIT))


def test_a_diverged_model_has_no_score():
    found = scored([["a", "b"]] * 2, [[math.nan, -1.0], [-1.0, -2.0]])
    assert all(math.isnan(one.value) for one in found.metrics.values())


def test_means_over_tasks():
    """An accuracy of 0.75 is centered at chance; tasks that lack their accuracy, or have another metric, have none."""
    half = scored([["a", "b"]] * 4, [[-1.0, -2.0]] * 3 + [[-2.0, -1.0]])  # 0.75 of chance 0.5
    tasks = {
        "half": half,
        "sure": replace(half, chance=0.0),
        "lacking": scored([["a", "b"]], [[-3.0, -2.0]], primary="acc_pmi"),
        "documents": scored([["a"]], [[-1.0]], kind="rolling", primary="bits_per_byte"),
    }
    found = metrics_of(values_of([replace(one, task=name) for name, one in tasks.items()]))
    bits = [one.metrics["bits_per_byte"].value for one in tasks.values()]
    assert found.pop("bits_per_byte") == pytest.approx(sum(bits) / 4)
    assert found.pop("acc_centered") == pytest.approx((0.5 + 0.75) / 2)
    assert found == {f"{name}/{metric}": value for name, one in tasks.items() for metric, value in values(one).items()}
    assert "acc_centered" not in metrics_of(values_of([tasks["documents"], tasks["lacking"]]))
    diverged = metrics_of(values_of([half, replace(scored([["a", "b"]], [[math.nan, -1.0]]), task="diverged")]))
    expected = (None, None, None, 0.75)
    assert tuple(diverged[name] for name in ("bits_per_byte", "acc_centered", "diverged/acc", "t/acc")) == expected


def test_seeds_and_items_are_crossed():
    mean, error, degrees = crossed(np.array([[1.0, 3.0], [5.0, 11.0]]))
    a, b, c = 18 / 2, 8 / 2, 4 / 4  # row means 2 and 8, column means 3 and 7, interaction 1, -1, -1, 1
    assert (mean, error) == pytest.approx((5, math.sqrt(a + b - c)))
    assert degrees == pytest.approx((a + b - c) ** 2 / (a**2 + b**2 + c**2))
    assert crossed(np.zeros((3, 4))) == (0, 0, 2)


@pytest.mark.parametrize("seed_spread", [0.0, 0.02, 0.04])
@pytest.mark.parametrize("seeds", [3, 5])
def test_false_positives_of_seeds_and_items(seeds: int, seed_spread: float):
    """No difference, at 5 %; items alone are wrong more often the more seeds vary."""
    studies, items = 1000, 400
    generator = np.random.default_rng(seeds)
    wrong = alone = 0
    for _ in range(studies):
        own = generator.normal(0, seed_spread, (seeds, 1))
        drawn = own + generator.normal(0, 0.1, items) + generator.normal(0, 0.4, (seeds, items))
        mean, error, degrees = crossed(drawn)
        wrong += abs(mean) > error * stats.t.ppf(0.975, degrees)
        first = drawn[0]
        alone += abs(first.mean()) > 1.96 * first.std(ddof=1) / math.sqrt(items)
    assert 0.015 <= wrong / studies <= 0.085
    assert alone / studies > {0.0: 0.03, 0.02: 0.1, 0.04: 0.25}[seed_spread]
