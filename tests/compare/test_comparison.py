import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.compare.made_runs import make_run, make_study, rows
from titan_exp.compare.compared_metrics import differing_keys, value_text
from titan_exp.compare.comparison import Comparison, compare
from titan_exp.compare.findings import findings, heading, layout_checks, remarks, verdict
from titan_exp.compare.output.formats import legend, records, text_table, to_csv
from titan_exp.compare.output.study_sections import pareto, scaling
from titan_exp.compare.runs import read_run, select
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.run_lookup import StudyFolder, StudyRecord, StudyRun, find_runs
from titan_exp.tracking.run_folder.run_folder import RunFolder

THREE = {0.001: [3.0, 3.1, 3.2], 0.003: [2.5, 2.61, 2.69], 0.01: [3.01, 3.08, 3.22]}


def compared(runs: Path, *words: str, **options: Any) -> Comparison:
    return compare(select(words or ("made",), runs), **options)


def said(comparison: Comparison) -> str:
    return "\n".join([*findings(comparison), *remarks(comparison, layout_checks(comparison.runs))])


def value(comparison: Comparison, row: int, metric: str) -> float | None:
    found = comparison.rows[row].estimates[metric]
    return None if found is None else found.mean


def test_columns_are_differing_keys_and_seeds_share_a_row(tmp_path: Path):
    make_study(tmp_path, THREE)
    found = compared(tmp_path)
    assert found.differing_keys.keys == ("optimizer.lr",)
    assert [row.label for row in found.rows] == ["lr=0.001", "lr=0.003", "lr=0.01"]
    assert [len(row.runs) for row in found.rows] == [3, 3, 3]
    assert heading(found) == "3 rows, 9 runs · at 50,000 tokens, where every run ends"


@pytest.mark.parametrize("with_record", [True, False])
def test_a_run_is_found_by_its_name_in_the_table(with_record: bool, tmp_path: Path):
    """Whatever the study's file spells; runs of no study, too."""
    values = {
        "optimizer.lr": ["4e-3", "0.02"],
        "optimizer.betas": ["[0.90, 0.95]", "[0.9,0.99]"],
        "data.document_mask": ["true", "False"],
        "training.max_grad_norm": ["1e0", "null"],
        "lr_schedule.decay": ["linear", "'cosine'"],
    }
    points, paths = [], set[Path]()
    for key, seed in itertools.product(values, (0, 1)):
        point = {other: spelled[key == other] for other, spelled in values.items()}
        read = {
            other: yaml.safe_load(word.replace("4e-3", "0.004").replace("1e0", "1.0")) for other, word in point.items()
        }
        path = make_run(tmp_path, {**read, "experiment.seed": seed}, metrics=rows(2.0))
        variant = " ".join(f"{other.rpartition('.')[2]}={word}" for other, word in point.items())
        points.append(StudyRun(f"{variant} seed={seed}", variant, seed, path.name, "", 1, 50, "local", ()))
        paths.add(path)
    if with_record:
        record = StudyRecord("made", "Which?", "", (), None, {"loss": "min"}, tuple(points), {})
        StudyFolder(tmp_path / "made").write(record, "")
    found = {}
    for row in compared(tmp_path).rows:
        for run in row.runs:
            (entry,) = find_runs([f"made/{row.name_of(run)}"], tmp_path)
            assert entry.folder.path.name == run.run_id
            found[entry.folder.path] = entry
    assert found.keys() == paths
    assert {entry.label for entry in found.values()} == {point.label for point in points} or not with_record


def test_verdicts_match_the_synthetic_truth(tmp_path: Path):
    make_study(tmp_path, THREE)
    found = compared(tmp_path)
    assert found.main.name == "validation_loss"
    deltas = [row.deltas["loss"] for row in found.rows]
    assert deltas[0] is None
    assert deltas[1] is not None
    assert deltas[1].difference == pytest.approx(-0.5)
    assert [verdict(found.main, delta) for delta in deltas] == ["", "different", "not distinguishable"]
    assert "lr=0.01: validation loss +0.0033 [" in said(found)
    assert "not distinguishable from the baseline (3 seeds, paired)" in said(found)
    assert "Holm" in said(found)
    other = compared(tmp_path, baseline="lr=3e-3")
    assert [verdict(other.main, row.deltas["loss"]) for row in other.rows] == ["different", "", "different"]
    assert "Exploratory: no question was registered" in said(found)
    assert "The unit is a pair of runs with one seed: 3 pairs." in said(found)


