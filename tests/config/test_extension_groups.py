"""Keys, groups, rules and guides that an extension adds, in a process of its own, since classes are made at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXTENSION = """
from titan_exp.config.extension import Extension

EXTENSION = Extension(
    name="noisy",
    summary="Noise.",
    groups={"noise": "noisy.config:NoiseConfig", "cluster": "noisy.config:LoudCluster"},
    idle={"noise.sigma": ("noise.mode", ("none",))},
    rules="noisy.rules",
)
"""
CONFIG = '''
from dataclasses import dataclass
from typing import Literal

from titan_exp.config.groups.types import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class NoiseConfig:
    """Noise in weights."""

    mode: Literal["none", "white"] = "none"
    """Color. E.g. `noise.mode=white`."""
    sigma: PositiveFloat = 1.0
    """Its deviation. E.g. `noise.sigma=2`."""


@dataclass(frozen=True)
class LoudCluster:
    """Keys of clusters."""

    loudspeakers: PositiveInt = 1
    """Number of them. E.g. `cluster.loudspeakers=2`."""

    @property
    def is_remote(self) -> bool:
        return self.loudspeakers > 1
'''
RULES = """
from titan_exp.rules.rule import Refuse, rules

RULES = rules(
    Refuse("noise.sigma", lambda noise: noise.sigma > 9, "{noise.sigma} is too loud", "noise.sigma=9"),
)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package `noisy`."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "noisy" / "conf" / "noise").mkdir(parents=True)
    (folder / "noisy" / "guides").mkdir()
    (folder / "noisy-1.dist-info").mkdir()
    for path, text in {
        "noisy/__init__.py": "",
        "noisy/extension.py": EXTENSION,
        "noisy/config.py": CONFIG,
        "noisy/rules.py": RULES,
        "noisy/conf/noise/none.yaml": "mode: none\nsigma: 1.0\n",
        "noisy/conf/noise/white.yaml": "defaults: [none, _self_]\nmode: white\n",
        "noisy/guides/noise.md": "# Noise\n",
        "noisy-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: noisy\nVersion: 1\n",
        "noisy-1.dist-info/entry_points.txt": "[titan_exp.extensions]\nnoisy = noisy.extension\n",
    }.items():
        (folder / path).write_text(text)
    return folder


def with_package(package: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), *sys.path]), "TITAN_EXP_LOCAL": "none"}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=package,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


MAIN = "import sys; from titan_exp.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--cfg", "job", "noise=white", "cluster.loudspeakers=3"], "mode: white\n"),
        (["train", "--cfg", "job", "cluster=slurm", "cluster.loudspeakers=3"], "loudspeakers: 3\n"),
        (["help", "noise"], "# Noise"),
    ],
)
def test_keys_and_groups_compose(package: Path, words: list[str], said: str):
    done = with_package(package, MAIN, *words)
    assert (done.returncode, said in done.stdout) == (0, True), done.stderr + done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["noise.sigma=10"], "noise.sigma=10.0: 10.0 is too loud\n    noise.sigma=9"),
        (["noise.sigma=-1"], "noise.sigma=-1: must be above 0"),
        (["cluster.loudspeakers=many"], "cluster.loudspeakers=many: must be a whole number"),
        (["cluster.loudspeaker=2"], "did you mean cluster.loudspeakers?"),
        (["noise=whit"], "did you mean white?"),
    ],
)
def test_they_are_typed_checked_and_suggested(package: Path, words: list[str], said: str):
    done = with_package(package, MAIN, "train", *words)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


IDS = """
import pickle
from dataclasses import replace
from titan_exp.config.groups.run import ClusterConfig
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import load_experiment, to_experiment, to_yaml
from titan_exp.launch.run_plan import run_id
from pathlib import Path

plain, loud = to_experiment(compose()), to_experiment(compose(["cluster.loudspeakers=3", "noise.mode=white"]))
assert (plain.cluster.is_remote, loud.cluster.is_remote, type(plain.cluster)) == (False, True, ClusterConfig)
assert pickle.loads(pickle.dumps(loud)) == loud
Path("config.yaml").write_text(to_yaml(loud))
assert load_experiment("config.yaml", trust=True) == loud
idle = replace(plain, noise=replace(plain.noise, sigma=2.0))
print(run_id(plain), run_id(idle) == run_id(plain), run_id(loud) != run_id(plain))
"""
ALONE = """
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch.run_plan import run_id

print(run_id(to_experiment(compose())))
"""


def test_ids_stay_where_they_are_at_their_defaults(package: Path, tmp_path: Path):
    done = with_package(package, IDS)
    assert done.returncode == 0, done.stderr
    name, *others = done.stdout.split()
    assert others == ["True", "True"]
    assert with_package(tmp_path, ALONE).stdout.split() == [name]
