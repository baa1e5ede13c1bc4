"""`training.loss_chunk_tokens=auto` on CUDA, for built-in and foreign models and objectives, built on fake ranks."""

from dataclasses import replace

import pytest
from torch import Tensor

from tests.config.composing import experiment
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import LOSS_CHUNK_TOKENS, ResolvedLayout, resolve_layout
from titan_exp.data.batch import Batch
from titan_exp.plan.check_user_code import check_user_code
from titan_exp.plan.extrapolate.eligibility import small_run
from titan_exp.plan.trace.trace_step import fake_rank
from titan_exp.trainer.objective import LanguageModeling, Loss

OWN = "tests.trainer.own_objective.LogitStatistics"


class Reports(LanguageModeling):
    """A user's objective that leaves the loss alone."""


class Halved(LanguageModeling):
    """A user's objective that reads whole logits."""

    def loss(self, logits: Tensor, batch: Batch) -> Loss:
        return super().loss(logits / 2, batch)


def planned(*overrides: str) -> Experiment:
    on_gpus = ("cluster.device=cuda", "cluster.gpus_per_node=1", "model.attention_backend=math")
    return resolve_layout(experiment(*on_gpus, *overrides), 1)


def chunk(run: Experiment, rank: int = 0) -> int | None:
    with fake_rank(run, rank) as fake:
        objective = fake.state.model.objective
        assert isinstance(objective, LanguageModeling)
        return objective.chunk_tokens


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], LOSS_CHUNK_TOKENS),
        ([f"training.objective={__name__}.Reports"], LOSS_CHUNK_TOKENS),
        ([f"training.objective={OWN}"], None),
        (["model.architecture=tests.models.own_model.Bigram"], None),
        (["cluster.device=cpu"], None),
    ],
)
def test_models_and_objectives_that_take_whole_logits_keep_them(overrides: list[str], expected: int | None):
    assert chunk(planned(*overrides)) == expected


def test_shards_of_the_vocabulary_are_for_objectives_that_take_them():
    whole = (f"training.objective={__name__}.Halved", "parallelism.tp=2")
    for build in (check_user_code, chunk):
        with pytest.raises(UserError, match=r"loss_parallel=true: \S+Halved has its own loss"):
            build(planned(*whole))
    for takes in (
        (*whole, "parallelism.loss_parallel=false"),
        (f"training.objective={__name__}.Reports", whole[1]),
        (f"training.objective={OWN}", whole[1]),
    ):
        check_user_code(planned(*takes))
        chunk(planned(*takes))


def test_every_rank_and_the_extrapolated_run_have_the_same():
    run = planned("parallelism.pp=2", "parallelism.dp_shard=2", "training.micro_batch_size=1")
    world = ResolvedLayout.of(run).world_size
    small = small_run(run, [1, 1], 1, replace(run.activation_checkpoint), pp=2)
    assert {chunk(run, rank) for rank in range(world)} == {chunk(small)} == {LOSS_CHUNK_TOKENS}
