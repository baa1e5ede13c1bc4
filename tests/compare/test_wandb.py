"""W&B through its real client against a stub server in this process."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compare.made_runs import config, make_study, rows
from tests.compare.wandb_server import WandbServer, serving

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with serving() as found:
        yield found


def titan_exp(server: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a child process: wandb keeps settings and a service for the life of its process."""
    known = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment = {
        **known,
        "WANDB_BASE_URL": server,
        "WANDB_API_KEY": "0" * 40,
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_HTTP_TIMEOUT": "3",
        "HOME": str(folder),
        "PYTHONPATH": str(REPOSITORY),
        "COLUMNS": "160",
    }
    command = [sys.executable, "-m", "titan_exp", "compare", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def mirrored(server: WandbServer, lr: float, seed: int, loss: float, **attributes: str) -> None:
    whole = {key: part for key, part in config({"optimizer.lr": lr}).items() if key not in ("paths", "tracking")}
    whole["experiment"] = {"name": "abl", "seed": seed}
    run = {"study": "abl", "run_id": f"id{lr}-{seed}", "experiment_id": f"e{lr}", "world_size": 2, "commit": "c0ffee"}
    logged = [{key: value for key, value in row.items() if value is not None} for row in rows(loss, steps=20)]
    # What a resume logs again: the later one holds.
    twice = [*logged[:12], {**logged[11], "loss": 99.0}, *logged[11:]]
    server.add(f"id{lr}-{seed}-x1y2z3", {**whole, "run": run}, twice, **attributes)


def test_a_group_is_read_and_compared(server: WandbServer, tmp_path: Path):
    for seed in (0, 1, 2):
        mirrored(server, 0.001, seed, 3.0 + seed / 10)
        mirrored(server, 0.003, seed, 2.5 + seed / 10 + seed / 1000)
    mirrored(server, 0.1, 0, math.nan, state="crashed")
    server.history["id0.1-0-x1y2z3"] = server.history["id0.1-0-x1y2z3"][:3]
    for row in server.history["id0.1-0-x1y2z3"]:
        row["loss"] = "NaN"
    done = titan_exp(server.address, tmp_path, "--from-wandb", "me/proj", "--group", "abl", "--json", "--target=2.9")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert server.filters == [{"group": "abl"}]
    assert found["keys"] == ["optimizer.lr"]
    assert [row["optimizer.lr"] for row in found["rows"]] == [0.001, 0.003, 0.1]
    assert [len(row["runs"]) for row in found["rows"]] == [3, 3, 1]
    assert found["rows"][1]["loss.delta"] == pytest.approx(-0.499)
    assert found["rows"][1]["loss.verdict"] == "different"
    assert found["rows"][0]["gpu_hours"] == pytest.approx(2 * 90 / 3600)
    assert found["rows"][2]["runs"][0]["state"] == "failed"
    run = found["rows"][0]["runs"][0]
    assert run["run_id"] == "id0.001-0"
    assert run["source"].startswith(f"{server.address}/me/proj/runs/")
    assert (tmp_path / "runs/abl/compare.html").exists()


def test_a_report_is_written_back(server: WandbServer, tmp_path: Path):
    make_study(tmp_path / "runs", {0.001: [3.0, 3.1], 0.003: [2.5, 2.61]}, study="abl")
    done = titan_exp(server.address, tmp_path, "abl", "--to-wandb", "me/proj")
    assert done.returncode == 0, done.stderr
    assert f"W&B report: {server.address}/me/proj/reports/" in done.stderr
    (saved,) = server.saved
    spec = json.loads(saved["spec"])
    text = json.dumps(spec)
    assert "lr=0.003: validation loss" in text
    assert "3.1500 \\u00b1" in text
    assert '"abl"' in text
    assert any(block["type"] == "panel-grid" for block in spec["blocks"])


def test_unreachable_server(tmp_path: Path):
    make_study(tmp_path / "runs", {0.001: [3.0]}, study="abl")
    done = titan_exp("http://127.0.0.1:9", tmp_path, "abl", "--to-wandb", "me/proj", "--html=none")
    assert done.returncode == 2, done.stderr
    assert "W&B refused me/proj" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--from-wandb", "me/proj", "--group", "abl"], "me/proj has no runs of group abl"),
        (["--from-wandb", "me/other"], "me/other"),
        (["abl", "--to-wandb", "me/other", "--html=none"], "me/other"),
    ],
)
def test_missing_runs(server: WandbServer, tmp_path: Path, words: list[str], answer: str):
    make_study(tmp_path / "runs", {0.001: [3.0]}, study="abl")
    done = titan_exp(server.address, tmp_path, *words)
    assert done.returncode == 2, done.stderr
    assert answer in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_account(server: WandbServer, tmp_path: Path):
    server.knows_account = False
    done = titan_exp(server.address, tmp_path, "--from-wandb", "me/proj")
    assert done.returncode == 2
    assert "wandb login" in done.stderr