def test_one_seed_gives_no_verdict(tmp_path: Path):
    make_study(tmp_path, {0.001: [3.0], 0.003: [2.5]})
    text = said(compared(tmp_path))
    assert "without an interval (one seed)" in text
    assert "Student" not in text
    make_study(tmp_path, {0.001: [3.0, 3.1], 0.003: [2.5, 2.6], 0.01: [math.nan, math.nan, 2.0]}, study="apart")
    assert "At most one common seed in some rows: no interval" in said(compared(tmp_path, "apart"))


def test_two_seeds_give_no_verdict(tmp_path: Path):
    """However small their noise: two pairs that agree by chance look like certainty."""
    make_study(tmp_path, {0.001: [3.0, 3.1], 0.003: [2.5, 2.6001]})
    found = compared(tmp_path)
    assert verdict(found.main, found.rows[1].deltas["validation_loss"]) == "too few seeds"
    assert "too few seeds to tell it from the baseline (2 seeds, paired)" in said(found)


def test_metrics_at_the_least_advanced_run(tmp_path: Path):
    make_run(tmp_path, {"optimizer.lr": 0.1}, metrics=rows(2.0))
    make_run(tmp_path, {"optimizer.lr": 0.2}, metrics=rows(2.0)[:30], state="running")
    make_run(tmp_path, {"optimizer.lr": 0.3}, metrics=rows(2.0)[:7], state="failed", reason="Traceback\nBoom: it broke")
    make_run(tmp_path, {"optimizer.lr": 0.4}, state="pending")
    found = compared(tmp_path)
    assert found.budget.tokens == 30_000
    assert "where the least advanced is (" in heading(found)
    expected = 2.0 + (1 - 30 / 45) * 2
    assert [value(found, row, "loss") for row in range(4)] == pytest.approx([expected, expected, None, None])
    assert [row.runs[0].state for row in found.rows] == ["done", "running", "failed", "new"]
    assert "(lr=0.3) failed after step 7: Boom: it broke." in said(found)
    assert "1 run has not seen so many tokens and has no number here: lr=0.4." in said(found)
    # What a run cost is divided by how much of it lies before the point; what it was does not depend on the point.
    assert value(found, 0, "gpu_hours") == pytest.approx(0.01 * 30 / 50)
    assert value(found, 2, "memory") == 2.0
    assert value(found, 2, "tokens_per_second") is None


def test_last_values_at_unequal_tokens_are_named(tmp_path: Path):
    evaluated = [row | {"validation_loss": 2.0} if row["step"] in (20, 30) else row for row in rows(2.0)]
    make_run(tmp_path, {"optimizer.lr": 0.1}, metrics=evaluated[:30])
    make_run(tmp_path, {"optimizer.lr": 0.2}, metrics=[*evaluated[:29], *rows(2.0)[29:]])
    found = said(compared(tmp_path))
    assert re.search(
        r"validation loss is at unequal tokens: the last value of \w+ is at 20,000, that of \w+ at 30,000. To compare "
        "all at equal tokens, add --at 20000",
        found,
    )
    assert found.count("unequal") == 1
    assert "unequal" not in said(compared(tmp_path, at="20000"))


def test_run_without_heartbeat_is_lost(tmp_path: Path):
    folder = make_run(tmp_path, {"optimizer.lr": 0.1}, metrics=rows(2.0)[:30], state="running")
    (folder / "heartbeat").write_text('{"step": 30, "time": 1.0}')
    RunFolder(folder).update_attempt(1, intent=1.0)
    make_run(tmp_path, {"optimizer.lr": 0.2}, metrics=rows(2.0))
    found = compared(tmp_path)
    assert [row.runs[0].state for row in found.rows] == ["lost", "done"]
    assert "at 50,000 tokens, where every finished run ends" in heading(found)
    assert "was lost after step 30" in said(found)


