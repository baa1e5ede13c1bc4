"""Sharded export in any layout is bitwise the output of `convert`, and transformers reads it."""

import errno
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.stores import make
from tests.parity.runs import train
from tests.trainer.test_trainer import run
from titan_exp.checkpoint.formats.safetensors import SafetensorsReader
from titan_exp.checkpoint.formats.torch_file import DCPTensorReader
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.cli.convert import run as convert_command
from titan_exp.config.checkpoint_files import INDEX
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.inference.generate import generate_command
from titan_exp.models.build import build_model

SAVING = ["training.steps=2", "checkpoint.mode=sync", "model.vocab_size=257"]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    store = SafetensorsReader(folder)
    return {name: store.read(name) for name in store.shapes}


def small_files_and_counted_bytes() -> None:
    from titan_exp.checkpoint.formats.sharded_hf_export import ShardedHFExporter

    defaults = ShardedHFExporter.__init__.__kwdefaults__
    assert defaults is not None
    defaults["file_bytes"] = 1e5
    written, original, fill = [0], os.pwrite, ShardedHFExporter._write_shards

    def counted(descriptor: int, data: memoryview, offset: int) -> int:
        written[0] += len(data)
        return original(descriptor, data, offset)

    def filled(self: ShardedHFExporter, *args: Any) -> int:
        found = fill(self, *args)
        (self._path.parent / f"bytes-{os.environ['RANK']}").write_text(str(written[0]))
        return found

    os.pwrite, ShardedHFExporter._write_shards = counted, filled  # type: ignore[method-assign,assignment]  # in this process alone


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param("parallelism.dp_shard=3 training.global_batch_size=12", "bf16", marks=pytest.mark.night),
        pytest.param(
            "parallelism.tp=2 parallelism.dp_shard=2",
            "fp32",
            marks=[pytest.mark.night, pytest.mark.proves("llama", "export")],
        ),
        # More ranks than key and value heads, whose projection each of them holds whole.
        ("parallelism.tp=4 parallelism.sequence_parallel=false", "fp32"),
        ("parallelism.pp=2 parallelism.tp=2 model.tied_embeddings=true", "bf16"),
        pytest.param(
            "parallelism=hsdp training.micro_batch_size=1 parallelism.cpu_offload=true", "fp32", marks=pytest.mark.night
        ),
        # A module has its own copy of embedding and head in the files.
        pytest.param(
            "model=deepseek_debug model.mtp.depth=1 parallelism.pp=2 parallelism.tp=2",
            "fp32",
            marks=[pytest.mark.night, pytest.mark.proves("deepseek", "export")],
        ),
        # Rows of experts are columns of the files.
        pytest.param(
            "model=gpt_oss_debug parallelism.tp=2 parallelism.dp_shard=2 parallelism.ep=2 parallelism.etp=2",
            "bf16",
            marks=[pytest.mark.night, pytest.mark.proves("gpt_oss", "export")],
        ),
        pytest.param("model=gpt_oss_debug parallelism.dp_shard=2", "fp32", marks=pytest.mark.night),
        pytest.param(
            "model=llama4_debug parallelism.tp=2 parallelism.dp_shard=2 parallelism.ep=2 parallelism.etp=2",
            "bf16",
            marks=[pytest.mark.night, pytest.mark.proves("llama4", "export")],
        ),
        pytest.param(
            "model=llama4_debug parallelism.pp=2 parallelism.dp_shard=2",
            "fp32",
            marks=[pytest.mark.night, pytest.mark.proves("llama4", "export")],
        ),
    ],
)
def test_equals_convert(tmp_path: Path, layout: str, dtype: str, capsys):
    path = tmp_path / "run"
    trained = train(path, *SAVING, *layout.split(), f"checkpoint.export={dtype}", mutate=small_files_and_counted_bytes)
    assert convert_command([str(path), str(tmp_path / "converted"), f"dtype={dtype}"]) == 0
    (folder,) = (path / "export").iterdir()
    assert folder.name == "step-00000002"
    expected, found = tensors(tmp_path / "converted"), tensors(folder)
    assert list(found) == list(json.loads((folder / INDEX).read_text())["weight_map"])
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    # Each row once, but for those that the first and the last stage of a pipeline both have.
    total = sum(tensor.nbytes for tensor in found.values())
    shared = "pp=2" in layout and ("tied" in layout or "mtp" in layout)
    copied = [name for name in found if "embed_tokens" in name and shared]
    twice = sum(found[name].nbytes for name in copied)
    assert sum(int(file.read_text()) for file in path.glob("bytes-*")) == total + twice
    assert_transformers_computes_the_same(folder, path, trained.weights)
    beside = [name for name in os.listdir(tmp_path / "converted") if name.endswith(".json")]
    assert "tokenizer.json" in beside
    assert [(folder / name).read_text() for name in beside] == [
        (tmp_path / "converted" / name).read_text() for name in beside
    ]


