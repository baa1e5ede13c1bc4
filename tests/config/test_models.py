"""The shipped shapes against published parameter counts, counted from the configuration alone."""

import pytest

from tests.config.composing import experiment, llama
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.rope import exceeds_context

PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_34b": 33_743_970_304,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "llama3_1_405b": 405_853_388_800,
    "llama3_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "deepseek_v2_lite_16b": 15_706_484_224,
    "deepseek_v2_236b": 235_741_434_880,
    "deepseek_v3_671b": 671_026_404_352,
    "kimi_k2_1t": 1_026_408_209_408,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "llama4_scout": 107_769_861_120,
    "llama4_maverick": 400_711_848_960,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "qwen3_next_80b_a3b": 79_674_391_296,
    "qwen3_5_0_8b": 752_393_024,
    "qwen3_5_2b": 1_881_825_088,
    "qwen3_5_4b": 4_205_751_296,
    "qwen3_5_9b": 8_953_803_264,
    "qwen3_5_27b": 26_895_998_464,
    "qwen3_5_35b_a3b": 34_660_610_688,
    "qwen3_5_122b_a10b": 122_111_526_912,
    "qwen3_5_397b_a17b": 396_346_350_336,
    "olmo_hybrid_7b": 7_430_870_688,
    "kimi_linear_48b_a3b": 49_122_675_072,
}

ACTIVE = {
    "llama2_7b": 6_607_343_616,
    "llama2_13b": 12_852_024_320,
    "llama2_34b": 33_481_826_304,
    "llama2_70b": 68_714_504_192,
    "llama3_8b": 7_504_924_672,
    "llama3_70b": 69_503_033_344,
    "llama3_1_8b": 7_504_924_672,
    "llama3_1_70b": 69_503_033_344,
    "llama3_1_405b": 403_752_042_496,
    "llama3_405b": 403_752_042_496,
    "llama3_2_1b": 973_146_112,
    "llama3_2_3b": 2_818_747_392,
    "qwen3_0_6b": 440_467_456,
    "qwen3_1_7b": 1_409_410_048,
    "qwen3_4b": 3_633_511_936,
    "qwen3_8b": 7_568_405_504,
    "qwen3_14b": 13_990_394_880,
    "qwen3_32b": 31_984_210_944,
    "qwen3_30b_a3b": 3_041_867_776,
    "qwen3_235b_a22b": 21_568_433_664,
    "deepseek_v2_lite_16b": 2_451_435_008,
    "deepseek_v2_236b": 20_851_512_320,
    "deepseek_v3_671b": 36_625_603_584,
    "kimi_k2_1t": 31_687_072_768,
    "gpt_oss_20b": 3_608_307_264,
    "gpt_oss_120b": 5_132_849_472,
    "llama4_scout": 16_138_408_960,
    "llama4_maverick": 16_150_205_440,
    "olmo2_1b": 1_279_395_840,
    "olmo2_7b": 6_887_575_552,
    "olmo2_13b": 13_202_396_160,
    "qwen3_next_80b_a3b": 3_563_764_480,
    "qwen3_5_0_8b": 498_113_344,
    "qwen3_5_2b": 1_373_265_728,
    "qwen3_5_4b": 3_570_052_096,
    "qwen3_5_9b": 7_936_684_544,
    "qwen3_5_27b": 25_624_600_064,
    "qwen3_5_35b_a3b": 2_946_429_568,
    "qwen3_5_122b_a10b": 9_008_449_536,
    "qwen3_5_397b_a17b": 16_331_922_176,
    "olmo_hybrid_7b": 7_045_519_008,
    "kimi_linear_48b_a3b": 3_106_965_888,
}
"""Parameters less the embedding table."""


def parameters(name: str) -> int:
    spec = model_spec(experiment(f"model={name}").model)
    assert spec is not None
    return spec.parameters


@pytest.mark.counts("total")
@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_count(name: str, count: int):
    assert parameters(name) == count


@pytest.mark.counts("active")
@pytest.mark.parametrize(("name", "count"), ACTIVE.items())
def test_active_parameters(name: str, count: int):
    spec = model_spec(experiment(f"model={name}").model)
    assert spec is not None
    assert spec.active_parameters == count


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama2_70b", (4096, 1e4, "none", 1, 4096)),
        ("llama3_8b", (8192, 5e5, "none", 1, 8192)),
        ("llama3_1_8b", (131072, 5e5, "llama3", 8, 8192)),
        ("llama3_405b", (131072, 5e5, "llama3", 8, 8192)),
        ("llama3_2_1b", (131072, 5e5, "llama3", 32, 8192)),
    ],
)
def test_context_and_rope(name: str, expected: tuple[object, ...]):
    model = llama(f"model={name}")
    rope = model.rope
    assert (model.context, rope.theta, rope.scaling, rope.factor, rope.original_context) == expected
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1, 4)


@pytest.mark.parametrize(
    ("name", "seq_len", "remedy"),
    [
        ("llama3_8b", 32768, "model.rope.scaling=yarn model.rope.factor=4"),
        ("qwen3_30b_a3b", 81920, "model.rope.scaling=yarn model.rope.factor=2"),
        ("deepseek_v3_671b", 327680, "model.rope.factor=80"),
        ("gpt_oss_20b", 262144, "model.rope.factor=64"),
        ("llama3_2_1b", 262144, "model.rope.factor=64 model.context=262144"),
    ],
)
def test_a_published_context_is_exceeded_by_a_declared_scaling_alone(name: str, seq_len: int, remedy: str):
    published = experiment(f"model={name}").model
    assert list(exceeds_context(published, published.context)) == []
    (found,) = exceeds_context(published, seq_len)
    assert f"the context of {published.name} is {published.context} tokens" in found.reason
    assert f"or {remedy}" in found.remedy
    assert list(exceeds_context(experiment(f"model={name}", *remedy.split()).model, seq_len)) == []


@pytest.mark.parametrize("name", ["llama_debug", "qwen3_moe_debug", "deepseek_debug"])
def test_a_debug_model_has_no_limit_unless_it_is_given(name: str):
    words = [f"model={name}", "training.seq_len=8192"]
    assert list(exceeds_context(experiment(*words).model, 8192)) == []
    (found,) = exceeds_context(experiment(*words, "model.context=4096").model, 8192)
    assert "4096 tokens" in found.reason


def test_the_debug_model_is_small_and_grouped():
    model = llama("model=llama_debug")
    assert 100_000 < parameters("llama_debug") < 1_000_000
    assert model.kv_heads < model.heads


def test_names_tell_the_models_apart():
    names = [experiment(f"model={name}").model.name for name in PUBLISHED]
    assert len(set(names)) == len(names) - 1  # llama3_405b is another name of llama3_1_405b
