"""Promise 1 for expert parallelism: wherever experts and tokens are, the curve stays."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.parity.runs import LINES, Curve, assert_same_curve, remembered, train
from tests.parity.test_continued import assert_continues, continued
from tests.patching import patch
from titan_exp.models.blocks.linear import InitSpec

MOE = "model=qwen3_moe_debug training.steps=6"
V3 = (
    "model.moe.score=sigmoid model.moe.router_bias=true model.moe.groups=4 model.moe.active_groups=2 "
    "model.moe.group_score=top2_sum model.moe.scale=2.5 model.moe.shared_experts=1 model.moe.balance.bias_rate=1e-2 "
    "model.moe.balance.loss=sequence model.moe.balance.coefficient=1e-2"
)
# One step of AdamW with so large an epsilon that the update is 100 times the gradient, beside small weights.
GRADIENTS = (
    "training.steps=1 optimizer.lr=1e8 optimizer.eps=1e6 optimizer.weight_decay=0 training.max_grad_norm=null "
    "lr_schedule=constant"
)
ODD = "model.moe.experts=6 model.moe.active_experts=1 model.moe.ffn_dim=192"
EXPERIMENTS = {
    "plain": MOE,
    "gradients": f"{MOE} {GRADIENTS}",
    "v3": " ".join([MOE, V3, *LINES]),
    # Six experts, of which a token uses one, of six groups of channels.
    "odd": f"{MOE} {ODD}",
    "three": f"{MOE} {ODD} training.global_batch_size=12",
}

DP2, DP4, TP2, CP2 = "parallelism.dp_shard=2", "parallelism.dp_shard=4", "parallelism.tp=2", "parallelism.cp=2"
EP2, EP4, ETP2 = "parallelism.ep=2", "parallelism.ep=4", "parallelism.etp=2"
WHOLE_TOKENS = "parallelism.sequence_parallel=false"
PP2 = "parallelism.pp=2 training.micro_batch_size=1"
HSDP = "parallelism.dp_replicate=2 parallelism.dp_shard=2"


@pytest.fixture(scope="module")
def one_device(tmp_path_factory) -> Callable[[str], Curve]:
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


DAY = [
    ("gradients", f"{TP2} {DP2} {ETP2} {EP2}"),
    ("plain", f"{PP2} {DP2} {EP2}"),
]
NIGHT = [
    ("gradients", f"{TP2} {DP2} {EP4}"),
    ("v3", f"{TP2} {DP2} {EP2} {WHOLE_TOKENS}"),
    ("v3", f"{DP4} {EP2} training.micro_batch_size=1"),
    ("plain", f"{DP2} {EP2}"),
    ("plain", f"{DP4} {EP4} parallelism.reshard_after_forward=always"),
    ("gradients", f"{DP4} {EP2}"),
    ("gradients", TP2),
    ("gradients", f"{TP2} {WHOLE_TOKENS}"),
    ("v3", f"{TP2} {EP2} training.micro_batch_size=2"),
    ("v3", f"{TP2} {DP2} {EP2}"),
    ("gradients", f"{TP2} {ETP2} {WHOLE_TOKENS}"),
    ("v3", f"{TP2} {ETP2} {DP4} {EP2}"),
    ("odd", f"{TP2} {ETP2} {CP2} {EP2}"),
    ("odd", f"{DP2} {CP2} {EP2}"),
    ("three", "parallelism.dp_shard=3 parallelism.ep=3"),
    # Six experts are divided unevenly among four shards.
    ("three", f"parallelism.dp_shard=2 {TP2}"),
    ("odd", f"{DP4} {EP2} parallelism.reshard_after_forward=never"),
    ("odd", "parallelism.dp_shard=8 parallelism.ep=2"),
    ("v3", f"{CP2} {EP2}"),
    ("v3", f"{CP2} {TP2} {DP2} parallelism.ep=8"),
    ("gradients", f"{HSDP} {EP2}"),
    ("v3", f"{HSDP} {TP2} {EP2}"),
    ("v3", f"{HSDP} {TP2} {ETP2} {EP2}"),
    ("plain", f"{PP2} {TP2} {EP2} {WHOLE_TOKENS}"),
    ("v3", f"{PP2} {DP2} {EP2} parallelism.pp_schedule=Interleaved1F1B"),
    ("plain", f"{DP2} {EP2} parallelism.cpu_offload=true"),
    ("plain", f"{DP4} {EP2} parallelism.prefetch_blocks=3 parallelism.reshard_after_forward=always"),
    ("plain", f"{DP4} {EP2} training.loss_chunk_tokens=37"),
]


@pytest.mark.proves("qwen3_moe", "layout")
@pytest.mark.parametrize(
    ("experiment", "layout"),
    [*(pytest.param(*case, marks=pytest.mark.day) for case in DAY)]
    + [pytest.param(*case, marks=pytest.mark.night) for case in NIGHT],
)
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, experiment: str, layout: str):
    expected = one_device(experiment)
    found = train(tmp_path, *EXPERIMENTS[experiment].split(), *layout.split())
    assert_same_curve(found, expected)


UNUSED = "model=qwen3_moe_debug training.steps=1 lr_schedule=constant optimizer.weight_decay=10"
"""Rounding would decide between experts in later steps."""


def routers_begin_at_zero() -> None:
    """All scores are equal, so every token chooses the first experts."""
    patch("titan_exp.models.blocks.feed_forward.Router.init_spec", lambda _: lambda self: {"weight": InitSpec("zeros")})


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(f"{DP4} {EP4}", marks=pytest.mark.night),
        pytest.param(f"{TP2} {DP2} {EP4} {WHOLE_TOKENS}", marks=pytest.mark.night),
        pytest.param(f"{TP2} {ETP2} {DP2} {EP2}", marks=pytest.mark.night),
    ],
)
def test_ranks_of_unused_experts_have_zero_gradients(tmp_path: Path, layout: str):
    """Weights decay at a gradient of zero, and would stay without one."""
    alone = train(tmp_path / "one", *UNUSED.split(), mutate=routers_begin_at_zero)
    found = train(tmp_path / "many", *UNUSED.split(), *layout.split(), mutate=routers_begin_at_zero)
    assert_same_curve(found, alone)
    # Each of four layers leaves five of its eight experts without a token.
    assert alone.rows[0]["experts/dead"] == 20


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(f"{DP2} {EP2}", TP2, marks=pytest.mark.night),
        pytest.param(f"{TP2} {DP2} {EP4}", f"{TP2} {ETP2}", marks=pytest.mark.night),
        pytest.param(f"{TP2} {ETP2} {DP2} {EP2}", "", marks=pytest.mark.night),
    ],
)
def test_resumes_with_other_expert_parallelism(tmp_path: Path, before: str, after: str):
    words = ["model=qwen3_moe_debug", *V3.split()]
    whole, changed = continued(tmp_path, [*words, *before.split()], [*words, *after.split()])
    assert_continues(whole, changed)


@pytest.mark.night
def test_resumes_bitwise_in_the_same_layout(tmp_path: Path):
    words = ["model=qwen3_moe_debug", *V3.split(), *f"{TP2} {DP2} {EP2}".split()]
    whole, changed = continued(tmp_path, words, words)
    assert changed.loss == whole.loss[5:]
    assert changed.grad_norm == whole.grad_norm[5:]
    for name, weight in whole.weights.items():
        assert torch.equal(changed.weights[name], weight), name
