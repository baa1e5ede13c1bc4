"""Fake trainers without torch, chosen by TITAN_EXP_RANK_MAIN."""

import ctypes
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.run import Run
from titan_exp.tracking.run_folder.run_folder import RunFolder

LIMIT = 60.0
"""Seconds after which a stand-in ends whatever happens, so that no test leaves a process behind."""


def rank() -> int:
    return int(os.environ["RANK"])


def log(folder: RunFolder, step: int) -> None:
    """Append a row of metrics, as rank 0 of the trainer does."""
    attempt = folder.read_attempts()[-1].attempt
    row = {"step": step, "loss": 3.0 / step, "tokens_per_second": 100.0 * step, "attempt": attempt}
    with folder.metrics.open("a") as file:
        file.write(json.dumps(row) + "\n")
    folder.beat(step, force=True)


def write_surroundings(folder: RunFolder) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TITAN_EXP_RENDEZVOUS")
    names += ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "TITAN_EXP_WORLD")
    seen = {name: os.environ.get(name) for name in names}
    handlers = {name: str(signal.getsignal(getattr(signal, name))) for name in ("SIGINT", "SIGTERM", "SIGUSR2")}
    meet = Path(os.environ["TITAN_EXP_RENDEZVOUS"]).parent.is_dir() if seen["TITAN_EXP_RENDEZVOUS"] else None
    report = {"env": seen, "handlers": handlers, "cwd": os.getcwd(), "path": sys.path, "rendezvous_folder": meet}
    (folder.path / f"seen-{rank()}.json").write_text(json.dumps(report))


def succeed(path: str) -> None:
    folder = RunFolder(path)
    write_surroundings(folder)
    print(f"hello from rank {rank()} → its log", flush=True)
    began = f"began-{folder.read_attempts()[-1].attempt}"
    (folder.path / f"{began}-{rank()}").touch()
    if rank() == 0:
        peers = [folder.path / f"{began}-{other}" for other in range(int(os.environ["WORLD_SIZE"]))]
        wait_until(lambda: all(peer.exists() for peer in peers))  # as collectives make it, in each attempt anew
        for step in (1, 2):
            log(folder, step)


def read_configuration(run: Run) -> None:
    assert run.experiment.training.steps > 0  # as the trainer does


def raise_on_rank_1(path: str) -> None:
    if rank() == 1:
        raise ValueError("the loss went for a walk")
    wait_for_ever(path)


def raise_everywhere_after_rank_1(path: str) -> None:
    """The peers of a failed rank fail after it, as collectives do."""
    folder = RunFolder(path)
    if rank() == 1:
        (folder.path / "rank-1-was-here").touch()
        raise ValueError("the cause")
    wait_until((folder.path / "rank-1-was-here").exists)
    time.sleep(0.2)
    raise ConnectionError("closed by peer")


def killed_on_rank_1(path: str) -> None:
    folder = RunFolder(path)
    write_surroundings(folder)
    if rank() == 1:
        print("about to allocate a lot", flush=True)
        wait_until((folder.path / "seen-0.json").exists)
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_ever(path)


def out_of_memory_on_rank_1(path: str) -> None:
    folder = RunFolder(path)
    write_surroundings(folder)
    if rank() == 1:
        wait_until((folder.path / "seen-0.json").exists)
        Path(os.environ["MEMORY_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
        blocks = []
        while True:
            blocks.append(b"1" * 2**24)
    wait_for_ever(path)


def wait_in_native_code(path: str) -> None:
    """Block the main thread in C, where Python handles no signal, as a collective does."""
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, libc.sleep, ctypes.c_void_p(int(LIMIT)))
    (Path(path) / "native").touch()
    libc.pthread_join(thread, None)


def exit_7(path: str) -> None:
    sys.exit(7)


def user_error(path: str) -> None:
    raise UserError("data.paths: no such folder. Give one that exists.")


def wait_for_ever(path: str) -> None:
    """Hang as in a collective whose peers are gone, ignoring stop requests."""
    folder = RunFolder(path)
    write_surroundings(folder)
    wait_until(lambda: False)


def lose_folder(path: str) -> None:
    """Delete the run folder, then fail as the trainer does without it."""
    shutil.rmtree(path)
    (Path(path) / "config.yaml").read_text()


def renew_folder(path: str) -> None:
    """Replace the run folder by a copy, as a deletion and a new start do, and end well before anybody notices."""
    shutil.copytree(path, f"{path}-copy")
    shutil.rmtree(path)
    Path(f"{path}-copy").rename(path)


def obey_stop(path: str) -> None:
    """Train until a stop is requested, save and exit with 85; resume at the saved step; 3 steps are all."""
    folder = RunFolder(path)
    write_surroundings(folder)
    saved = folder.path / f"saved-{rank()}"
    step = int(saved.read_text()) if saved.exists() else 0
    if rank() == 0:
        log(folder, step + 1)
    # As in training, no rank ends before all have started.
    name = "resumed" if saved.exists() else "started"
    (folder.path / f"{name}-{rank()}").touch()
    peers = [folder.path / f"{name}-{peer}" for peer in range(int(os.environ["WORLD_SIZE"]))]
    wait_until(lambda: all(peer.exists() for peer in peers))
    if name == "resumed":
        return
    wait_until(folder.stop_requested)
    time.sleep(float(os.environ.get("FAKE_SAVE_SECONDS", "0")))
    saved.write_text("1")
    sys.exit(85)


def fail_once(path: str) -> None:
    """Fail at the first attempt only."""
    folder = RunFolder(path)
    if folder.read_attempts()[-1].attempt == 1:
        raise RuntimeError("out of luck")
    succeed(path)


def die_unless_lucky(path: str) -> None:
    """Fail for one point of a sweep."""
    text = RunFolder(path).config.read_text()
    if "seed: 1\n" in text:
        raise RuntimeError("seed 1 is unlucky")
    succeed(path)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    if not condition():
        raise TimeoutError("the stand-in waited too long")


def fail_while_a_thread_waits(path: str) -> None:
    """As a thread of a process group that waits for peers."""
    threading.Thread(target=time.sleep, args=(2 * LIMIT,)).start()
    raise RuntimeError("out of luck")


def learn(path: str) -> None:
    """Log a validation loss at each of the steps, which falls faster at a higher rate."""
    run = Run(RunFolder(path))
    rate, seed, attempt = run.experiment.optimizer.lr, run.experiment.experiment.seed, run.attempts[-1].attempt
    for step in range(1, run.experiment.training.steps + 1):
        loss = 3 + seed % 7 + seed % 11 / 1e3 * rate / step - 100 * rate
        row = {"step": step, "tokens": 10 * step, "loss": loss, "validation_loss": loss, "attempt": attempt}
        with run.folder.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        run.folder.beat(step, force=True)
        time.sleep(0.1)
