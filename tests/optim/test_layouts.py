"""Layout invariance of every optimizer: weights and state after a few steps are those of one device."""

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from tests.optim.updates import Tensors, assert_same, experiment_of, optimizer_config, updated
from tests.parity.drawn import draw
from tests.parity.test_drawn import MOST_RANKS, seeds
from tests.patching import patch
from titan_exp.ops.autograd import local_tensor

OPTIMIZERS = {
    "muon": ["optimizer=muon"],
    "muon, heads": ["optimizer=muon", "optimizer.split_attention=head", "optimizer.scale=original"],
    "muon, fused": ["optimizer=muon", "optimizer.split_attention=fused", "optimizer.split_feed_forward=fused"],
    "dion": ["optimizer=dion"],
    "soap": ["optimizer=soap", "optimizer.precondition_every=2"],
    "soap, heads": ["optimizer=soap", "optimizer.split_attention=head", "optimizer.sides=smaller"],
    "lion": ["optimizer=lion"],
    "lion, bf16": ["optimizer=lion", "optimizer.state_precision=bf16"],
    "adafactor": ["optimizer=adafactor"],
    "schedule-free AdamW": ["optimizer=schedule_free_adamw"],
    "sgd": ["optimizer=sgd", "optimizer.lr=0.1"],
    "adamw": ["optimizer=adamw"],
    "adamw, bf16": ["optimizer=adamw", "optimizer.state_precision=bf16"],
}
BLOCKS = {f"adamw, {name}": ["optimizer=adamw", f"optimizer.state_precision={name}"] for name in ("int8", "fp8")}
"""Optimizers that refuse layouts in which a block of a row would lie on two ranks."""
DENSE, EXPERTS, LATENT = "model=llama_debug", "model=qwen3_moe_debug", "model=deepseek_debug"
LAYOUTS = [
    pytest.param(f"{DENSE} parallelism.tp=2 parallelism.dp_shard=2", marks=pytest.mark.night),
    pytest.param(f"{EXPERTS} parallelism.dp_shard=2 parallelism.tp=2 parallelism.etp=2", marks=pytest.mark.day),
    pytest.param(f"{DENSE} parallelism.dp_shard=3 training.global_batch_size=12", marks=pytest.mark.night),
    pytest.param(f"{DENSE} parallelism=hsdp parallelism.tp=2", marks=pytest.mark.night),
    pytest.param(f"{DENSE} parallelism=ddp", marks=pytest.mark.night),
    pytest.param(f"{DENSE} parallelism.tp=4 parallelism.dp_shard=2", marks=pytest.mark.night),
    pytest.param(f"{DENSE} parallelism.pp=2 parallelism.dp_shard=2", marks=pytest.mark.night),
    pytest.param(f"{EXPERTS} parallelism.dp_shard=4 parallelism.ep=2", marks=pytest.mark.night),
    pytest.param(f"{EXPERTS} parallelism.dp_shard=3 training.global_batch_size=12", marks=pytest.mark.night),
    pytest.param(f"{LATENT} parallelism.dp_shard=2 parallelism.tp=2", marks=pytest.mark.night),
    pytest.param(f"{LATENT} parallelism.dp_shard=4 parallelism.ep=4", marks=pytest.mark.night),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "drawn_by" in metafunc.fixturenames:
        metafunc.parametrize("drawn_by", seeds(metafunc.config))


@cache
def one_device(*model: str) -> list[tuple[Tensors, Tensors]]:
    return updated(experiment_of(*model), [optimizer_config(*words) for words in OPTIMIZERS.values()])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_and_state_are_those_of_one_device(layout: str):
    model, *words = layout.split()
    assert_updates_of_one_device([model], words)


@pytest.mark.night
def test_ranks_without_experts_update_what_they_have():
    """Two experts over three ranks: one has none."""
    words = ["parallelism.dp_shard=3", "training.global_batch_size=12"]
    assert_updates_of_one_device([EXPERTS, "model.moe.experts=2", "model.moe.active_experts=1"], words)


@pytest.mark.night
def test_updates_and_state_in_a_drawn_layout_are_those_of_one_device(drawn_by: str):
    drawn = draw(random.Random(drawn_by), MOST_RANKS)
    print(f"the run: {drawn}")
    assert_updates_of_one_device(drawn.experiment, drawn.layout)


def assert_updates_of_one_device(model: Sequence[str], layout: Sequence[str]) -> None:
    found = updated(experiment_of(*model, *layout), [optimizer_config(*words) for words in OPTIMIZERS.values()])
    for name, in_layout, expected in zip(OPTIMIZERS, found, one_device(*model), strict=True):
        try:
            assert_same(in_layout, expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_a_restored_optimizer_continues_bitwise():
    configs = [optimizer_config(*words) for words in (OPTIMIZERS | BLOCKS).values()]
    experiment = experiment_of(DENSE, "parallelism.tp=2")
    for found, expected in zip(
        updated(experiment, configs, restored_after=2), updated(experiment, configs), strict=True
    ):
        assert_same(found, expected, exact=True)


def muon_orthogonalizes_local_shards() -> None:
    patch(
        "titan_exp.optim.matrices.ShardedMatrix.of",
        lambda original: classmethod(lambda _, tensor: original(local_tensor(tensor))),
    )


def muon_joins_shards_in_the_order_of_the_mesh() -> None:
    patch(
        "titan_exp.optim.matrices.ShardedMatrix._applied",
        lambda _: property(lambda self: list(self.axes)),
    )


def muon_updates_come_back_from_another_owner() -> None:
    patch(
        "titan_exp.optim.muon.OwnerGroup.scatter",
        lambda original: (
            lambda self, owned, shapes, owners, like: original(
                self, {index: found.flip(0) for index, found in owned.items()}, shapes, owners, like
            )
        ),
    )


def soap_computes_bases_of_local_shards() -> None:
    patch(
        "titan_exp.optim.matrices.ShardedMatrix.of",
        lambda original: classmethod(lambda _, tensor: original(local_tensor(tensor))),
    )


def soap_permutes_nothing_with_its_basis() -> None:
    """The second moment stays where the eigenvectors before were."""
    patch(
        "titan_exp.optim.soap.iterated_basis",
        lambda original: (
            lambda covariance, basis: (
                original(covariance, basis)[0],
                torch.arange(basis.shape[-1]).expand(len(basis), -1),
            )
        ),
    )


def dion_sums_nothing_over_columns() -> None:
    patch("titan_exp.optim.dion.COLUMNS", lambda _: -9)


def adafactor_keeps_local_means() -> None:
    patch("titan_exp.optim.adafactor.sum_over_shards", lambda _: lambda sums: None)


MUTATIONS = [
    ("muon", muon_orthogonalizes_local_shards),
    ("muon", muon_joins_shards_in_the_order_of_the_mesh),
    ("muon", muon_updates_come_back_from_another_owner),
    ("soap", soap_computes_bases_of_local_shards),
    ("soap", soap_permutes_nothing_with_its_basis),
    ("dion", dion_sums_nothing_over_columns),
    ("adafactor", adafactor_keeps_local_means),
]


@pytest.mark.night
@pytest.mark.parametrize(("name", "mutate"), MUTATIONS, ids=lambda case: getattr(case, "__name__", case))
def test_mutations_are_noticed(name: str, mutate):
    experiment = experiment_of(DENSE, "parallelism.tp=2", "parallelism.dp_shard=2")
    expected = one_device(DENSE)[list(OPTIMIZERS).index(name)]
    with pytest.raises(AssertionError):
        assert_same(updated(experiment, [optimizer_config(*OPTIMIZERS[name])], mutate=mutate)[0], expected)
