"""Block-scaled fp8 weights as DeepSeek V3 publishes them: read exactly, by slices, and never written."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.deepseek_shapes import V3
from tests.models.test_deepseek import IDS, exported, in_transformers, noisy_model
from tests.parity.runs import train
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.mapping import ImportReader
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.checkpoint.formats.safetensors import SafetensorsReader
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.cli.convert import run as convert_command
from titan_exp.config.checkpoint_files import INDEX
from titan_exp.config.errors.user_error import UserError
from titan_exp.models.convert.state_dict_map import state_dict_map
from titan_exp.models.spec.transformer import MTPConfig
from titan_exp.trainer.restore import load_source

FP8 = torch.float8_e4m3fn
CONFIG = replace(V3, dim=160, ffn_dim=288, kv_lora_rank=136, layers=2, mtp=MTPConfig(1))
"""Blocks of 128 rows and columns that the sizes do not fill, also in the last rows of `kv_a`."""


def is_quantized(name: str, tensor: Tensor) -> bool:
    """True for the linears of blocks, as in the published files: not router, norms, embedding and head."""
    plain = ("mlp.gate.weight", "eh_proj.weight", "embed_tokens.weight", "head.weight")
    return tensor.dim() == 2 and ".layers." in name and not name.endswith(plain)


def expanded(scales: Tensor, shape: torch.Size, blocks: tuple[int, int]) -> Tensor:
    """Scale of each element, in the plainest way."""
    rows, columns = torch.arange(shape[0]) // blocks[0], torch.arange(shape[1]) // blocks[1]
    return scales[rows[:, None], columns[None]]


def quantize(folder: Path, blocks: tuple[int, int] = (128, 128)) -> dict[str, Tensor]:
    """Rewrite a folder as published: weights, scales and the rest in different files. Returns the exact values."""
    exact, files = {}, [dict[str, Tensor]() for _ in range(4)]
    tensors = load_file(folder / "model.safetensors")
    for number, (name, tensor) in enumerate(tensors.items()):
        if not is_quantized(name, tensor):
            exact[name] = files[3][name] = tensor
            continue
        counts = [-(-size // block) for size, block in zip(tensor.shape, blocks, strict=True)]
        scales = torch.rand(counts, generator=torch.Generator().manual_seed(number)) * 1e-3 + 1e-4
        spread = expanded(scales, tensor.shape, blocks)
        quantized = (tensor / spread).clamp(-448, 448).to(FP8)
        files[number % 2][name], files[2][f"{name}_scale_inv"] = quantized, scales
        exact[name] = quantized.float() * spread
    (folder / "model.safetensors").unlink()
    listed = {}
    for number, content in enumerate(files, start=1):
        file = f"model-{number:05d}-of-00004.safetensors"
        save_file(content, folder / file, metadata={"format": "pt"})
        listed |= dict.fromkeys(content, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    values = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(blocks)}
    edit_config(folder, quantization_config=values)
    return exact


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return exported(noisy_model(CONFIG), CONFIG, tmp_path / "published")


@pytest.mark.parametrize("blocks", [(128, 128), (48, 32)])
def test_values_are_exact(folder: Path, blocks: tuple[int, int]):
    exact = quantize(folder, blocks)
    source = open_checkpoint(folder)
    assert source.model == replace(CONFIG, name="published")
    expected = ImportReader(TorchFileReader(exact), state_dict_map(CONFIG, "huggingface"))
    for name in expected.shapes:
        assert source.parameters.dtype(name) == torch.float32
        assert torch.equal(source.parameters.read(name), expected.read(name)), name


def test_slices_read_their_blocks_only(folder: Path, monkeypatch: pytest.MonkeyPatch):
    exact = quantize(folder)
    source = open_checkpoint(folder)
    expected = ImportReader(TorchFileReader(exact), state_dict_map(CONFIG, "huggingface"))
    read: list[tuple[int, ...]] = []
    plain = SafetensorsReader.read

    def counted(self: SafetensorsReader, name: str, *window: slice) -> Tensor:
        found = plain(self, name, *window)
        read.append(tuple(found.shape))
        return found

    monkeypatch.setattr(SafetensorsReader, "read", counted)
    for name, window in (
        ("blocks.1.feed_forward.experts.gate_up.weight", (slice(2, 4), slice(16, 48), slice(120, 131))),
        ("blocks.1.feed_forward.experts.down.weight", (slice(15, 16), slice(127, 129), slice(3, 32))),
        ("blocks.0.feed_forward.gate_up.weight", (slice(250, 290), slice(150, 160))),
        ("blocks.0.attention.kv_a.weight", (slice(127, 144), slice(0, 160))),
        ("blocks.0.feed_forward.down.weight", (slice(7, 7), slice(0, 288))),
    ):
        assert torch.equal(source.parameters.read(name, *window), expected.read(name, *window)), name
    read.clear()
    source.parameters.read("blocks.0.feed_forward.down.weight", slice(129, 131), slice(0, 100))
    assert read == [(2, 100), (1, 1)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_written_weights_are_not_quantized(folder: Path, tmp_path: Path, dtype: str):
    exact = quantize(folder)
    words = ["format=huggingface", f"dtype={dtype}"]
    assert convert_command([str(folder), str(tmp_path / "plain"), *words]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    found = load_file(tmp_path / "plain/model.safetensors")
    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        assert torch.equal(found[name], tensor if "bias" in name else tensor.to(kind)), name
    if dtype == "fp32":
        ours = load_source(open_checkpoint(folder), torch.device("cpu"), seq_len=64)
        with torch.no_grad():
            logits = in_transformers(tmp_path / "plain")(IDS).logits
            torch.testing.assert_close(ours(IDS), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        "parallelism.dp_shard=4 parallelism.ep=2",
        pytest.param("parallelism.tp=2 parallelism.etp=2 parallelism.dp_shard=1", marks=pytest.mark.night),
    ],
)
def test_ranks_read_their_shards(tmp_path: Path, layout: str):
    words = ["model=deepseek_debug", "model.mtp.depth=1", "model.moe.ffn_dim=64", "checkpoint.mode=sync"]
    first = train(tmp_path / "first", *words, "training.steps=1", "checkpoint.export=fp32")
    (folder,) = (tmp_path / "first/export").iterdir()
    exact = quantize(folder, (48, 32))
    start = [f"checkpoint.initial={folder}", "training.steps=0"]
    found = train(tmp_path / "second", *words, *layout.split(), *start)
    assert found.disputed == []
    expected = ImportReader(TorchFileReader(exact), state_dict_map(open_checkpoint(folder).model, "huggingface"))
    assert set(expected.shapes) <= set(first.weights)
    for name in expected.shapes:
        assert torch.equal(found.weights[name], expected.read(name)), name


def in_file(change: Callable[[dict[str, Tensor]], object], number: int) -> Callable[[Path], None]:
    """A change of the tensors in one file, which the index follows."""

    def edit(folder: Path) -> None:
        file = f"model-{number:05d}-of-00004.safetensors"
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file)
        index = json.loads((folder / INDEX).read_text())
        others = {name: other for name, other in index["weight_map"].items() if other != file}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": others | dict.fromkeys(tensors, file)}))

    return edit


def quantization(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        known = json.loads((folder / "config.json").read_text())["quantization_config"]
        edit_config(folder, quantization_config={**known, **values})

    return edit


UP = "model.layers.1.mlp.experts.3.up_proj.weight"
HARM: list[tuple[Callable[[Path], object], str]] = [
    (quantization(quant_method="gptq"), r"cannot read weights quantized with quant_method='gptq'.* We read"),
    (quantization(weight_block_size=None), "cannot read weights quantized with .*weight_block_size=None"),
    (quantization(fmt="e5m2"), "fmt='e5m2'"),
    (lambda folder: edit_config(folder, quantization_config=None), r"unexpected: .*_scale_inv"),
    (quantization(weight_block_size=[64, 64]), r"_scale_inv is \[\d, \d\], but .* blocks of 64×64"),
    (in_file(lambda tensors: tensors.pop(f"{UP}_scale_inv"), 3), f"{UP} is in fp8, and its scales {UP}_scale_inv are"),
    (
        in_file(lambda tensors: tensors.update({"model.norm.weight_scale_inv": torch.ones(2)}), 3),
        "model.norm.weight has scales but is not in fp8",
    ),
    (
        in_file(lambda tensors: tensors.update({"model.x.weight_scale_inv": torch.ones(2, 2)}), 3),
        "model.x.weight_scale_inv has no weight model.x.weight",
    ),
    (
        in_file(lambda tensors: tensors.update({f"{UP}_scale_inv": tensors[f"{UP}_scale_inv"].bfloat16()}), 3),
        "_scale_inv is torch.bfloat16, not fp32",
    ),
]


@pytest.mark.parametrize(("harm", "says"), HARM)
def test_other_quantizations_are_refused(folder: Path, harm: Callable[[Path], object], says: str):
    quantize(folder)
    open_checkpoint(folder)
    harm(folder)
    with pytest.raises(UserError, match=says):
        open_checkpoint(folder)


def test_fp8_without_scales_is_refused(folder: Path, tmp_path: Path):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, UP: tensors[UP].to(FP8)}, folder / "model.safetensors")
    source = open_checkpoint(folder)
    with pytest.raises(UserError, match=f"{UP} is F8_E4M3, and we read"):
        export_weights(source, tmp_path / "x", ExportOptions("huggingface"))
