"""Small hybrids: layers of each kind with groups of value heads, chunks that a sequence does not fill, odd widths."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.config.composing import experiment
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.models.build import build_model

HYBRIDS = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
}
"""Classes of transformers by family."""


def proving(*columns: str) -> list[Any]:
    """Every family as a parameter of a test that proves this of it."""
    return [pytest.param(family, marks=pytest.mark.proves(family, *columns)) for family in HYBRIDS]


def shape(family: str, *overrides: str) -> ModelConfig:
    """The family's preset for tests, with an attention kernel that has a reference."""
    return experiment(f"model={family}_debug", "model.attention_backend=math", "model.context=512", *overrides).model


def noisy_model(config: ModelConfig, seq_len: int = 128) -> nn.Module:
    """Weights of a few tenths, norms around their neutral value, moderate decays: ones and zeros would hide errors."""
    model = build_model(config, seq_len=seq_len, attention_backend="math")
    reset: Any = model.reset_buffers
    reset()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            module = model.get_submodule(name.rpartition(".")[0])
            if name.endswith("router.bias"):
                tensor.copy_(0.1 * noise)
            elif isinstance(tensor, nn.Parameter):
                centered = "norm" in name and not getattr(module, "zero_centered", False)
                scale = 0.3 if "convolution" in name else 0.5 if "forget" in name else 0.2 if "norm" in name else 0.1
                tensor.copy_(centered + scale * noise)
    return model
