"""Tasks in comparisons, on the console, in `show` and as metrics of studies, from made run folders."""

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from rich.console import Console

from tests.compare.made_runs import make_run, rows
from titan_exp.cli.main import main
from titan_exp.compare.comparison import Comparison, compare
from titan_exp.compare.output.formats import json_values, records, to_csv, to_markdown
from titan_exp.compare.output.pages import show, to_html
from titan_exp.compare.runs import read_run, select
from titan_exp.config.command_line.output import json_text
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.study.study_file import read_study
from titan_exp.extensions.tasks.compare import Line, Runs, newest
from titan_exp.extensions.tasks.scores import Score, TaskScores, values_of, write_evaluation
from titan_exp.tracking.console import ConsoleSink
from titan_exp.tracking.run_folder.run import Lineage

ITEMS = 60
LRS = (0.001, 0.003)


def scored(task: str, bits: np.ndarray, hits: np.ndarray, *, chance: float = 0.25, **more: Any) -> TaskScores:
    """Scores of a task by the values of its items."""
    weights = more.get("weights", np.ones(len(bits)))
    scores = {
        "bits_per_byte": Score(float(np.average(bits, weights=weights)), 0.1, bits, weights),
        "acc": Score(float(hits.mean()), 0.1, hits, np.ones(len(hits))),
    }
    ids = tuple(map(str, range(len(bits))))
    return TaskScores(task, more.get("digest", "d" * 64), "acc", scores, ids, chance, 0, ())


def drawn(seed: int, *, shift: float = 0.0, items: int = ITEMS) -> tuple[np.ndarray, np.ndarray]:
    """Bits and hits of items: difficulties that all runs share, noise of the run, and a shift."""
    hard, own = np.random.default_rng(7).normal(1.0, 0.5, items), np.random.default_rng(seed)
    bits = hard + own.normal(shift, 0.1, items) + own.normal(0, 0.02)
    return bits, (bits + own.normal(0, 0.3, items) < 1.0).astype(float)


def write(run: Path, found: Sequence[TaskScores], step: int = 50) -> None:
    write_evaluation(run, values_of(found), step=step, tokens=1000 * step)


def made(runs: Path, by_row: Mapping[float, Sequence[Sequence[TaskScores]]], **options: Any) -> Comparison:
    """Comparison of runs by learning rate and seed."""
    for lr, seeds in by_row.items():
        for seed, found in enumerate(seeds):
            run = make_run(runs, {"optimizer.lr": lr, "experiment.seed": seed}, metrics=rows(2.0 + lr))
            write(run, found)
    return compare(select(["made"], runs), **options)


def numbers(comparison: Comparison, metric: str, row: int = 1) -> dict[str, Any]:
    found = records(comparison)[row]
    return {name.removeprefix(f"{metric}.") or name: found[name] for name in found if name.startswith(f"{metric}.")} | {
        "value": found[metric]
    }


def notes(comparison: Comparison) -> str:
    (section,) = comparison.added_sections
    return "\n".join(section.notes)


def test_one_run_against_another_is_a_paired_test_over_items(tmp_path: Path):
    one, two = drawn(1), drawn(2, shift=0.1)
    found = made(tmp_path, {0.001: [[scored("arc", *one)]], 0.003: [[scored("arc", *two)]]})
    for metric, first, second in (("bits_per_byte", one[0], two[0]), ("acc", one[1], two[1])):
        known, test = numbers(found, f"tasks/arc/{metric}"), scipy.stats.ttest_rel(second, first)
        assert known["value"] == pytest.approx(second.mean())
        assert known["delta"] == pytest.approx(second.mean() - first.mean())
        low, high = test.confidence_interval()
        assert (known["delta_low"], known["delta_high"], known["p"]) == pytest.approx((low, high, test.pvalue))
    assert numbers(found, "tasks/arc/bits_per_byte")["verdict"] == "differs on these items"
    assert "train three seeds or more" in notes(found)
    assert numbers(found, "tasks/arc/acc")["verdict"] == "n.d."


def test_several_seeds_and_items_are_crossed(tmp_path: Path):
    """The formula of the interval, written again."""
    values = {lr: [drawn(10 * place + seed, shift=0.1 * place) for seed in range(3)] for place, lr in enumerate(LRS)}
    found = made(tmp_path, {lr: [[scored("arc", *one)] for one in seeds] for lr, seeds in values.items()})
    d = np.array([two[0] - one[0] for one, two in zip(values[0.001], values[0.003], strict=True)])
    n, m = d.shape
    a, b = d.mean(1).var(ddof=1) / n, d.mean(0).var(ddof=1) / m
    rest = d - d.mean(1, keepdims=True) - d.mean(0) + d.mean()
    c = (rest**2).sum() / ((n - 1) * (m - 1)) / (n * m)
    v = max(a + b - c, a, b)
    degrees = v**2 / (a**2 / (n - 1) + b**2 / (m - 1) + c**2 / ((n - 1) * (m - 1)))
    half = math.sqrt(v) * scipy.stats.t.ppf(0.975, degrees)
    known = numbers(found, "tasks/arc/bits_per_byte")
    assert (known["delta"], known["n"]) == (pytest.approx(d.mean()), 3)
    assert (known["delta_low"], known["delta_high"]) == pytest.approx((d.mean() - half, d.mean() + half))
    assert known["verdict"] == "differs"
    assert "over items and seeds together" in notes(found)
    assert "train three seeds" not in notes(found)


