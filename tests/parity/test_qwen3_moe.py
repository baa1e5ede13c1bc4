"""Promise 1 for experts: routing, balance losses and biases are the same in every layout and for every micro-batch."""

from pathlib import Path

import pytest

from tests.parity.runs import LINES, assert_same_curve, remembered, train
from tests.parity.test_continued import assert_continues, continued

MOE = "model=qwen3_moe_debug"
V3_ROUTER = (
    "model.moe.score=sigmoid model.moe.router_bias=true model.moe.groups=4 model.moe.active_groups=2 "
    "model.moe.group_score=top2_sum model.moe.scale=2.5 model.moe.shared_experts=1 model.moe.balance.bias_rate=1e-2"
)
EXPERIMENTS = {
    "global": MOE,
    "sequence": f"{MOE} {V3_ROUTER} model.moe.balance.loss=sequence model.moe.balance.coefficient=1e-2",
    "switch": " ".join([MOE, "model.moe.balance.loss=switch model.moe.balance.coefficient=1e-2", *LINES]),
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


@pytest.mark.proves("qwen3_moe", "layout")
@pytest.mark.parametrize(
    ("experiment", "layout"),
    [
        ("global", "parallelism.dp_shard=2 training.micro_batch_size=2"),
        ("sequence", "training.micro_batch_size=2 activation_checkpoint=full"),
        ("sequence", "parallelism.cp=2 activation_checkpoint=selective"),
        ("switch", "parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble training.micro_batch_size=1"),
        ("switch", "parallelism.cp=2 parallelism.cp_method=allgather compile=blocks compile.backend=aot_eager"),
        ("global", "parallelism.cp=2 parallelism.dp_shard=2 parallelism.cp_method=ulysses"),
        ("global", "parallelism.dp_replicate=2 parallelism.dp_shard=2 activation_checkpoint=full"),
    ],
)
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, experiment: str, layout: str):
    found = train(tmp_path, *EXPERIMENTS[experiment].split(), *layout.split())
    assert_same_curve(found, one_device(experiment))


@pytest.mark.night
def test_resumes_in_another_layout(tmp_path: Path):
    words = EXPERIMENTS["sequence"].split()
    whole, changed = continued(tmp_path, [*words, "parallelism.dp_shard=2"], [*words, "parallelism.pp=2"])
    assert_continues(whole, changed)
