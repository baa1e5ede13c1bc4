"""Outcome of a ladder from made-up runs of a known surface: table, law, test, multiplier, refusals, page and JSON."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.compare.made_runs import make_run, rows
from titan_exp.compare import statistics
from titan_exp.compare.comparison import compare
from titan_exp.compare.output.formats import json_values, to_markdown
from titan_exp.compare.output.pages import to_html
from titan_exp.compare.output.plots import study_plots
from titan_exp.compare.runs import select
from titan_exp.compare.study_outcome import LadderOutcome
from titan_exp.config.command_line.output import json_text

SIZES = (1_000_000, 3_000_000, 10_000_000, 30_000_000)
FASTER = 1.1
"""Compute that the baseline needs for what the candidate reaches."""


def surface(parameters: float, tokens: float) -> float:
    return 1.8 + 400 * parameters**-0.34 + 410 * tokens**-0.28


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "DRAWS", 120)


def made(
    runs: Path,
    *,
    per: tuple[int, ...] = (10, 20, 40),
    seeds: int = 2,
    sd: float = 0.002,
    candidate: bool = False,
    loss: Callable[[float, float], float] = surface,
    cost: float = 1.0,
    diverged: tuple[int, int] | None = None,
) -> Path:
    """A ladder's runs and record. `cost` is the candidate's FLOPs over the baseline's."""
    draw, points = np.random.default_rng(0), list[dict[str, Any]]()
    arms = ("slow", "fast") if candidate else ("",)
    for size in SIZES:
        for each in per:
            for seed in range(seeds):
                shared = sd * draw.standard_normal()
                for arm in arms:
                    steps = each * size // 100_000
                    gained = 1.0 if arm != "fast" else math.sqrt(FASTER)
                    final = loss(size * gained, each * size * gained) + shared + sd / 4 * draw.standard_normal()
                    values = {"training.steps": steps, "model.dim": 32 * size // 1_000_000, "experiment.seed": seed}
                    values |= {"optimizer.lr": 3e-3 if arm == "fast" else 1e-3}
                    lost = (size, each) == diverged
                    state: dict[str, Any] = (
                        {"state": "failed", "reason": "rank 0: Diverged: step 1: loss nan"} if lost else {}
                    )
                    # The rows have the end of a run; its last validation loss is 0.1 above.
                    found = [row | {"step": steps, "tokens": each * size} for row in rows(final - 0.1)[-1:]]
                    path = make_run(runs, values, metrics=found, study="climb", **state)
                    flops = 7.0 * size * (cost if arm == "fast" else 1.0)
                    rung = {"scale": f"multiple={size // 1_000_000}", "per_parameter": str(each), "arm": arm}
                    rung |= {
                        "parameters": size,
                        "tokens": each * size,
                        "flops_per_token": flops,
                        "begins": 0,
                        "steps": steps,
                    }
                    variant = f"{rung['scale']} tokens={each}N {arm}".strip()
                    point = {"run_id": path.name, "variant": variant, "seed": seed, "rung": rung | {"sequences": 8}}
                    points.append(point | {"choices": {"rung": f"{size // 1_000_000} {each}N"}})
    ladder = {"metric": "validation_loss", "better": "min", "baseline": arms[0], "runs": len(points)}
    record = {"name": "climb", "points": points, "baseline": points[-1]["variant"], "ladder": ladder}
    record |= {"metrics": {"validation_loss": "min"}, "lists": {"rung": ["model.dim", "training.steps"]}}
    (runs / "climb" / "study.json").write_text(json.dumps(record))
    return runs / "climb"


def outcome(runs: Path) -> LadderOutcome:
    found = compare(select(["climb"], runs)).ladder
    assert found is not None
    return found


def test_a_ladder_shows_its_rungs_and_the_law_of_them(tmp_path: Path):
    made(tmp_path)
    comparison = compare(select(["climb"], tmp_path))
    found = comparison.ladder
    assert found is not None
    assert [(row.parameters, row.tokens) for row in found.rows] == [(n, d * n) for n in SIZES for d in (10, 20, 40)]
    assert all(len(row.losses[""]) == 2 for row in found.rows)
    assert found.law is not None
    assert found.law.exponents == pytest.approx((0.34, 0.28), rel=0.15)
    assert found.law.noise == pytest.approx(0.002, rel=0.5)
    assert found.law.freedom == 12
    test, beyond = found.held_out, found.extrapolated
    assert test is not None
    assert beyond is not None
    assert (test.parameters, test.tokens) == (SIZES[-1], 40 * SIZES[-1])
    assert test.low <= (test.measured or 0) <= test.high
    assert (beyond.parameters, beyond.tokens, beyond.measured) == (2 * SIZES[-1], 80 * SIZES[-1], None)
    assert beyond.loss == pytest.approx(surface(2 * SIZES[-1], 80 * SIZES[-1]), abs=0.005)
    assert beyond.loss - 0.01 < beyond.low < beyond.loss < beyond.high < beyond.loss + 0.01
    assert found.refusals == ()
    text = to_markdown(comparison)
    assert "### Ladder of sizes, by final losses" in text
    assert "| 30 | 40N | 30,000,000 | 1,200,000,000 | 2.52e+17 |" in text
    assert "at the largest size run" in text
    assert (
        "Extrapolation, beyond every run: at 4 times the compute of the largest (60M parameters, 2.4B tokens)" in text
    )
    assert "12 degrees of freedom" in text
    assert comparison.budget.why == "each run at its own end, which is not at equal tokens"
    assert comparison.differing_keys.keys == ("rung",), "one column for all keys of a rung"
    assert all(row.deltas["validation_loss"] is None for row in comparison.rows), "no rung is compared with another"


def test_the_compute_multiplier_is_the_one_that_was_made(tmp_path: Path):
    made(tmp_path, candidate=True)
    found = outcome(tmp_path)
    assert found.arms == ("slow", "fast")
    assert found.multiplier is not None
    assert found.multiplier.estimate == pytest.approx(FASTER, rel=0.005)
    assert FASTER - 0.01 < found.multiplier.low < found.multiplier.estimate < found.multiplier.high < FASTER + 0.01
    largest = found.rows[-1].multiplier
    assert largest is not None
    assert largest[0] == pytest.approx(FASTER, rel=0.02)
    assert largest[1] < largest[0] < largest[2]
    assert any("Compute multiplier of fast against slow: 1." in text for text in found.sentences)


def test_a_candidate_that_costs_more_flops_pays_for_them(tmp_path: Path):
    made(tmp_path / "same", candidate=True)
    made(tmp_path / "dear", candidate=True, cost=FASTER)
    same, dear = outcome(tmp_path / "same").multiplier, outcome(tmp_path / "dear").multiplier
    assert same is not None
    assert dear is not None
    assert dear.estimate == pytest.approx(same.estimate / FASTER)
    assert (dear.low, dear.high) == pytest.approx((same.low / FASTER, same.high / FASTER))


def test_one_length_gives_a_law_over_flops(tmp_path: Path):
    made(tmp_path, per=(20,), seeds=3, sd=0.0005)
    found = outcome(tmp_path)
    assert found.law is not None
    assert found.law.variables == ("C",)
    assert "tokens_per_parameter: [10, 20, 40]" in found.refusals[0]


def test_a_law_that_fails_its_test_is_not_extrapolated(tmp_path: Path):
    made(tmp_path, loss=lambda n, d: surface(n, d) + 0.1 * (n >= SIZES[-1]))
    found = outcome(tmp_path)
    assert found.extrapolated is None
    text = " ".join(found.sentences)
    assert ("It fails." in text and "Nothing is extrapolated: " in text) or "No law: " in text


@pytest.mark.parametrize(
    ("also", "said"),
    [
        ({"seeds": 1}, "No law: No rung has two seeds"),
        ({"loss": lambda n, d: 2.0, "candidate": True}, "No compute multiplier"),
        ({"diverged": (3_000_000, 20)}, "2 runs diverged. We fit the law without their rungs"),
    ],
)
def test_what_the_runs_do_not_tell_is_said(tmp_path: Path, also: dict[str, Any], said: str):
    made(tmp_path, **also)
    found = outcome(tmp_path)
    assert any(text.startswith(said) for text in found.refusals), found.refusals
    assert ("diverged" in said) == (found.law is not None)


def test_runs_that_did_not_end_are_counted(tmp_path: Path):
    folder = made(tmp_path)
    record = json.loads((folder / "study.json").read_text())
    record["ladder"]["runs"] += 5
    (folder / "study.json").write_text(json.dumps(record))
    assert outcome(tmp_path).refusals[0].startswith("The ladder waits for 5 runs")


def test_page_and_json_have_the_ladder(tmp_path: Path):
    made(tmp_path, candidate=True)
    comparison = compare(select(["climb"], tmp_path))
    ((title, picture),) = study_plots(comparison)
    assert title.startswith("validation loss over FLOPs (curves: L = 1.")
    assert picture.startswith(b"\x89PNG")
    page = to_html(comparison)
    assert "Ladder of sizes, by final losses" in page
    assert "over FLOPs" in page
    found = json.loads(json_text(json_values(comparison)))["ladder"]
    assert found["law"]["variables"] == ["N", "D"]
    assert len(found["rows"]) == 12
    assert found["rows"][0]["losses"]["fast"].keys() == {"0", "1"}
    assert found["multiplier"]["estimate"] == pytest.approx(FASTER, rel=0.005)
    assert found["held_out"]["measured"] == pytest.approx(surface(SIZES[-1], 40 * SIZES[-1]), abs=0.01)