@pytest.mark.parametrize(("at", "tokens"), [("done", 50_000), ("end", math.inf), ("12k", 12_000), ("2e4", 20_000)])
def test_token_budget_by_name_and_number(tmp_path: Path, at: str, tokens: float):
    make_run(tmp_path, {"optimizer.lr": 0.1}, metrics=rows(2.0))
    make_run(tmp_path, {"optimizer.lr": 0.2}, metrics=rows(2.0)[:30], state="preempted")
    found = compared(tmp_path, at=at)
    assert found.budget.tokens == tokens
    assert (value(found, 1, "loss") is None) == (at == "done")


@pytest.mark.parametrize(
    ("at", "words"), [("60k", "The longest has seen 50,000"), ("soon", "must be least"), ("-3", "must be")]
)
def test_invalid_token_budget_is_refused(tmp_path: Path, at: str, words: str):
    make_study(tmp_path, {0.001: [3.0]})
    with pytest.raises(UserError, match=words):
        compared(tmp_path, at=at)


def test_diverged_runs_are_reported_and_left_out_of_means(tmp_path: Path):
    make_study(tmp_path, {0.001: [3.0, 3.1], 0.1: [2.5]})
    broken = [*rows(2.0)[:-1], {**rows(2.0)[-1], "loss": math.nan, "validation_loss": math.inf}]
    make_run(tmp_path, {"optimizer.lr": 0.1, "experiment.seed": 1}, metrics=broken)
    found = compared(tmp_path)
    assert value(found, 1, "loss") == 2.5
    assert "lr=0.1: 1 of 2 runs diverged in loss (seed 1), left out" in said(found)


def test_a_group_that_diverged_or_failed_has_no_speed(tmp_path: Path):
    make_study(tmp_path, {0.001: [3.0], 0.1: [math.inf, math.inf], 0.2: [2.0, math.inf]})
    make_run(tmp_path, {"optimizer.lr": 0.3}, metrics=rows(2.0)[:30], state="failed", reason="rank 0: Diverged: nan")
    make_run(tmp_path, {"optimizer.lr": 0.1, "parallelism.tp": 2}, metrics=rows(math.inf), world_size=2)
    found = compared(tmp_path)
    speeds = {row.label: value(found, place, "tokens_per_second") for place, row in enumerate(found.rows)}
    assert [label for label, speed in speeds.items() if speed is None] == ["tp=1 lr=0.1", "tp=1 lr=0.3", "tp=2 lr=0.1"]
    assert value(found, list(speeds).index("tp=1 lr=0.1"), "time") is None
    assert value(found, list(speeds).index("tp=1 lr=0.1"), "memory") is not None
    assert not scaling(found)


def test_rows_have_one_name_everywhere(tmp_path: Path):
    folder = make_study(tmp_path, {0.001: [3.0, 3.1], 0.1: [2.5, 2.6]})
    make_run(tmp_path, {"optimizer.lr": 0.2}, metrics=rows(2.0)[:30], state="failed", reason="it broke")
    make_run(tmp_path, {"optimizer.lr": 0.2, "experiment.seed": 1}, metrics=rows(2.0)[:30])
    found = compared(tmp_path)
    names = [row.label for row in found.rows]
    assert names == ["lr=0.001", "lr=0.1", "lr=0.2"]
    assert "(lr=0.2 seed=0) failed" in said(found)
    assert [record["label"] for record in records(found)] == names
    assert to_csv(found).startswith("label,optimizer.lr,")
    runs = {path.name: read_run(path) for path in folder.iterdir()}
    points = [{"run_id": name, "variant": f"rate {run.config['optimizer']['lr']}"} for name, run in runs.items()]
    (folder / "study.json").write_text(json.dumps({"question": "?", "points": points}))
    table = text_table(compared(tmp_path))
    assert table.keys == ("point", "lr"), "the name that sentences and plots have is in the table"
    assert {row.keys for row in table.rows} == {("rate 0.001", "0.001"), ("rate 0.1", "0.1"), ("rate 0.2", "0.2")}


