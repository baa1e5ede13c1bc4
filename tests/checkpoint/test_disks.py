"""Saving on real full disks and read-only mounts, which refuse root as well."""

import pytest

from tests.checkpoint.saving import checkpointer, one_step, snapshot, trained
from tests.faults import NO_MOUNTS, can_mount, fill, read_only, small_disk
from titan_exp.checkpoint.dcp.checksums import find_damage
from titan_exp.config.errors.user_error import UserError

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not can_mount(), reason=NO_MOUNTS),
]
MODES = ["sync", "async", "async_process"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("leave", [0, 100_000])
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
            assert "step 20 could not be written" in caplog.text
            assert "training continues, and the newest complete one is that of step 10" in caplog.text
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
    with read_only(tmp_path), pytest.raises(UserError, match=r"cannot be written.*Read-only file system"):
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
            assert "step 20 could not be written" in caplog.text
            assert "Read-only file system" in caplog.text
            assert saver.latest() == 10
        saver.save(30, [model], optimizer, {}, {"step": 30})
        saver.wait()
        assert saver.folder.complete_steps() == [30]
    finally:
        saver.close()


def _equal(one, other) -> bool:
    return one.equal(other)
