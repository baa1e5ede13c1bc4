"""Saving on real full disks and read-only mounts, which refuse root as well."""

import time
from dataclasses import replace

import pytest

from tests.checkpoint.saving import checkpointer, one_step, snapshot, trained
from tests.faults import NO_MOUNTS, can_mount, fill, read_only, small_disk
from titan_exp.checkpoint.checkpointer import Checkpointer
from titan_exp.checkpoint.storage_writer import find_damage
from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.logging import configure_logging, get_logger
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState, StateName, write_atomically

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not can_mount(), reason=NO_MOUNTS),
]
MODES = ["sync", "async", "async_process"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("leave", [pytest.param(0, marks=pytest.mark.night), 100_000])
def test_full_disk_costs_one_checkpoint(tmp_path, caplog, mode, leave):
    model, optimizer = trained()
    with small_disk(tmp_path / "disk", 8 * 2**20) as disk:
        saver = checkpointer(disk, mode)
        try:
            saver.save(10, [model], optimizer, {}, {"step": 10})
            saver.wait()
            expected = snapshot(model, optimizer)
            # Nothing fits, or a part of the file does.
            filler = fill(disk, leave=leave)
            one_step(model, optimizer)
            saver.save(20, [model], optimizer, {}, {"step": 20})
            saver.wait()
            assert "could not write the checkpoint of step 20" in caplog.text
            assert "Training continues, and the newest complete one is that of step 10" in caplog.text
            assert "No space left on device" in caplog.text
            assert [entry.name for entry in saver.folder.path.iterdir()] == ["step-00000010"]
            assert find_damage(saver.folder.path_of(10)) is None
            other, other_optimizer = trained(seed=9, steps=0)
            saver.load(10, [other], other_optimizer)
            assert all(map(_equal, expected, snapshot(other, other_optimizer)))
            filler.unlink()
            saver.save(30, [model], optimizer, {}, {"step": 30})
            saver.wait()
            assert saver.latest() == 30
        finally:
            saver.close()


def test_read_only_folder_is_refused_before_training(tmp_path):
    with read_only(tmp_path), pytest.raises(UserError, match=r"Cannot write checkpoints.*Read-only file system"):
        checkpointer(tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_folder_turned_read_only_costs_one_checkpoint(tmp_path, caplog, mode):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, mode, keep=1)
    try:
        saver.save(10, [model], optimizer, {}, {"step": 10})
        saver.wait()
        with read_only(tmp_path):
            saver.save(20, [model], optimizer, {}, {"step": 20})
            saver.wait()
            assert "could not write the checkpoint of step 20" in caplog.text
            assert "Read-only file system" in caplog.text
            assert saver.latest() == 10
        saver.save(30, [model], optimizer, {}, {"step": 30})
        saver.wait()
        assert saver.folder.complete_steps() == [30]
    finally:
        saver.close()


def _equal(one, other) -> bool:
    return one.equal(other)


@pytest.mark.parametrize("mode", ["sync", "async", pytest.param("async_process", marks=pytest.mark.night)])
@pytest.mark.parametrize("minutes", [pytest.param(None, marks=pytest.mark.night), 10.0])
def test_saves_that_fail_for_too_long_end_the_run(tmp_path, mode, minutes):
    model, optimizer = trained()
    now = 0.0
    config = replace(checkpointer(tmp_path, mode).config, fail_after_minutes=minutes)
    saver = Checkpointer(config, tmp_path / "checkpoints", clock=lambda: now)

    def save(step):
        saver.save(step, [model], optimizer, {}, {"step": step})
        while saver._pending is not None:
            saver.poll()

    try:
        save(10)
        assert saver.warning() is None
        with read_only(tmp_path):
            save(20)
            warning = saver.warning()
            assert warning is not None
            for part in (str(tmp_path / "checkpoints"), "Read-only file system", "one is that of step 10"):
                assert part in warning
            now = 599.0
            assert not saver.interval_elapsed()
            save(30)
        save(40)
        assert saver.warning() is None
        with read_only(tmp_path):
            save(50)
            now = 599.0 + 600.0
            # One more save decides, however far the next regular one is.
            assert saver.interval_elapsed() == (minutes is not None)
            if minutes is None:
                save(60)
            else:
                with pytest.raises(UserError, match=r"fail_after_minutes=10.*Read-only file system") as error:
                    save(60)
                assert "that of step 40" in str(error.value)
                assert f"titan-exp retry {tmp_path}" in str(error.value)
    finally:
        saver.close()


def test_heartbeat_and_its_warning_on_a_full_or_read_only_disk(tmp_path):
    with small_disk(tmp_path / "disk", 2**20) as disk:
        folder = RunFolder(disk)
        folder.beat(1, force=True, warning="a long warning, which a shorter text replaces")
        folder.logs.mkdir()
        fill(disk)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(disk / "other", "text")
        for step, warning in ((20, "no checkpoint"), (3, None)):
            folder.beat(step, force=True, warning=warning)
            beat = folder.read_heartbeat()
            assert beat is not None
            assert (beat.step, beat.warning, folder.warning()) == (step, warning, warning)
        (disk / "filler").unlink()
        folder.beat(4, force=True, warning="no checkpoint")
        states: dict[StateName, str | None] = {"failed": "no checkpoint", "running": None}
        for state, known in states.items():
            folder.write_state(RunState(state, 4, time.time(), 1, None))
            assert folder.warning() == known
        with folder.claim("launcher"), read_only(disk):
            assert folder.holder() is not None
            configure_logging(1, disk / "logs")
            get_logger().error("this line is lost, and the rank is not")
            assert "is on a read-only disk" in (folder.warning() or "")
