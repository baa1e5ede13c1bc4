import errno
import os
import pickle

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.saving import checkpointer, one_step, snapshot, trained
from tests.models.shapes import real_model
from titan_exp.checkpoint.checkpointer import load_model
from titan_exp.checkpoint.reader import SafeReader, tensor_shapes


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_state_comes_back_bitwise(tmp_path, mode):
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
    load_model(saver.folder.at(10), other)
    for old, new in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_checkpoint_counts_only_once_it_is_whole(tmp_path):
    model, optimizer = trained()
    saver = checkpointer(tmp_path)
    assert saver.latest() is None
    saver.save(10, [model], optimizer, {}, {})
    saver.wait()
    assert saver.latest() == 10
    saver.folder.partial(20).mkdir()
    assert checkpointer(tmp_path).latest() == 10
    assert not saver.folder.partial(20).exists()


def test_old_ones_go_when_newer_ones_are_whole(tmp_path):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, keep=2)
    for step in (10, 20, 30):
        saver.save(step, [model], optimizer, {}, {})
    # The third may be complete already; the first stays until training has taken note of it.
    assert saver.folder.complete()[:2] == [10, 20]
    saver.wait()
    assert saver.folder.complete() == [20, 30]


def test_the_same_step_is_saved_once(tmp_path):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, "sync")
    saver.save(10, [model], optimizer, {}, {})
    written = saver.folder.at(10).stat().st_mtime_ns
    saver.save(10, [model], optimizer, {}, {})
    assert saver.folder.at(10).stat().st_mtime_ns == written


def test_off_saves_nothing(tmp_path):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, "off")
    saver.save(10, [model], optimizer, {}, {})
    assert not saver.due(10)
    assert saver.latest() is None


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_full_disk_keeps_the_last_one_and_says_so(tmp_path, monkeypatch, caplog, mode):
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


def test_metadata_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Harm()))
    with pytest.raises(pickle.UnpicklingError, match="not checkpoint metadata"):
        SafeReader(tmp_path).read_metadata()
    assert not (tmp_path / "harmed").exists()


def test_no_entry_needs_unpickling(tmp_path):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, "sync")
    saver.save(10, [model], optimizer, {"0": {"epoch": 0}}, {"step": 10})
    entries = SafeReader(saver.folder.at(10)).read_metadata().state_dict_metadata
    assert set(tensor_shapes(saver.folder.at(10))) == set(entries)
    assert dist.get_world_size() == 1