def test_two_seeds_are_too_few_and_seeds_need_not_be_shared(tmp_path: Path):
    both = [[scored("arc", *drawn(seed))] for seed in range(2)]
    found = made(tmp_path / "a", {0.001: both, 0.003: both})
    assert numbers(found, "tasks/arc/acc")["verdict"] == "n < 3"
    for seed in (5, 6):
        run = make_run(tmp_path / "b", {"optimizer.lr": 0.003, "experiment.seed": seed}, metrics=rows(2.0))
        write(run, [scored("arc", *drawn(seed))])
    assert numbers(made(tmp_path / "b", {0.001: both}), "tasks/arc/acc")["delta"] == pytest.approx(
        np.mean([drawn(seed)[1] for seed in (5, 6)]) - np.mean([drawn(seed)[1] for seed in range(2)])
    )


def test_items_of_another_version_are_not_paired(tmp_path: Path):
    one = scored("arc", *drawn(1))
    found = made(tmp_path, {0.001: [[one]], 0.003: [[scored("arc", *drawn(2), digest="e" * 64)]]})
    known = numbers(found, "tasks/arc/acc")
    assert (known["value"], known["delta"]) == (None, None)
    assert "arc has other items in lr=0.003 than in the baseline" in notes(found)
    fewer = made(tmp_path / "b", {0.001: [[one]], 0.003: [[scored("arc", *drawn(2, items=30))]]})
    assert numbers(fewer, "tasks/arc/acc")["delta"] is None


def test_a_ratio_of_sums_keeps_its_weights(tmp_path: Path):
    weights = np.linspace(0.5, 1.5, ITEMS)
    one, two = drawn(1), drawn(2)
    pair = [[[scored("text", *values, weights=weights)]] for values in (one, two)]
    known = numbers(made(tmp_path, dict(zip(LRS, pair, strict=True))), "tasks/text/bits_per_byte")
    d = two[0] - one[0]
    assert known["delta"] == pytest.approx(np.average(d, weights=weights))
    residual = weights * (d - np.average(d, weights=weights)) / weights.sum()
    half = math.sqrt(ITEMS / (ITEMS - 1) * (residual**2).sum()) * scipy.stats.t.ppf(0.975, ITEMS - 1)
    assert known["delta_high"] - known["delta"] == pytest.approx(half)


def test_a_suite_is_centered_at_chance(tmp_path: Path):
    values = [[drawn(seed), drawn(seed + 9, items=20)] for seed in (1, 2)]
    by_row = {
        lr: [[scored("arc", *arc), scored("boolq", *boolq, chance=0.5)]]
        for lr, (arc, boolq) in zip(LRS, values, strict=True)
    }
    found = made(tmp_path, by_row)
    centered = [((arc[1].mean() - 0.25) / 0.75 + (boolq[1].mean() - 0.5) / 0.5) / 2 for arc, boolq in values]
    known = numbers(found, "tasks/acc_centered")
    assert known["value"] == pytest.approx(centered[1])
    assert known["delta"] == pytest.approx(centered[1] - centered[0])
    errors = [
        scipy.stats.sem(one - zero) / (1 - chance)
        for one, zero, chance in zip(
            [values[1][0][1], values[1][1][1]], [values[0][0][1], values[0][1][1]], (0.25, 0.5), strict=True
        )
    ]
    half = known["delta_high"] - known["delta"]
    assert half == pytest.approx(1.99 * math.hypot(*errors) / 2, rel=0.03)
    assert "(accuracy − chance) / (1 − chance)" in notes(found)


def test_every_output_has_the_table(tmp_path: Path):
    found = made(tmp_path, {lr: [[scored("arc", *drawn(seed))]] for seed, lr in enumerate(LRS)})
    screen = io.StringIO()
    show(found, Console(file=screen, width=100))
    for text in (screen.getvalue(), to_markdown(found), to_html(found)):
        assert {"Tasks", "arc", "items"} <= {*re.findall(r"\w+", text)}
    assert "| arc | bits\\_per\\_byte | lr=0.001 | 1 |" in to_markdown(found)
    assert json.loads(json_text(json_values(found)))["rows"][1]["tasks/arc/acc.n"] == 1
    assert any("same items" in note for note in json.loads(json_text(json_values(found)))["notes"]["Tasks"])
    assert list(csv.DictReader(io.StringIO(to_csv(found))))[1]["tasks/arc/acc"]


