"""Promise 1 for parametrizations and parameter groups: scales and frozen parameters are those of one device."""

from pathlib import Path

import pytest

from tests.parity.runs import LINES, Curve, assert_same_curve, train

SCALED = [
    *(
        "model=llama_debug",
        "parametrization=completep",
        "parametrization.base_width=16",
        "parametrization.base_depth=2",
    ),
    *("parametrization.base_head_dim=8", "+optimizer.groups.ends={match:[head,norm.weight],betas:[0.8,0.9]}", *LINES),
]
EXPERTS = [
    *("model=deepseek_debug", "parametrization=mup", "parametrization.base_width=16", "training.steps=3"),
    *("parametrization.fixed=[kv_lora_rank]", "parametrization.output_multiplier=2"),
]
FROZEN = [
    *("model=qwen3_moe_debug", "training.steps=3"),
    "+optimizer.groups.still={match:[embedding,blocks.0.*,*.router.weight,*.q_norm.weight,blocks.2.*.down.weight],"
    "frozen:true}",
]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return train(tmp_path_factory.mktemp("scaled"), *SCALED)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return train(tmp_path_factory.mktemp("experts"), *EXPERTS)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return train(tmp_path_factory.mktemp("frozen"), *FROZEN)


def nightly(*layouts: str) -> list[object]:
    return [pytest.param(layout, marks=pytest.mark.night) for layout in layouts]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("parallelism.tp=2 parallelism.dp_shard=2", marks=pytest.mark.day),
        *nightly("parallelism.pp=2 training.micro_batch_size=1", "parallelism=hsdp", "parallelism.cp=2"),
    ],
)
def test_scales_are_the_same_in_every_layout(tmp_path: Path, scaled: Curve, layout: str):
    assert_same_curve(train(tmp_path, *SCALED, *layout.split()), scaled)


@pytest.mark.parametrize("layout", nightly("parallelism.dp_shard=2 parallelism.ep=2", "parallelism.tp=2"))
def test_scales_of_experts_and_latents(tmp_path: Path, experts: Curve, layout: str):
    assert_same_curve(train(tmp_path, *EXPERTS, *layout.split()), experts)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("parallelism.dp_shard=2 parallelism.ep=2", marks=pytest.mark.day),
        *nightly(
            *("parallelism.tp=2", "parallelism.cp=2", "parallelism=ddp parallelism.dp_replicate=2"),
            "activation_checkpoint=full parallelism.dp_shard=2",
        ),
    ],
)
def test_frozen_parameters_in_every_layout(tmp_path: Path, frozen: Curve, layout: str):
    assert_same_curve(train(tmp_path, *FROZEN, *layout.split()), frozen)


def test_frozen_parameters_keep_their_initial_values(tmp_path: Path, frozen: Curve):
    initial = train(tmp_path, *FROZEN, "training.steps=0", "checkpoint=sync").weights
    kept = {name for name, weight in initial.items() if weight.equal(frozen.weights[name])}
    assert {"embedding.weight", "blocks.0.attention.qkv.weight", "blocks.3.feed_forward.router.weight"} <= kept
    assert {"head.weight", "blocks.1.attention.qkv.weight", "blocks.3.attention.k_norm.weight"} & kept == set()
