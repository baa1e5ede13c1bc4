"""Promise 1 for GPT-OSS: sinks, windows and biases of experts give the same curve in every layout."""

from pathlib import Path

import pytest

from tests.parity.runs import LINES, assert_same_curve, remembered, train
from tests.parity.test_continued import assert_continues, continued
from tests.parity.test_quantized import assert_same_recipe

GPT_OSS = "model=gpt_oss_debug optimizer.lr=1e-3"
COMPILED = "compile=blocks compile.backend=aot_eager"
EXPERIMENTS = {
    # Larger sinks and biases. With still larger weights the limits amplify rounding, in every layout.
    "plain": f"{GPT_OSS} model.init_std=0.05",
    # Fewer heads, and biases of fewer numbers, than ranks divide.
    "few heads": f"{GPT_OSS} model.init_std=0.05 model.heads=2 model.kv_heads=2 model.head_dim=6",
    "documents": " ".join([GPT_OSS, *LINES]),
    "limited": f"{GPT_OSS} model.swiglu_limit=0.1",
    # One step of AdamW, whose update is 100 times the gradient: later ones amplify the rounding of small gradients.
    "limited gradients": "model=gpt_oss_debug model.swiglu_limit=0.1 training.steps=1 optimizer.lr=1e8 "
    "optimizer.eps=1e6 optimizer.weight_decay=0 training.max_grad_norm=null lr_schedule=constant",
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


@pytest.mark.proves("gpt_oss", "layout")
@pytest.mark.parametrize(
    ("experiment", "layout"),
    [
        pytest.param("plain", "parallelism.cp=2 parallelism.cp_method=ring parallelism.tp=2 parallelism.etp=2",
                     marks=pytest.mark.day),
        *(
            pytest.param(experiment, layout, marks=pytest.mark.night)
            for experiment, layout in (
                ("few heads", "parallelism.tp=2 parallelism.dp_shard=4"),
                ("plain", f"parallelism.dp_shard=2 {COMPILED}"),
                ("plain", "parallelism.dp_replicate=2 training.micro_batch_size=2 activation_checkpoint=full"),
                ("plain", "parallelism.tp=2 parallelism.sequence_parallel=false"),
                ("plain", "parallelism.tp=4"),
                ("plain", "parallelism.tp=4 parallelism.dp_shard=4 parallelism.sequence_parallel=false"),
                ("few heads", f"parallelism.tp=2 parallelism.dp_shard=4 parallelism.etp=2 {COMPILED}"),
                ("documents", "parallelism.cp=2 parallelism.cp_method=allgather"),
                ("documents", "parallelism.cp=2 parallelism.cp_method=ulysses parallelism.dp_shard=2"),
                ("limited gradients", "parallelism.cp=4 parallelism.cp_method=ring"),
                ("plain", "parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble"),
                ("limited", "parallelism.pp=2 parallelism.tp=2 parallelism.etp=2 "
                            "parallelism.pp_schedule=InterleavedZeroBubble"),
                ("plain", "parallelism.dp_shard=2 parallelism.ep=2"),
                ("limited", "parallelism.dp_shard=4 parallelism.ep=2 activation_checkpoint=selective"),
                ("plain", "parallelism.tp=2 parallelism.ep=2"),
                ("plain", "parallelism.tp=2 parallelism.dp_shard=2 parallelism.ep=2 parallelism.etp=2"),
                ("documents", f"parallelism.pp=2 parallelism.cp=2 parallelism.ep=2 {COMPILED}"),
            )
        ),
    ],
)  # fmt: skip
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, experiment: str, layout: str):
    seconds = 360.0 if COMPILED in layout else 120.0  # four ranks compile for minutes on busy cores
    found = train(tmp_path / "many", *EXPERIMENTS[experiment].split(), *layout.split(), timeout=seconds)
    assert_same_curve(found, one_device(experiment))


@pytest.mark.proves("gpt_oss", "fp8")
@pytest.mark.night
@pytest.mark.parametrize("recipe", ["float8_rowwise", "mxfp8"])
def test_quantized_experts_with_bias_are_those_of_one_device(tmp_path: Path, recipe: str):
    words = [*GPT_OSS.split(), f"quantization={recipe}", "quantization.smallest_gemm=0", "training.steps=3"]
    expected = train(tmp_path / "one", *words)
    found = train(tmp_path / "many", *words, "parallelism.dp_shard=2", "parallelism.ep=2")
    assert_same_recipe(found, expected)


@pytest.mark.night
def test_resumes_in_another_layout(tmp_path: Path):
    words = GPT_OSS.split()
    etp = ["parallelism.tp=2", "parallelism.etp=2"]
    whole, changed = continued(tmp_path, [*words, *etp], [*words, "parallelism.dp_shard=2", "parallelism.ep=2"])
    assert_continues(whole, changed)
