"""Discoveries among all registered questions: against definitions, what is shown, and the line that measures again."""

import json
import math
import random
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.compare.made_runs import made_question
from tests.launch.test_looks import QUESTION, Pretended, gains, home, sweep  # noqa: F401  # a fixture
from titan_exp.cli.main import main
from titan_exp.launch.ledger import enter
from titan_exp.launch.sweep.looks import drawn_seeds

RUNS = Path("runs")


def shown(*words: str) -> dict[str, Any]:
    assert main(["compare", "--discoveries", *words, "--json=found.json"]) == 0
    return json.loads(Path("found.json").read_text())


def text(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["compare", "--discoveries", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def asked(*e_values: float, names: Sequence[str] = "abcdefghijklmnopqrstuvwxyz") -> None:
    """Questions a, b, c, ..., each registered, looked at once, and answered; answers come in another order."""
    RUNS.mkdir(exist_ok=True)
    pairs = list(zip(names, e_values, strict=False))
    for name, _ in pairs:
        enter(RUNS, made_question(name, pairs=0))
    random.Random(5).shuffle(pairs)
    for name, e in pairs:
        enter(RUNS, made_question(name, e_better=1.5))
        enter(
            RUNS, made_question(name, e_better=e, pairs=5, outcome="better" if e > 15 else "undecided", why="evidence")
        )


def e_bh_by_definition(e_values: Sequence[float], alpha: float) -> list[bool]:
    """The largest set of which each member has at least number of questions / (alpha * size of the set)."""
    number = len(e_values)
    for size in range(number, 0, -1):
        members = [e >= number / (alpha * size) for e in e_values]
        if sum(members) >= size:
            return members
    return [False] * number


def e_lond_by_definition(e_values: Sequence[float], alpha: float) -> list[bool]:
    weights = [t**-1.6 for t in range(1, 200_001)]
    total, found = math.fsum(weights) + 200_000**-0.6 / 0.6, list[bool]()
    for e, weight in zip(e_values, weights, strict=False):
        found.append(e >= total / (alpha * weight * (1 + sum(found))))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_discoveries_are_those_of_the_definitions(seed: int):
    """Over all questions, each once and by its newest row, and online in the order of registration."""
    draw = random.Random(seed)
    e_values = [round(math.exp(draw.uniform(-1, 8)), 3) for _ in range(9)]
    asked(*e_values)
    for alpha in (0.05, 0.2):
        found = shown(f"alpha={alpha}")
        assert (found["questions"], found["false_discovery_rate"]) == (9, alpha)
        assert [one["study"] for one in found["shown"]] == list("abcdefghi")
        assert [one["e_value"] for one in found["shown"]] == e_values
        assert [one["discovery"] for one in found["shown"]] == e_bh_by_definition(e_values, alpha)
        assert [one["online_discovery"] for one in found["shown"]] == e_lond_by_definition(e_values, alpha)
        assert any(e_bh_by_definition(e_values, alpha))


def test_the_order_of_registration_decides_online_and_nothing_else():
    asked(2.0, 2.0, 200.0)
    assert [one["online_discovery"] for one in shown()["shown"]] == [False, False, False]
    assert [one["discovery"] for one in shown()["shown"]] == [False, False, True]
    (RUNS / "questions.jsonl").unlink()
    asked(200.0, 2.0, 2.0)
    assert [one["online_discovery"] for one in shown()["shown"]] == [True, False, False]


def test_names_narrow_what_is_shown_and_not_what_counts(capsys: pytest.CaptureFixture[str]):
    asked(21.0, *[1.0] * 7)
    assert not shown("a")["shown"][0]["discovery"], "alone it would be one"
    assert [one["study"] for one in shown("c", "runs/a")["shown"]] == ["a", "c"]
    assert shown("a")["questions"] == 8
    said = text(capsys, "a")
    assert "At most 5 % of the discoveries by e-BH are false on average, over the 8 questions of runs/questions" in said
    assert "a: better, but no discovery. Alone among 8 questions, one needs an e-value of 160" in said
    assert "{looks: anytime, tries: 8}" in said
    assert "better, but no discovery" not in text(capsys, "b")
    assert main(["compare", "--discoveries", "zz"]) == 2
    assert "zz: this study has registered no question. Those that have are a, b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ({"changed": ("alpha: 0.05 → 0.2",), "outcome": "better"}, 1.0),
        ({"dropped": "it loses", "outcome": "undecided"}, 1.0),
        ({"why": "withheld", "outcome": "undecided"}, 1.0),
        ({"outcome": "continue"}, 900.0),
        ({"outcome": "worse"}, 900.0),
    ],
)
def test_no_question_counts_more_than_it_may(values: dict[str, Any], counts: float, capsys: pytest.CaptureFixture[str]):
    RUNS.mkdir()
    enter(RUNS, made_question("a", e_better=900.0, **values))
    (one,) = shown()["shown"]
    assert (one["e_value"], one["discovery"], one["online_discovery"]) == (counts, counts > 1, counts > 1)
    said = text(capsys)
    assert ("Changed after a look: 1." in said) == ("changed" in values)
    assert ("better, changed after a look" in said) == ("changed" in values)
    assert ("Without a verdict yet: 1." in said) == (values["outcome"] == "continue")


