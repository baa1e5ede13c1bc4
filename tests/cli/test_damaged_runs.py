"""Every file of a run folder, damaged in every way, for every verb that reads it: one bad run is one named line."""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import pytest

from titan_exp.cli.main import main
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.attempt_end import AttemptResult, acquire_run, close_attempt
from titan_exp.launch.local import executor as local_run
from titan_exp.launch.run_console import RunConsole
from titan_exp.launch.run_plan import plan_relaunch
from titan_exp.tracking.run_folder.metrics_jsonl import JsonlSink, read_last_values
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

TYPED = [
    "+experiment=smoke",
    "model=qwen3_moe_debug",
    "training.steps=4",
    "experiment.name=study",
    "cluster.device=cpu",
]
SECONDS = 20
"""Limit of one command; a FIFO would be waited for without end."""
GOOD, BAD = "good", "bad"
SHARE = 16
"""By day one case in so many, the same each time."""


def start_again(bad: Path) -> int:
    """Start as the launcher does up to the ranks, and end as a rank and the launcher do."""
    folder = RunFolder(bad)
    plan = plan_relaunch(folder, trust=True)
    with acquire_run(folder, "launcher", print):
        number = local_run._open_attempt(plan, folder.read_state(), RunConsole(), renew=True)
        JsonlSink(folder.metrics, number).close("done")
        close_attempt(folder, number, AttemptResult("failed", 1, "a test"))
    return 0


def verb(*words: str) -> Callable[[Path], int]:
    return lambda bad: main([word.format(bad=bad, good=bad.with_name(GOOD), runs=bad.parents[1]) for word in words])


VERBS: dict[str, Callable[[Path], int]] = {
    "status": verb("status"),
    "status NAME": verb("status", "study"),
    "show": verb("show", "{bad}"),
    "diff": verb("diff", "{good}", "{bad}"),
    "compare": verb("compare", "{good}", "{bad}", "--html=none"),
    "compare NAME": verb("compare", "study"),
    "logs": verb("logs", "{bad}"),
    "cancel": verb("cancel", "{bad}"),
    "retry": verb("retry", "{bad}", "{good}"),
    "start again": start_again,
    "train": verb("train", "--config-path", "{bad}", "data.preview=1"),
    "continue_from": verb("train", *TYPED, "training.steps=6", "checkpoint.continue_from={bad}", "data.preview=1"),
    "generate": verb("generate", "{bad}", "prompt=x", "tokens=1"),
    "evaluate": verb("evaluate", "{bad}"),
}
ONE_LINE = ("status", "status NAME", "compare", "compare NAME")
"""Verbs of several runs, of which the good one is shown."""


def bits(content: bytes, place: str) -> bytes:
    flipped, draw = bytearray(content), random.Random(place)
    for _ in range(3 if content else 0):
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def wrong_types(content: bytes, place: str) -> bytes:
    """Every number a list, every text a number, every list an object."""
    text = content.decode(errors="replace")
    return (
        random.Random(place)
        .choice([text.replace("1", "[1]"), text.replace('"', "7"), text.replace("[", '{"a":')])
        .encode()
    )


