"""A process that was forked from a warm one is the process that an exec would have made.

`python -m tests.test_warm_start` says what it finds in itself.
"""

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm_start
from titan_exp.tracking.logging import PROGRESS

SELF = [sys.executable, "-m", "tests.test_warm_start"]


def state() -> dict[str, Any]:
    """What this process is and has."""
    # Of those of faulthandler, the signal module says what was before it was imported.
    others = {
        signal.SIGKILL,
        signal.SIGSTOP,
        signal.SIGSEGV,
        signal.SIGFPE,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGILL,
    }
    signals = sorted(signal.valid_signals() - others)
    process = psutil.Process()
    return {
        "words": [word for word in process.cmdline() if word],
        "environment": dict(os.environ),
        "shown": process.environ(),
        "argv": sys.argv,
        "path": sys.path,
        "main": sys.modules["__main__"].__spec__.name,  # type: ignore[union-attr]
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "session": os.getsid(0) == os.getpid(),
        "group": os.getpgid(0) == os.getpid(),
        "handlers": {int(number): str(signal.getsignal(number)) for number in signals},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "umask": os.umask(0o22),
        "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
        "descriptors": sorted(
            int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")
        ),
        "streams": [repr(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "reported since it began": PROGRESS.snapshot().seconds < time.time() - process.create_time() + 0.5,
        "threads": threading.active_count(),
        "faults": __import__("faulthandler").is_enabled(),
    }


def described(words: list[str], **options: Any) -> dict[str, Any]:
    options.setdefault("env", dict(os.environ))  # not what a library has set beside Python
    done = subprocess.run(words, input="some text", capture_output=True, text=True, check=True, timeout=60, **options)
    return json.loads(done.stdout)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`described` of a process that is executed as ever."""

    def run(words: list[str], **options: Any) -> dict[str, Any]:
        with monkeypatch.context() as cold:
            cold.setattr(subprocess, "_fork_exec", warm_start.execute)
            return described(words, **options)

    return run


@pytest.mark.parametrize("case", ["plain", "session", "group", "folder", "variables", "descriptor", "blocked"])
def test_it_is_what_an_exec_makes(case: str, tmp_path: Path, executed: Any):
    read, written = os.pipe()
    variables = {"PATH": os.environ["PATH"], "RANK": "3", "PYTHONPATH": f"{warm_start.REPOSITORY}:/else", "A": "b=c ü"}
    variables |= {name: value for name, value in os.environ.items() if name.startswith(warm_start.READ_AT_START)}
    options = {
        "plain": {},
        "session": {"start_new_session": True},
        "group": {"process_group": 0},
        "folder": {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(warm_start.REPOSITORY)}},
        "variables": {"env": {**variables, "PYTHONSAFEPATH": "1", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}},
        "descriptor": {"pass_fds": [read]},
        "blocked": {},
    }[case]
    masked = [signal.SIGTERM] if case == "blocked" else []
    words = [*SELF, "two words", ""]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, masked)
    try:
        warm, cold = described(words, **options), executed(words, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(read)
        os.close(written)
    assert warm.pop("forked")
    assert not cold.pop("forked")
    # Its own template, and a channel to it, are all that it has beside.
    warm["descriptors"] = [number for number in warm["descriptors"] if number < warm_start.SPARE]
    for key in cold.keys() - {"descriptors"}:
        assert warm[key] == cold[key], key
    assert warm["descriptors"] == cold["descriptors"]


ENDS = {
    "exit 3": (3, "", ""),
    "words": (1, "", "it says why"),
    "fail": (1, "", "ValueError: it fails"),
    "interrupt": (-signal.SIGINT, "", "KeyboardInterrupt"),
    "kill": (-signal.SIGKILL, "", ""),
    "threads": (0, "of a thread\nat the end\n", ""),
    "nobody reads": (120, None, "BrokenPipeError: [Errno 32] Broken pipe"),
}
"""Return code, output after the first line and last words of errors, by what a process does."""


@pytest.mark.parametrize("code", ENDS)
@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.night)], ids=["warm", "cold"])
def test_it_ends_as_any(code: str, cold: bool, monkeypatch: pytest.MonkeyPatch):
    if cold:
        monkeypatch.setattr(subprocess, "_fork_exec", warm_start.execute)
    variables = {**os.environ, "PYTHONUNBUFFERED": ""}
    process = subprocess.Popen([*SELF, code], env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    if code in ("interrupt", "kill"):
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT if code == "interrupt" else signal.SIGKILL)
    if code == "nobody reads":
        process.stdout.close()
        process.stdout = None
    said, wrong = process.communicate(timeout=60)
    assert (process.returncode, said, wrong.rstrip().rpartition("\n")[2]) == ENDS[code]


def test_what_it_starts_is_its_child_and_ends_with_nothing_left():
    process = subprocess.Popen([*SELF, "start"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    assert child.ppid() == process.pid
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=60)
    child.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "LC_ALL", "TORCH_LOGS", "LD_PRELOAD"])
def test_variables_that_are_read_at_the_start_are_given_to_an_interpreter(name: str):
    value = {"PYTHONHASHSEED": "1", "LC_ALL": "C"}.get(name, "")
    assert not described(SELF, env={**os.environ, "PYTHONPATH": str(warm_start.REPOSITORY), name: value})["forked"]


def test_another_copy_of_the_package_is_not_forked(tmp_path: Path):
    (tmp_path / "titan_exp").mkdir()
    (tmp_path / "titan_exp" / "__init__.py").touch()
    (tmp_path / "titan_exp" / "__main__.py").write_text("import json; print(json.dumps('the other'))")
    words = [sys.executable, "-m", "titan_exp"]
    done = subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == "the other"


def main(what: str) -> None:
    if what == "exit 3":
        sys.exit(3)
    if what == "fail":
        raise ValueError("it fails")
    if what == "words":
        sys.exit("it says why")
    if what == "nobody reads":
        time.sleep(0.3)  # until nobody can
        print("text")
        return
    if what == "threads":
        atexit.register(print, "at the end")
        threading.Timer(0.3, print, ["of a thread"]).start()
        return
    if what == "start":
        print(subprocess.Popen([*SELF, "wait"], stdout=subprocess.DEVNULL).pid, flush=True)
    if what in ("start", "wait", "interrupt", "kill"):
        print("waits", flush=True)
        time.sleep(60)
    print(json.dumps({**state(), "forked": bool(vars(warm_start)["_words"]), "text": sys.stdin.read()}))


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "")
