"""Compiled code outlives its process: the next one finds it where the runs are kept."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.runs import SMALL
from tests.ranks import run_ranks
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment, to_yaml
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.profiling.step_times import VARIABLE, set_compile_cache


def made_run(runs: Path, *overrides: str) -> Path:
    """A run folder as the launcher makes it."""
    experiment = resolve_layout(to_experiment(compose([*SMALL, "training.steps=1", *overrides])), 1)
    folder = RunFolder(runs / experiment.experiment.name / "0123456789ab")
    folder.path.mkdir(parents=True)
    folder.config.write_text(to_yaml(experiment))
    return folder.path


def train_rank(path: str) -> str | None:
    """Run a rank process without a cache set by the user; returns the cache that it used."""
    from titan_exp.trainer.rank_main import main

    os.environ.pop(VARIABLE, None)
    main(path)
    return os.environ.get(VARIABLE)


def compile_a_product(path: str) -> dict[str, int]:
    """Compile, forward and backward, what needs no code but the library's; returns what torch says of its caches."""
    from titan_exp.config.schema.typed_config import load_experiment

    os.environ.pop(VARIABLE, None)
    folder = RunFolder(path)
    set_compile_cache(folder, load_experiment(folder.config).experiment.name)
    weight = torch.randn(8, 8, requires_grad=True)
    torch.compile(torch.mm, backend="inductor")(torch.randn(4, 8), weight).backward(torch.ones(4, 8))
    counters: Any = torch._dynamo.utils.counters
    found = {**counters["inductor"], **counters["aot_autograd"]}
    return {name: count for name, count in found.items() if name.endswith(("hit", "miss", "bypass"))}


def test_a_rank_keeps_its_compiled_code_beside_the_runs(tmp_path: Path):
    path = made_run(tmp_path / "runs", "experiment.name=named")
    assert run_ranks(1, train_rank, str(path)) == [str(tmp_path / f"runs/.compile-{os.geteuid()}")]


def test_a_moved_run_keeps_its_cache_inside(tmp_path: Path):
    path = made_run(tmp_path / "runs")
    (tmp_path / "elsewhere").mkdir()
    moved = path.rename(tmp_path / "elsewhere" / "copy")
    assert run_ranks(1, train_rank, str(moved)) == [str(moved / f".compile-{os.geteuid()}")]


def test_a_folder_that_the_user_names_is_used(tmp_path: Path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    set_compile_cache(RunFolder(tmp_path / "runs/first/0123456789ab"), "first")
    assert os.environ[VARIABLE] == str(tmp_path / "mine")


@pytest.mark.night
def test_another_process_finds_what_one_compiled(tmp_path: Path):
    path = made_run(tmp_path / "runs")
    (first,) = run_ranks(1, compile_a_product, str(path))
    assert (first["autograd_cache_miss"], first.get("autograd_cache_hit", 0)) == (1, 0)
    assert any((tmp_path / f"runs/.compile-{os.geteuid()}").rglob("*"))
    (again,) = run_ranks(1, compile_a_product, str(path))
    assert (again["autograd_cache_hit"], again.get("autograd_cache_miss", 0)) == (1, 0)
    assert (again["fxgraph_cache_hit"], again.get("fxgraph_cache_miss", 0)) == (2, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to other users")
def test_compiled_code_of_another_user_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    planted = tmp_path / f"runs/.compile-{os.geteuid()}"
    planted.mkdir(parents=True)
    os.chown(planted, 1, 1)
    set_compile_cache(RunFolder(tmp_path / "runs/first/0123456789ab"), "first")
    assert VARIABLE not in os.environ