def test_marks_of_the_table_are_explained(tmp_path: Path):
    make_study(tmp_path, {0.001: [3.0, 3.1, 3.2], 0.003: [2.5, 2.61, 2.69], 0.01: [3.01, 3.3, 2.9]})
    make_run(tmp_path, {"optimizer.lr": 0.1}, metrics=rows(math.inf))
    text = legend(text_table(compared(tmp_path)))
    words = (
        "↓: lower",
        "↑: higher",
        "±: half",
        "[ , ]: 95 %",
        "n.d.: not",
        "diverged: no",
        "—: no number",
        "yellow:",
    )
    assert [word for word in words if word not in text] == []
    assert "n.d.*" not in text
    assert "red:" not in text
    make_study(tmp_path / "two", {0.001: [3.0], 0.003: [2.5]})
    plain = legend(text_table(compared(tmp_path / "two", metrics=["loss"])))
    assert plain == "↓: lower is better"


def test_tokens_to_a_target(tmp_path: Path):
    make_run(tmp_path, {"optimizer.lr": 0.1}, metrics=rows(2.0))
    make_run(tmp_path, {"optimizer.lr": 0.2}, metrics=rows(2.9))
    found = compared(tmp_path, target=2.5)
    assert value(found, 0, "tokens_to_target") == 34_000
    assert value(found, 1, "tokens_to_target") is None


def test_user_metrics(tmp_path: Path):
    make_run(tmp_path, {"optimizer.lr": 0.1}, metrics=rows(2.0, more={"validation_loss/code": 1.5}))
    make_run(tmp_path, {"optimizer.lr": 0.2}, metrics=rows(2.0, more={"validation_loss/code": 1.25}))
    found = compared(tmp_path, metrics=["validation_loss/code", "grad_norm"])
    assert [metric.name for metric in found.metrics] == ["validation_loss/code", "grad_norm"]
    assert value(found, 1, "validation_loss/code") == 1.25
    assert found.metrics[0].better == "min"
    with pytest.raises(UserError, match="did you mean grad_norm"):
        compared(tmp_path, metrics=["gradnorm"])


def test_study_gives_question_baseline_and_metrics(tmp_path: Path):
    folder = make_study(tmp_path, {0.001: [3.0, 3.1], 0.003: [2.5, 2.6]})
    ids = {path.name: json.loads((path / "code.json").read_text()) for path in folder.iterdir()}
    by_lr = sorted(ids, key=lambda name: "lr: 0.001" in (folder / name / "config.yaml").read_text())
    extra = make_run(tmp_path, {"optimizer.lr": 0.5}, metrics=rows(1.0))
    points = [
        {"run_id": name, "label": f"{kind} seed", "variant": kind, "seed": 0}
        for name, kind in zip(by_lr, ["fast", "fast", "slow", "slow"], strict=True)
    ]
    points.append({"run_id": "0123456789ab", "label": "steep seed=1", "variant": "steep", "seed": 1})
    study = {"name": "made", "question": "How fast?", "points": points, "baseline": "slow"}
    study |= {"metrics": {"loss": "min", "memory": "min"}, "skipped": {"tp=7": "4 heads"}, "removed": []}
    (folder / "study.json").write_text(json.dumps(study))
    found = compared(tmp_path)
    assert [row.label for row in found.rows] == ["fast", "slow"]
    assert (found.baseline, found.baseline_why) == (1, "the study's")
    assert [metric.name for metric in found.metrics] == ["loss", "memory"]
    notes = "\n".join(found.notes)
    assert "1 point of the study without a run yet (new): steep seed=1." in notes
    assert f"of no point: {extra.name}" in notes
    assert "1 point of the study cannot run: tp=7 (4 heads)." in notes
    # Named beside the study, the run is taken in.
    assert len(compared(tmp_path, "made", extra.name).runs) == 5


