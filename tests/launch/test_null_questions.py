"""A null question, forty times through the command line, with real training."""

import json
from pathlib import Path

import pytest

from tests.journeys.command import REPOSITORY, TITAN_EXP, run

SOURCE = '''\
from hashlib import sha256

from titan_exp.data.sources.python_stdlib import PythonStdlibSource


class Reordered(PythonStdlibSource):
    """The same documents in another order, so that two orders differ by chance alone."""

    def __init__(self, config, salt):
        super().__init__(config)
        self.fingerprint += salt
        paths = dict(zip(self._keys, self._paths, strict=True))
        self._keys = sorted(paths, key=lambda key: sha256((salt + key).encode()).digest())
        self._paths = [paths[key] for key in self._keys]
'''
QUESTION = """\
question: Does another order of the same documents change the loss?
held_fixed:
  - model=llama_debug
  - model.layers=1
  - training.seq_len=64
  - training.steps=10
  - evaluation.every=10
  - data.source=reordered.Reordered
  - data.streaming=true
  - data.validation_documents=4
  - optimizer.lr=3e-3
  - checkpoint=none
  - cluster.device=cpu
  - plan.gate=off
axes: [{list: {one: [+data.options.salt=one], other: [+data.options.salt=other]}}]
baseline: one
metrics: {validation_loss: min}
pairs: {looks: [3, 5, 8]}
"""
QUESTIONS = 40


def outcome(home: Path, name: str) -> str:
    """Outcome of a question."""
    (home / "sweeps" / f"{name}.yaml").write_text(QUESTION)
    command = [*TITAN_EXP, "sweep", name, "--jobs=2", "--yes", "--json"]
    found = run(command, home, limit=900, environment={"PYTHONPATH": f"{REPOSITORY}:{home}", "OMP_NUM_THREADS": "1"})
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)["registered"]["outcome"]


@pytest.mark.night
@pytest.mark.timeout(7200)
def test_a_null_question_finds_nothing(tmp_path: Path):
    """Seeds follow from the names, so that the count is the same every night."""
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "reordered.py").write_text(SOURCE)
    found = [outcome(tmp_path, f"null-{number:02d}") for number in range(QUESTIONS)]
    print(found)
    assert len(found) - found.count("undecided") <= 2, found
