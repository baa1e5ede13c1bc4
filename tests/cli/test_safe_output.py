"""Names, tags and reasons of foreign runs reach a terminal as text, never as commands to it."""

import io
import json
import re
import shutil
import time
from pathlib import Path

import pytest

from titan_exp.cli.main import main
from titan_exp.config.command_line.output import visible
from titan_exp.config.command_line.terminal import Terminal
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch.run_plan import create_run_folder, plan_run
from titan_exp.tracking.console import ConsoleSink
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202egnp\x7f\x08"
"""Sets the title, clears the screen, overwrites the line, colours by C1, turns the direction of text."""
WRITTEN = r"\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202egnp\x7f\x08"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two runs below a folder with such a name, which have such text in each of their files."""
    monkeypatch.chdir(tmp_path)
    name = f"runs/{EVIL}"
    typed = ["model=llama_debug", "training.steps=10", "cluster.device=cpu", "experiment.name=x"]
    found = []
    for seed in (0, 1):
        plan = plan_run(to_experiment(compose([*typed, f"experiment.seed={seed}"])), typed)
        create_run_folder(plan)
        folder = plan.folder
        folder.add_attempt(world_size=1, hosts=(f"host{EVIL}",), launched_by="slurm", job_id=f"7{EVIL}")
        folder.update_attempt(1, start=time.time() - 9, end=time.time(), exit=1, reason=f"out of {EVIL}")
        folder.write_state(RunState("failed", 4, time.time(), 1, f"out of {EVIL}"))
        row = {"step": 4, "tokens": 400, "loss": 2.0 + seed, "tokens_per_second": 9.0, "attempt": 1, f"r/{EVIL}": 1.0}
        folder.metrics.write_text(json.dumps(row) + "\n")
        folder.make_attempt_logs(1)
        (folder.attempt_logs(1) / "rank-00000.log").write_text(f"\x1b[32mgreen\x1b[0m {EVIL}\n")
        config = folder.config.read_text()
        changed = {"name: x": f"name: {json.dumps(EVIL)}", "tags: []": f"tags: [{json.dumps(EVIL + str(seed))}]"}
        for before, after in changed.items():
            assert before in config
            config = config.replace(before, after)
        folder.config.write_text(config)
        code = json.loads(folder.code.read_text())
        folder.code.write_text(json.dumps({**code, "branch": EVIL, "commit": f"{seed}{EVIL}", "files": {}}))
        found.append(folder.path)
    Path("runs/x").rename(name)
    point = {
        "label": EVIL,
        "variant": EVIL,
        "seed": 1,
        "experiment_id": "",
        "processes": 1,
        "steps": 4,
        "kind": "local",
    }
    points = [{**point, "label": f"{EVIL}{path.name}", "run_id": path.name, "overrides": [EVIL]} for path in found]
    fields = {"name": EVIL, "question": EVIL, "size": "", "typed": [], "baseline": None, "metrics": {"loss": "min"}}
    Path(name, "study.json").write_text(json.dumps({**fields, "points": points, "skipped": {EVIL: EVIL}}))
    return [f"{name}/{path.name}" for path in found]


@pytest.mark.parametrize("verb", ["status", "status NAME", "show", "diff", "compare", "logs", "logs NAME", "cancel"])
def test_verbs(verb: str, runs: list[str], capsys: pytest.CaptureFixture[str]):
    words = {
        "status NAME": ["status", EVIL],
        "show": ["show", runs[0]],
        "diff": ["diff", *runs],
        "compare": ["compare", *runs],
        "logs": ["logs", runs[0]],
        "logs NAME": ["logs", EVIL],
        "cancel": ["cancel", EVIL],
    }
    assert main(words.get(verb, [verb])) in (0, 2)
    said = "".join(capsys.readouterr())
    assert CONTROL.search(said) is None
    if verb != "cancel":
        assert r"\x1b]0;owned" in said
    if verb.startswith("logs"):
        assert f"green {WRITTEN.partition(chr(92) + 'r')[0]}" in said


@pytest.mark.parametrize(
    "words",
    [
        [EVIL],
        ["show", EVIL],
        ["train", f"model={EVIL}"],
        ["train", f"training.{EVIL}=1"],
        ["sweep", EVIL],
        ["compare", EVIL],
        ["show", "x", f"paths.runs={EVIL}"],
    ],
)
def test_refusals(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert CONTROL.search(said) is None
    assert r"\x1b" in said


def test_rich_keeps_its_own_escape_sequences_and_no_others():
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, width=200)
    sink = ConsoleSink(4, title=EVIL, console=console)
    sink.warn(f"a warning {EVIL}")
    sink.log({"step": 1, "loss": 1.0, "tokens": 9})
    sink.note(f"[bold]a note[/nothing] {EVIL}")
    sink.close(EVIL)
    text = out.getvalue()
    assert "\x1b[" in text  # rich's
    assert "[bold]a note[/nothing]" in text
    for sequence in ("\x1b]0", "\x1b[2J", "\x9b", "\u202e", "\x07", "\x7f"):
        assert sequence not in text


def test_what_is_text_stays():
    text = "a\ttab, two\nlines, café, 字, 🙂, a path's byte \udcff, a right-to-left letter א"
    assert visible(text) == text
    assert visible(EVIL) == WRITTEN
    assert visible("half \ud83d") == r"half \ud83d"


def test_the_fixture_is_as_a_run(runs: list[str]):
    folder = RunFolder(runs[0])
    assert folder.read_state() is not None
    assert EVIL in folder.read_attempts()[0].hosts[0]
    shutil.rmtree(folder.path)