def test_the_line_that_measures_a_winner_again_works(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    home: Path,  # noqa: F811
):
    gains(0.5, monkeypatch)
    assert sweep("paths.runs=elsewhere/all of them") == 0
    (home / "sweeps" / "mine_2.yaml").write_text(QUESTION)  # the name is taken
    for words in (["--markdown"], []):
        capsys.readouterr()
        assert main(["compare", "--discoveries", "paths.runs=elsewhere/all of them", *words]) == 0
        out = capsys.readouterr().out
        (line,) = (line.strip() for line in out.splitlines() if "titan-exp sweep" in line)
        copy, again = line.split("; ")
        assert shlex.split(copy)[0] == "cp"
    subprocess.run(["sh", "-c", copy], check=True)
    program, *typed = shlex.split(again)
    assert (program, typed[:2]) == ("titan-exp", ["sweep", "mine_3"])
    monkeypatch.setattr("tests.launch.test_looks.seeds", lambda: drawn_seeds("mine_3", "high", "low", 100))
    first = {seed for _, seed in Pretended.trained}
    assert main(typed) == 0
    assert len({seed for _, seed in Pretended.trained} - first) == 3, "three pairs with new seeds"
    out = text(capsys, "paths.runs=elsewhere/all of them")
    assert "mine_3 measures mine again with new seeds: better. That needs no correction" in out
    assert "over the 2 questions of" in out
    assert "titan-exp sweep" not in out, "once is enough"


def test_only_a_winner_is_measured_again(capsys: pytest.CaptureFixture[str]):
    """A question that was undecided, and is asked again until it is better, is no measurement of a winner."""
    RUNS.mkdir()
    same = {"arms": ("new", "plain")}
    enter(RUNS, made_question("a", outcome="undecided", **same))
    enter(RUNS, made_question("b", outcome="better", e_better=30.0, **same))
    assert "needs no correction" not in text(capsys)
    enter(RUNS, made_question("c", outcome="undecided", **same))
    enter(RUNS, made_question("d", outcome="better", **same))
    assert [one["measured_again"] for one in shown()["shown"]] == [None, "c", None, None]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--discoveries"], "no study under runs/ has registered a question. Add pairs: to its file."),
        (["a", "alpha=0.1"], "so add --discoveries"),
        (["--discoveries", "--csv"], "csv=True: this is of no use with --discoveries"),
        (["--discoveries", "at=end"], "at=end: this is of no use with --discoveries"),
        (["--discoveries", "alpha=1"], "alpha=1"),
    ],
)
def test_what_cannot_be_judged_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["compare", *words]) == 2
    assert said in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_formats(capsys: pytest.CaptureFixture[str]):
    asked(61.0)
    capsys.readouterr()
    assert main(["compare", "--discoveries", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "| a | new against plain in validation\\_loss | better | discovery | discovery | 5 | 61 |" in out
    assert "```" not in out, "the study is gone, so there is no line to type"
