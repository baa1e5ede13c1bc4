"""Promise 1 for optimizers: a user's in one file, values by role, and runs that continue in another layout."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.parity.runs import LINES, Curve, assert_same_curve, train
from tests.parity.test_continued import assert_continues, continued
from tests.patching import patch

OWN = ["optimizer.name=tests.optim.matrix_momentum", "+optimizer.momentum=0.8", "optimizer.lr=0.02", *LINES]
HALVES = "parallelism=hsdp training.micro_batch_size=1"
ROLES = [
    *("model=qwen3_moe_debug", "training.steps=3", "+optimizer.lr_scales={embedding:2.0,expert:0.25,vector:0.5}"),
    "+optimizer.weight_decays={expert:5.0,matrix:1.0}",
]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return train(tmp_path_factory.mktemp("one"), *OWN)


@pytest.mark.parametrize("layout", ["parallelism.tp=2", "parallelism.tp=2 parallelism.dp_shard=2"])
def test_matrices_are_updated_apart_in_every_layout(tmp_path: Path, one_device: Curve, layout: str):
    curve = train(tmp_path, *OWN, *layout.split())
    assert_same_curve(curve, one_device)
    name = "optimizer/largest_momentum"
    expected = [row[name] for row in one_device.rows]
    assert min(expected) > 0
    assert [row[name] for row in curve.rows] == pytest.approx(expected, rel=1e-4)


@pytest.fixture(scope="module")
def roles_on_one_device(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return train(tmp_path_factory.mktemp("roles"), *ROLES)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("parallelism.dp_shard=2 parallelism.ep=2", marks=pytest.mark.day),
        *(
            pytest.param(layout, marks=pytest.mark.night)
            for layout in (
                "parallelism.tp=2 parallelism.etp=2 optimizer.implementation=foreach",
                "parallelism.dp_shard=2 parallelism.tp=2 parallelism.ep=4",
                "parallelism.dp_shard=2 parallelism.cp=2 parallelism.ep=2 compile=blocks compile.backend=aot_eager",
                "parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble training.micro_batch_size=1 "
                "parallelism.dp_shard=2 parallelism.ep=2",
                "parallelism=ddp parallelism.dp_replicate=2",
            )
        ),
    ],
)
def test_roles_have_their_learning_rate_and_weight_decay_in_every_layout(
    tmp_path: Path, roles_on_one_device: Curve, layout: str
):
    assert_same_curve(train(tmp_path, *ROLES, *layout.split()), roles_on_one_device)


def sharded_experts_are_taken_for_matrices() -> None:
    patch(
        "titan_exp.optim.parameter_groups._role",
        lambda original: (
            lambda module, parameter: (
                "matrix" if isinstance(parameter, DTensor) and parameter.dim() > 2 else original(module, parameter)
            )
        ),
    )


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        pytest.param("muon", "parallelism.dp_shard=2", "parallelism.tp=2", marks=pytest.mark.day),
        pytest.param("schedule_free_adamw", "parallelism.tp=2", "parallelism.dp_shard=2", marks=pytest.mark.night),
        *(
            pytest.param(name, "parallelism.tp=2 parallelism.dp_shard=2", HALVES, marks=pytest.mark.night)
            for name in ("dion", "adafactor", "schedule_free_adamw", "soap")
        ),
    ],
)
def test_a_run_goes_on_in_another_layout(tmp_path: Path, optimizer: str, before: str, after: str):
    own = [f"optimizer={optimizer}", "optimizer.lr=1e-3"]
    whole, changed = continued(tmp_path, [*own, *before.split()], [*own, *after.split()])
    assert_continues(whole, changed)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("optimizer=schedule_free_adamw lr_schedule=constant", marks=pytest.mark.day),
        pytest.param("optimizer=soap optimizer.precondition_every=2 parallelism.dp_shard=2", marks=pytest.mark.night),
    ],
)
def test_a_run_resumes_bitwise(tmp_path: Path, words: str):
    own = [*words.split(), "optimizer.lr=1e-3", "training.seq_len=32"]
    whole, changed = continued(tmp_path, own, own)
    assert changed.loss == whole.loss[5:]
    assert all(torch.equal(changed.weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.night
def test_a_role_that_depends_on_the_layout_is_noticed(tmp_path: Path, roles_on_one_device: Curve):
    layout = ["parallelism.dp_shard=2", "parallelism.ep=2"]
    with pytest.raises(AssertionError):
        assert_same_curve(
            train(tmp_path, *ROLES, *layout, mutate=sharded_experts_are_taken_for_matrices), roles_on_one_device
        )
