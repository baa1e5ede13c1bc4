"""Metrics of experts: the same in every layout, from training steps alone, and without them in the logged loss."""

import json
import math
from pathlib import Path

import pytest

from tests.parity.runs import PARAGRAPHS, Curve, train
from titan_exp.cli.status import run as status_command
from titan_exp.compare.compared_metrics import METRICS, choose_metrics
from titan_exp.compare.runs import read_run
from titan_exp.tracking.run_folder.metrics_jsonl import layer_counts, load_statistics, read_metrics

BALANCED = [
    *("model=qwen3_moe_debug", "model.moe.router_bias=true", "model.moe.balance.bias_rate=1e-2"),
    *("model.moe.balance.loss=sequence", "model.moe.balance.coefficient=1e-2", "training.steps=4"),
    *PARAGRAPHS,
]
HELD_OUT = ["data.validation_fraction=0.1", "data.validation_documents=40"]
NAMES = ["load_max", "dead", "entropy", "bias_range", "balance_loss", "z_loss"]
TOKENS = 8 * 64
"""Tokens of a global batch."""


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Curve]:
    path = tmp_path_factory.mktemp("one")
    return path, train(path, *BALANCED, "training.micro_batch_size=8")


def of_experts(row: dict) -> dict:
    return {key: value for key, value in row.items() if key.startswith("experts/")}


def test_a_row_has_totals_and_layers(one_device: tuple[Path, Curve]):
    path, curve = one_device
    keys = {f"experts/{name}" for name in NAMES} | {
        f"experts/layer_{layer}/{name}" for layer in range(4) for name in NAMES
    }
    assert {*of_experts(curve.rows[0])} == keys
    record = read_metrics(path / "expert_load.jsonl")
    assert [row["step"] for row in record] == [1, 2, 3, 4]
    for row, counts in zip(curve.rows, map(layer_counts, record), strict=True):
        assert list(counts) == [f"layer_{layer}" for layer in range(4)]
        assert {sum(tokens) for tokens in counts.values()} == {TOKENS * 3}, "3 experts for each token"
        layers = [load_statistics(tokens) for tokens in counts.values()]
        assert row["experts/load_max"] == max(layer.load_max for layer in layers) > 1
        assert row["experts/dead"] == sum(layer.dead for layer in layers)
        assert row["experts/entropy"] == pytest.approx(sum(layer.entropy for layer in layers) / 4)
        for total, name in ((sum, "balance_loss"), (sum, "z_loss"), (max, "bias_range")):
            assert row[f"experts/{name}"] == pytest.approx(
                total(row[f"experts/layer_{layer}/{name}"] for layer in range(4))
            )
    # The sequence loss of a balanced router is its factor, the biases move by two rates a step at most.
    assert 4 * 1e-2 <= curve.rows[0]["experts/balance_loss"] < 4 * 2e-2
    assert 1e-2 < curve.rows[0]["experts/bias_range"] <= 2.001e-2 < curve.rows[3]["experts/bias_range"] <= 8.01e-2


@pytest.mark.parametrize(
    "layout",
    [
        "parallelism.tp=2",
        *(
            pytest.param(layout, marks=pytest.mark.night)
            for layout in (
                "parallelism.dp_shard=2 training.micro_batch_size=2",
                "parallelism.pp=2 activation_checkpoint=full training.micro_batch_size=1",
                "parallelism.pp=2 parallelism.cp=2",
                "parallelism.dp_shard=2 parallelism.ep=2 training.micro_batch_size=2",
                "training.micro_batch_size=2 activation_checkpoint=full",
                "tracking.log_every=2",
            )
        ),
    ],
)
def test_no_layout_changes_them(tmp_path: Path, one_device: tuple[Path, Curve], layout: str):
    path, expected = one_device
    found = train(tmp_path, *BALANCED, *layout.split())
    logged = [step for step in (1, 2, 3, 4) if "log_every" not in layout or step % 2 == 0]
    assert [row["step"] for row in found.rows] == logged
    record = [row for row in read_metrics(path / "expert_load.jsonl") if row["step"] in logged]
    assert read_metrics(tmp_path / "expert_load.jsonl") == record
    for row in found.rows:
        assert of_experts(row) == pytest.approx(of_experts(expected.rows[row["step"] - 1]), rel=1e-5)


def test_evaluation_leaves_no_trace(tmp_path: Path):
    never = train(tmp_path / "never", *BALANCED, *HELD_OUT)
    often = train(tmp_path / "often", *BALANCED, *HELD_OUT, "evaluation.every=1")
    for row, expected in zip(often.rows, never.rows, strict=True):
        assert row["validation_loss"] > 0
        assert of_experts(row) == of_experts(expected) != {}


def test_the_logged_loss_is_the_cross_entropy(tmp_path: Path):
    words = ["model=qwen3_moe_debug", "training.steps=1"]
    off = ["model.moe.balance.loss=none", "model.moe.balance.coefficient=0", "model.moe.balance.z_loss=0"]
    plain = train(tmp_path / "plain", *words, *off)
    pulled = train(tmp_path / "pulled", *words, "model.moe.balance.z_loss=10")
    assert pulled.loss == plain.loss
    assert pulled.grad_norm != plain.grad_norm
    assert pulled.rows[0]["experts/z_loss"] > 1
    assert {*of_experts(plain.rows[0])} & {f"experts/{name}" for name in NAMES} == {
        "experts/load_max",
        "experts/dead",
        "experts/entropy",
    }


def test_every_bias_moves_beside_a_layer_without_experts(tmp_path: Path):
    (row,) = train(tmp_path, "model=deepseek_debug", "training.steps=1").rows
    assert "experts/layer_0/bias_range" not in row
    # Up or down by the rate, or not at all.
    rate = 1e-3
    assert all(rate <= row[f"experts/layer_{layer}/bias_range"] <= 2.001 * rate for layer in (1, 2, 3))


def test_a_dense_model_has_none(tmp_path: Path):
    assert of_experts(train(tmp_path, "training.steps=1").rows[0]) == {}
    assert not (tmp_path / "expert_load.jsonl").exists()


def test_compare_shows_the_balance_and_status_keeps_its_columns(
    one_device: tuple[Path, Curve], capsys: pytest.CaptureFixture[str]
):
    path, curve = one_device
    run = read_run(path)
    default = [metric.name for metric in choose_metrics([], [run], None)]
    assert [name for name in default if name.startswith("experts/")] == [f"experts/{name}" for name in NAMES[:3]]
    known = {metric.name for metric in METRICS}
    assert {f"experts/{name}" for name in NAMES} <= known
    (chosen,) = choose_metrics([("experts/layer_3/bias_range", None)], [run], None)
    assert chosen.read(run, math.inf) == curve.rows[-1]["experts/layer_3/bias_range"]
    assert status_command([str(path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["loss"] == curve.loss[-1]
    assert entry["reported"] == {}


def test_statistics_of_a_load():
    assert load_statistics([4, 4, 4, 4]) == (1.0, 0, 1.0)
    assert load_statistics([16, 0, 0, 0]) == (4.0, 3, 0.0)
    assert load_statistics([8, 8, 0, 0]) == (2.0, 2, 0.5)
    assert load_statistics([0, 0]) == (0.0, 2, 0.0)