@pytest.mark.parametrize(
    ("values", "tokens", "reason"),
    [
        ({"data.validation_documents": 3}, (None, None), "data.validation_documents differs"),
        ({"data.paths": ["b"]}, (100.0, 90.0), "data.paths differs; of 90 and 100 tokens"),
        ({"optimizer.lr": 0.5}, (100.0, 90.0), "of 90 and 100 tokens"),
        ({"data.paths": ["b"]}, (100.0, 100.0), ""),
        ({"optimizer.lr": 0.5}, (100.0, 100.0), ""),
    ],
)
def test_losses_of_different_documents_rank_nothing(
    tmp_path: Path, values: dict[str, Any], tokens: tuple[float | None, ...], reason: str
):
    """In runs without a study, too."""
    for own, count in zip(({"data.paths": ["a"]}, {"data.paths": ["a"], **values}), tokens, strict=True):
        made = rows(3.0)
        made[-1] |= {} if count is None else {"validation_tokens": count}
        make_run(tmp_path, own, metrics=made)
    found = said(compared(tmp_path))
    assert ("ranks nothing" in found) == bool(reason)
    assert not reason or f"is of different documents ({reason}), so that it ranks nothing." in found


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"paths": ["a/x"]}, {"paths": ["b/x"]}, ""),
        ({"paths": ["a/x"]}, {"paths": ["a/y"]}, "evaluation.sets.held.data.paths differs"),
        ({}, {"validation_documents": 3}, "evaluation.sets.held.data.validation_documents differs"),
    ],
)
def test_sets_of_different_documents_rank_nothing(tmp_path: Path, first: dict, second: dict, reason: str):  # 0.1 s
    """Paths of the runs' own data do not count in sets that have others."""
    for number, own in enumerate((first, second)):
        made = rows(3.0)
        made[-1] |= {"validation_loss/held": 3.0}
        sets = {"held": {"data": {"source": "text", **own}}}
        make_run(tmp_path, {"data.paths": [str(number)], "evaluation.sets": sets}, metrics=made)
    found = said(compared(tmp_path, metrics=["validation_loss/held"]))
    assert ("ranks nothing" in found) == bool(reason)
    assert not reason or f"validation_loss/held is of different documents ({reason})" in found


def test_a_table_is_uniform(tmp_path: Path):
    """Numbers of a column have one number of decimals; values are as typed; `n` counts what the mean is of; an empty
    mapping is no key beside its members; and nothing is corrected of too few seeds."""
    losses = {0.001: [3.0, 3.1], 0.003: [2.5, 2.6], 0.01: [2.5, 2.6]}
    made = make_study(tmp_path, losses)
    make_run(tmp_path, {"optimizer.lr": 0.001, "experiment.seed": 2}, metrics=rows(3.0, steps=10), state="preempted")
    found = compared(tmp_path, at="done")
    assert [row.n for row in text_table(found).rows] == ["2 of 3", "2", "2"]
    assert "Significance is corrected" not in said(found)
    for number, path in enumerate(sorted(made.iterdir())):
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        lines = [{**line, "mine": 1.5 if number else 1.125} for line in lines]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for row in (table := text_table(compared(tmp_path, metrics=["mine"], at="end"))).rows:
        assert re.fullmatch(r"1\.\d{3}", row.cells[0].value), table
    assert value_text([955.0, 45.5]) == "[955,45.5]"
    keys = differing_keys([{"optimizer": {"options": {}}}, {"optimizer": {"options": {"beta": 0.9}}}]).keys
    assert keys == ("optimizer.options.beta",)


def test_labels_have_varied_keys_and_columns_differing_keys(tmp_path: Path):
    paths = [
        make_run(tmp_path, {"training.steps": steps, "lr_schedule.decay_steps": steps - 10}, metrics=rows(3.0))
        for steps in (50, 60)
    ]
    points = [
        {"run_id": path.name, "label": f"steps={steps}", "variant": f"steps={steps}"}
        for path, steps in zip(paths, (50, 60), strict=True)
    ]
    (tmp_path / "made" / "study.json").write_text(json.dumps({"name": "made", "points": points}))
    found = compared(tmp_path, baseline="decay_steps=50")
    assert [row.label for row in found.rows] == ["steps=50", "steps=60"]
    assert found.differing_keys.keys == ("training.steps", "lr_schedule.decay_steps")
    assert found.baseline == 1
    # Without a study nothing says which key matters.
    (tmp_path / "made" / "study.json").unlink()
    assert compared(tmp_path).rows[0].label == "steps=50 decay_steps=40"


