"""Presets that fit the `config.json` of published repositories, as classes of `transformers` write it."""

import json
from typing import Any

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.models.convert import hf_config
from titan_exp.models.convert.hf_config import repository_lines

transformers = pytest.importorskip("transformers")

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}


def plain(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def decoder(kind: str, shape: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """`config.json` of a class by layers, width, query and KV heads, and width of the feed-forward."""
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return written(kind, **dict(zip(keys, shape, strict=True)), **more)


def written(kind: str, **keys: Any) -> dict[str, Any]:
    made = transformers.CONFIG_MAPPING[kind](**keys)
    return json.loads(made.to_json_string(use_diff=False))


def llama2(*shape: int) -> dict[str, Any]:
    rest = {"vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    return decoder("llama", shape, rope_parameters=plain(1e4), **rest)


def llama3(*shape: int, factor: float = 0, **more: Any) -> dict[str, Any]:
    rest = {"vocab_size": 128256, "max_position_embeddings": 131072 if factor else 8192, "rms_norm_eps": 1e-5}
    rope = {**LLAMA3, "factor": factor} if factor else plain(5e5)
    return decoder("llama", shape, rope_parameters=rope, **rest, **more)


def qwen3(*shape: int, kind: str = "qwen3", theta: float = 1e6, context: int = 40960, **more: Any) -> dict[str, Any]:
    rest = {"vocab_size": 151936, "max_position_embeddings": context, "rms_norm_eps": 1e-6, "head_dim": 128}
    return decoder(kind, shape, rope_parameters=plain(theta), **rest, **more)


def olmo2(*shape: int) -> dict[str, Any]:
    rest = {"vocab_size": 100352, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
    return decoder("olmo2", shape, rope_parameters=plain(5e5), **rest)


def qwen3_moe(*shape: int, moe: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "moe_intermediate_size": moe}
    return qwen3(*shape, kind="qwen3_moe", **experts)


def deepseek(version: int, *shape: int, moe: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """MoE: width, experts, shared, chosen, groups, groups of a token, dense layers."""
    keys = ("moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group")
    moe_keys = dict(zip((*keys, "topk_group", "first_k_dense_replace"), moe, strict=True))
    latents = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    rest = {"max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "q_lora_rank": 1536}
    return decoder(f"deepseek_v{version}", shape, **{**moe_keys, **latents, **rest, **more})


def yarn(theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return {**YARN, "rope_theta": theta, "factor": 40.0, **more}


def v3(*shape: int, moe: tuple[int, ...], **more: Any) -> dict[str, Any]:
    router = {"norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return deepseek(3, *shape, moe=moe, **router, **more)


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    made = written("gpt_oss", num_hidden_layers=layers, num_local_experts=experts)
    return {**made, "quantization_config": {"quant_method": "mxfp4"}}


def llama4(experts: int, every: int, context: int, **more: Any) -> dict[str, Any]:
    """The multimodal file, with the class's defaults for the vision tower."""
    text = {"num_local_experts": experts, "interleave_moe_layer_step": every, "max_position_embeddings": context}
    return written("llama4", text_config={**text, "num_hidden_layers": 48, **more})


LITE = {"q_lora_rank": None, "norm_topk_prob": False, "topk_method": "greedy", "routed_scaling_factor": 1.0}
V2 = {"norm_topk_prob": False, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
V3 = {"routed_scaling_factor": 2.5, "vocab_size": 129280, "num_nextn_predict_layers": 1}
K2 = {"routed_scaling_factor": 2.827, "vocab_size": 163840, "num_nextn_predict_layers": 0}
SCOUT = {**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0}
PUBLISHED = {
    "llama2_7b": lambda: llama2(32, 4096, 32, 32, 11008),
    "llama2_13b": lambda: llama2(40, 5120, 40, 40, 13824),
    "llama2_70b": lambda: llama2(80, 8192, 64, 8, 28672),
    "llama3_8b": lambda: llama3(32, 4096, 32, 8, 14336),
    "llama3_70b": lambda: llama3(80, 8192, 64, 8, 28672),
    "llama3_1_8b": lambda: llama3(32, 4096, 32, 8, 14336, factor=8),
    "llama3_1_70b": lambda: llama3(80, 8192, 64, 8, 28672, factor=8),
    "llama3_1_405b": lambda: llama3(126, 16384, 128, 8, 53248, factor=8),
    "llama3_2_1b": lambda: llama3(16, 2048, 32, 8, 8192, factor=32, tie_word_embeddings=True),
    "llama3_2_3b": lambda: llama3(28, 3072, 24, 8, 8192, factor=32, tie_word_embeddings=True),
    "qwen3_0_6b": lambda: qwen3(28, 1024, 16, 8, 3072, tie_word_embeddings=True),
    "qwen3_1_7b": lambda: qwen3(28, 2048, 16, 8, 6144, tie_word_embeddings=True),
    "qwen3_4b": lambda: qwen3(36, 2560, 32, 8, 9728, tie_word_embeddings=True),
    "qwen3_8b": lambda: qwen3(36, 4096, 32, 8, 12288),
    "qwen3_14b": lambda: qwen3(40, 5120, 40, 8, 17408),
    "qwen3_32b": lambda: qwen3(64, 5120, 64, 8, 25600),
    "olmo2_1b": lambda: olmo2(16, 2048, 16, 16, 8192),
    "olmo2_7b": lambda: olmo2(32, 4096, 32, 32, 11008),
    "olmo2_13b": lambda: olmo2(40, 5120, 40, 40, 13824),
    "qwen3_30b_a3b": lambda: qwen3_moe(48, 2048, 32, 4, 6144, moe=768),
    "qwen3_235b_a22b": lambda: qwen3_moe(94, 4096, 64, 4, 12288, moe=1536),
    "deepseek_v2_lite_16b": lambda: deepseek(
        2,
        *(27, 2048, 16, 16, 10944),
        moe=(1408, 64, 2, 6, 1, 1, 1),
        vocab_size=102400,
        rope_parameters=yarn(mscale=0.707, mscale_all_dim=0.707),
        **LITE,
    ),
    "deepseek_v2_236b": lambda: deepseek(
        2,
        *(60, 5120, 128, 128, 12288),
        moe=(1536, 160, 2, 6, 8, 3, 1),
        vocab_size=102400,
        rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0),
        **V2,
    ),
    "deepseek_v3_671b": lambda: v3(
        *(61, 7168, 128, 128, 18432),
        moe=(2048, 256, 1, 8, 8, 4, 3),
        rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0),
        **V3,
    ),
    "kimi_k2_1t": lambda: {
        **v3(
            *(61, 7168, 64, 64, 18432),
            moe=(2048, 384, 1, 8, 1, 1, 1),
            rope_parameters=yarn(5e4, factor=32.0, beta_fast=1, mscale=1.0, mscale_all_dim=1.0),
            **{**K2, "max_position_embeddings": 131072},
        ),
        "model_type": "kimi_k2",
    },
    "gpt_oss_20b": lambda: gpt_oss(24, 32),
    "gpt_oss_120b": lambda: gpt_oss(36, 128),
    "llama4_scout": lambda: llama4(16, 1, 10485760, rope_parameters=SCOUT),
    "llama4_maverick": lambda: llama4(128, 2, 1048576, rope_parameters=plain(5e5), use_qk_norm=False),
}
"""Repositories by the preset that fits, with the numbers that their owners published."""
BY_DAY = ("deepseek_v3_671b", "llama4_scout")


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[] if name in BY_DAY else [pytest.mark.night]) for name in PUBLISHED]
)
def test_the_preset_of_a_published_repository_fits(preset: str):
    first, *unread = repository_lines(PUBLISHED[preset](), "x")
    assert first == f"fits model={preset}"
    expected = {
        "deepseek_v3_671b": ["it has 1 module of multi-token prediction; train with model.mtp.depth=1"],
        "llama4_scout": ["not read: vision tower (vision_config)"],
        "llama4_maverick": ["not read: vision tower (vision_config)"],
    }
    assert unread == expected.get(preset, [])


def test_keys_that_differ_are_overrides():
    (line,) = repository_lines(qwen3(36, 4096, 32, 8, 12288, theta=5e6, context=262144), "x")
    assert line == "model=qwen3_8b fits but for model.context=262144 model.rope.theta=5000000.0"


def test_what_a_family_cannot_compute_is_said():
    values = {**qwen3(36, 4096, 32, 8, 12288), "use_sliding_window": True}
    (line,) = repository_lines(values, "x")
    assert line.startswith("cannot be converted: config.json: use_sliding_window=True")
    (line,) = repository_lines(qwen3(36, 4096, 32, 8, 12288) | {"quantization_config": {"quant_method": "awq"}}, "x")
    assert "quant_method='awq'" in line


def test_two_families_that_read_one_model_type_are_named(monkeypatch: pytest.MonkeyPatch):
    built_in = hf_config.component
    monkeypatch.setattr(
        hf_config, "builtin_components", lambda _: {"mine": "my.family", "llama": "titan_exp.models.llama"}
    )
    monkeypatch.setattr(hf_config, "component", lambda group, _: built_in(group, "llama"))
    with pytest.raises(UserError, match="the families mine and llama both read the model_type 'llama'"):
        list(repository_lines({"model_type": "llama"}, "anybody/theirs"))
