import errno
import multiprocessing
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.saving import checkpointer, load_model, one_step, snapshot, trained
from tests.models.shapes import real_model
from titan_exp.checkpoint.checkpointer import Checkpointer
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.storage_reader import SafeStorageReader, tensor_shapes
from titan_exp.config.errors.user_error import UserError

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_state_roundtrips_bitwise(tmp_path, mode):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, mode)
    saver.save(10, [model], optimizer, {"3": {"epoch": 1}, "4": [2, None]}, {"step": 10, "tokens": 77})
    expected = snapshot(model, optimizer)
    # Training goes on at once: a background save must not see it.
    one_step(model, optimizer)
    saver.wait()

    other, other_optimizer = trained(seed=9, steps=0)
    restored = checkpointer(tmp_path).load(10, [other], other_optimizer)
    assert restored.progress == {"step": 10, "tokens": 77}
    assert restored.data == {"3": {"epoch": 1}, "4": [2, None]}
    for old, new in zip(expected, snapshot(other, other_optimizer), strict=True):
        assert torch.equal(old, new)


def test_weights_alone_can_be_loaded(tmp_path):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, "sync")
    saver.save(10, [model], optimizer, {}, {})
    other = real_model(seed=9)
    load_model(saver.folder.path_of(10), other)
    for old, new in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(old, new)


def test_partial_checkpoint_is_ignored(tmp_path):
    model, optimizer = trained()
    saver = checkpointer(tmp_path)
    assert saver.latest() is None
    saver.save(10, [model], optimizer, {}, {})
    saver.wait()
    assert saver.latest() == 10
    saver.folder.partial_path(20).mkdir()
    assert checkpointer(tmp_path).latest() == 10
    assert not saver.folder.partial_path(20).exists()


def test_retention_deletes_after_newer_are_complete(tmp_path):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, keep=2)
    for step in (10, 20, 30):
        saver.save(step, [model], optimizer, {}, {})
    # The third may be complete already; the first stays until training has taken note of it.
    assert saver.folder.complete_steps()[:2] == [10, 20]
    saver.wait()
    assert saver.folder.complete_steps() == [20, 30]


def test_the_same_step_is_saved_once(tmp_path):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, "sync")
    saver.save(10, [model], optimizer, {}, {})
    written = saver.folder.path_of(10).stat().st_mtime_ns
    saver.save(10, [model], optimizer, {}, {})
    assert saver.folder.path_of(10).stat().st_mtime_ns == written


def test_mode_off_saves_nothing(tmp_path):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, "off")
    saver.save(10, [model], optimizer, {}, {})
    assert not saver.due(10)
    assert saver.latest() is None


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch, caplog, mode):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, mode)
    saver.save(10, [model], optimizer, {}, {})
    saver.wait()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    saver.save(20, [model], optimizer, {}, {})
    saver.wait()
    monkeypatch.undo()
    assert "step 20" in caplog.text
    assert "No space left" in caplog.text
    assert saver.latest() == 10
    saver.save(30, [model], optimizer, {}, {})
    saver.wait()
    assert saver.latest() == 30


class _Harm:
    def __reduce__(self):
        return (os.mkdir, ("harmed",))


def test_metadata_with_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Harm()))
    with pytest.raises(UserError, match="not checkpoint metadata"):
        SafeStorageReader(tmp_path).read_metadata()
    assert not (tmp_path / "harmed").exists()


def test_no_entry_needs_unpickling(tmp_path):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, "sync")
    saver.save(10, [model], optimizer, {"0": {"epoch": 0}}, {"step": 10})
    entries = SafeStorageReader(saver.folder.path_of(10)).read_metadata().state_dict_metadata
    assert set(tensor_shapes(saver.folder.path_of(10))) == set(entries)
    assert dist.get_world_size() == 1


def test_save_interval_in_minutes(tmp_path):
    model, optimizer = trained()
    now = 1000.0
    config = replace(checkpointer(tmp_path, "sync").config, every=None, every_minutes=2.0)
    saver = Checkpointer(config, tmp_path / "checkpoints", clock=lambda: now)
    now += 119
    assert not saver.interval_elapsed()
    assert not saver.due(10)
    now += 1
    assert saver.interval_elapsed()
    saver.save(7, [model], optimizer, {}, {})
    assert not saver.interval_elapsed()
    now += 121
    assert saver.interval_elapsed()