@pytest.mark.parametrize("same_value", [True, False])
def test_named_list_of_a_study_is_one_column(tmp_path: Path, same_value: bool):
    points = []
    for name, lr in [("plain", 1e-3), ("plain", 2e-3), ("steep", 1e-3), ("steep", 2e-3)]:
        decay = {"plain": 0.1, "steep": 0.2}[name] + (0 if same_value or lr == 1e-3 else 0.5)
        values = {"optimizer.weight_decay": decay, "training.max_grad_norm": decay, "optimizer.lr": lr}
        path = make_run(tmp_path, values, metrics=rows(3.0 + lr))
        points.append({"run_id": path.name, "variant": f"{name} lr={lr:g}", "choices": {"change": name}})
    keys = ["optimizer.weight_decay", "training.max_grad_norm"]
    study = {"name": "made", "points": points, "baseline": "plain lr=0.002", "lists": {"change": keys}}
    (tmp_path / "made" / "study.json").write_text(json.dumps(study))
    found = compared(tmp_path, baseline=None if same_value else points[1]["run_id"])
    assert [row.label for row in found.rows] == [point["variant"] for point in points]
    assert found.baseline == 1
    # A name with two meanings, after a change of the study file, does not hide the keys.
    assert ("change" in found.differing_keys.keys) == same_value
    if same_value:
        assert {*found.differing_keys.keys} == {"change", "optimizer.lr"}
        assert [row.values["change"] for row in found.rows] == ["plain", "plain", "steep", "steep"]
        assert compared(tmp_path, baseline="change=steep lr=0.001").baseline == 2
        # Beside a run without a choice, the keys stay.
        other = make_run(tmp_path / "other", {"optimizer.weight_decay": 0.7}, metrics=rows(3.0))
        assert "change" not in compared(tmp_path, "made", str(other)).differing_keys.keys


def test_ways_to_name_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = make_study(tmp_path / "runs", {0.001: [3.0], 0.002: [3.0]})
    one, two = sorted(path.name for path in folder.iterdir())
    monkeypatch.chdir(tmp_path)
    for words, count in [
        (["made"], 2),
        (["runs/made"], 2),
        (["runs/made/"], 2),
        ([str(folder)], 2),
        ([one[:6]], 1),
        ([f"runs/made/{one}", two], 2),
        (["m*"], 2),
        (["runs/made/*"], 2),
        ([f"{folder}/*"], 2),
        ([f"made/{one}", one], 1),
    ]:
        assert len(select(words, Path("runs")).runs) == count, words


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["mad"], "Did you mean made"),
        (["nothing/*"], "unknown run or study"),
        ([], "Name a study"),
        (["zz"], "made"),
    ],
)
def test_unknown_names_are_refused_with_suggestions(tmp_path: Path, words: Sequence[str], answer: str):
    make_study(tmp_path, {0.001: [3.0]})
    with pytest.raises(UserError, match=answer):
        select(words, tmp_path)


def test_damaged_run_is_reported_and_left_out(tmp_path: Path):
    folder = make_study(tmp_path, {0.001: [3.0], 0.002: [3.0]})
    damaged = sorted(folder.iterdir())[0]
    (damaged / "metrics.jsonl").write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    found = compared(tmp_path)
    assert len(found.rows) == 1
    assert found.notes[0].startswith("Left out: ")
    assert "line 2" in found.notes[0]
    (sorted(folder.iterdir())[1] / "config.yaml").write_text("[1, 2")
    with pytest.raises(UserError, match="cannot read any of these runs"):
        compared(tmp_path)


def test_duplicate_run_counts_once(tmp_path: Path):
    make_study(tmp_path / "one", {0.001: [3.0]})
    make_study(tmp_path / "two", {0.001: [3.0]})
    found = compared(tmp_path, str(tmp_path / "one/made"), str(tmp_path / "two/made"))
    assert len(found.runs) == 1
    assert "with the same id" in found.notes[0]


