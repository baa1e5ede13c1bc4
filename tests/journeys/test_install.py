"""The README's commands in a fresh clone, and a wheel away from the checkout."""

import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.journeys.command import REPOSITORY, run

SHORT = "model=llama_debug training.seq_len=64 evaluation.every=0 cluster.device=cpu"


def test_make_hands_overrides_on():
    """In any order, those of make itself left out."""
    words = ["model=qwen3_moe_laptop", "+optimizer.lr_scales.expert=0.5", "experiment.notes=a b", "paths.runs=here"]
    own = ["PYTHON=python3", "ARGS=--cfg job 'data.paths=[a, b]'"]
    command = ["make", "--dry-run", "--no-print-directory", "train", *words, *own]
    found = run(command, REPOSITORY, environment={"MAKEFLAGS": ""})
    *_, train, generate = found.stdout.splitlines()
    typed = shlex.split(train)[2:]
    assert typed[-3:] == ["--cfg", "job", "data.paths=[a, b]"]
    assert sorted(typed[:-3]) == sorted(words)
    assert shlex.split(generate)[1:] == ["generate", "prompt=def ", "paths.runs=here"]


@pytest.mark.night  # two minutes of installing, which `make test` in a fresh clone does too
@pytest.mark.timeout(900)
def test_make_train_in_a_fresh_clone(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, clone], check=True, timeout=60)
    # The working tree as it is, so that this tests what is about to be committed.
    changed = run(["git", "ls-files", "--modified", "--others", "--exclude-standard"], REPOSITORY).stdout.split("\n")
    for name in filter(None, changed):
        source = REPOSITORY / name
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        if source.exists():
            (clone / name).write_bytes(source.read_bytes())
        else:
            (clone / name).unlink(missing_ok=True)
    environment = {"PYTHONPATH": "", "VIRTUAL_ENV": "", "MAKEFLAGS": ""}
    first = run(
        ["make", "--no-print-directory", "train", *SHORT.split(), "training.steps=30"],
        clone,
        limit=800,
        environment=environment,
    )
    assert first.returncode == 0, first.stdout + first.stderr
    (folder,) = (clone / "runs" / "first").iterdir()
    assert (folder / "loss.png").stat().st_size > 10_000
    assert first.stdout.splitlines()[-1].endswith(f"of {folder.relative_to(clone)}")
    again = run(["make", "train", *SHORT.split(), "training.steps=30"], clone, limit=60, environment=environment)
    assert again.returncode == 0
    assert "nothing starts" in again.stdout


@pytest.mark.timeout(300)
def test_a_wheel_brings_configurations_and_the_plugin(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(REPOSITORY)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    # What the package needs comes from this environment; its own copy, an editable one, is not on that path.
    needs = {"PYTHONPATH": sysconfig.get_path("purelib")}
    away = tmp_path / "away"
    away.mkdir()
    command = str(tmp_path / "env" / "bin" / "titan-exp")
    where = run([str(python), "-c", "import titan_exp; print(titan_exp.__file__)"], away, environment=needs)
    assert where.stdout.startswith(str(tmp_path / "env")), where.stdout + where.stderr
    words = [*SHORT.split(), "training.steps=5"]
    swept = run([command, "train", "-m", *words], away, environment=needs)
    assert swept.returncode == 0, swept.stdout + swept.stderr
    assert len(list(Path(away, "runs", "first").iterdir())) == 1
    plan = run([command, "sweep", "optimizers", "--dry-run"], away, environment=needs)
    assert "108 to start." in plan.stdout, plan.stderr
    assert os.listdir(away) == ["runs"]
