"""DeepSeek V2-Lite, V2 and V3 against `transformers`: logits, choices, gradients, conversion both ways, generation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models.deepseek_shapes import LITE, PARAMETERS, V2, V3
from tests.models.round_trip import assert_comes_back
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.mapping import ImportReader
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.inference.generate import DecodeSession
from titan_exp.models.blocks.linear import InitSpec
from titan_exp.models.build import build_model, init_specs
from titan_exp.models.convert.hf_config import from_huggingface, to_huggingface
from titan_exp.models.deepseek import Config, spec, state_dict_map

transformers = pytest.importorskip("transformers")

SHAPES = {"lite": LITE, "v2": V2, "v3": V3}
IDS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))


def noisy_model(config: ModelConfig) -> nn.Module:
    """Weights of a few tenths, norms around one, router biases around zero: ones and zeros would hide errors."""
    model = build_model(config, seq_len=64, attention_backend="math")
    model.reset_buffers()  # type: ignore[operator]  # the decoder's own
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("router.bias") or "weight" in name:
                tensor.copy_(1 + 0.2 * noise if "norm" in name else 0.1 * noise)
    return model


def exported(model: nn.Module, config: Config, folder: Path) -> Path:
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    source = OpenCheckpoint(Path("memory"), "torch", config, TorchFileReader(tensors))
    export_weights(source, folder, ExportOptions("huggingface"))
    return folder


def in_transformers(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()


def chosen_by_ours(model: nn.Module) -> list[torch.Tensor]:
    chosen: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("router"):
            module.register_forward_hook(lambda _, __, routing: chosen.append(routing.experts.sort(-1).values))
    return chosen


def chosen_by_theirs(model: nn.Module) -> list[torch.Tensor]:
    chosen: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, found: chosen.append(found[2].sort(-1).values))
    return chosen


@pytest.mark.proves("deepseek", "logits", "gradients")
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("version", SHAPES)
def test_logits_choices_and_gradients_equal(tmp_path: Path, version: str, dense: bool):
    config = SHAPES[version]
    config = replace(config, dense_layers=config.layers) if dense else config
    ours = noisy_model(config)
    theirs = in_transformers(exported(ours, config, tmp_path / "export"))
    assert type(theirs).__name__ == ("DeepseekV3ForCausalLM" if version == "v3" else "DeepseekV2ForCausalLM")
    our_choices, their_choices = chosen_by_ours(ours), chosen_by_theirs(theirs)
    labels = IDS.roll(-1, dims=1).flatten()
    logits, expected = ours(IDS), theirs(IDS).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert len(our_choices) == len(their_choices) == config.layers - config.dense_layers
    assert all(torch.equal(mine, other.view_as(mine)) for mine, other in zip(our_choices, their_choices, strict=True))
    for found in (logits, expected):
        F.cross_entropy(found.flatten(0, 1), labels).backward()
    reader = ImportReader(TorchFileReader(their_gradients(theirs)), state_dict_map(config, "huggingface"))
    for name, parameter in ours.named_parameters():
        wanted = reader.read(name)
        assert parameter.grad is not None
        assert wanted.norm() > 0
        assert (parameter.grad - wanted).norm() <= 1e-4 * wanted.norm(), name


def their_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients by the names of checkpoints, which hold each expert apart; zeros for buffers."""
    found = {name: torch.zeros_like(buffer) for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            gate, up = gradient.chunk(2, dim=1)
            for expert in range(gate.shape[0]):
                found[f"{stem}.{expert}.gate_proj.weight"], found[f"{stem}.{expert}.up_proj.weight"] = (
                    gate[expert],
                    up[expert],
                )
        elif stem.endswith("experts") and last == "down_proj":
            found |= {f"{stem}.{expert}.down_proj.weight": part for expert, part in enumerate(gradient)}
        else:
            found[name] = gradient
    return found


@pytest.mark.proves("deepseek", "import", "export")
@pytest.mark.parametrize("version", SHAPES)
def test_a_published_folder_comes_back_byte_for_byte(tmp_path: Path, version: str):
    torch.manual_seed(0)
    kind = "V3" if version == "v3" else "V2"
    values = to_huggingface(SHAPES[version], dtype="float32", special_tokens={})
    config = getattr(transformers, f"Deepseek{kind}Config")(**values)
    theirs = getattr(transformers, f"Deepseek{kind}ForCausalLM")(config).eval()
    assert sum(parameter.numel() for parameter in theirs.parameters()) == PARAMETERS[version]
    with torch.no_grad():
        for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
            if "norm" in name or "bias" in name or "gate.weight" in name:
                tensor.add_(0.2 * torch.randn_like(tensor))
    assert_comes_back(theirs, SHAPES[version], IDS, tmp_path)


@pytest.mark.parametrize("version", SHAPES)
def test_the_spec_has_every_parameter(version: str):
    config = SHAPES[version]
    with torch.device("meta"):
        model = build_model(config, seq_len=16, attention_backend="math")
    assert spec(config).parameters == PARAMETERS[version]
    table = init_specs(model)
    assert table is not None
    assert {init.std for init in table.values() if isinstance(init, InitSpec) and init.kind == "normal"} == {0.02}


def test_a_router_of_neither_version_is_refused(tmp_path: Path):
    strange = replace(V3, moe=replace(V3.moe, router_bias=False))
    with pytest.raises(UserError, match=r"router_bias=false: .*the router of DeepSeek V3.*\n.*router_bias=true"):
        exported(noisy_model(strange), strange, tmp_path / "export")
    values = to_huggingface(V3, dtype="float32", special_tokens={})
    with pytest.raises(UserError, match=r"a router with .*'greedy'"):
        from_huggingface({**values, "topk_method": "greedy"}, "strange")
    assert from_huggingface({**values, "model_type": "kimi_k2"}, "tiny") == V3


@pytest.mark.parametrize(
    ("scaling", "context", "applies"), [("yarn", 16, True), ("yarn_if_longer", 16, False), ("yarn_if_longer", 17, True)]
)
def test_yarn_applies_always_or_beyond_the_original_context(scaling: Any, context: int, applies: bool):
    found = spec(replace(V3, context=context, rope=replace(V3.rope, scaling=scaling)))
    plain = spec(replace(V3, context=context, rope=replace(V3.rope, scaling="none")))
    assert found.rope is not None
    assert plain.rope is not None
    assert (found.rope.frequencies["scaling"] == "yarn") is applies
    assert found.attention is not None
    assert plain.attention is not None
    assert plain.attention.scale == 24**-0.5
    assert (found.attention.scale == plain.attention.scale) is not applies


@pytest.mark.proves("deepseek", "generate")
@pytest.mark.parametrize("version", SHAPES)
def test_cached_latents_generate_what_the_whole_text_does(version: str):
    model = noisy_model(SHAPES[version])
    cached = DecodeSession(model, 24, cache=True)
    whole = DecodeSession(noisy_model(SHAPES[version]), 24, cache=False)
    ids = IDS[0].tolist()
    for length in range(5, 32):
        torch.testing.assert_close(
            cached.next_logits(ids[:length]), whole.next_logits(ids[:length]), atol=1e-5, rtol=1e-5
        )
    cache = model.get_submodule("blocks.0.attention").cache
    numbers = sum(tensor[0, 0].numel() for tensor in vars(cache)["_kept"])
    assert numbers == 32 + 8
