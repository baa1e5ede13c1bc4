"""Selected linear layers of a recipe by device, and scales of whole weights."""

import dataclasses

import pytest
import torch
from torch import nn

from tests.config.composing import experiment
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.models.blocks.linear import Linear
from titan_exp.models.build import build_model
from titan_exp.models.spec.lookup import model_spec
from titan_exp.quantization import recipes as instructions
from titan_exp.quantization.float8 import E4M3, scale_of
from titan_exp.quantization.quantize import WeightScales, describe, quantize
from titan_exp.quantization.recipes import Float8LinearImpl, NVFP4LinearImpl, needs_emulation

CPU = torch.device("cpu")
SMALL = ["model=llama_debug", "training.seq_len=64", "cluster.device=cpu"]


def made(*overrides: str):
    return resolve_layout(experiment(*SMALL, *overrides), 1)


def model_of(*overrides: str) -> nn.Module:
    run = made(*overrides)
    with torch.device("meta"):
        return build_model(run.model, seq_len=64, attention_backend="flash")


def quantized(*overrides: str) -> list[str]:
    run, model = made(*overrides), model_of(*overrides)
    quantize(model, run.quantization, layers=run.model.layers, device=CPU)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "linear_impl", None), Float8LinearImpl)
    ]


def test_the_configuration_knows_the_shapes_that_there_are():
    run = made()
    found = {
        name: (module.in_features, module.out_features)
        for name, module in model_of().named_modules()
        if isinstance(module, Linear)
    }
    spec = model_spec(run.model)
    assert spec is not None
    assert found == {name: (linear.inputs, linear.outputs) for name, linear in spec.linears()}


def test_names_layers_and_sizes_are_left_out():
    rowwise = "quantization=float8_rowwise"
    assert len(quantized(rowwise)) == 16
    middle = quantized(rowwise, "quantization.high_precision_first=1", "quantization.high_precision_last=2")
    assert {name.split(".")[1] for name in middle} == {"1"}
    assert {name.split(".")[-1] for name in quantized(rowwise, "quantization.filter=['*.attention.*']")} == {
        "gate_up",
        "down",
    }
    assert {name.split(".")[-1] for name in quantized(rowwise, "quantization.smallest_gemm=65")} == set()
    assert quantized("quantization=none") == []


def test_without_a_number_small_ones_are_left_out_on_gpus_alone():
    assert made("quantization=mxfp8").quantization.smallest_gemm == 0
    assert made("quantization=mxfp8", "cluster.device=cuda").quantization.smallest_gemm == 4096
    assert (
        made("quantization=mxfp8", "cluster.device=cuda", "quantization.emulate=true").quantization.smallest_gemm == 0
    )
    assert made("quantization=mxfp8", "quantization.smallest_gemm=7").quantization.smallest_gemm == 7


def test_the_log_says_what_is_done():
    said = describe(model_of(), made("quantization=mxfp8").quantization, layers=4, device=CPU)
    assert said is not None
    assert said.startswith("mxfp8, emulated on cpu: 16 of 16 linear layers, ")
    assert describe(model_of(), made().quantization, layers=4, device=CPU) is None
    with pytest.raises(UserError, match="would quantize no linear layer"):
        describe(nn.Identity(), made("quantization=mxfp8").quantization, layers=4, device=CPU)
    with pytest.raises(UserError, match=r"the model has torch\.nn\.Linear layers"):
        describe(nn.Linear(4, 4), made("quantization=mxfp8").quantization, layers=4, device=CPU)
    config = dataclasses.replace(made("quantization=mxfp8").quantization, filter=["blocks.*.experts"])
    with pytest.raises(UserError, match="no such linear layer"):
        describe(model_of(), config, layers=4, device=CPU)


def test_what_a_gpu_lacks_is_emulated_or_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    hopper = torch.device("cuda", 0)
    assert not needs_emulation(made("quantization=float8_rowwise").quantization, hopper)
    assert needs_emulation(made("quantization=float8_rowwise", "quantization.emulate=true").quantization, hopper)
    assert needs_emulation(made("quantization=mxfp8").quantization, hopper)
    with pytest.raises(UserError, match=r"NVIDIA H200 lacks the instructions of mxfp8.*capability 10.0"):
        needs_emulation(made("quantization=mxfp8", "quantization.emulate=false").quantization, hopper)
    assert set(instructions.MIN_CAPABILITY) == {
        "float8_tensorwise",
        "float8_rowwise",
        "float8_rowwise_gw_hp",
        "mxfp8",
        "nvfp4",
    }


def test_a_gpu_s_nvfp4_is_refused_without_its_torchao(monkeypatch: pytest.MonkeyPatch):
    """At the start, where the GPU is known: before torchao's modules are imported, which older versions lack."""
    monkeypatch.setattr("titan_exp.config.torch_features.torchao_version", lambda: "0.17.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    config, gpu = made("quantization=nvfp4").quantization, torch.device("cuda", 0)
    with pytest.raises(
        UserError, match=r"nvfp4: its kernels need torchao 0\.18 or newer, and you have torchao 0\.17\.0"
    ):
        quantize(model_of(), config, layers=4, device=gpu)
    quantize(model_of(), dataclasses.replace(config, emulate=True), layers=4, device=gpu)
    quantize(model_of(), made("quantization=mxfp8").quantization, layers=4, device=gpu)


@pytest.mark.parametrize("recipe", ["float8_tensorwise", "nvfp4"])
def test_scales_are_those_of_the_weights_as_they_are_now(recipe: str):
    run = made(f"quantization={recipe}", "quantization.power_of_two_scales=false")
    model = build_model(run.model, seq_len=64, attention_backend="flash")
    quantize(model, run.quantization, layers=4, device=CPU)
    for module in model.modules():
        if isinstance(module, Linear):
            nn.init.normal_(module.weight)
    scales = WeightScales([model], [], torch.bfloat16)
    scales.refresh()
    with torch.no_grad():
        model.get_parameter("blocks.2.feed_forward.down.weight")[3, 5] = -1234.5
    scales.refresh()
    for name in ("blocks.2.feed_forward.down", "blocks.0.attention.qkv"):
        module = model.get_submodule(name)
        assert isinstance(module, Linear)
        assert isinstance(module.linear_impl, Float8LinearImpl | NVFP4LinearImpl)
        rounded = module.weight.bfloat16()
        if isinstance(module.linear_impl, NVFP4LinearImpl):
            expected = module.linear_impl.recipe.scale_of_weight(rounded)
        else:
            expected = scale_of(rounded, E4M3, over=None, power_of_two=False)
        assert module.linear_impl.weight_scale is not None
        assert torch.equal(module.linear_impl.weight_scale, expected)
