"""Metadata of a checkpoint is written by whoever made it: whatever it says, no code runs and no weight is forgotten."""

import io
import json
import os
import pickle
import pickletools
import random
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from tests.checkpoint.saving import checkpointer, saved, trained
from titan_exp.checkpoint.formats.torch_file import DCPTensorReader
from titan_exp.checkpoint.load_state import load_state, read_progress
from titan_exp.checkpoint.storage_reader import SafeStorageReader, load_into, tensor_shapes
from titan_exp.checkpoint.storage_writer import ChecksumWriter, find_damage
from titan_exp.config.checkpoint_files import CHECKSUMS_FILE, METADATA_FILE
from titan_exp.config.errors.user_error import UserError

pytestmark = pytest.mark.usefixtures("one_rank")

STATE = {
    "model.weight": torch.arange(24.0).view(6, 4),
    "model.bias": torch.arange(5.0),
    "progress": torch.arange(7, dtype=torch.uint8),
}


class Harm:
    """An object whose unpickling makes a folder."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("harmed",))


def harmful() -> bytes:
    file = io.BytesIO()
    torch.save(Harm(), file)
    return file.getvalue()


HARM = harmful()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of STATE, with a file beside it that does harm where it is unpickled."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "step-00000010"
    dcp.save(dict(STATE), storage_writer=dcp.FileSystemWriter(folder))
    (folder / "harm.pt").write_bytes(HARM)
    torch.save(torch.zeros(6, 4), tmp_path / "elsewhere.pt")
    return folder


def rewrite(path: Path, change: Callable[[Metadata], None]) -> None:
    metadata = SafeStorageReader(path).read_metadata()
    change(metadata)
    (path / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def load(path: Path) -> dict[str, Tensor]:
    state = {key: torch.full_like(tensor, 77) for key, tensor in STATE.items()}
    load_into(path, state)
    return state


def list_as_bytes(metadata: Metadata, key: str = "model.weight") -> None:
    """What torch's own planner unpickles."""
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == key)
    metadata.storage_data[MetadataIndex(key)] = replace(place, relative_path="harm.pt", offset=0, length=len(HARM))