def test_save_timings_are_reported_once(tmp_path, caplog):
    model, optimizer = trained()
    caplog.set_level("INFO", logger="titan_exp")
    saver = checkpointer(tmp_path)
    saver.save(10, [model], optimizer, {}, {})
    saver.wait()
    times = saver.pop_timings()
    assert set(times) == {"checkpoint_pause", "checkpoint_write"}
    assert min(times.values()) > 0
    assert saver.pop_timings() == {}
    assert "saved step 10: training paused for" in caplog.text


def test_weights_only_save(tmp_path):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, "sync")
    saver.save(10, [model], optimizer, {"0": {}}, {"step": 10}, weights_only=True)
    keys = set(tensor_shapes(saver.folder.path_of(10)))
    assert keys == {*(f"model.{name}" for name in model.state_dict()), "progress"}
    other, other_optimizer = trained(seed=9, steps=0)
    restored = checkpointer(tmp_path).load(10, [other], other_optimizer)
    assert restored.progress == {"step": 10, "weights_only": True}
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_failed_save_frees_disk_space(tmp_path, monkeypatch, mode):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, mode)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    saver.save(10, [model], optimizer, {}, {})
    saver.wait()
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert saver.durable is None


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_failed_publication_fails_the_save(tmp_path, monkeypatch, caplog, mode):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, mode)

    def read_only(self: CheckpointFolder, step: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(CheckpointFolder, "publish", read_only)
    saver.save(10, [model], optimizer, {}, {})
    saver.wait()
    assert "Read-only file system" in caplog.text
    assert saver.durable is None
    monkeypatch.undo()
    saver.save(10, [model], optimizer, {}, {})
    saver.wait()
    assert saver.latest() == 10


def test_uncreatable_folder_is_refused_before_training(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(UserError, match=r"(?s)Cannot write checkpoints: \S*checkpoints.*checkpoint=none"):
        checkpointer(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_refused_before_training(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Cannot write checkpoints"):
        checkpointer(tmp_path)


def test_failed_retention_does_not_stop_training(tmp_path, monkeypatch, caplog):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, "sync", keep=1)
    saver.save(10, [model], optimizer, {}, {})

    def refused(self: CheckpointFolder, step: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(CheckpointFolder, "_remove", refused)
    saver.save(20, [model], optimizer, {}, {})
    assert "could not delete" in caplog.text
    monkeypatch.undo()
    assert checkpointer(tmp_path).latest() == 20
    saver.save(30, [model], optimizer, {}, {})
    assert saver.folder.complete_steps() == [30]


def test_save_process_writes_and_reports_failures(tmp_path, caplog):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, "async_process")
    try:
        saver.save(10, [model], optimizer, {"0": {"rows": 3}}, {"step": 10})
        expected = snapshot(model, optimizer)
        one_step(model, optimizer)
        saver.wait()
        assert saver.latest() == 10
        saver.folder.partial_path(20).write_text("in the way")
        saver.save(20, [model], optimizer, {}, {})
        saver.wait()
        assert "could not write the checkpoint of step 20" in caplog.text
        assert "File exists" in caplog.text
        saver.folder.partial_path(20).unlink()
        saver.save(20, [model], optimizer, {}, {})
        saver.wait()
        assert saver.latest() == 20
    finally:
        saver.close()
    assert multiprocessing.active_children() == []
    other, other_optimizer = trained(seed=9, steps=0)
    assert checkpointer(tmp_path).load(10, [other], other_optimizer).data == {"0": {"rows": 3}}
    assert all(map(torch.equal, expected, snapshot(other, other_optimizer)))


@pytest.mark.parametrize("mode", ["sync", "async", "async_process"])
def test_deleted_run_folder_is_not_created_again(tmp_path, caplog, mode):
    model, optimizer = trained()
    run = tmp_path / "run"
    run.mkdir()
    saver = checkpointer(run, mode)
    try:
        saver.save(10, [model], optimizer, {}, {"step": 10})
        saver.wait()
        shutil.rmtree(run / "checkpoints")
        saver.save(20, [model], optimizer, {}, {"step": 20})
        saver.wait()
        assert "are gone. Until that of step 20 is complete" in caplog.text
        assert saver.folder.complete_steps() == [20]
        shutil.rmtree(run)
        saver.save(30, [model], optimizer, {}, {"step": 30})
        saver.wait()
        assert "could not write the checkpoint of step 30" in caplog.text
        assert not run.exists()
    finally:
        saver.close()