def test_layout_check(tmp_path: Path):
    make_run(tmp_path, {}, metrics=rows(2.0))
    same = [{**row, "loss": row["loss"] * (1 + 1e-6)} for row in rows(2.0)]
    make_run(tmp_path, {"parallelism.tp": 2}, metrics=same, world_size=2)
    wrong = [{**row, "loss": row["loss"] * (1 + 1e-5)} for row in rows(2.0)]
    make_run(tmp_path, {"parallelism.pp": 2}, metrics=wrong, world_size=2)
    make_run(tmp_path, {"experiment.seed": 1}, metrics=rows(2.0))
    found = compared(tmp_path)
    checks = {check.layouts: check for check in layout_checks(found.runs)}
    assert set(checks) == {("tp=1", "tp=2"), ("pp=1", "pp=2")}
    assert checks["tp=1", "tp=2"].holds
    assert checks["tp=1", "tp=2"].largest == pytest.approx(1e-6, rel=0.01)
    assert checks["pp=1", "pp=2"].holds is False
    assert "MORE THAN ROUNDING" in said(found)


def test_bf16_has_its_own_tolerance(tmp_path: Path):
    for tp, factor in ((1, 1.0), (2, 1.001)):
        values = {"training.mixed_precision": "bf16", "parallelism.tp": tp}
        make_run(tmp_path, values, metrics=[{**row, "loss": row["loss"] * factor} for row in rows(2.0)])
    (check,) = layout_checks(compared(tmp_path).runs)
    assert (check.tolerance, check.holds) == (2e-3, True)


def test_scaling_efficiency_over_the_smallest_world_size(tmp_path: Path):
    for tp, speed in ((1, 1000.0), (2, 1800.0), (4, 2400.0)):
        for seed in (0, 1):
            values = {"parallelism.tp": tp, "experiment.seed": seed, "optimizer.lr": 0.1}
            make_run(tmp_path, values, metrics=rows(2.0, speed=speed), world_size=tp)
    make_run(tmp_path, {"optimizer.lr": 0.2}, metrics=rows(2.0, speed=1.0))
    (series,) = scaling(compared(tmp_path))
    assert series.kind == "strong"
    assert series.fixed == "lr=0.1"
    assert [(point.label, point.world_size) for point in series.points] == [("tp=1", 1), ("tp=2", 2), ("tp=4", 4)]
    assert [point.speedup for point in series.points] == pytest.approx([1.0, 1.8, 2.4])
    assert [point.efficiency for point in series.points] == pytest.approx([1.0, 0.9, 0.6])


def test_growing_batch_is_weak_scaling(tmp_path: Path):
    for shards in (1, 2):
        values = {"parallelism.dp_shard": shards, "training.global_batch_size": 8 * shards}
        make_run(tmp_path, values, metrics=rows(2.0, speed=900.0 * shards), world_size=shards)
    (series,) = scaling(compared(tmp_path))
    assert series.kind == "weak"
    assert [point.efficiency for point in series.points] == pytest.approx([1.0, 1.0])


def test_pareto_front(tmp_path: Path):
    for lr, loss, seconds in ((0.1, 3.0, 10.0), (0.2, 2.5, 20.0), (0.3, 2.6, 30.0), (0.4, 2.0, 40.0)):
        make_run(tmp_path, {"optimizer.lr": lr}, metrics=rows(loss), seconds=seconds)
    points = pareto(compared(tmp_path))
    assert [(point.row, point.is_on_front) for point in points] == [(0, True), (1, True), (2, False), (3, True)]
    assert points[0].gpu_hours == pytest.approx(10 / 3600)


def test_pareto_front_ignores_rounding(tmp_path: Path):
    for tp, loss in ((1, 2.0), (2, 2.0 - 1e-7)):
        make_run(tmp_path, {"parallelism.tp": tp}, metrics=rows(loss), seconds=10.0 * tp)
    assert [point.is_on_front for point in pareto(compared(tmp_path))] == [True, False]


