"""Qwen3 against `transformers`: logits, gradients per parameter, and conversion both ways, from the same weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models.round_trip import assert_comes_back
from tests.models.shapes import TINY, TINY_HUGGINGFACE
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.mapping import ImportReader
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.models.build import build_model, init_specs
from titan_exp.models.qwen3 import Config, spec, state_dict_map
from titan_exp.models.spec.rope import ScaledRope

transformers = pytest.importorskip("transformers")

CHANGES = {
    "architecture": "qwen3",
    "head_dim": 32,
    "norm_eps": 1e-6,
    "rope": ScaledRope(1e6),
    "attention_backend": "math",
}
SHAPE = Config(**{**vars(TINY), **CHANGES})
"""Heads wider than dim / heads, in groups."""

IDS = torch.randint(0, 97, (2, 64), generator=torch.Generator().manual_seed(1))


def noisy_model(config: ModelConfig) -> nn.Module:
    """Weights of a few tenths and norms around one: zeros and ones would hide errors."""
    model = build_model(config, seq_len=64, attention_backend="math")
    model.reset_buffers()  # type: ignore[operator]  # the decoder's own
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.1 * noise)
    return model


def exported(model: nn.Module, config: ModelConfig, folder: Path) -> Path:
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    export_weights(
        OpenCheckpoint(Path("memory"), "torch", config, TorchFileReader(tensors)), folder, ExportOptions("huggingface")
    )
    return folder


def in_transformers(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


@pytest.mark.proves("qwen3", "logits", "gradients")
@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_equal(tmp_path: Path, tied: bool):
    config = replace(SHAPE, tied_embeddings=tied)
    ours = noisy_model(config)
    theirs = in_transformers(exported(ours, config, tmp_path / "export"))
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    labels = IDS.roll(-1, dims=1).flatten()
    logits, expected = ours(IDS), theirs(IDS).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    for found in (logits, expected):
        F.cross_entropy(found.flatten(0, 1), labels).backward()
    their_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    gradients = ImportReader(TorchFileReader(their_gradients), state_dict_map(config, "huggingface"))
    for name, parameter in ours.named_parameters():
        wanted = gradients.read(name)
        assert parameter.grad is not None
        assert wanted.norm() > 0
        assert (parameter.grad - wanted).norm() <= 1e-4 * wanted.norm(), name


@pytest.mark.proves("qwen3", "import", "export")
@pytest.mark.parametrize("tied", [False, True])
def test_a_published_folder_comes_back_byte_for_byte(tmp_path: Path, tied: bool):
    torch.manual_seed(0)
    theirs = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **TINY_HUGGINGFACE,
            head_dim=32,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=tied,
        )
    ).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    assert_comes_back(theirs, replace(SHAPE, tied_embeddings=tied, attention_backend="auto"), IDS, tmp_path)


def test_the_spec_has_every_parameter():
    with torch.device("meta"):
        model = build_model(SHAPE, seq_len=16, attention_backend="math")
    assert spec(SHAPE).shapes == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    table = init_specs(model)
    assert table is not None
    assert {table[f"blocks.0.{name}.weight"].std for name in ("attention.out", "feed_forward.down")} == {0.02}
