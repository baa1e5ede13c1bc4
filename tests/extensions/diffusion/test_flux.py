"""FLUX.1 against the model of diffusers from the same weights, its files in both naming schemes, and its spec."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.config.composing import experiment
from tests.extensions.diffusion.flux_shapes import (
    COLUMNS,
    ROWS,
    TEXT_TOKENS,
    called,
    fill,
    from_theirs,
    needs_diffusers,
    tiny,
    tiny_in_diffusers,
    tiny_inputs,
    tiny_model,
    to_theirs,
)
from tests.models.round_trip import tensors
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint
from titan_exp.cli.convert import run
from titan_exp.config.errors.user_error import UserError
from titan_exp.extensions.diffusion import state_dict as diffusion_state_dict
from titan_exp.extensions.diffusion.flux import Config
from titan_exp.inference.evaluate import evaluate_command
from titan_exp.inference.generate import generate_command
from titan_exp.models.build import build_model, init_specs
from titan_exp.models.convert.hf_config import to_json
from titan_exp.models.convert.state_dict_map import half_split_rows
from titan_exp.models.spec.lookup import family_violations, model_spec
from titan_exp.ops.attention.mask_pattern import CAUSAL
from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.rules import violations
from titan_exp.trainer.restore import load_source


def differences(config: Config, *, guidance: bool = True) -> tuple[float, float]:
    """Differences from diffusers, relative: of the output, and the largest one of the gradient of a parameter."""
    theirs, ours = tiny_in_diffusers(guidance_embeds=guidance), tiny_model(config)
    ours.load_state_dict(from_theirs(config, theirs.state_dict(), "diffusers"))
    inputs = tiny_inputs(guidance=guidance)
    found, expected = ours(**inputs), called(theirs, inputs)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    for output in (found, expected):
        (output * direction).sum().backward()
    gradients = to_theirs(config, {name: given(weight.grad) for name, weight in ours.named_parameters()}, "diffusers")
    worst = 0.0
    for name, parameter in theirs.named_parameters():
        other = given(parameter.grad)
        assert other.norm() > 0, name
        worst = max(worst, float((gradients[name] - other).norm() / other.norm()))
    return float(((found - expected).abs().max() / expected.abs().max()).detach()), worst


def given(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


@needs_diffusers
@pytest.mark.proves("flux", "logits", "gradients")
@pytest.mark.parametrize("guidance", [True, False])
def test_output_and_gradients_are_those_of_diffusers(guidance: bool):
    output, gradients = differences(tiny(guidance_embeds=guidance), guidance=guidance)
    assert output <= 1e-5
    assert gradients <= 1e-4


def the_last_modulation_is_not_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_exp.extensions.diffusion.flux.STATE_DICTS", {"diffusers": _names(swaps_output=False)})


def the_last_modulation_begins_with_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.extensions.diffusion.transformer import modulation as plain

    def swapped(*arguments: Any) -> tuple[Tensor, ...]:
        return plain(*arguments)[::-1]

    monkeypatch.setattr("titan_exp.extensions.diffusion.transformer.modulation", swapped)


def rows_and_columns_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.extensions.diffusion.transformer import AxialRotaryEmbedding

    plain = AxialRotaryEmbedding.forward
    monkeypatch.setattr(AxialRotaryEmbedding, "forward", lambda self, ids: plain(self, ids[..., [0, 2, 1]]))


def the_axes_are_in_another_order(_: pytest.MonkeyPatch) -> Config:
    return replace(tiny(), rope_axes=(6, 6, 4))


def guidance_is_not_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.extensions.diffusion.transformer import sinusoid as plain

    monkeypatch.setattr("titan_exp.extensions.diffusion.transformer.sinusoid", lambda x: plain(x) * (x.max() < 900))


def attention_is_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CausalAttention.__init__
    monkeypatch.setattr(
        CausalAttention, "__init__", lambda self, backend, scale, _: plain(self, backend, scale, CAUSAL)
    )


def the_norm_of_heads_has_the_eps_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.models.blocks.transformer import RMSNorm

    plain = RMSNorm.__init__
    monkeypatch.setattr(RMSNorm, "__init__", lambda self, dim, _, style, **rest: plain(self, dim, 2**-7, style, **rest))


def sines_come_before_cosines(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.extensions.diffusion.transformer import sinusoid as plain

    monkeypatch.setattr("titan_exp.extensions.diffusion.transformer.sinusoid", lambda x: plain(x).roll(128, dims=-1))


def norms_of_heads_keep_the_order_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(start: int, width: int, name: str, first: int) -> Any:
        is_norm = ".norm" in name
        return (
            [diffusion_state_dict.RowRange(start, width, name, first)]
            if is_norm
            else half_split_rows(start, width, name, first)
        )

    monkeypatch.setattr(diffusion_state_dict, "half_split_rows", rows)


def the_feed_forward_comes_behind_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_their_order(layer: Any) -> Any:
        return range(layer.linear("out").inputs)

    monkeypatch.setattr(diffusion_state_dict, "_by_head", in_their_order)


def gates_and_shifts_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_exp.extensions.diffusion.transformer import modulation as plain

    def changed(*arguments: Any) -> tuple[Tensor, ...]:
        shift, scale, *rest = plain(*arguments)
        return (rest[0], scale, shift, *rest[1:]) if rest else (shift, scale)

    monkeypatch.setattr("titan_exp.extensions.diffusion.transformer.modulation", changed)


def _names(**changes: Any) -> Any:
    return replace(diffusion_state_dict.DIFFUSERS, **changes)


MUTATIONS: list[Callable[[pytest.MonkeyPatch], Config | None]] = [
    the_last_modulation_is_not_swapped,
    the_last_modulation_begins_with_the_scale,
    rows_and_columns_change_places,
    the_axes_are_in_another_order,
    guidance_is_not_embedded,
    attention_is_causal,
    the_norm_of_heads_has_the_eps_of_bf16,
    sines_come_before_cosines,
    norms_of_heads_keep_the_order_of_neighbours,
    gates_and_shifts_change_places,
    the_feed_forward_comes_behind_all_heads,
]


@needs_diffusers
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mutations_are_noticed(monkeypatch: pytest.MonkeyPatch, mutation: Callable[..., Config | None]):
    output, gradients = differences(mutation(monkeypatch) or tiny())
    assert output > 2e-5
    assert gradients > 2e-4


@needs_diffusers
@pytest.mark.proves("flux", "import", "export")
def test_files_of_both_naming_schemes_come_back_bitwise(tmp_path: Path):
    """A folder of diffusers, of several files, through Black Forest Labs' names and our own, and back."""
    theirs = tiny_in_diffusers()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=700_000)
    source = open_checkpoint(tmp_path / "theirs")
    assert (source.format, source.model) == ("diffusers", replace(tiny(), name="theirs"))
    ours, inputs = load_source(source, torch.device("cpu"), seq_len=32), tiny_inputs()
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs), called(theirs, inputs), atol=2e-4, rtol=1e-5)
    export_weights(source, tmp_path / "bfl", ExportOptions("bfl"))
    original = load_file(tmp_path / "bfl" / "model.safetensors")
    assert_equal(converted_by_diffusers(original), theirs.state_dict())
    for folder, form in (("own", "safetensors"), ("run", "dcp"), ("back", "diffusers"), ("again", "bfl")):
        export_weights(source, tmp_path / folder, ExportOptions(form, file_bytes=700_000))
        source = open_checkpoint(tmp_path / folder)
        assert replace(source.model, name="theirs") == replace(tiny(), name="theirs")
        assert source.format == form
    assert_equal(tensors(tmp_path / "back"), theirs.state_dict())
    assert_equal(tensors(tmp_path / "again"), original)
    assert_equal(type(theirs).from_pretrained(tmp_path / "back").state_dict(), theirs.state_dict())


