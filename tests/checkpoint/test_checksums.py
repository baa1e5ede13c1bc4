"""Any damage to a checkpoint's files is detected, and the newest intact one is used."""

import json
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.saving import checkpointer, load_model, saved, snapshot, trained
from tests.checkpoint.tools import exported
from tests.models.shapes import real_model
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.checkpoint.storage_writer import find_damage, has_checksums
from titan_exp.config.checkpoint_files import CHECKSUMS_FILE
from titan_exp.config.errors.user_error import UserError

pytestmark = pytest.mark.usefixtures("one_rank")
DATA_FILE, METADATA_FILE = "__0_0.distcp", ".metadata"


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


@pytest.mark.parametrize("name", [DATA_FILE, METADATA_FILE, CHECKSUMS_FILE])
@pytest.mark.parametrize("harm", [truncate, flip_a_bit, grow, Path.unlink])
def test_damage_is_detected_and_an_older_checkpoint_used(tmp_path, caplog, name: str, harm: Callable[[Path], None]):
    saver = saved(tmp_path, 10, 20)
    if (harm, name) == (Path.unlink, CHECKSUMS_FILE):
        pytest.skip("this is how a checkpoint from before checksums looks")
    if name == CHECKSUMS_FILE and harm is flip_a_bit:
        # In the middle of it stands a sum or a name; space between them would not matter.
        file = saver.folder.path_of(20) / CHECKSUMS_FILE
        file.write_text(file.read_text().replace('"crc32": "', '"crc32": "1', 1))
    else:
        harm(saver.folder.path_of(20) / name)
    again = checkpointer(tmp_path)
    assert again.latest() == 10
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    for word in ("step 20 is damaged", "We use that of step 10 instead", "step-00000020.damaged"):
        assert word in line
    if name == DATA_FILE:
        assert DATA_FILE in line
    assert again.folder.complete_steps() == [10], "a damaged one does not count when old ones go"
    assert (tmp_path / "checkpoints/step-00000020.damaged").is_dir()


def test_any_single_bit_flip_is_detected(tmp_path):
    path = saved(tmp_path, 10).folder.path_of(10)
    seed = random.randrange(10**6)
    print(f"seed of the flips: {seed}")
    chance = random.Random(seed)
    meant = json.loads((path / CHECKSUMS_FILE).read_text())
    drawn = [(name, None) for name in [DATA_FILE, METADATA_FILE, CHECKSUMS_FILE] * 25]
    # Bit 5 makes capitals of letters, which other readers of hexadecimal numbers take for the same.
    capitals = [(CHECKSUMS_FILE, (position, 5)) for position in range((path / CHECKSUMS_FILE).stat().st_size)]
    for name, given in [*drawn, *capitals]:
        content = (path / name).read_bytes()
        position, bit = given or (chance.randrange(len(content)), chance.randrange(8))
        changed = bytearray(content)
        changed[position] ^= 1 << bit
        (path / name).write_bytes(changed)
        try:
            # Space between the sums may become other space.
            same = name == CHECKSUMS_FILE and json.loads(changed.decode()) == meant
        except ValueError:
            same = False
        assert same or find_damage(path) is not None, f"bit {bit} of byte {position} of {name}"
        (path / name).write_bytes(content)
    assert find_damage(path) is None


def test_converted_checkpoint_has_verified_checksums(tmp_path):
    exported("llama3", "dcp", tmp_path / "weights")
    assert has_checksums(tmp_path / "weights")
    assert open_checkpoint(tmp_path / "weights").format == "dcp"
    flip_a_bit(max((tmp_path / "weights").glob("*.distcp"), key=lambda file: file.stat().st_size))
    with pytest.raises(UserError, match=r"is damaged: .*distcp does not match its checksum"):
        open_checkpoint(tmp_path / "weights")