def assert_transformers_computes_the_same(folder: Path, run: Path, weights: dict[str, torch.Tensor]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = build_model(load_experiment(run / "config.yaml").model, seq_len=64, attention_backend="math")
    dtype = SafetensorsReader(folder).dtype("model.norm.weight")
    ours.load_state_dict({name: weight.to(dtype).float() for name, weight in weights.items()})
    ours.reset_buffers()  # type: ignore[operator]  # the decoder's own
    ids = torch.randint(0, 257, (2, 64))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), atol=2e-5, rtol=1e-4)


def test_export_interval_and_end(tmp_path: Path):
    run(tmp_path, "checkpoint.export=bf16", "checkpoint.export_every=2", "training.steps=5", "checkpoint=none")
    assert sorted(os.listdir(tmp_path / "export")) == ["step-00000002", "step-00000004", "step-00000005"]


def test_full_disk_leaves_no_export_and_fails_the_run(tmp_path: Path, monkeypatch, caplog):
    saving = ["checkpoint.export=bf16", "training.steps=2", "checkpoint.mode=sync"]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(UserError, match="could not export"):
            run(tmp_path, *saving)
    assert list((tmp_path / "export").iterdir()) == []
    # The same command exports what it has trained.
    (tmp_path / "export" / "step-00000002.partial").mkdir()
    finished, _ = run(tmp_path, *saving)
    assert finished
    assert os.listdir(tmp_path / "export") == ["step-00000002"]
    before = (tmp_path / "export" / "step-00000002" / "model.safetensors").stat().st_mtime_ns
    run(tmp_path, *saving)
    assert (tmp_path / "export" / "step-00000002" / "model.safetensors").stat().st_mtime_ns == before


def test_full_disk_of_one_rank_fails_all(tmp_path: Path):
    with pytest.raises(AssertionError, match="could not export"):
        train(tmp_path, *SAVING, "parallelism.tp=2", "checkpoint.export=bf16", mutate=full_on_rank_1_and_slow_on_rank_0)
    assert list((tmp_path / "export").iterdir()) == []


def full_on_rank_1_and_slow_on_rank_0() -> None:
    remove = shutil.rmtree

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(1)
        remove(*args, **kwargs)

    if os.environ["RANK"] == "1":
        os.pwrite = full  # type: ignore[assignment]  # on purpose
    else:
        shutil.rmtree = slow  # type: ignore[assignment]  # the end of rank 1 must not end this one before


def test_slices_of_sharded_checkpoints(tmp_path: Path):
    """Any rows and columns, across the pieces of four ranks."""
    train(tmp_path, *SAVING, "parallelism.tp=2", "parallelism.dp_shard=2")
    store = DCPTensorReader(CheckpointFolder(tmp_path / "checkpoints").path_of(2))
    for name, shape in store.shapes.items():
        whole, rows = store.read(name), slice(shape[0] // 3, 2 * shape[0] // 3 + 1)
        assert torch.equal(store.read(name, rows), whole[rows]), name
        if len(shape) > 1:
            columns = slice(shape[1] // 5, shape[1] - 1)
            assert torch.equal(store.read(name, rows, columns), whole[rows, columns]), name
            assert torch.equal(store.read(name, slice(None), columns), whole[:, columns]), name


def test_tokenizer_of_a_token_store_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    store = make(tmp_path / "store")
    words = ["data=tokens", f"data.paths=[{store.path}]", "evaluation.every=0", "checkpoint.export=bf16"]
    train(tmp_path / "run", *SAVING, *words)
    assert (tmp_path / "run/export/step-00000002/tokenizer.json").is_file()
    capsys.readouterr()
    assert generate_command([str(tmp_path / "run"), "prompt=000/", "tokens=3"]) == 0
    assert capsys.readouterr().out.startswith("000/")
