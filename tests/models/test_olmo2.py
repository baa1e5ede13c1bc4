"""OLMo 2 against `transformers`: logits, gradients per parameter, and conversion both ways, from the same weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.models.round_trip import assert_comes_back
from tests.models.shapes import TINY, TINY_HUGGINGFACE
from tests.models.test_qwen3 import IDS, exported, in_transformers, noisy_model
from titan_exp.checkpoint.formats.mapping import ImportReader
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.models.build import build_model
from titan_exp.models.convert.hf_config import from_huggingface
from titan_exp.models.olmo2 import Config, spec, state_dict_map
from titan_exp.models.spec.rope import ScaledRope

transformers = pytest.importorskip("transformers")

CHANGES = {"architecture": "olmo2", "norm_eps": 1e-6, "rope": ScaledRope(5e5), "attention_backend": "math"}
SHAPE = Config(**{**vars(TINY), **CHANGES})
"""Groups of query heads, in which the norms of queries and keys have other widths."""


@pytest.mark.proves("olmo2", "logits", "gradients")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_and_gradients_equal(tmp_path: Path, kv_heads: int):
    config = replace(SHAPE, kv_heads=kv_heads)
    ours = noisy_model(config)
    theirs = in_transformers(exported(ours, config, tmp_path / "export"))
    assert type(theirs).__name__ == "Olmo2ForCausalLM"
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


@pytest.mark.proves("olmo2", "import", "export")
@pytest.mark.parametrize("tied", [False, True])
def test_a_published_folder_comes_back_byte_for_byte(tmp_path: Path, tied: bool):
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 5e5}
    keys = {**TINY_HUGGINGFACE, "rms_norm_eps": 1e-6, "rope_parameters": rope, "tie_word_embeddings": tied}
    theirs = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**keys)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    assert_comes_back(theirs, replace(SHAPE, tied_embeddings=tied, attention_backend="auto"), IDS, tmp_path)


def test_defaults_of_config_json_are_those_of_the_class():
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    found = from_huggingface(
        {key: TINY_HUGGINGFACE[key] for key in keys} | {"model_type": "olmo2", "max_position_embeddings": 2048}, "x"
    )
    theirs = transformers.Olmo2Config()
    assert isinstance(found, Config)
    assert (found.norm_eps, found.init_std, found.tied_embeddings, found.rope.theta, found.kv_heads) == (
        *(theirs.rms_norm_eps, theirs.initializer_range, theirs.tie_word_embeddings),
        *(theirs.rope_parameters["rope_theta"], found.heads),
    )


def test_the_spec_has_every_parameter():
    with torch.device("meta"):
        model = build_model(SHAPE, seq_len=16, attention_backend="math")
    assert spec(SHAPE).shapes == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert spec(SHAPE).layers[0].residual_outputs == {"attention_norm", "feed_forward_norm"}
    assert spec(SHAPE).shapes["blocks.0.attention.k_norm.weight"] == (32,)