class EarlyPickler(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def pickled_early(metadata: Metadata) -> bytes:
    file = io.BytesIO()
    EarlyPickler(file).dump(metadata)
    return file.getvalue()


def pickled_by_3_13(metadata: Metadata) -> bytes:
    assert metadata.storage_meta is not None
    metadata.storage_meta.checkpoint_id = Path("/checkpoint")
    found = pickle.dumps(metadata, protocol=2).replace(b"cpathlib._local\n", b"cpathlib\n")
    assert b"cpathlib\nPosixPath\n" in found
    return found.replace(b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n")


@pytest.mark.parametrize("pickled", [pickled_early, pickled_by_3_13])
def test_metadata_of_every_python_is_read(path: Path, pickled: Callable[[Metadata], bytes]):
    (path / METADATA_FILE).write_bytes(pickled(SafeStorageReader(path).read_metadata()))
    assert all(torch.equal(found, STATE[key]) for key, found in load(path).items())


@pytest.mark.parametrize("words", [(torch.Size, "count"), (_MEM_FORMAT_ENCODING, "mro"), (_MEM_FORMAT_ENCODING, 3)])
def test_an_early_pickle_names_members_alone(path: Path, words: tuple[Any, Any]):
    class Attribute:
        def __reduce__(self) -> Any:
            return (getattr, words)

    (path / METADATA_FILE).write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(UserError, match="damaged"):
        load(path)


def test_written_metadata_is_the_same_under_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = list[bytes]()
    for name in ("today", "early"):
        if name == "early":
            monkeypatch.setattr(Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
            assert b"getattr" in pickle.dumps(_MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST)
        dcp.save(dict(STATE), storage_writer=ChecksumWriter(tmp_path / name, single_file_per_rank=True))
        found.append((tmp_path / name / METADATA_FILE).read_bytes())
    # The save has a random identity and a folder.
    assert found[0][:2] == b"\x80\x04"
    today, early = ([opcode.name for opcode, *_ in pickletools.genops(each)] for each in found)
    assert today == early
    assert not any(word in each for word in (b"getattr", b"pathlib") for each in found)


def test_an_untouched_checkpoint_is_loaded(path: Path):
    for key, tensor in load(path).items():
        assert torch.equal(tensor, STATE[key])


def test_a_weight_listed_as_bytes_is_not_unpickled(path: Path):
    rewrite(path, list_as_bytes)
    state = {key: torch.zeros_like(tensor) for key, tensor in STATE.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    assert Path("harmed").is_dir(), "the checkpoint is harmful"
    Path("harmed").rmdir()
    with pytest.raises(UserError, match=r"lists .* as BytesStorageMetadata instead of a tensor"):
        load(path)
    assert not Path("harmed").exists()


def set_size(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.weight"].size = torch.Size([6, 5])  # type: ignore[union-attr]


def set_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["progress"].properties.dtype = torch.float32  # type: ignore[union-attr]


def drop_chunks(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.weight"].chunks = []  # type: ignore[union-attr]


def shorten_chunk(metadata: Metadata) -> None:
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([5, 4]))
    metadata.state_dict_metadata["model.weight"].chunks = [chunk]  # type: ignore[union-attr]


def forget(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["model.weight"]


def point_elsewhere(metadata: Metadata) -> None:
    for index, place in metadata.storage_data.items():
        if index.fqn == "model.weight":
            metadata.storage_data[index] = replace(place, relative_path="../elsewhere.pt", offset=0, length=10**6)


def transform(metadata: Metadata) -> None:
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = replace(place, transform_descriptors=["zstd"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_size, r"model.weight has the shape \[6, 5\] there and \[6, 4\] here"),
        (set_dtype, "progress has the dtype torch.float32 there and torch.uint8 here"),
        (drop_chunks, "lists 0 of the 24 elements of model.weight"),
        (shorten_chunk, "lists 20 of the 24 elements of model.weight"),
        (forget, "does not list model.weight"),
        (point_elsewhere, "not a file of the checkpoint"),
        (transform, r"stores model.\w+ with the transforms"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(path: Path, change: Callable[[Metadata], None], says: str):
    rewrite(path, change)
    with pytest.raises(UserError, match=says):
        load(path)


def test_classes_beside_metadata_are_not_called(path: Path):
    """The modules of torch's metadata hold other classes, too."""
    (path / METADATA_FILE).write_bytes(pickle.dumps(dcp.FileSystemWriter(path / "other")))
    with pytest.raises(UserError, match="not checkpoint metadata"):
        load(path)


def test_memory_for_objects_is_bounded_by_the_file(path: Path):
    """One flipped bit makes a length or a name the number of an object, for which pickle takes 16 bytes each."""
    (path / METADATA_FILE).write_bytes(b"\x80\x04}r" + (2**24).to_bytes(4, "little") + b".")
    with pytest.raises(UserError, match="9 bytes have an object of number 16777216"):
        load(path)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ([2**44], rf"lists progress with {2**44} bytes, and all files together have"),
        ([2**62], rf"lists progress with {2**62} bytes, and all files together have"),
        ([-1, -7], "the entry 'progress' has no shape"),
    ],
)
def test_shapes_larger_than_the_files_are_refused_before_memory_is_taken(path: Path, shape: list[int], says: str):
    rewrite(path, lambda metadata: setattr(metadata.state_dict_metadata["progress"], "size", torch.Size(shape)))
    with pytest.raises(UserError, match=says):
        read_progress(path)


def test_a_conversion_takes_no_memory_for_what_is_not_there(path: Path):
    rewrite(path, lambda metadata: setattr(metadata.state_dict_metadata["model.weight"], "size", torch.Size([2**50])))
    with pytest.raises(UserError, match=f"weight with {2**52} bytes"):
        DCPTensorReader(path)


def test_a_state_of_an_optimizer_larger_than_the_files_is_refused(tmp_path: Path):
    saver = saved(tmp_path, 10)
    path, (model, optimizer) = saver.folder.path_of(10), trained()
    key = next(key for key in tensor_shapes(path) if key.startswith("optimizer."))
    rewrite(path, lambda metadata: setattr(metadata.state_dict_metadata[key], "size", torch.Size([2**50])))
    with pytest.raises(UserError, match=f"lists {key} with {2**52} bytes"):
        load_state(path, [model], optimizer)


CHANGES = (list_as_bytes, set_size, set_dtype, drop_chunks, shorten_chunk, forget, point_elsewhere, transform)


def corrupt(chance: random.Random, path: Path) -> None:
    """One or two changes of the table of contents, or of bytes of its file."""
    for _ in range(chance.choice((1, 1, 2))):
        if chance.random() < 0.5:
            try:
                rewrite(path, chance.choice(CHANGES))
            except (UserError, KeyError, StopIteration, AttributeError):
                continue
        else:
            content = bytearray((path / METADATA_FILE).read_bytes())
            for _ in range(chance.choice((1, 1, 3))):
                content[chance.randrange(len(content))] = chance.randrange(256)
            (path / METADATA_FILE).write_bytes(content)


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.night)])
@pytest.mark.timeout(1800)
def test_no_table_of_contents_runs_code_or_leaves_a_weight_as_it_was(path: Path, count: int):
    content, refused = (path / METADATA_FILE).read_bytes(), 0
    for seed in range(count):
        (path / METADATA_FILE).write_bytes(content)
        corrupt(random.Random(seed), path)
        try:
            loaded = load(path)
        except UserError:
            refused += 1
        else:
            assert all(torch.equal(loaded[key], STATE[key]) for key in STATE), f"seed {seed}"
        assert not Path("harmed").exists(), f"seed {seed}"
    assert 0.5 < refused / count < 1


def test_a_checkpoint_without_checksums_beside_one_with_them_is_damaged(tmp_path: Path, caplog):
    saver = saved(tmp_path, 10, 20)
    newest = saver.folder.path_of(20)
    (newest / CHECKSUMS_FILE).unlink()
    assert find_damage(newest) == f"{CHECKSUMS_FILE} is missing, which other checkpoints beside it have"
    assert saver.latest() == 10
    assert "step 20 is damaged" in caplog.text


def test_a_resumed_run_ends_on_such_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With checksums that fit: whoever can write a checkpoint can write these."""
    monkeypatch.chdir(tmp_path)
    model, optimizer = trained()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    saver = checkpointer(tmp_path, "sync")
    saver.save(10, [model], optimizer, {}, {"step": 10})
    path = saver.folder.path_of(10)
    (path / "harm.pt").write_bytes(HARM)
    key = next(key for key in SafeStorageReader(path).read_metadata().state_dict_metadata if key.startswith("model."))
    rewrite(path, lambda metadata: list_as_bytes(metadata, key))
    checksums = json.loads((path / CHECKSUMS_FILE).read_text())
    del checksums["files"][METADATA_FILE]
    (path / CHECKSUMS_FILE).write_text(json.dumps(checksums))
    with pytest.raises(UserError, match=r"lists .* as BytesStorageMetadata"):
        saver.load(10, [model], optimizer)
    assert not Path("harmed").exists()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
