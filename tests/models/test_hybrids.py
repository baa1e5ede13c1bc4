"""Hybrids against `transformers`: logits, choices, gradients per parameter, config and conversion both ways."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tests.config.composing import experiment
from tests.models.hybrid_shapes import HYBRIDS, noisy_model, proving, shape
from tests.models.round_trip import tensors
from tests.models.test_deepseek import in_transformers
from tests.models.test_qwen3_moe import choices
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.mapping import ImportReader
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint
from titan_exp.checkpoint.formats.safetensors import RenamedReader
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.inference.generate import DecodeSession
from titan_exp.models.build import build_model, init_specs
from titan_exp.models.convert.hf_config import from_huggingface, to_huggingface
from titan_exp.models.convert.state_dict_map import state_dict_map
from titan_exp.models.spec.linear_attention import LinearAttentionConfig
from titan_exp.models.spec.lookup import model_spec, parameter_roles
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.optim.parameter_groups import named_parameters
from titan_exp.parallel.compute_weights import ComputeWeights
from titan_exp.parallel.meta_init import init_weights
from titan_exp.trainer.restore import load_source

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 320, (2, 100), generator=torch.Generator().manual_seed(1))
"""Longer than a chunk of the delta rule, and not a multiple of it."""


def spec_of(config: ModelConfig) -> ModelSpec:
    spec = model_spec(config)
    assert spec is not None
    return spec


def exported(model: nn.Module, config: ModelConfig, folder: Path) -> Path:
    spec = spec_of(config)
    state = {name: tensor for name, tensor in model.state_dict().items() if name in spec.state_shapes}
    source = OpenCheckpoint(Path("memory"), "torch", config, TorchFileReader(state))
    export_weights(source, folder, ExportOptions("huggingface"))
    return folder


def stored_gradients(theirs: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Gradients under the names, and in the shapes, of a saved file: those of a model whose weights they are."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(folder)  # type: ignore[operator]  # a method of transformers
    found = tensors(folder)
    for name in [name for name in found if name.endswith("q_conv1d.weight")]:
        # transformers cuts the joint filters in three equal parts, whatever the widths.
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        widths = [len(found[name.replace("conv1d", "proj")]) for name in names]
        found |= dict(zip(names, torch.cat([found[name] for name in names]).split(widths), strict=True))
    return found


class InDouble(TorchFunctionMode):
    """Lets models compute in fp64 that cast to fp32 on their way."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        args, kwargs = tree_map(lambda value: torch.float64 if value is torch.float32 else value, (args, kwargs or {}))
        return func(*args, **kwargs)


ROUTERS = ("Qwen3NextTopKRouter", "Qwen3_5MoeTopKRouter", "KimiLinearTopkRouter")


@pytest.mark.parametrize("family", proving("logits", "gradients"))
def test_logits_choices_and_gradients_equal(tmp_path: Path, family: str):
    # Norms behind branches enlarge the rounding of small outputs; the next test compares the same model in fp64.
    bound = 1e-4 if family == "olmo_hybrid" else 1e-5
    assert_equal(shape(family), family, torch.float32, bound, tmp_path)


@pytest.mark.parametrize(
    ("family", "bound"),
    # Tables of RoPE are in fp32.
    [("qwen3_5", 1e-6), ("olmo_hybrid", 1e-12), ("kimi_linear", 1e-12)],
)
def test_dense_models_equal_in_fp64(tmp_path: Path, family: str, bound: float):
    dense = ["model.dense_layers=6"] if family == "kimi_linear" else []
    assert_equal(shape(family, *dense), family, torch.float64, bound, tmp_path)


def assert_equal(config: Any, family: str, dtype: torch.dtype, bound: float, tmp_path: Path) -> None:
    """Hold logits against those of transformers, relative to the largest, then choices and gradients."""
    ours = noisy_model(config)
    theirs = in_transformers(exported(ours, config, tmp_path / "export")).to(dtype)
    assert type(theirs).__name__ == HYBRIDS[family]
    own = choices(ours.to(dtype), "Router", lambda out: out.experts)
    their = [choices(theirs, name, lambda out: out[2]) for name in ROUTERS]
    labels = IDS.roll(-1, dims=1).flatten()
    with InDouble() if dtype == torch.float64 else nullcontext():
        logits, expected = ours(IDS), theirs(IDS).logits
        for found in (logits, expected):
            F.cross_entropy(found.flatten(0, 1), labels).backward()
    assert logits.dtype == dtype
    assert (logits - expected).abs().max() <= bound * expected.abs().max()
    chosen = [layer for found in their for layer in found]
    assert len(own) == len(chosen) == sum(layer.router is not None for layer in spec_of(config).layers)
    assert all(torch.equal(mine.flatten(0, -2), other.flatten(0, -2)) for mine, other in zip(own, chosen, strict=True))
    reader = with_aliases(TorchFileReader(stored_gradients(theirs, tmp_path / "gradients")), config)
    for name, parameter in ours.named_parameters():
        wanted = reader.read(name)
        assert parameter.grad is not None
        assert wanted.norm() > 0, name
        assert (parameter.grad - wanted).norm() <= 10 * bound * wanted.norm(), name


