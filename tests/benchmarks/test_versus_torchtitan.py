"""`python -m benchmarks versus`: rows as configurations, turns within a budget, cached weights, both real sides."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.bench import ROOT, call_words
from benchmarks.versus import comparison, sides, turns
from benchmarks.versus.cases import CASES, OPTIONS, Job, case_of, read_planned, rows_named, too_large
from benchmarks.versus.comparison import PlannedRow, plan_row, plan_table
from benchmarks.versus.sides import Clock, export_weights, peer_options, run_role
from benchmarks.versus.turns import Budget, Results, Session
from tests.config.composing import give_gpus
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.models.blocks.linear import ShardSpec, init_shard_
from titan_exp.models.build import build_model, init_specs
from titan_exp.plan.devices import DEVICES, Device

PEER = ROOT / ".peer"
needs_peer = pytest.mark.skipif(
    not (PEER / "torchtitan").is_dir() and importlib.util.find_spec("torchtitan") is None,
    reason="torchtitan is not installed: make peer",
)


def run(*words: str, path: str = "", flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *flags, "-m", "benchmarks", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env=environment,
    )


@pytest.mark.parametrize("name", [*CASES, *OPTIONS])
def test_every_row_is_a_run_that_may_start(name: str, monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 1)
    job = Job(name, 10, 15)
    experiment: Any = job.experiment()
    shape = job.case.peer_model
    assert (experiment.model.dim, experiment.model.layers) == (shape["dim"], shape["n_layers"])
    if job.case.peer_family == "llama3":
        hidden = int(shape["ffn_dim_multiplier"] * int(2 * 4 * shape["dim"] / 3))
        assert experiment.model.ffn_dim == -(-hidden // shape["multiple_of"]) * shape["multiple_of"]
    else:
        moe, theirs = experiment.model.moe, shape["moe_args"]
        assert (moe.experts, moe.active_experts, moe.ffn_dim) == (
            theirs["num_experts"],
            theirs["top_k"],
            shape["moe_inter_dim"],
        )
    words = peer_options(dataclasses.replace(job, weights="weights"), "dump")
    assert len({word.partition("=")[0] for word in words}) == len(words), "an option is given twice"


def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["versus", "--rows", "1b_bf16_compile"]) == 2
    printed = capsys.readouterr().err
    assert "torch finds no CUDA GPU here" in printed
    assert "--tiny" in printed
    assert main(["versus", "--rows", "2b"]) == 2
    assert "--rows 2b: unknown row. Rows are all, options, 8b_bf16_compile" in capsys.readouterr().err


def test_rows_are_named_by_groups_cases_and_overrides():
    assert rows_named("all") == list(CASES)
    assert rows_named("1b_bf16_compile,all")[:2] == ["1b_bf16_compile", "8b_bf16_compile"]
    case = case_of("1b_bf16_compile+compile.cuda_graphs=true+optimizer.lr=1")
    assert case.ours[-2:] == ("compile.cuda_graphs=true", "optimizer.lr=1")
    assert case.goal is None
    assert case.peer == CASES["1b_bf16_compile"].peer


ROLE = """
import json, pathlib, sys, time
words = json.loads(sys.argv[2])
role, job = words["role"], words["job"]
with pathlib.Path(words["cache"]).open("a") as file:
    print(role, job["row"].split("_")[0], job["layers"] or "", file=file)
if role == "weights":
    print(json.dumps({"folder": "weights"}))
elif role == "peer" and job["row"] == "8b_bf16_selective":
    sys.exit("the peer is out of memory")
else:
    time.sleep(SLEEP if role == "ours" else 0)
    speed = {"peer": 100.0, "ours": 120.0}[role]
    losses = {"peer": [2.0, 1.5], "ours": [2.0, 1.25]}[role]
    print(json.dumps({"tokens_per_second": speed, "allocated": 1.0, "reserved": 2.0, "losses": losses}))