def converted_by_diffusers(original: dict[str, Tensor]) -> dict[str, Tensor]:
    """Diffusers' reader of Black Forest Labs' names, which is written for a width of 3072, for ours."""
    convert = import_module("diffusers.loaders.single_file_utils").convert_flux_transformer_checkpoint_to_diffusers
    constants = tuple(64 if constant == 3072 else constant for constant in convert.__code__.co_consts)
    return FunctionType(convert.__code__.replace(co_consts=constants), convert.__globals__)(dict(original))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def debug() -> Config:
    config = experiment("model=flux_debug").model
    assert isinstance(config, Config)
    return config


def test_names_of_black_forest_labs_come_back_and_describe_the_model(tmp_path: Path):
    """Their file has no `config.json`: the shape is read off its tensors, with the axes of the published models."""
    config = replace(debug(), dim=256, rope_axes=(16, 56, 56))
    model = build_model(config, seq_len=32, attention_backend="math")
    fill(model)
    theirs = to_theirs(config, model.state_dict(), "bfl")
    assert_equal(from_theirs(config, theirs, "bfl"), dict(model.state_dict()))
    save_file(theirs, tmp_path / "flux1-debug.safetensors")
    source = open_checkpoint(tmp_path / "flux1-debug.safetensors")
    published = {"name": "flux1-debug", "text_tokens": 512, "context": 4608}
    assert source.model == replace(config, **published)
    assert_equal({name: source.parameters.read(name) for name in source.parameters.shapes}, dict(model.state_dict()))
    save_file({"one": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"does not hold the tensors of a FLUX\.1"):
        open_checkpoint(tmp_path / "other.safetensors")


def test_convert_names_the_class_and_images_need_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Black Forest Labs' file, for training, and from there for diffusers."""
    model = build_model(debug(), seq_len=32, attention_backend="math")
    fill(model)
    file, start, back = (str(tmp_path / name) for name in ("flux1.safetensors", "start", "back"))
    save_file(to_theirs(debug(), model.state_dict(), "bfl"), file)
    with pytest.raises(UserError, match="the axes rotate pairs of features"):
        run([file, start])  # axes of the published models, for heads of 128
    export_weights(own_checkpoint(model, tmp_path / "own"), Path(start), ExportOptions("dcp"))
    assert run([start, back]) == 0
    printed = capsys.readouterr().out
    assert f"{back}: diffusers" in printed
    assert f"FluxTransformer2DModel.from_pretrained({back!r})" in printed
    assert_equal(tensors(tmp_path / "back"), to_theirs(debug(), model.state_dict(), "diffusers"))
    with pytest.raises(UserError, match="back does not read tokens"):
        evaluate_command([back])
    with pytest.raises(UserError, match=r"do not come from a run.*\n.*store=FOLDER"):
        generate_command([back])


def own_checkpoint(model: nn.Module, folder: Path) -> OpenCheckpoint:
    """Safetensors of the debug model with its own names."""
    folder.mkdir()
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    (folder / "model.json").write_text(json.dumps(to_json(debug(), {})))
    return open_checkpoint(folder)


def test_the_first_output_is_zero_and_every_weight_has_its_distribution():
    config = debug()
    model = build_model(config, seq_len=64, attention_backend="math")
    specs = init_specs(model)
    assert specs is not None
    kinds = {name: specs[name] for name, _ in model.named_parameters()}
    zero = {name.removesuffix(".weight") for name, init in kinds.items() if init.kind == "zeros" and "weight" in name}
    blocks = {name.split(".", 2)[2] for name in zero if name.startswith("blocks.")}
    assert blocks == {"text.modulation", "image.modulation", "modulation"}
    assert {name for name in zero if not name.startswith("blocks.")} == {"output.modulation", "output.linear"}
    assert {init.kind for name, init in kinds.items() if name.endswith(".bias")} == {"zeros"}
    assert {init.kind for name, init in kinds.items() if name.endswith("_norm.weight")} == {"ones"}
    assert kinds["inputs.time.out.weight"].std == 0.02
    assert kinds["blocks.3.qkv_up.weight"].std == pytest.approx((2 / (64 + 7 * 64)) ** 0.5)


def test_guidance_is_required_by_the_model_that_reads_it_alone():
    inputs = tiny_inputs()
    with pytest.raises(ValueError, match="reads a guidance scale"):
        tiny_model(tiny())(**{**inputs, "guidance": None})
    with pytest.raises(ValueError, match="reads no guidance scale"):
        tiny_model(tiny(guidance_embeds=False))(**inputs)


def test_flops_count_what_is_executed():
    """Every key is visible; text and image tokens pass through their own weights, a modulation once per sequence."""
    config = replace(tiny(), text_tokens=TEXT_TOKENS)
    model, inputs = tiny_model(config), tiny_inputs()
    fill(model)
    for name in ("image", "text", "pooled", "times", "guidance"):
        inputs[name].requires_grad_()
    with FlopCounterMode(display=False) as counter:
        model(**inputs).sum().backward()
    spec, seq = model_spec(config), TEXT_TOKENS + ROWS * COLUMNS
    assert spec is not None
    assert counter.get_total_flops() == pytest.approx(2 * seq * spec.flops_per_token(seq))


def test_attention_counted_as_causal_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_exp.models.spec.model_spec.AttentionSpec.pattern", CAUSAL)
    with pytest.raises(AssertionError):
        test_flops_count_what_is_executed()


@pytest.mark.parametrize(
    ("name", "seq_len", "tera"), [("flux_dev", 512, 20.4), ("flux_dev", 4608, 223), ("flux_schnell", 4352, 208)]
)
def test_flops_of_the_published_shapes(name: str, seq_len: int, tera: float):
    """Per sequence of text tokens and an image of 256 x 256 or 1024 x 1024 pixels."""
    spec = model_spec(experiment(f"model={name}").model)
    assert spec is not None
    assert spec.flops_per_token(seq_len) * seq_len / 1e12 == pytest.approx(tera, rel=5e-3)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("model.rope_axes=[8,12,10]", "model.rope_axes"),
        ("model.rope_axes=[7,13,12]", "model.rope_axes"),
        ("model.rope_axes=[16,16]", "model.rope_axes"),
        ("model.heads=3", "model.heads"),
        ("model.double_layers=5", "model.double_layers"),
        ("model.vocab_size=320", "model.vocab_size"),
    ],
)
def test_impossible_shapes_are_refused(override: str, field: str):
    found = list(family_violations(experiment("model=flux_debug", override).model))
    assert [violation.field for violation in found] == [field]


def test_a_run_is_refused_that_would_predict_its_tokens():
    found = violations(experiment("model=flux_debug"))
    assert [violation.field for violation in found] == ["training.objective"]
    assert "flux-debug reads none" in found[0].reason