@pytest.mark.parametrize(
    ("first", "second", "keys", "short"),
    [
        ({"optimizer": {"lr": 1}}, {"optimizer": {"lr": 1.0}}, [], []),
        ({"optimizer": {"lr": True}}, {"optimizer": {"lr": 1}}, ["optimizer.lr"], ["lr"]),
        ({"optimizer": {"name": "a"}}, {"optimizer": {"name": "b"}}, ["optimizer.name"], ["optimizer"]),
        (
            {"optimizer": {"options": {"b": 1}}, "data": {"options": {"b": 1}}},
            {"optimizer": {"options": {"b": 2}}, "data": {"options": {"b": 2}}},
            ["optimizer.options.b", "data.options.b"],
            ["optimizer.options.b", "data.options.b"],
        ),
        ({"model": {"options": {}}}, {"model": {"options": {"x": 1}}}, ["model.options.x"], ["x"]),
        (
            {"paths": {"runs": 1}, "tracking": {"log_every": 1}, "experiment": {"notes": "a", "seed": 1}},
            {"paths": {"runs": 2}, "tracking": {"log_every": 2}, "experiment": {"notes": "b", "seed": 2}},
            [],
            [],
        ),
        (
            {"checkpoint": {"every": 1, "initial": "a"}},
            {"checkpoint": {"every": 2, "initial": "b"}},
            ["checkpoint.initial"],
            ["initial"],
        ),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, ["a.b"], ["b"]),
        # A column beside that of the loss.
        ({"balance": {"loss": "none"}}, {"balance": {"loss": "switch"}}, ["balance.loss"], ["balance"]),
    ],
)
def test_differing_keys(first: dict, second: dict, keys: list[str], short: list[str] | None):
    found = differing_keys([first, second])
    assert list(found.keys) == keys
    if short is not None:
        assert [found.short[key] for key in keys] == short


def test_choice_of_a_group_stands_for_keys_that_others_lack():
    adamw = {"optimizer": {"name": "adamw", "lr": 1, "weight_decay": 0.1, "implementation": "fused"}}
    soap = {"optimizer": {"name": "soap", "lr": 2, "weight_decay": 0.2, "max_dim": 64}}
    found = differing_keys([adamw, soap])
    assert found.keys == ("optimizer.name", "optimizer.lr", "optimizer.weight_decay")
    assert found.stands_for["optimizer.name"] == ("optimizer.name", "optimizer.implementation", "optimizer.max_dim")
    larger = {"optimizer": {**soap["optimizer"], "max_dim": 128}}
    assert "optimizer.max_dim" in differing_keys([adamw, soap, larger]).keys


def test_model_name_stands_for_its_shape():
    small = {"model": {"name": "s", "dim": 1, "layers": 1, "heads": 1}, "optimizer": {"lr": 1}}
    large = {"model": {"name": "l", "dim": 2, "layers": 2, "heads": 2}, "optimizer": {"lr": 2}}
    found = differing_keys([small, large])
    assert found.keys == ("model.name", "optimizer.lr")
    assert found.all_keys == ("model.dim", "model.layers", "model.heads", "optimizer.lr")
    # A name that means two shapes tells nothing apart.
    other = {"model": {"name": "l", "dim": 3, "layers": 3, "heads": 3}, "optimizer": {"lr": 2}}
    assert "model.name" not in differing_keys([small, large, other]).keys


def test_measured_over_predicted(tmp_path: Path):
    one = make_run(tmp_path, {"optimizer.lr": 1e-3}, metrics=rows(3.0, speed=5000.0))
    make_run(tmp_path, {"optimizer.lr": 2e-3}, metrics=rows(3.0))
    names = [metric.name for metric in compared(tmp_path).metrics]
    assert not any("predicted" in name for name in names)
    (one / "plan.json").write_text(json.dumps({"memory": 1.6, "tokens_per_second": 10000.0}))
    found = compared(tmp_path)
    assert value(found, 0, "speed_of_predicted") == pytest.approx(0.5)
    assert value(found, 0, "memory_of_predicted") == pytest.approx(2.0 / 1.6)
    assert value(found, 1, "speed_of_predicted") is None