"""
"""A role without training: tells which it is, and answers."""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    return _session(tmp_path, monkeypatch, seconds=None, sleep=0)


def _session(path: Path, monkeypatch: pytest.MonkeyPatch, *, seconds: float | None, sleep: float) -> Session:
    script = path / "role.py"
    script.write_text(textwrap.dedent(ROLE).replace("SLEEP", str(sleep)))
    monkeypatch.setattr(turns, "COMMAND", [sys.executable, str(script)])
    return Session(Budget(seconds), Results(path / "results", "here"), path / "called")


def test_sides_take_turns_and_a_failure_costs_only_its_row(session: Session):
    session.run([Job("1b_bf16_compile", 1, 1), Job("8b_bf16_selective", 1, 1)], rounds=2)
    lines = session.cache.read_text().splitlines()
    called = [line for line in lines if not line.startswith("weights")]
    assert len(lines) - len(called) == 2, "the weights of each model once"
    assert [line.split() for line in called] == [
        *(["peer", "1b"], ["ours", "1b"], ["peer", "8b"], ["ours", "8b"]),
        *(["ours", "1b"], ["peer", "1b"], ["ours", "8b"], ["peer", "8b"]),
    ]
    rows = [json.loads(line) for line in (session.results.folder / "rows.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1] * 4 + [2] * 4
    table = (session.results.folder / "table.md").read_text()
    (good,) = [line for line in table.splitlines() if line.startswith("| 1B")]
    assert "| 100 | 120 | 1.200 | ≥ 1.20 | 2.0 | 2.0 | 1.000 | 1.0 / 1.0 | 2.5e-01 | 2 + 2 |" in good
    (bad,) = [line for line in table.splitlines() if "selective" in line]
    assert bad.count("failed: exit code 1; the peer is out of memory") == 2
    assert session.results.failed


def test_what_does_not_fit_the_gpu_is_left_out_with_a_note(session: Session, tmp_path: Path):
    (tmp_path / "plan.json").write_text('{"8b_bf16_eager": 75.0, "1b_bf16_compile": 85.0}')
    rows = ["8b_bf16_eager", "1b_bf16_compile", "30b_a3b_bf16_compile", "8b_bf16_eager+optimizer.lr=1"]
    planned = read_planned(tmp_path / "plan.json")
    assert too_large(rows, 139.8, planned) == {}
    left_out = too_large(rows, 79.1, planned)
    assert left_out == {
        ("8b_bf16_eager", "peer"): "Not run: 8b_bf16_eager, torchtitan: it reserved 89.2 GiB on an H200, of 79.1 here.",
        ("1b_bf16_compile", "ours"): "Not run: 1b_bf16_compile, ours: it is planned at 85.0 GiB, of 79.1 here.",
    }
    assert too_large(rows, 79.1, read_planned(tmp_path / "none")).keys() == {("8b_bf16_eager", "peer")}
    session = dataclasses.replace(session, left_out=left_out.keys())
    jobs = [Job(row, 1, 1) for row in rows]
    session.run(jobs, rounds=1)
    session.fill_caches(jobs, 1)
    called = [line.strip() for line in session.cache.read_text().splitlines() if not line.startswith("weights")]
    assert called == [
        *("ours 8b", "peer 1b", "peer 30b", "ours 30b", "ours 8b"),
        *("peer 1b 1", "peer 30b 1", "ours 30b 1"),
    ]


@pytest.mark.night  # it takes its time
def test_a_row_that_does_not_fit_into_the_budget_is_left_out_with_a_note(session: Session, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(turns, "UNKNOWN_SECONDS", 1.0)
    session = _session(tmp_path, monkeypatch, seconds=30.0, sleep=16.0)
    session.run([Job("1b_bf16_compile", 1, 1), Job("8b_bf16_compile", 1, 1)], rounds=1)
    note = r"Not run: 8b_bf16_compile, round 1: it needs about \d+ s of \d+ s left"
    assert re.search(note, session.results.table()), session.results.table()
    assert not session.results.failed


def test_a_process_ends_with_the_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(turns, "UNKNOWN_SECONDS", 0.5)
    session, began = _session(tmp_path, monkeypatch, seconds=3.0, sleep=100.0), time.monotonic()
    session.run([Job("1b_bf16_compile+optimizer.lr=1", 1, 1)], rounds=1)
    assert time.monotonic() - began < 20
    assert re.search(r"failed: ended after \d s, when the budget was spent", session.results.table())


def test_caches_are_filled_with_weights_and_one_layer_of_every_compiled_side(session: Session):
    rows = ["8b_bf16_eager", "1b_bf16_compile", "1b_bf16_compile+compile.cuda_graphs=true"]
    session.fill_caches([Job(row, 1, 1) for row in rows], 2)
    called = sorted(line.strip() for line in session.cache.read_text().splitlines())
    assert called == ["ours 1b 1", "ours 1b 1", "peer 1b 1", "weights 1b", "weights 8b"]


def test_one_process_at_a_time_fills_the_caches_where_two_would_not_fit():
    assert [comparison.processes_that_fill(gib) for gib in (79.1, 139.8)] == [1, 2]


def test_initial_weights_are_those_of_our_runs_and_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    job = Job("8b_bf16_compile", 1, 1, tiny=True)
    folder = export_weights(job, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sides, "init_weights", lambda *_: pytest.fail("drawn again"))
        assert export_weights(Job("8b_float8_rowwise", 1, 1, tiny=True), tmp_path) == folder
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    run = job.experiment()
    with torch.device("meta"):
        model = build_model(run.model, seq_len=64, attention_backend="flash")
    table, found = init_specs(model), open_checkpoint(folder).parameters
    assert table is not None
    for name, parameter in model.named_parameters():
        drawn = torch.empty(parameter.shape)
        init_shard_(drawn, run.experiment.seed, name, table[name], ShardSpec.whole(tuple(parameter.shape)))
        assert torch.equal(found.read(name), drawn.bfloat16()), name


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_memory_is_that_of_the_timed_steps():
    clock, loss = Clock(2), torch.ones((), device="cuda")
    before = torch.cuda.memory_allocated()
    for megabytes in (400, 300, 100, 50):
        clock.begin_step()
        held = torch.empty(megabytes * 2**20, dtype=torch.uint8, device="cuda")
        del held
        clock.end_step(loss)
    found = clock.result(1)
    assert found["allocated"] * 1024 == pytest.approx(before / 2**20 + 100, abs=4)
    assert found["reserved"] * 1024 >= 400, "what warm-up reserved is still reserved"
    assert found["steps"] == 2


def test_the_planners_table_names_ratios_and_missed_goals():
    table = plan_table(
        [
            PlannedRow("8b_bf16_compile", 50.0, 62.1 * 0.9, 35600 * 1.2, 1.0),
            PlannedRow("1b_bf16_compile", 30.0, 46.8 * 0.8, 52400 * 1.0, 1.0),
        ]
    )
    head, _, first, second = table.splitlines()[:4]
    assert len({line.count("|") for line in (head, first, second)}) == 1
    assert first == (
        "| 8B×8 bf16 compile | 50.0 | 55.9 | 62.1 | 0.90 | 42,720 | 35,600 | 1.20 | 1.10 | memory by 3.1 GiB |"
    )
    assert second.endswith("| 37.4 | 46.8 | 0.80 | 52,400 | 52,400 | 1.00 | 1.20 | speed by 20.0 % |")


def test_planned_rows_are_written_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def plan(row: str, device: Device) -> PlannedRow:
        if row != "8b_bf16_compile":
            raise RuntimeError("out of time")
        return PlannedRow(row, 50.0, 55.0, 40000.0, 1.0, device=device)

    monkeypatch.setattr(comparison, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"])
    monkeypatch.setattr(comparison, "plan_row", plan)
    with pytest.raises(RuntimeError, match="out of time"):
        main(["versus", "--plan", "--output", str(tmp_path)])
    text = (tmp_path / "plan.md").read_text()
    assert "| 8B×8 bf16 compile | 50.0 | 55.0 |" in text
    assert "Planned for one H100 80GB SXM." in text
    assert "copies 2.98 TB/s" in text
    assert json.loads((tmp_path / "plan.json").read_text()) == {"8b_bf16_compile": 55.0}


@pytest.mark.parametrize("names", [[], ["NVIDIA of tomorrow"], ["NVIDIA H200"], ["NVIDIA H100 80GB HBM3"]])
def test_rows_are_planned_for_the_gpu_that_is_present_or_an_h200(names: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comparison, "gpu_names", list)
    monkeypatch.setattr(comparison, "command_lines", lambda *_: names)
    device = comparison.present_device()
    assert device is DEVICES["h100" if "H100" in "".join(names) else "h200"]
    row = PlannedRow("8b_bf16_compile", 50.0, 55.0, 35600.0, 1.0, device=device)
    assert row.speed_ratio == (1.0 if device is DEVICES["h200"] else None), "torchtitan was measured on an H200"


@pytest.mark.night
def test_a_row_is_planned_without_a_gpu():
    row = plan_row("8b_bf16_eager")
    assert 40 < row.allocated <= row.reserved < 120
    assert row.speed > 1e4


@pytest.mark.night  # the real sides of all rows, a minute each
@pytest.mark.timeout(1500)
@needs_peer
def test_both_real_sides_compute_the_same_from_the_same_weights(tmp_path: Path):
    words = ["versus", "--tiny", "--rounds", "1", "--warmup", "2", "--steps", "3"]
    done = run(*words, "--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "out"), path=str(PEER))
    assert done.returncode == 0, done.stderr + done.stdout
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    losses = {(row["row"], row["side"]): row["losses"] for row in rows}
    assert len(losses) == 2 * len(CASES)
    for name in CASES:
        # Float8 rounds: the peer's scales are not powers of two.
        close = 2e-2 if "float8" in name else 2e-5
        assert losses[name, "ours"] == pytest.approx(losses[name, "peer"], abs=close), name
        assert losses[name, "ours"][0] != losses[name, "ours"][-1]


HIDE_TRITON = """\
from importlib.machinery import PathFinder
find = PathFinder.find_spec.__func__
def hide(cls, name, path=None, target=None):
    return None if name.partition(".")[0] == "triton" else find(cls, name, path, target)
