"""Fuzzer of the command line: random command lines end with exit code 0, 1 or 2, and say why in the words of the house.

Nothing is launched, traced or downloaded. `pytest -m night tests/cli/test_fuzz.py` draws ten thousand lines.
"""

import contextlib
import io
import json
import logging
import os
import random
import re
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_lines import CommandLines
from titan_exp.cli.main import main
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch.run_plan import create_run_folder, plan_run

BY_DAY = 60
"""Lines of the test by day."""
BY_NIGHT = 10_000
LIMIT = 60
"""Seconds after which a line hangs."""

NOT_OURS = re.compile(
    r"Traceback|Error executing job|HYDRA_FULL_ERROR|NoneType|object has no attribute|Errno|<class '|<\S+ object at 0x"
    r"|full_key:|object_type=|subscriptable|unhashable|unexpected keyword|positional argument|codec can't|^\w*Error\b"
    r"|\w+Error: |not iterable|unsupported operand|^'[^']*'$|AssertionError",
    re.MULTILINE,
)
"""Text of exceptions that nobody has explained."""


@dataclass(frozen=True)
class Outcome:
    """End of one command line."""

    words: list[str]
    cause: str
    """Empty if the line ended as it should; else the kind of failure, the same for the same defect."""
    text: str
    """Standard error, or the traceback."""


@pytest.fixture(scope="module")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Current folder with runs, damaged runs and files; nothing is launched from it."""
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.setenv("HF_HUB_OFFLINE", "1")
        launch_nothing(patch)
        fill(folder)
        yield folder


def launch_nothing(patch: pytest.MonkeyPatch) -> None:
    """Replace what starts processes, traces a model or takes minutes."""
    from types import SimpleNamespace

    def refuse(*_: Any, **__: Any) -> Any:
        raise UserError("The fuzzer starts nothing.")

    for kind in ("local.executor.LocalExecutor", "slurm.executor.SlurmExecutor"):
        for method in ("launch", "submit"):
            patch.setattr(f"titan_exp.launch.{kind}.{method}", refuse)
    patch.setattr("titan_exp.launch.memory_gate.gate_run", lambda plan, echo: plan)
    patch.setattr("titan_exp.launch.sweep.sweeper.predict_sweep_memory", lambda sweep_plan, *_, **__: sweep_plan)
    patch.setattr("titan_exp.plan.predict.predict", refuse)
    patch.setattr("titan_exp.plan.layout_search.LayoutSearch", lambda *_: SimpleNamespace(run=refuse))
    patch.setattr("titan_exp.plan.predictions.predict_many", refuse)
    patch.setattr("titan_exp.launch.local.ranks.run_on_ranks", refuse)
    patch.setattr("titan_exp.cli.tokenize.build_store", refuse)
    patch.setattr("titan_exp.launch.sweep.shipped_study.StudySweep.record", refuse)
    for verb in ("logs", "status"):  # --follow and --watch
        patch.setattr(f"titan_exp.cli.{verb}.time", SimpleNamespace(sleep=refuse))


def fill(folder: Path) -> None:
    """Write runs, damaged runs, a file and a folder."""
    (folder / "afile").write_text("text\n")
    (folder / "folder").mkdir()
    for name, seed in (("first", 0), ("first", 1), ("study", 2)):
        typed = ["model=llama_debug", "training.steps=3", f"experiment.name={name}", f"experiment.seed={seed}"]
        plan = plan_run(to_experiment(compose(typed)), typed)
        create_run_folder(plan)
        rows = [{"step": step, "tokens": step * 512, "loss": 5 - step, "attempt": 1} for step in range(1, 4)]
        plan.folder.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, file, content in (
        ("empty", "config.yaml", b""),
        ("yaml", "config.yaml", b"a: [1\n"),
        ("state", "state.json", b"[]"),
        ("bytes", "config.yaml", b"\xff\xfe\x00"),
        ("lines", "metrics.jsonl", b'{"step": 1}\n[]\n{"step": "x", "loss": null}\n{"st'),
    ):
        damaged = folder / "runs" / "damaged" / name
        damaged.mkdir(parents=True)
        (damaged / "config.yaml").write_bytes(next((folder / "runs" / "first").glob("*/config.yaml")).read_bytes())
        (damaged / file).write_bytes(content)
    (folder / "runs" / "damaged" / "folder" / "config.yaml").mkdir(parents=True)


def outcome(words: Sequence[str]) -> Outcome:
    """Run a command line in this process."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", write_through=True)
    try:
        with _isolated(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code: Any = main(words)
            out.flush()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        ours = [
            f"{Path(frame.filename).name}:{frame.name}" for frame in frames if "titan_exp" in frame.filename.split("/")
        ]
        cause = f"{type(error).__name__} in {frames[-1].name if frames else ''} from {ours[-1] if ours else ''}"
        return Outcome([*words], cause, "".join(traceback.format_exception(error)))
    shown = err.buffer.getvalue().decode()  # type: ignore[attr-defined]
    if code not in (0, 1, 2, None):
        return Outcome([*words], f"exit code {code!r}"[:60], shown)
    if code in (1, 2) and not shown.strip() and not out.buffer.tell():
        return Outcome([*words], "no message", shown)
    foreign = NOT_OURS.search(shown)
    return Outcome([*words], f"text of an exception: {foreign[0]}" if foreign else "", shown)


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Keep logging, warnings, environment and the current folder; end a line that hangs."""

    def hangs(*_: Any) -> None:
        raise TimeoutError(f"the line takes more than {LIMIT} s")

    folder, environment, level = Path.cwd(), dict(os.environ), logging.getLogger().level
    disabled, handlers, path = logging.root.manager.disable, logging.getLogger().handlers[:], sys.path[:]
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        logging.getLogger().setLevel(level)
        logging.getLogger().handlers[:], sys.path[:] = handlers, path
        logging.disable(disabled)


def failures(seed: int, count: int) -> list[tuple[int, Outcome]]:
    """Lines of a seed that fail, with their numbers."""
    drawn = ((index, outcome(CommandLines(random.Random(f"{seed}:{index}")).draw())) for index in range(count))
    return [(index, end) for index, end in drawn if end.cause]


def report(seed: int, found: Sequence[tuple[int, Outcome]]) -> str:
    """First failure of each cause, with the line to repeat it."""
    by_cause: dict[str, list[tuple[int, Outcome]]] = {}
    for index, end in found:
        by_cause.setdefault(end.cause, []).append((index, end))
    blocks = []
    for cause, ends in sorted(by_cause.items(), key=lambda pair: -len(pair[1])):
        index, end = min(ends, key=lambda pair: len(" ".join(pair[1].words)))
        line = f"titan-exp {shlex.join(end.words)}".encode(errors="backslashreplace").decode()
        blocks.append(f"{len(ends)} x {cause}\n  seed {seed}, line {index}: {line[:600]}\n{end.text[-1500:]}")
    return "\n".join(blocks)


def test_no_line_tracebacks(playground: Path):
    found = failures(seed=14, count=BY_DAY)
    assert not found, report(14, found)


@pytest.mark.night
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_no_line_tracebacks_by_night(seed: int, playground: Path):
    found = failures(seed, BY_NIGHT // 4)
    assert not found, report(seed, found)
