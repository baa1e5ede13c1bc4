"""Expandable segments: the variable that ranks get before CUDA starts, and what turns it off."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.config.composing import experiment
from titan_exp.config.devices import allocator_environment, uses_expandable_segments
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.launch.rank import main
from titan_exp.launch.rank.rank_env import RankInfo
from titan_exp.launch.run_plan import run_id
from titan_exp.tracking.run_folder.run import Run
from titan_exp.tracking.run_folder.run_folder import RunFolder

SET = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("overrides", "given", "expected"),
    [
        (["cluster.device=cuda"], {}, SET),
        (["cluster.device=cpu"], {}, {}),
        (["cluster.device=cuda", "cluster.expandable_segments=false"], {}, {}),
        (["cluster.device=cuda", "compile.cuda_graphs=true"], {}, {}),
        (["cluster.device=cuda"], {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        (["cluster.device=cuda"], {"PYTORCH_CUDA_ALLOC_CONF": ""}, {}),
        (["cluster.device=cuda"], {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}, {}),
        (["cluster.device=cuda"], {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "0"}, SET),
    ],
)
def test_ranks_get_it_unless_the_user_or_an_option_says_otherwise(
    overrides: list[str], given: dict[str, str], expected: dict[str, str]
):
    run = experiment(*overrides)
    assert allocator_environment(run.cluster, run.compile, given) == expected
    if not given:
        assert uses_expandable_segments(run.cluster, run.compile) == bool(expected)


def test_it_is_set_before_the_trainer_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Any launcher starts ranks by this module, which imports no torch: torch reads the variable once."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # restored by the fixture
    del os.environ["PYTORCH_ALLOC_CONF"]
    folder, seen = RunFolder(tmp_path), list[str | None]()
    folder.config.write_text(to_yaml(experiment("cluster.device=cuda")))
    folder.add_attempt(world_size=1, hosts=["localhost"])
    monkeypatch.setattr(main, "_rank_main", lambda _: seen.append(os.environ.get("PYTORCH_ALLOC_CONF")))
    monkeypatch.setattr(main._Rank, "_handle_signals", lambda _: None)
    still = SimpleNamespace(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr(main, "Watchdog", lambda *_, **__: still)
    attempt = folder.read_attempts()[-1].attempt
    assert main._Rank(Run(folder), replace(RankInfo(0, 1, 0), attempt=attempt)).run() == 0
    assert seen == ["expandable_segments:True"]


def test_it_changes_no_run_id():
    assert run_id(experiment("cluster.expandable_segments=false")) == run_id(experiment())
