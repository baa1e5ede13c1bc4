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


EVERY = {
    "adamw": "",
    "adamw, foreach": "optimizer.implementation=foreach",
    "adamw, bf16": "optimizer.state_precision=bf16",
    "adamw, int8": "optimizer.state_precision=int8",
    "adamw, fp8": "optimizer.state_precision=fp8",
    "sgd": "optimizer=sgd",
    "lion": "optimizer=lion",
    "lion, bf16": "optimizer=lion optimizer.state_precision=bf16",
    "schedule-free AdamW": "optimizer=schedule_free_adamw lr_schedule=constant",
    "adafactor": "optimizer=adafactor",
    "muon": "optimizer=muon",
    "muon, heads in bf16": "optimizer=muon optimizer.split_attention=head optimizer.precision=bf16",
    "muon, clipped": "optimizer=muon optimizer.qk_clip=0.1",
    "dion": "optimizer=dion",
    "soap": "optimizer=soap",
    # Without a larger epsilon every power iteration turns rounding into larger steps.
    "soap, iterated": "optimizer=soap optimizer.precondition_every=2 optimizer.eps=1e-4",
    "of torch": "optimizer.name=torch.optim.RMSprop +optimizer.options.momentum=0.5",
}
"""Words of every optimizer and of every precision of its state."""
ROUNDED = ("adamw, bf16", "adamw, int8", "adamw, fp8", "lion", "lion, bf16", "muon, heads in bf16", "of torch")
"""Optimizers that turn rounding into a larger step here and there: by the sign of a gradient, by the neighbour that a
moment is rounded to, or by an epsilon that this test does not enlarge."""


def rate_of(name: str) -> str:
    """Learning rate at which the weights move in ten steps."""
    return {"sgd": "optimizer.lr=0.1", "adafactor": "optimizer.lr=0.03"}.get(name, "optimizer.lr=1e-3")


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        pytest.param("muon", "parallelism.dp_shard=2", "parallelism.tp=2", marks=pytest.mark.day),
        pytest.param("schedule-free AdamW", "parallelism.tp=2", "parallelism.dp_shard=2", marks=pytest.mark.night),
        *(
            pytest.param(name, "parallelism.tp=2 parallelism.dp_shard=2", HALVES, marks=pytest.mark.night)
            for name in EVERY
        ),
    ],
)
def test_a_run_goes_on_in_another_layout(tmp_path: Path, name: str, before: str, after: str):
    own = [*EVERY[name].split(), rate_of(name)]
    whole, changed = continued(tmp_path, [*own, *before.split()], [*own, *after.split()])
    if name not in ROUNDED:
        assert_continues(whole, changed)
        return
    assert [row["step"] for row in changed.rows] == [6, 7, 8, 9, 10]
    assert changed.loss == pytest.approx(whole.loss[5:], rel=2e-5)


@pytest.mark.night
@pytest.mark.parametrize("name", ["muon", "dion", "soap", "adafactor"])
def test_stacks_of_experts_go_on_in_another_layout(tmp_path: Path, name: str):
    """From whole experts on each rank to shards of all, so that an expert's state moves to other owners."""
    own = ["model=qwen3_moe_debug", *EVERY[name].split(), rate_of(name), "training.seq_len=32"]
    before = "parallelism.dp_shard=4 parallelism.ep=2 training.micro_batch_size=1"
    after = "parallelism.tp=2 parallelism.etp=2 parallelism.dp_shard=2"
    assert_continues(*continued(tmp_path, [*own, *before.split()], [*own, *after.split()]))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("schedule-free AdamW", "", marks=pytest.mark.day),
        *(pytest.param(name, "parallelism.dp_shard=2", marks=pytest.mark.night) for name in EVERY),
    ],
)
def test_a_run_resumes_bitwise(tmp_path: Path, name: str, layout: str):
    own = [*EVERY[name].split(), *layout.split(), rate_of(name), "training.seq_len=32"]
    whole, changed = continued(tmp_path, own, own)
    assert changed.loss == whole.loss[5:]
    assert all(torch.equal(changed.weights[name], weight) for name, weight in whole.weights.items())


def optimizers_begin_again() -> None:
    """Every tensor of the optimizer's state keeps its initial value."""
    patch("titan_exp.checkpoint.optimizer_state.is_optional", lambda _: lambda key: True)
    patch(
        "titan_exp.checkpoint.storage_reader.tensor_shapes",
        lambda original: (
            lambda path: {key: shape for key, shape in original(path).items() if not key.startswith("optimizer.")}
        ),
    )


@pytest.mark.night
@pytest.mark.parametrize("name", EVERY)
def test_state_that_is_not_restored_is_noticed(tmp_path: Path, name: str):
    own = [*EVERY[name].split(), rate_of(name), "training.seq_len=32"]
    whole, changed = continued(tmp_path, own, own, mutate=optimizers_begin_again)
    assert changed.loss[1:] != pytest.approx(whole.loss[6:], rel=2e-5)


@pytest.mark.night
def test_a_role_that_depends_on_the_layout_is_noticed(tmp_path: Path, roles_on_one_device: Curve):
    layout = ["parallelism.dp_shard=2", "parallelism.ep=2"]
    with pytest.raises(AssertionError):
        assert_same_curve(
            train(tmp_path, *ROLES, *layout, mutate=sharded_experts_are_taken_for_matrices), roles_on_one_device
        )