PathFinder.find_spec = classmethod(hide)
"""


@pytest.mark.night
@needs_peer
def test_the_check_on_a_cpu_needs_no_triton(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(HIDE_TRITON)
    words = ["versus", "--tiny", "--rounds", "1", "--warmup", "1", "--steps", "2", "--rows", "8b_bf16_eager"]
    places = ["--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "out")]
    done = run(*words, *places, path=f"{tmp_path}:{PEER}")
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.night
def test_a_checkout_needs_no_installed_distribution(tmp_path: Path):
    for folder in (Path(entry) for entry in sys.path if Path(entry).name == "site-packages"):
        for entry in folder.iterdir():
            if not entry.name.startswith(("titan_exp", "__editable__", "_titan_exp")) and entry.suffix != ".pth":
                target = tmp_path / "packages" / entry.name
                target.parent.mkdir(exist_ok=True)
                if not target.exists():
                    target.symlink_to(entry)
    job = {"row": "8b_bf16_eager", "warmup": 1, "timed": 1, "tiny": True}
    words = call_words(run_role, role="ours", cache=str(tmp_path / "cache"), job=job)[3:]
    path = str(tmp_path / "packages")
    probe = "import importlib.metadata as m, sys; sys.exit('titan_exp' in {d.name for d in m.distributions()})"
    bare = subprocess.run([sys.executable, "-S", "-c", probe], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert bare.returncode == 0, "the distribution is hidden"
    done = run(*words, path=path, flags=("-S",))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 1