def test_fallback_checkpoint_is_intact(tmp_path):
    model, optimizer = trained()
    saver = checkpointer(tmp_path, "sync")
    saver.save(10, [model], optimizer, {}, {"step": 10})
    expected = snapshot(model, optimizer)
    saver.save(20, [model], optimizer, {}, {"step": 20})
    flip_a_bit(saver.folder.path_of(20) / DATA_FILE)
    other, other_optimizer = trained(seed=5, steps=0)
    again = checkpointer(tmp_path)
    step = again.latest()
    assert step == 10
    assert again.load(step, [other], other_optimizer).progress == {"step": 10}
    assert all(map(_equal, expected, snapshot(other, other_optimizer)))
    again.save(20, [other], other_optimizer, {}, {"step": 20})
    again.wait()
    assert checkpointer(tmp_path).latest() == 20


def test_all_damaged_is_refused_and_nothing_changed(tmp_path):
    saver = saved(tmp_path, 10, 20)
    truncate(saver.folder.path_of(10) / DATA_FILE)
    (saver.folder.path_of(20) / DATA_FILE).unlink()
    with pytest.raises(UserError) as caught:
        checkpointer(tmp_path).latest()
    for word in ("is intact", f"step 10: {DATA_FILE} has", f"step 20: {DATA_FILE} is missing", "from the beginning"):
        assert word in str(caught.value)
    assert saver.folder.complete_steps() == [10, 20]


def test_checkpoint_without_checksums_loads_with_a_log_line(tmp_path, caplog):
    saver = saved(tmp_path, 10)
    (saver.folder.path_of(10) / CHECKSUMS_FILE).unlink()
    caplog.set_level("INFO", logger="titan_exp")
    assert checkpointer(tmp_path).latest() == 10
    assert "is older than checksums" in caplog.text


@pytest.mark.parametrize("harm", [truncate, Path.unlink])
def test_checkpoint_without_checksums_has_its_sizes_checked(tmp_path, harm):
    saver = saved(tmp_path, 10)
    (saver.folder.path_of(10) / CHECKSUMS_FILE).unlink()
    assert find_damage(saver.folder.path_of(10)) is None
    harm(saver.folder.path_of(10) / DATA_FILE)
    assert DATA_FILE in (find_damage(saver.folder.path_of(10)) or "")


def test_checksums_cover_all_files(tmp_path):
    path = saved(tmp_path, 10).folder.path_of(10)
    files = json.loads((path / CHECKSUMS_FILE).read_text())["files"]
    assert sorted([*files, CHECKSUMS_FILE]) == sorted(file.name for file in path.iterdir())
    for name, one in files.items():
        assert one == {"size": (path / name).stat().st_size, "crc32": f"{zlib.crc32((path / name).read_bytes()):08x}"}


def test_every_file_belongs_to_one_shard(tmp_path):
    path = saved(tmp_path, 10).folder.path_of(10)
    flip_a_bit(path / DATA_FILE)
    for shares in (1, 2, 3):
        assert sum(find_damage(path, share, shares) is not None for share in range(shares)) == 1


def test_damaged_weights_are_not_loaded(tmp_path):
    path = saved(tmp_path, 10).folder.path_of(10)
    flip_a_bit(path / DATA_FILE)
    with pytest.raises(UserError, match=r"step-00000010 is damaged: __0_0\.distcp"):
        load_model(path, real_model(seed=1))


def test_lost_writes_are_detected(tmp_path, monkeypatch):
    """The checksums are of the bytes passed to the disk, not of those read back."""
    fsync = os.fsync

    def lossy(descriptor: int) -> None:
        fsync(descriptor)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith(DATA_FILE):
            flip_a_bit(Path(name))

    monkeypatch.setattr(os, "fsync", lossy)
    saver = saved(tmp_path, 10)
    assert DATA_FILE in (find_damage(saver.folder.path_of(10)) or "")


def _equal(one, other) -> bool:
    return one.equal(other)
