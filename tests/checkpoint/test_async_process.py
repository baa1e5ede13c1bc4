"""The save process may die or lack shared memory: training and saving continue."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.checkpoint.saving import checkpointer, trained
from tests.faults import NO_MOUNTS, can_mount
from tests.ranks import run_ranks
from titan_exp.checkpoint.retention import CheckpointFolder


def writing_processes() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children()
        if process.status() != psutil.STATUS_ZOMBIE and "spawn_main" in " ".join(process.cmdline())
    ]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("moment", ["writing", pytest.param("idle", marks=pytest.mark.night)])
def test_killed_save_process_is_replaced_by_the_next_save(tmp_path, caplog, capfd, moment):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, "async_process")
    try:
        saver.save(10, [model], optimizer, {}, {"step": 10})
        saver.wait()
        (first,) = writing_processes()
        if moment == "writing":
            # Stopped, it cannot be quicker than its death.
            first.suspend()
            saver.save(20, [model], optimizer, {}, {"step": 20})
            first.kill()
        else:
            first.kill()
            # All of its threads are gone, and nobody has been told yet.
            os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
            saver.save(20, [model], optimizer, {}, {"step": 20})
        saver.wait()
        if moment == "writing":
            assert "could not write the checkpoint of step 20" in caplog.text
            assert "the checkpoint save process of this or another rank died" in caplog.text
            assert list(saver.folder.path.glob("*.partial")) == []
            saver.save(20, [model], optimizer, {}, {"step": 20})
            saver.wait()
        assert saver.latest() == 20
        assert [process.pid for process in writing_processes()] != [first.pid]
    finally:
        saver.close()
    assert "INFO" not in capfd.readouterr().err


def _die_and_go_on(rank_that_dies: int, path: str) -> list[int]:
    """Save; kill one rank's process while all of them write; save the same step again, and the next."""
    import torch
    import torch.distributed as dist

    from titan_exp.trainer.distributed import joined_process_group

    with joined_process_group(torch.device("cpu")):
        model, optimizer = trained()
        saver = checkpointer(Path(path), "async_process", keep=9)
        saver.save(1, [model], optimizer, {}, {"step": 1})
        saver.wait()
        (process,) = writing_processes()
        dies = dist.get_rank() == rank_that_dies
        if dies:
            process.suspend()
        saver.save(2, [model], optimizer, {}, {"step": 2})
        if dies:
            time.sleep(0.2)
            process.kill()
        saver.save(2, [model], optimizer, {}, {"step": 2})
        saver.save(3, [model], optimizer, {}, {"step": 3})
        saver.close()
        return [saver.durable or 0]


@pytest.mark.night
def test_killed_save_process_of_one_of_three_ranks(tmp_path):
    # torch alone waits for half an hour.
    assert run_ranks(3, _die_and_go_on, 2, str(tmp_path), limit=100) == [[3]] * 3
    assert CheckpointFolder(tmp_path / "checkpoints").complete_steps() == [1, 2, 3]


@pytest.mark.usefixtures("one_rank")
def test_save_process_ignores_signals(tmp_path):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, "async_process")
    try:
        saver.save(10, [model], optimizer, {}, {})
        saver.wait()
        (process,) = writing_processes()
        process.suspend()
        saver.save(20, [model], optimizer, {}, {})
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
        process.resume()
        saver.wait()
        assert saver.latest() == 20
    finally:
        saver.close()


SMALL_SHARED_MEMORY = """
import logging, sys, warnings
from pathlib import Path
import torch
from tests.checkpoint.saving import checkpointer, trained
from titan_exp.trainer.distributed import joined_process_group
logging.basicConfig(stream=sys.stdout, format="%(message)s")
with joined_process_group(torch.device("cpu")):
    model, optimizer = trained()
    saver = checkpointer(Path(sys.argv[1]), "async_process")
    saver.save(10, [model], optimizer, {}, {})
    saver.save(20, [model], optimizer, {}, {})
    saver.close()
    print("newest", saver.latest())
"""


@pytest.mark.skipif(not can_mount(), reason=NO_MOUNTS)
def test_too_little_shared_memory_falls_back_to_a_thread(tmp_path):
    """In a mount namespace of its own, whose /dev/shm has 64 kB."""
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", SMALL_SHARED_MEMORY, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "newest 20" in done.stdout
    assert "/dev/shm of" in done.stdout
    assert "A thread writes checkpoints instead" in done.stdout


def _addresses_of_save_process(path: str) -> list[str]:
    """Addresses on which this rank's save process can be reached."""
    import torch

    from titan_exp.trainer.distributed import joined_process_group

    with joined_process_group(torch.device("cpu")):
        model, optimizer = trained()
        saver = checkpointer(Path(path), "async_process")
        saver.save(1, [model], optimizer, {}, {"step": 1})
        saver.wait()
        found = [opened for process in writing_processes() for opened in process.net_connections()]
        saver.close()
        return sorted({opened.laddr.ip for opened in found if opened.status == psutil.CONN_LISTEN})


@pytest.mark.parametrize("ranks", [1, 2])
def test_save_processes_of_one_machine_listen_on_the_loopback_interface(tmp_path, ranks):
    assert run_ranks(ranks, _addresses_of_save_process, str(tmp_path)) == [["127.0.0.1"]] * ranks
