"""Promise 1 in a chain of runs of experts and of hybrids: each continues the one before in another layout, or from its
export."""

from pathlib import Path

import pytest
import torch

from tests.parity import test_hybrids as hybrids
from tests.parity.runs import assert_same_curve, train
from titan_exp.cli.convert import run as convert_command
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics

EP4 = "parallelism.dp_shard=4 parallelism.ep=4"
EP2_TP2 = "parallelism.tp=2 parallelism.ep=2"
CP2, PP2 = "parallelism.cp=2 parallelism.cp_method=ring", "parallelism.pp=2"
# Biases, and the load of the step before: the state of both kinds of balance.
BIASED = ["model=qwen3_moe_debug", "model.moe.router_bias=true", "model.moe.balance.bias_rate=1e-2"]
SAVING = ["checkpoint.mode=sync", "checkpoint.every=2", "checkpoint.keep=5"]


@pytest.mark.night
@pytest.mark.parametrize(
    ("words", "layouts"),
    [
        pytest.param(BIASED, (EP4, EP2_TP2, ""), id="experts"),
        pytest.param(hybrids.EXPERIMENTS["next_documents"].split(), ("parallelism.tp=2", CP2, PP2), id="qwen3_next"),
        pytest.param(hybrids.DENSE.split(), ("", f"{CP2} parallelism.tp=2", "parallelism.dp_shard=4"), id="qwen3_5"),
        pytest.param(hybrids.OLMO.split(), (PP2, "parallelism.tp=2 parallelism.dp_shard=2", CP2), id="olmo_hybrid"),
        pytest.param(hybrids.EXPERIMENTS["kimi_documents"].split(), (CP2, EP2_TP2, PP2), id="kimi_linear"),
    ],
)
def test_a_chain_of_layouts_is_one_curve(tmp_path: Path, words: list[str], layouts: tuple[str, ...]):
    whole = train(tmp_path / "whole", *words)
    for place, layout in enumerate(layouts):
        begins, parent = 2 * place, [] if place == 0 else continues(tmp_path / str(place - 1), 2 * place)
        found = train(tmp_path / str(place), *words, *SAVING, *parent, *layout.split())
        assert found.disputed == []
        assert [row["step"] for row in found.rows] == [*range(begins + 1, 7)]
        assert found.loss == pytest.approx(whole.loss[begins:], rel=2e-6)
        assert found.grad_norm == pytest.approx(whole.grad_norm[begins:], rel=2e-5)
        for name, weight in whole.weights.items():
            torch.testing.assert_close(found.weights[name], weight, atol=2e-5, rtol=1e-4)
    biases = [weight for name, weight in whole.weights.items() if name.endswith("router.bias")]
    assert all(bias.any() for bias in biases)
    assert biases or words is not BIASED


@pytest.mark.night
def test_an_export_begins_a_run_in_any_layout(tmp_path: Path):
    words = ["model=qwen3_moe_debug", "training.steps=4"]
    first = train(tmp_path / "first", *words, *SAVING, *EP4.split())
    assert convert_command([str(tmp_path / "first"), str(tmp_path / "export")]) == 0
    frozen = [*words, f"checkpoint.initial={tmp_path / 'export'}", "optimizer.lr=1e-30"]
    begun = train(tmp_path / "begun", *frozen, *EP2_TP2.split())
    for name, weight in first.weights.items():
        # Files of other tools have no load of the step before.
        assert torch.equal(begun.weights[name], weight) or name.endswith("previous_load"), name
    trained = [*words, f"checkpoint.initial={tmp_path / 'export'}"]
    alone, shared = (train(tmp_path / f"on {layout}", *trained, *layout.split()) for layout in ("", EP2_TP2))
    assert_same_curve(shared, alone)
    (last,) = [row["loss"] for row in read_metrics(tmp_path / "first" / "metrics.jsonl") if row["step"] == 4]
    assert alone.loss[0] < first.loss[0]
    assert alone.loss[0] == pytest.approx(last, abs=0.5)


def continues(parent: Path, step: int) -> list[str]:
    return [f"checkpoint.continue_from={parent}", f"checkpoint.continue_step={step}"]
