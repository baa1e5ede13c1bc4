"""Rows of a tensor in a DCP file, and exports that hold no tensor whole although a rank saved it so."""

import io
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.test_sharded_hf_export import tensors
from tests.checkpoint.tools import SHAPE, exported, weights
from titan_exp.checkpoint import storage_writer
from titan_exp.checkpoint.formats import mapping, safetensors
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.checkpoint.formats.torch_file import DCPTensorReader
from titan_exp.checkpoint.load_state import MODEL_PREFIX
from titan_exp.checkpoint.storage_writer import read_saved

STORED = torch.arange(64.0 * 6).view(64, 6)


class CountedFile(io.BytesIO):
    """File in memory that counts read bytes."""

    count = 0

    def readinto(self, buffer, /):
        found = super().readinto(buffer)
        self.count += found
        return found

    def read(self, size=-1, /):
        found = super().read(size)
        self.count += len(found)
        return found


def saved(tensor: torch.Tensor) -> CountedFile:
    file = CountedFile()
    torch.save(tensor, file)
    file.seek(0)
    return file


@pytest.mark.parametrize(
    "stored",
    [STORED, STORED[:, :0], STORED.bfloat16(), STORED.t().contiguous().t(), torch.cat([STORED, STORED])[32:96]],
    ids=["rows", "no columns", "bf16", "columns", "part of a storage"],
)
@pytest.mark.parametrize("piece", [1, 100, 2**24])
def test_a_window_of_a_saved_tensor(stored: torch.Tensor, piece: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage_writer, "PIECE_BYTES", piece)
    for rows, columns in ((slice(0, 64), slice(0, 6)), (slice(5, 23), slice(2, 5)), (slice(60, 64), slice(0, 1))):
        expected = stored[rows, columns]
        target = torch.full(expected.shape, 7.0)
        read_saved(saved(stored), (rows.start, min(columns.start, stored.shape[1])), target)
        assert torch.equal(target, expected.float())


def test_a_number_is_read():
    target = torch.zeros(())
    read_saved(saved(torch.tensor(3.0)), (), target)
    assert target == 3


def test_only_rows_of_the_window_are_read():
    stored = torch.randn(1000, 100)
    file = saved(stored)
    target = torch.zeros(10, 100)
    read_saved(file, (500, 0), target)
    assert torch.equal(target, stored[500:510])
    # The archive's directory and its description of the tensor are a few kB.
    assert file.count < stored.nbytes / 10


def test_rows_beyond_the_tensor_are_refused():
    with pytest.raises(ValueError, match=r"lists a part of shape \[64, 6\] up to \[65, 6\]"):
        read_saved(saved(STORED), (1, 0), torch.zeros(64, 6))
    with pytest.raises(ValueError, match=r"lists a part of .* up to"):
        read_saved(saved(STORED), (1,), torch.zeros(64))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")
@pytest.mark.parametrize(
    ("name", "form"),
    [("llama3", "huggingface"), ("llama2", "llama"), ("llama3_2", "safetensors"), ("llama3_1", "dcp")],
)
def test_tensors_that_a_rank_saved_whole_are_exported_by_rows(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "ours"
    exported(name, "dcp", path)  # for its description
    (path / "checksums.json").unlink()
    state = {f"{MODEL_PREFIX}{key}": value for key, value in weights(name).items()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, overwrite=True), no_dist=True)
    expected = exported(name, form, tmp_path / "expected")
    piece, sizes = 10_000, list[int]()
    monkeypatch.setattr(safetensors, "PIECE_BYTES", piece)
    monkeypatch.setattr(mapping, "HELD_BYTES", piece)
    monkeypatch.setattr("titan_exp.checkpoint.formats.torch_file.CHUNK_BYTES", piece)
    plain = DCPTensorReader.read

    def counted(self: DCPTensorReader, name: str, *window: slice) -> torch.Tensor:
        found = plain(self, name, *window)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(DCPTensorReader, "read", counted)
    export_weights(open_checkpoint(path), tmp_path / "found", ExportOptions(form))
    monkeypatch.undo()
    if form in ("huggingface", "safetensors"):
        found, wanted = tensors(tmp_path / "found"), tensors(expected)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
    source = open_checkpoint(tmp_path / "found").parameters
    for key, value in weights(name).items():
        assert torch.equal(source.read(key), value), key
    # A window of gate or up needs as many rows of the other, and two groups of 32, in which they alternate.
    row = 4 * SHAPE.dim
    assert max(sizes) <= 2 * piece + 64 * row < SHAPE.ffn_dim * 2 * row
