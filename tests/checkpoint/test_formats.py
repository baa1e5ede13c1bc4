"""Every format against its reference implementation, and bitwise round trips."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint import meta_llama
from tests.checkpoint.tools import KINDS, assert_holds, exported, in_memory, kind, weights
from tests.models.shapes import real_model
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.models.build import build_model
from titan_exp.models.convert.hf_config import to_huggingface
from titan_exp.models.llama import Config
from titan_exp.ops.attention.rope import Frequencies

FORMATS = ("huggingface", "llama", "torchtune", "safetensors", "torch.pt", "dcp")


def our_logits(name: str, state: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    model = build_model(kind(name), seq_len=128, attention_backend="math")
    model.load_state_dict(state)
    model.reset_buffers()  # type: ignore[operator]  # the decoder's own
    with torch.no_grad():
        return model(ids)


@pytest.mark.proves("llama", "export")
@pytest.mark.parametrize("name", KINDS)
def test_transformers_computes_the_same_from_an_export(name: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    folder = exported(name, "huggingface", tmp_path / "export", file_bytes=1e5)
    assert len(list(folder.glob("*.safetensors"))) > 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert theirs.dtype == torch.float32
    ids = torch.randint(0, 97, (2, 128))
    with torch.no_grad():
        torch.testing.assert_close(our_logits(name, weights(name), ids), theirs(ids).logits, atol=2e-6, rtol=1e-5)
    assert theirs.generation_config.eos_token_id == 1
    assert theirs.generation_config.bos_token_id is None, "the end of a text begins none"
    assert not theirs.generation_config.do_sample


@pytest.mark.proves("llama", "import")
@pytest.mark.parametrize("name", KINDS)
def test_transformers_checkpoint_computes_the_same(name: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    values = to_huggingface(kind(name), dtype="float32", special_tokens={"bos_token_id": 1, "eos_token_id": 2})
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, attn_implementation="eager")).eval()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    source = open_checkpoint(tmp_path / "theirs")
    assert replace(source.model, name="tiny") == kind(name)
    assert source.special_tokens == {"bos_token_id": 1, "eos_token_id": 2}
    state = {key: source.parameters.read(key) for key in source.parameters.shapes}
    ids = torch.randint(0, 97, (2, 128))
    with torch.no_grad():
        torch.testing.assert_close(our_logits(name, state, ids), theirs(ids).logits, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_meta_reference_computes_the_same(name: str, tmp_path: Path):
    folder = exported(name, "llama", tmp_path / "export")
    params = json.loads((folder / "params.json").read_text())
    state = torch.load(folder / "consolidated.00.pth", weights_only=True)
    rope = kind(name).rope
    assert rope.original_context is not None
    stretched = Frequencies(
        rope.theta,
        scaling=rope.scaling,
        factor=rope.factor,
        original_context=rope.original_context,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
    )
    ids = torch.randint(0, 97, (2, 128))
    theirs = meta_llama.logits(state, params, ids, stretched.inverse(16))
    torch.testing.assert_close(our_logits(name, weights(name), ids), theirs, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", KINDS)
def test_every_format_roundtrips_bitwise(name: str, form: str, tmp_path: Path):
    form, target = form.removesuffix(".pt"), tmp_path / form
    exported(name, form, target)
    source = open_checkpoint(target)
    assert source.format == form
    assert replace(source.model, name="tiny") == kind(name)
    assert_holds(source, name)


def test_conversion_through_every_format_is_bitwise(tmp_path: Path):
    source = in_memory("llama3_2")
    for number, form in enumerate((*FORMATS, *reversed(FORMATS))):
        target = tmp_path / f"{number}-{form}"
        export_weights(source, target, ExportOptions(form.removesuffix(".pt")))
        source = open_checkpoint(target)
    assert_holds(source, "llama3_2")


@pytest.mark.parametrize("form", FORMATS)
def test_bf16(form: str, tmp_path: Path):
    export_weights(in_memory("llama3"), tmp_path / form, ExportOptions(form.removesuffix(".pt"), torch.bfloat16))
    assert_holds(open_checkpoint(tmp_path / form), "llama3", torch.bfloat16)


@pytest.mark.parametrize("by_words", [True, False], ids=["llama3", "llama2"])
@pytest.mark.parametrize("name", ["llama2", "llama3_1"])
def test_all_model_parallel_files_are_read(name: str, by_words: bool, tmp_path: Path):
    """The embedding is sharded over the vocabulary in Llama 3's files, by columns in Llama 2's."""
    folder = exported(name, "llama", tmp_path / "one")
    whole = torch.load(folder / "consolidated.00.pth", weights_only=True)
    parallel = tmp_path / "parallel"
    parallel.mkdir()
    (parallel / "params.json").write_text((folder / "params.json").read_text())
    ranks = 2
    if by_words:
        # 97 words are not divided evenly by anything: one word more, as a padded vocabulary has.
        whole = {key: torch.cat([value, value[:1]]) if len(value) == 97 else value for key, value in whole.items()}
    for rank in range(ranks):
        state = {}
        for key, value in whole.items():
            by_columns = key.endswith(("wo.weight", "w2.weight")) or (key.startswith("tok") and not by_words)
            uneven = key == "output.weight" and not by_words
            if value.dim() == 1 or uneven:
                state[key] = value
            else:
                state[key] = value.chunk(ranks, dim=1 if by_columns else 0)[rank].clone()
        torch.save(state | {"rope.freqs": torch.ones(8)}, parallel / f"consolidated.{rank:02d}.pth")
    source = open_checkpoint(parallel)
    for key, value in weights(name).items():
        found = source.parameters.read(key)
        assert torch.equal(found[: len(value)], value), key
    part = source.parameters.read("blocks.1.feed_forward.down.weight", slice(3, 9), slice(50, 70))
    assert torch.equal(part, weights(name)["blocks.1.feed_forward.down.weight"][3:9, 50:70])


def test_published_params_are_understood(tmp_path: Path):
    """Llama 3.2's params.json says neither that the head is tied nor the factor; its files hold the head."""
    folder = exported("llama3_2", "llama", tmp_path / "export")
    params = json.loads((folder / "params.json").read_text())
    (folder / "params.json").write_text(json.dumps(params | {"vocab_size": -1}))
    (folder / "model.json").unlink()
    model = open_checkpoint(folder).model
    assert isinstance(model, Config)
    assert model.tied_embeddings
    assert model.vocab_size == 97
    assert (model.rope.scaling, model.rope.factor, model.context) == ("llama3", 32.0, 131072)


def test_torch_file_loads_into_the_model(tmp_path: Path):
    path = exported("llama3", "torch", tmp_path / "weights.pt")
    content = torch.load(path, weights_only=True)
    model = real_model(seed=5, **{"ffn_dim": 128, **KINDS["llama3"]})
    model.load_state_dict(content["model"])
    assert content["config"]["model"]["dim"] == 64
