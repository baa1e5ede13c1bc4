"""FlashAttention 3 and 4 where they are not: refused in words, by the device and by what is installed."""

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, list_flash_attention_impls

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.torch_features import FLASH_PACKAGES
from titan_exp.ops.attention.sdpa import activate, choose_backend, runs_here

GPU = torch.device("cuda", 0)


def give_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")


def test_torch_knows_them():
    assert {package.implementation for package in FLASH_PACKAGES.values()} <= set(list_flash_attention_impls())


@pytest.mark.parametrize("backend", FLASH_PACKAGES)
def test_a_cpu_has_none(backend: str):
    with pytest.raises(UserError, match="needs a GPU, and this run uses a CPU"):
        choose_backend(backend, torch.device("cpu"), head_dims=[64], bf16=True, documents=False)


def test_a_gpu_may_be_too_old_or_too_new(monkeypatch: pytest.MonkeyPatch):
    give_gpu(monkeypatch, (10, 0))
    with pytest.raises(UserError, match=r"FlashAttention 3 needs CUDA capability 9.0, and NVIDIA H200 has 10.0"):
        activate("fa3", GPU)


@pytest.mark.skipif(FLASH_PACKAGES["fa3"].is_installed(), reason="FlashAttention 3 is installed")
def test_what_cannot_be_imported(monkeypatch: pytest.MonkeyPatch):
    give_gpu(monkeypatch, (9, 0))
    assert not runs_here("fa3", GPU)
    with pytest.raises(UserError, match="does not load here: No module named 'flash_attn_interface'"):
        activate("fa3", GPU)
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("head_dims", "bf16", "chosen"),
    [
        ([128], True, "flash"),
        ([192], True, "flash"),
        ([288], True, "efficient"),
        ([64, 288], True, "efficient"),
        ([64, 292], True, "math"),
        ([], True, "flash"),
        ([], False, "efficient"),
    ],
)
def test_auto_takes_a_kernel_for_heads_of_every_layer(
    monkeypatch: pytest.MonkeyPatch, head_dims: list[int], bf16: bool, chosen: str
):
    give_gpu(monkeypatch, (8, 0))
    assert choose_backend("auto", GPU, head_dims=head_dims, bf16=bf16, documents=False) == chosen


def test_deterministic_runs_on_hopper_take_flash(monkeypatch: pytest.MonkeyPatch):
    give_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    chosen = [
        choose_backend("auto", GPU, head_dims=[128], bf16=True, documents=documents, deterministic=deterministic)
        for documents, deterministic in ((False, False), (False, True), (True, True))
    ]
    assert chosen == ["cudnn", "flash", "efficient"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("backend", FLASH_PACKAGES)
def test_they_are_torchs_flash_kernel_to_rounding(backend: str):
    if not runs_here(backend, GPU):
        pytest.skip(f"{backend} is not installed, or not for this GPU")
    from titan_exp.ops.attention.sdpa import CausalAttention

    random = torch.Generator("cuda").manual_seed(0)
    heads = [torch.randn(2, n, 256, 128, device=GPU, dtype=torch.bfloat16, generator=random) for n in (8, 2, 2)]
    found = {}
    for name in ("flash", backend):
        inputs = [tensor.clone().requires_grad_() for tensor in heads]
        core = CausalAttention(choose_backend(name, GPU, head_dims=[128], bf16=True, documents=False))
        output = core(*inputs)
        found[name] = [output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]
    activate("auto", GPU)
    for mine, expected in zip(found[backend], found["flash"], strict=True):
        torch.testing.assert_close(mine, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("parts", "chosen"), [(False, "flex"), (True, "efficient")])
def test_auto_takes_block_masks_for_windows_and_sinks(monkeypatch: pytest.MonkeyPatch, parts: bool, chosen: str):
    give_gpu(monkeypatch, (9, 0))
    how = {"head_dims": [64], "bf16": True, "documents": False, "masked": True}
    assert choose_backend("auto", GPU, **how, parts=parts) == chosen
