"""Metrics of an objective, a model and an optimizer: the same in every layout, and seen by status and compare."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.runs import LINES, Curve, train
from titan_exp.cli.status import run as status_command
from titan_exp.compare.compared_metrics import choose_metrics
from titan_exp.compare.runs import read_run
from titan_exp.config.errors.user_error import UserError
from titan_exp.trainer.metrics import MetricReducer
from titan_exp.trainer.objective import LanguageModeling

OBJECTIVE = [
    "training.objective=tests.trainer.own_objective.LogitStatistics",
    *("training.steps=4", "training.z_loss=0.01", "training.global_batch_size=8", *LINES),
]
NAMES = ["objective/z_loss", "objective/logit_square", "objective/logit_max"]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return train(tmp_path_factory.mktemp("one"), *OBJECTIVE, "training.micro_batch_size=2")


@pytest.mark.parametrize(
    "layout",
    [
        "parallelism.dp_shard=2 training.micro_batch_size=2",
        "parallelism.tp=2",
        pytest.param("parallelism.tp=2 parallelism.loss_parallel=false", marks=pytest.mark.night),
        pytest.param("parallelism.pp=2", marks=pytest.mark.night),
        "parallelism.cp=2 training.micro_batch_size=4",
    ],
)
def test_an_objectives_metrics_are_the_same_in_every_layout(tmp_path: Path, one_device: Curve, layout: str):
    curve = train(tmp_path, *OBJECTIVE, *layout.split())
    for name in ["loss", *NAMES]:
        expected = [row[name] for row in one_device.rows]
        assert len(set(expected)) == 4
        assert [row[name] for row in curve.rows] == pytest.approx(expected, rel=2e-6)


def test_a_metric_of_several_numbers_is_named():
    optimizer: Any = SimpleNamespace(metric_reductions={"norm": "mean"}, metrics=lambda: {"norm": torch.zeros(2)})
    mesh: Any = SimpleNamespace(device=torch.device("cpu"))
    experts: Any = SimpleNamespace(reductions={}, shares=dict)
    reducer = MetricReducer(LanguageModeling(), nn.Module(), [], optimizer, mesh, experts=experts)
    with pytest.raises(UserError, match=r"optimizer/norm is a tensor of \[2\]"):
        reducer.reduce({"loss": torch.zeros(())}, [])


VALIDATION = ["evaluation.every=2", "data.validation_fraction=0.1", "data.validation_documents=40"]
MODEL = ["model.architecture=tests.trainer.own_statistics", *VALIDATION, *OBJECTIVE[1:]]
MODEL_NAMES = ["model/hidden_square", "model/hidden_max", "model/block_tokens"]


@pytest.fixture(scope="module")
def model_on_one_device(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return train(tmp_path_factory.mktemp("model"), *MODEL, "training.micro_batch_size=2")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("parallelism.dp_shard=2 training.micro_batch_size=2", marks=pytest.mark.night),
        pytest.param("parallelism.pp=2", marks=pytest.mark.night),
        "parallelism.pp=2 parallelism.dp_shard=2 training.micro_batch_size=1 activation_checkpoint=full",
        pytest.param("parallelism.tp=2 parallelism.sequence_parallel=false", marks=pytest.mark.night),
        "parallelism.tp=2",
        "tracking.log_every=2",
    ],
)
def test_metrics_of_model_modules_are_reduced_over_ranks_and_steps_stay_apart(
    tmp_path: Path, model_on_one_device: Curve, layout: str, capsys: pytest.CaptureFixture
):
    expected = {row["step"]: row for row in model_on_one_device.rows}
    tokens = expected[1]["model/block_tokens"]
    assert tokens == 8 * 64 * 4, "all tokens of 8 sequences in 4 layers"
    assert {row["model/block_tokens"] for row in expected.values()} == {tokens}, "of a step, not of all steps so far"
    found = train(tmp_path, *MODEL, *layout.split()).rows
    assert [row["step"] for row in found] == ([2, 4] if "log_every" in layout else [1, 2, 3, 4])
    for row in found:
        # With sequence parallelism a tensor-parallel rank sees half of the tokens, which only a mean allows.
        for name in MODEL_NAMES[:2] if layout == "parallelism.tp=2" else MODEL_NAMES:
            assert row[name] == pytest.approx(expected[row["step"]][name], rel=1e-5), (row["step"], name)
    assert status_command([str(tmp_path)]) == 0
    assert set(MODEL_NAMES) <= set(capsys.readouterr().out.split())
    assert set(MODEL_NAMES) <= {metric.name for metric in choose_metrics([], [read_run(tmp_path)], None)}


def test_a_key_of_the_model_switches_its_metrics_off(tmp_path: Path, model_on_one_device: Curve):
    without = train(tmp_path, *MODEL, "training.micro_batch_size=2", "+model.statistics=false")
    assert not any(name.startswith("model/") for row in without.rows for name in row)
    assert without.loss == model_on_one_device.loss


def test_status_and_compare_show_reported_metrics(tmp_path: Path, capsys: pytest.CaptureFixture):
    train(tmp_path, *OBJECTIVE)
    run = read_run(tmp_path)
    assert status_command([str(tmp_path)]) == 0
    assert set(NAMES) <= set(capsys.readouterr().out.split())
    assert [metric.name for metric in choose_metrics([], [run], None)][-3:] == sorted(NAMES)
    (chosen,) = choose_metrics([("objective/logit_max", None)], [run], None)
    assert chosen.read(run, float("inf")) == run.rows[-1]["objective/logit_max"]


def test_the_z_loss_term_is_reported_alone(tmp_path: Path):
    plain = train(tmp_path / "plain", "training.steps=2")
    assert not any(name.startswith("objective/") for name in plain.rows[0])
    pulled = train(tmp_path / "pulled", "training.steps=2", "training.z_loss=0.01", "training.loss_chunk_tokens=37")
    assert pulled.rows[0]["loss"] == pytest.approx(plain.rows[0]["loss"], rel=1e-6)
    whole = train(tmp_path / "whole", "training.steps=2", "training.z_loss=0.01")
    assert pulled.rows[0]["objective/z_loss"] == pytest.approx(whole.rows[0]["objective/z_loss"], rel=1e-6)
    assert whole.rows[0]["objective/z_loss"] > 0.1
