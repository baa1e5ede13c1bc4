"""Promise 1 for hybrids, whose linear attention hands a state from token to token: one curve in every layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.runs import LINES, assert_same_curve, remembered, train
from tests.parity.test_quantized import assert_same_recipe
from tests.patching import patch

NEXT, DENSE, OLMO, KIMI = (
    f"model={name}_debug optimizer.lr=1e-3 model.init_std=0.05"
    for name in ("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear")
)
LINED = " ".join(LINES)
EXPERIMENTS = {
    "next": NEXT,
    "next_documents": f"{NEXT} {LINED}",
    "dense": f"{DENSE} model.layers=2 model.linear_attention.full_every=2",
    "dense_documents": f"{DENSE} {LINED}",
    "experts_documents": f"model=qwen3_5_moe_debug optimizer.lr=1e-3 model.init_std=0.05 {LINED}",
    "olmo": OLMO,
    "olmo_documents": f"{OLMO} {LINED}",
    "kimi": KIMI,
    "kimi_documents": f"{KIMI} {LINED}",
}
WHOLE = "parallelism.sequence_parallel=false"
COMPILED = "compile=blocks compile.backend=aot_eager"


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


def case(family: str, experiment: str, layout: str, *marks: pytest.MarkDecorator):
    return pytest.param(experiment, layout, marks=[pytest.mark.proves(family, "layout"), *marks])


@pytest.mark.parametrize(
    ("experiment", "layout"),
    [
        case("qwen3_next", "next_documents", "parallelism.dp_shard=2 training.micro_batch_size=2"),
        case("qwen3_next", "next", "activation_checkpoint=full training.micro_batch_size=4"),
        case("qwen3_next", "next_documents", f"activation_checkpoint=selective {COMPILED}"),
        case("qwen3_next", "next_documents", "parallelism.tp=2", pytest.mark.day),
        case("qwen3_next", "next", f"parallelism.tp=2 {WHOLE}"),
        case("qwen3_next", "next", "parallelism.dp_shard=2 parallelism.ep=2"),
        case("qwen3_next", "next_documents", "parallelism.pp=2 parallelism.pp_schedule=Interleaved1F1B"),
        case("qwen3_next", "next_documents", "parallelism.cp=2 parallelism.cp_method=allgather"),
        case("qwen3_5", "dense_documents", f"parallelism.tp=2 parallelism.dp_shard=2 {COMPILED}"),
        case("qwen3_5", "dense_documents", "parallelism.cp=2 parallelism.tp=2 parallelism.cp_method=ring"),
        case("qwen3_5", "dense", "parallelism.pp=2"),
        case("qwen3_5_moe", "experts_documents", "parallelism.tp=2 parallelism.ep=2"),
        case("qwen3_5_moe", "experts_documents", f"parallelism.cp=2 activation_checkpoint=selective {COMPILED}"),
        case("olmo_hybrid", "olmo_documents", "parallelism.tp=2"),
        case("olmo_hybrid", "olmo", f"parallelism.tp=4 {WHOLE}"),
        case("olmo_hybrid", "olmo_documents", "parallelism.cp=2 parallelism.cp_method=ulysses"),
        # Four decay rates, which are not sharded over eight ranks.
        case("olmo_hybrid", "olmo_documents", "parallelism.tp=2 parallelism.dp_shard=4"),
        case("olmo_hybrid", "olmo", f"parallelism.pp=2 activation_checkpoint=full {COMPILED}"),
        case("kimi_linear", "kimi_documents", "parallelism.tp=2"),
        case("kimi_linear", "kimi", f"parallelism.tp=2 {WHOLE} parallelism.ep=2"),
        case("kimi_linear", "kimi_documents", "parallelism.cp=2 parallelism.cp_method=ring"),
        case("kimi_linear", "kimi", "parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble"),
        case("kimi_linear", "kimi_documents", f"activation_checkpoint=full {COMPILED}"),
    ],
)
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, experiment: str, layout: str):
    words = [*EXPERIMENTS[experiment].split(), *layout.split()]
    assert_same_curve(train(tmp_path / "many", *words), one_device(experiment))


def require_fp32_decays() -> None:
    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: Any, x: Any) -> Any:
            assert {self.of_rank(name).dtype for name in ("log_rate", "bias")} == {torch.float32}
            assert x.dtype == torch.bfloat16
            return forward(self, x)

        return checked

    patch("titan_exp.models.blocks.mixers.ForgetGate.forward", make)


@pytest.mark.parametrize("layout", ["parallelism.dp_shard=2", "parallelism.dp_shard=2 parallelism.tp=2"])
def test_decays_stay_in_fp32_under_data_parallelism(tmp_path: Path, layout: str):
    words = [*KIMI.split(), "training.mixed_precision=bf16", "training.steps=3", *layout.split()]
    found = train(tmp_path / "many", *words, mutate=require_fp32_decays)
    expected = train(tmp_path / "one", *words[:4])
    assert found.loss == pytest.approx(expected.loss, rel=2e-3)
    assert found.disputed == []


@pytest.mark.night
@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        pytest.param(NEXT, "float8_rowwise", marks=pytest.mark.proves("qwen3_next", "fp8")),
        pytest.param(NEXT, "mxfp8", marks=pytest.mark.proves("qwen3_next", "fp8")),
        pytest.param(DENSE, "float8_rowwise_gw_hp", marks=pytest.mark.proves("qwen3_5", "fp8")),
        pytest.param(OLMO, "float8_rowwise", marks=pytest.mark.proves("olmo_hybrid", "fp8")),
        pytest.param(KIMI, "float8_tensorwise", marks=pytest.mark.proves("kimi_linear", "fp8")),
    ],
)
def test_quantized_linears_are_those_of_one_device(tmp_path: Path, words: str, recipe: str):
    # Larger weights and steps would enlarge what roundings of sums flip.
    own = [words.split(maxsplit=1)[0], f"quantization={recipe}", "training.steps=2", "optimizer.lr=5e-4"]
    expected = train(tmp_path / "one", *own)
    assert_same_recipe(train(tmp_path / "many", *own, "parallelism.tp=2"), expected)