def test_scores_are_those_at_the_compared_tokens(tmp_path: Path):
    early, late = (scored("arc", *drawn(seed)) for seed in (1, 2))
    for lr in LRS:
        run = make_run(tmp_path, {"optimizer.lr": lr}, metrics=rows(2.0))
        write(run, [early], 20)
        write(run, [late], 40)
    for at, one in (("30k", early), ("least", late)):
        found = compare(select(["made"], tmp_path), at=at)
        assert numbers(found, "tasks/arc/acc")["value"] == pytest.approx(one.metrics["acc"].value)
    assert not compare(select(["made"], tmp_path), at="10k").added_sections


def test_a_continued_run_has_its_parents_scores_before_it_begins(tmp_path: Path):
    paths = [make_run(tmp_path, {"optimizer.lr": lr}, metrics=rows(2.0)) for lr in LRS]
    for path, steps in zip(paths, ((20, 40), (50,)), strict=True):
        for step in steps:
            write(path, [scored("arc", *drawn(step))], step)
    parent, child = (read_run(path) for path in paths)
    child = replace(child, parent=parent, lineage=Lineage(str(paths[0]), 30, 30_000))
    found = {up_to: newest(child, up_to) for up_to in (50_000, 45_000, 15_000)}
    assert {up_to: one and one[0] for up_to, one in found.items()} == {50_000: 50_000, 45_000: 20_000, 15_000: None}


def test_tests_over_items_and_seeds_keep_their_level():
    """Without an effect, 95 % of the intervals hold zero if seeds are a part of them, and fewer over items alone."""
    draw = np.random.default_rng(0)

    def share(seeds: int) -> float:
        wrong = 0
        for _ in range(200):
            hard = draw.beta(2, 2, 500)
            chances = np.clip(hard + draw.normal(0, 0.04, (2, seeds, 1)), 0, 1)
            both: list[Runs] = [
                {seed: {"t": scored("t", hits, hits)} for seed, hits in enumerate(row)}
                for row in (draw.random((*chances.shape[:2], 500)) < chances).astype(float)
            ]
            _, delta = Line("acc", (both[0][0]["t"],)).measure(*both)
            assert delta is not None
            assert delta.p is not None
            wrong += delta.p < 0.05
        return wrong / 200

    assert share(5) < 0.1
    assert share(1) > 0.25


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: text.replace('"acc": {', '"other": {'),
        lambda text: text.replace('"chance": 0.25', '"chance": 1'),
        lambda text: text.replace('"ids": ["0", ', '"ids": ['),
        lambda text: text.replace('"items": [', '"items": ["x", ', 1),
        lambda text: text.replace('"items": [', '"items": [[1], ', 1),
        lambda text: "[]",
    ],
)
def test_damaged_scores_are_refused(damage: Any, tmp_path: Path):
    run = make_run(tmp_path, {}, metrics=rows(2.0))
    write(run, [scored("arc", *drawn(1))])
    path = run / "tasks" / "step-00000050.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(UserError, match=r"step-00000050\.json (has no|cannot be used)"):
        _ = compare(select(["made"], tmp_path)).added_sections


LOGGED = {"tasks/arc/acc": 0.5, "validation_bits_per_byte": 1.25, "validation_loss/code": 1.5, "tasks/bits_per_byte": 2}


def test_any_logged_metric_can_be_a_studys(tmp_path: Path):
    names = "{tasks/arc/acc: max, validation_bits_per_byte: min, validation_loss/code: min}"
    (tmp_path / "mine.yaml").write_text(
        f"question: Which?\naxes:\n  - grid: {{optimizer.lr: [1, 2]}}\nmetrics: {names}"
    )
    study = read_study(tmp_path / "mine.yaml")
    for lr in LRS:
        make_run(tmp_path, {"optimizer.lr": lr}, metrics=rows(2.0, more=LOGGED))
    found = compare(select(["made"], tmp_path), metrics=tuple(study.metrics))
    assert [(metric.name, metric.better) for metric in found.metrics] == list(study.metrics.items())
    assert [found.rows[0].numbers[name][0] for name in study.metrics] == [0.5, 1.25, 1.5]


def test_console_and_show_have_the_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_run(tmp_path, {}, metrics=[*rows(2.0), {"step": 51, "tokens": 51_000, "loss": 2.0, **LOGGED}])
    assert main(["show", str(run)]) == 0
    out = capsys.readouterr().out
    assert "validation_bits_per_byte 1.25" in out
    assert "validation_loss: code 1.5" in out
    assert "tasks/arc: acc 0.5" in out
    screen = io.StringIO()
    ConsoleSink(100, console=Console(file=screen, width=200)).log({"step": 1, "tokens": 1000, **LOGGED})
    assert "validation bits per byte 1.2500  tasks/bits per byte 2.0000" in screen.getvalue()