CONTENTS: dict[str, Callable[[bytes, str], bytes]] = {
    "empty": lambda content, place: b"",
    "truncated": lambda content, place: content[: len(content) // 2],
    "flipped": bits,
    "flipped again": lambda content, place: bits(content, place + "again"),
    "binary": lambda content, place: random.Random(place).randbytes(4096),
    "nested": lambda content, place: b"[" * 100_000,
    "nested objects": lambda content, place: b'{"a":' * 100_000,
    "nested in its first line": lambda content, place: b"a: " + b"- " * 100_000 + b"\n" + content,
    "wrong types": wrong_types,
    "numbers without end": lambda content, place: content.replace(b"1", b"1" * 5000),
    "an array": lambda content, place: b"[]\n",
    "no text": lambda content, place: b'{"\\ud800": "\\ud800"}\n' + content.replace(b"a", b"\\ud800"),
}


def place_instead(path: Path, damage: str) -> None:
    """Put something that is not such a file in its place."""
    path.unlink()
    match damage:
        case "folder":
            path.mkdir()
        case "dangling link":
            path.symlink_to(path.with_name("nowhere"))
        case "loop":  # unreadable for root, too
            path.symlink_to(path)
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "huge":
            with path.open("wb") as file:
                file.truncate(2**33)


DAMAGES = (*CONTENTS, "folder", "dangling link", "loop", "fifo", "device", "huge")

OPENED: list[set[str]] = []
"""Names of the files that the present command opens."""


def note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and OPENED and isinstance(arguments[0], str):
        OPENED[-1].add(arguments[0])


sys.addaudithook(note)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a study with two runs; the second failed, and has every file that a run can have."""
    home = tmp_path_factory.mktemp("home")
    before = Path.cwd()
    os.chdir(home)
    assert verb("train", *TYPED)(home / "runs" / "study" / BAD) == 0
    (made,) = (path.parent for path in Path("runs/study").glob("*/config.yaml"))
    made.rename(made.with_name(GOOD))
    group = Path("runs/study").absolute()
    shutil.copytree(group / GOOD, group / BAD, symlinks=True)
    folder = RunFolder(group / BAD)
    folder.write_state(RunState("failed", 4, time.time(), 1, "out of luck"))
    (group / BAD / "lineage.json").write_text('{"parent": "study/good", "step": 1, "tokens": 100}\n')
    begin = {"time": 1.0, "attempt": 1}
    events = (
        {"event": "started", "group": 0},
        {"event": "quorum", "step": 1, "quorum": 1, "groups": [0], "joined": []},
    )
    late = {"step": 4, "tokens": 100, "sums/bits_per_byte": 1.5}
    (group / BAD / "tasks.jsonl").write_text(json.dumps(late) + "\n")
    (group / BAD / "groups.jsonl").write_text("".join(f"{json.dumps(begin | event)}\n" for event in events))
    folder.stop.write_text("a test\n")
    point = {"label": "a", "variant": "a", "seed": 1, "experiment_id": "", "processes": 1, "steps": 4, "kind": "local"}
    points = [{**point, "run_id": name, "overrides": []} for name in (GOOD, BAD)]
    fields = {"name": "study", "question": "q", "size": "", "typed": [], "baseline": None, "metrics": {"loss": "min"}}
    (group / "study.json").write_text(json.dumps({**fields, "points": points, "skipped": {}}))
    yield group
    os.chdir(before)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def call(name: str, bad: Path) -> tuple[int, str]:
    """Exit code of a command and what it printed."""
    out = io.StringIO()
    with limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = VERBS[name](bad)
        except UserError as error:
            code = error.exit_code
            print(error)
    return code, out.getvalue()


def restored(study: Path, kept: Path) -> None:
    shutil.rmtree(study)
    shutil.copytree(kept, study, symlinks=True)


@pytest.mark.parametrize("name", VERBS)
def test_a_damaged_file_is_one_named_line(study: Path, name: str, tmp_path: Path, request: pytest.FixtureRequest):
    every = "night" in request.config.option.markexpr
    if name == "retry":  # which would start it; what a start reads is damaged for "start again"
        RunFolder(study / BAD).write_state(RunState("done", 4, time.time(), 1, None))
    kept = tmp_path / "kept"
    shutil.copytree(study, kept, symlinks=True)
    OPENED.append(set())
    whole = call(name, study / BAD)
    opened = OPENED.pop()
    restored(study, kept)
    assert whole[0] in (0, 1), whole
    files = sorted({Path(path).resolve() for path in opened if Path(path).is_file()})
    files = [path.relative_to(study) for path in files if path.is_relative_to(study)]
    files = [path for path in files if path.parts[0] != GOOD and "checkpoints" not in path.parts]
    assert files
    loss = float(read_last_values(study / GOOD / "metrics.jsonl")["loss"] or 0)
    failures = []
    for file in files:
        for damage in DAMAGES:
            place = f"{name} {file} {damage}"
            if crc32(place.encode()) % SHARE and not every:
                continue
            path = study / file
            if damage in CONTENTS:
                path.write_bytes(CONTENTS[damage](path.read_bytes(), place))
            else:
                place_instead(path, damage)
            try:
                code, text = call(name, study / BAD)
                shown = name not in ONE_LINE or GOOD in text or file.parts[0] != BAD
                shown |= f"{loss:.4f}" in text or (name == "compare" and code == 2)
                if code not in (0, 1, 2) or not shown or "Traceback" in text:
                    failures.append(f"{place}: exit code {code}, {text[-300:]}")
            except Exception as error:
                trace = "".join(traceback.format_tb(error.__traceback__)[-2:])
                failures.append(f"{place}: {type(error).__name__}: {str(error)[:200]} {trace}")
            restored(study, kept)
    assert not failures, f"{len(failures)} of {len(files) * len(DAMAGES)}:\n" + "\n".join(failures)
