"""The core alone: a copy of the tree without `titan_exp/extensions` composes, plans, trains, resumes and compares."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    *("titan_exp", "hydra_plugins", "conf", "sweeps", "docs", "tests", "benchmarks", "pyproject.toml", "README.md"),
    *("CHANGELOG.md", ".gitignore"),
)
LEFT_OUT = [ROOT / "titan_exp" / "extensions", ROOT / "tests" / "extensions", ROOT / "conf" / "local"]

BY_DAY = ("tests/config/test_extension.py", "tests/models/test_described_once.py")
"""Core tests that run there in every run of the tests; `make night` runs all of them."""

OF_THE_WHOLE = (
    *("tests/config/test_reference.py", "tests/test_models_page.py", "tests/journeys", "tests/cluster"),
    *("tests/test_language.py", "tests/benchmarks", "tests/adding"),
)
"""Tests of pages and commands that extensions have a part in, and of this machine."""

JOURNEY = """
from titan_exp.cli.main import main
from titan_exp.config.extension import extensions

assert extensions() == {}
SMOKE = ["+experiment=smoke", "training.steps=4", "checkpoint.every=2", "paths.runs=runs"]
assert main(["plan", *SMOKE]) == 0
assert main(["train", *SMOKE, "training.stop_after=2"]) == 0
assert main(["train", *SMOKE]) == 0
assert main(["compare", "runs/smoke", "html=none"]) == 0
for words in (
    "train model=huggingface",
    "evaluate runs/smoke --experts",
    "doctor --numerics",
    "train +experiment=flux_laptop",
    "sweep diffusion_times",
    "encode images=glyphs",
    "train cluster.replica_groups=2",
    "train semi_sync=diloco",
    "train semi_sync.interval=5",
    "sweep semi_synchronous",
    "train data=images",
    "train data.images=glyphs",
    "train tracking.images_every=5",
    "train training.objective=rectified_flow",
    "train data.source=latents",
    "generate guidance=3",
    "help replica-groups",
):
    assert main(words.split()) == 2
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree without extensions."""
    copy = tmp_path_factory.mktemp("core")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=left_out)
        else:
            shutil.copy(ROOT / name, copy / name)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "the core alone"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=copy, check=True, timeout=60)
    return copy


def left_out(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__" or Path(folder, name) in LEFT_OUT]


def run_there(core: Path, *words: str, limit: float) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(core), "TITAN_EXP_LOCAL": "none", "XDG_STATE_HOME": f"{core}.state"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=core,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def test_the_core_plans_trains_resumes_and_compares(core: Path):
    done = run_there(core, "-c", JOURNEY, limit=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, count in (("transformers", 1), ("analysis", 2), ("diffusion", 9), ("replica_groups", 5)):
        assert done.stderr.count(f"it comes with the extension {name}, which you have not installed") == count


def test_a_selection_of_the_cores_tests_passes(core: Path):
    done = run_there(core, "-m", "pytest", "-q", "-p", "no:cacheprovider", *BY_DAY, limit=240)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.night
@pytest.mark.timeout(4 * 3600)
def test_all_of_the_cores_tests_pass(core: Path):
    others = [f"--ignore={path}" for path in OF_THE_WHOLE]
    words = ("-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadgroup", "tests", *others)
    done = run_there(core, "-m", "pytest", *words, limit=4 * 3600)
    assert done.returncode == 0, done.stdout[-20000:]