def with_aliases(files: Any, config: ModelConfig) -> ImportReader:
    row_map = state_dict_map(config, "huggingface")
    names = {name: alias for name, alias in row_map.aliases.items() if alias in files.shapes}
    return ImportReader(RenamedReader(files, names), row_map)


@pytest.mark.parametrize("family", proving("import", "export"))
def test_a_folder_of_transformers_comes_back_bitwise(tmp_path: Path, family: str):
    # transformers writes the joint filters of q, k and v in three equal parts, whatever their widths.
    equal = ["model.linear_attention.value_dim=12"] if family == "olmo_hybrid" else []
    config = shape(family, "model.attention_backend=auto", *equal)
    values = to_huggingface(config, dtype="float32", special_tokens={})
    kind = getattr(transformers, HYBRIDS[family])
    torch.manual_seed(0)
    theirs = kind(kind.config_class(**json.loads(json.dumps(values)))).eval()
    theirs.set_attn_implementation("eager")
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.randn_like(parameter) * 0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "theirs")
    source = open_checkpoint(tmp_path / "theirs")
    assert source.model == from_huggingface(values, "theirs")
    ours = load_source(source, torch.device("cpu"), seq_len=128)
    with torch.no_grad():
        expected_logits = theirs(IDS).logits
        assert (ours(IDS) - expected_logits).abs().max() <= 1e-5 * expected_logits.abs().max()
    export_weights(source, tmp_path / "ours", ExportOptions("huggingface"))
    found, expected = (tensors(tmp_path / side) for side in ("ours", "theirs"))
    aliases = state_dict_map(config, "huggingface").aliases
    found = {name if name in expected else aliases[name]: tensor for name, tensor in found.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    again = kind.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("family", HYBRIDS)
def test_config_json_comes_back(family: str):
    balance = ["model.moe.balance.bias_rate=0"] if family == "kimi_linear" else []
    config = shape(family, "model.attention_backend=auto", *balance)
    values = to_huggingface(config, dtype="bfloat16", special_tokens={})
    assert from_huggingface(json.loads(json.dumps(values)), config.name) == config
    theirs = getattr(transformers, HYBRIDS[family]).config_class(**json.loads(json.dumps(values)))
    assert from_huggingface(theirs.to_dict(), config.name) == config


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_spec_has_every_parameter(family: str):
    config = shape(family)
    with torch.device("meta"):
        model = build_model(config, seq_len=16, attention_backend="math")
    spec = spec_of(config)
    assert spec.shapes == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    kinds = ["linear" if layer.linear_attention is not None else "full" for layer in spec.layers]
    assert kinds[:4] == ["linear", "linear", "linear", "full"]


@pytest.mark.parametrize("family", HYBRIDS)
def test_documents_of_a_row_do_not_see_each_other(family: str):
    """Packed documents, one of a single token, give the logits of each by itself."""
    model = noisy_model(shape(family)).eval()
    lengths = (3, 1, 66, 30)
    parts = IDS[:1].split(lengths, dim=1)
    documents = torch.cat([torch.full_like(part, number) for number, part in enumerate(parts)], dim=1)
    positions = torch.cat([torch.arange(length)[None] for length in lengths], dim=1)
    with torch.no_grad():
        packed = model(IDS[:1], positions, documents)
        alone = torch.cat([model(part) for part in parts], dim=1)
    # Rounding reaches 1e-4 behind norms of small outputs, and a leak several tenths.
    torch.testing.assert_close(packed, alone, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("family", proving("generate"))
def test_greedy_text_equals_that_of_transformers(tmp_path: Path, family: str):
    config = shape(family)
    ours = noisy_model(config)
    with torch.no_grad():
        ours.get_parameter("head.weight").mul_(5)
    theirs = in_transformers(exported(ours, config, tmp_path / "export"))
    with torch.no_grad():
        whole = ours(IDS[:1, :71])[0, -1]
    session, ids = DecodeSession(ours, 128, cache=True), IDS[0, :70].tolist()
    session.next_logits(ids)
    torch.testing.assert_close(session.next_logits([*ids, int(IDS[0, 70])]), whole, atol=1e-3, rtol=1e-4)
    session.reset()
    for _ in range(10):
        ids.append(int(session.next_logits(ids).argmax()))
    wanted = theirs.generate(IDS[:1, :70], max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert ids == wanted[0].tolist()
    assert len(set(ids[70:])) > 3


@pytest.mark.parametrize("family", HYBRIDS)
def test_initial_decays_and_roles(family: str):
    """Decay rates and time steps begin within the published bounds; neither these nor filters are matrices."""
    config = shape(family)
    model = build_model(config, seq_len=16, attention_backend="math")
    table = init_specs(model)
    assert table is not None
    init_weights(model, table, seed=3)
    forget = {name: tensor for name, tensor in model.named_parameters() if ".forget." in name}
    rates = torch.cat([tensor for name, tensor in forget.items() if name.endswith("log_rate")]).exp()
    steps = torch.cat([F.softplus(tensor) for name, tensor in forget.items() if name.endswith("bias")])
    low, high = {"olmo_hybrid": (0, 16), "kimi_linear": (1, 16)}.get(family, (0.01, 16))
    assert low <= rates.min() < rates.mean() < rates.max() <= high
    assert len(rates.unique()) == len(rates)
    if family in ("olmo_hybrid", "kimi_linear"):
        assert 0.99e-3 <= steps.min() < steps.max() <= 0.101
    roles = parameter_roles(spec_of(config))
    assert {named.name: named.role for named in named_parameters([model])} == roles
    assert all(roles[name] == "vector" for name in roles if "convolution" in name or ".forget." in name)
    assert any("convolution" in name for name in roles)


def test_decays_stay_in_fp32_under_mixed_precision():
    model = noisy_model(shape("qwen3_next"))
    copies = ComputeWeights([model], torch.bfloat16).copies
    names = {name: tensor in copies for name, tensor in model.named_parameters()}
    assert not any(copied for name, copied in names.items() if ".forget." in name)
    assert names["blocks.0.attention.qkv.weight"]


def test_the_language_model_of_a_multimodal_folder_is_read(tmp_path: Path):
    """Published files of Qwen3.5 hold a vision tower and modules of multi-token prediction beside it."""
    config = shape("qwen3_5")
    folder = exported(noisy_model(config), config, tmp_path / "text")
    wanted = tensors(folder)
    text = json.loads((folder / "config.json").read_text())
    stored = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in wanted.items()}
    stored |= {"model.visual.merger.norm.weight": torch.ones(3), "mtp.fc.weight": torch.ones(2, 4)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    source = open_checkpoint(folder)
    assert source.model == from_huggingface(text, "text")
    export_weights(source, tmp_path / "again", ExportOptions("huggingface"))
    found = tensors(tmp_path / "again")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("preset", "megaflops"),
    [
        ("qwen3_next_80b_a3b", (67.4, 0.07, 5.2)),
        ("qwen3_5_27b", (231.7, 0.08, 7.9)),
        ("qwen3_5_397b_a17b", (235.9, 0.10, 10.5)),
        ("olmo_hybrid_7b", (177.4, 0.09, 5.4)),
        ("kimi_linear_48b_a3b", (78.9, 0.10, 5.2)),
    ],
)
def test_flops_of_a_layer_per_token(preset: str, megaflops: tuple[float, float, float]):
    """Forward FLOPs of projections, convolution and delta rule, at any length."""
    layer = next(layer for layer in spec_of(experiment(f"model={preset}").model).layers if layer.linear_attention)
    mixer = layer.linear_attention
    assert mixer is not None
    projections = sum(part.flops_per_token for part in layer.linears if part.name.startswith("attention."))
    filters = 6 * mixer.taps * mixer.channels
    for seq_len in (64, 4096):
        parts = (projections, filters, mixer.flops_per_token(seq_len) - filters)
        assert parts == pytest.approx([3e6 * part for part in megaflops], rel=0.1)


def test_olmo_hybrid_has_rope_unless_its_file_names_a_null_theta(tmp_path: Path):
    """As the class of transformers, whose released model has none."""
    config = shape("olmo_hybrid")
    assert_equal(shape("olmo_hybrid", "model.rope.theta=1e4"), "olmo_hybrid", torch.float32, 1e-4, tmp_path)
    values = to_huggingface(config, dtype="float32", special_tokens={})
    assert values["rope_parameters"] == {"rope_theta": None, "rope_type": "default"}
    read: Any = from_huggingface({**values, "rope_parameters": None}, "x")
    assert read.rope.theta == 10000
    del values["rope_parameters"]
    assert from_huggingface(values, "x") == read


def test_the_published_file_of_kimi_linear_is_read():
    """It nests linear attention, counts layers from 1, and names other keys than the class writes."""
    values = to_huggingface(experiment("model=kimi_linear_48b_a3b").model, dtype="bfloat16", special_tokens={})
    nested = values["linear_attn_config"]
    assert nested["full_attn_layers"] == [4, 8, 12, 16, 20, 24, 27]
    assert (nested["num_heads"], nested["head_dim"], nested["short_conv_kernel_size"]) == (32, 128, 4)
    flat = ("layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    published = {key: value for key, value in values.items() if key not in flat}
    read: Any = from_huggingface(published, "x")
    assert read == from_huggingface(values, "x")
    assert read.linear_attention == LinearAttentionConfig(32, 32, 128, 128, 4, 4)
    with pytest.raises(UserError, match="linear_attn_config"):
        from_huggingface({**published, "linear_attn_config": {**nested, "full_attn_layers": [4, 5]}}, "x")
