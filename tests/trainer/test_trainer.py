import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.parity.runs import EVALUATE, PARAGRAPHS, SMALL, train
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.distributed import joined_process_group
from titan_exp.trainer.parts import Diverged
from titan_exp.trainer.trainer import Trainer

CPU = torch.device("cpu")


def experiment(*overrides: str) -> Experiment:
    return resolve_layout(to_experiment(compose([*SMALL, "training.steps=10", *overrides])), 1)


def run(path: Path, *overrides: str) -> tuple[bool, RunFolder]:
    """Train on one rank in this process."""
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    with joined_process_group(CPU):
        trainer = Trainer(experiment(*overrides), folder, CPU)
        trainer.restore()
        try:
            finished = trainer.run()
        finally:
            trainer.report.close("done")
    return finished, folder


def test_rows_have_the_documented_keys(tmp_path):
    _, folder = run(tmp_path, "tracking.log_every=5", "optimizer.lr=3e-3")
    rows = read_metrics(folder.metrics)
    assert [row["step"] for row in rows] == [5, 10]
    assert rows[1]["tokens"] == 10 * 8 * 64
    assert rows[0]["lr"] == pytest.approx(3e-3)
    for key in ("loss", "grad_norm", "tokens_per_second", "tflops", "memory", "attempt", "time"):
        assert isinstance(rows[1][key], float | int), key
    assert rows[1]["mfu"] is None, "nobody knows a CPU's peak"


def test_the_first_loss_is_that_of_a_uniform_prediction(tmp_path):
    _, folder = run(tmp_path, "training.steps=1")
    assert read_metrics(folder.metrics)[0]["loss"] == pytest.approx(math.log(320), abs=0.15)


@pytest.mark.parametrize("layout", [["parallelism.dp_shard=2"], ["parallelism=hsdp"], ["training.micro_batch_size=3"]])
def test_validation_loss_is_the_same_in_every_layout(tmp_path, layout):
    batch = "training.global_batch_size=12"
    settings = ["training.steps=2", *PARAGRAPHS, *EVALUATE.split(), "evaluation.every=1", batch]
    alone = train(tmp_path / "one", *settings).rows
    found = train(tmp_path / "many", *settings, *layout).rows
    assert alone[0]["validation_tokens"] > 1_000
    for one, many in zip(alone, found, strict=True):
        assert many["validation_tokens"] == one["validation_tokens"]
        assert many["validation_loss"] == pytest.approx(one["validation_loss"], rel=2e-6)
        assert many["validation_perplexity"] == pytest.approx(math.exp(one["validation_loss"]), rel=1e-5)


def test_evaluation_does_not_disturb_training(tmp_path):
    held_out = [*PARAGRAPHS, *EVALUATE.split()]
    _, without = run(tmp_path / "without", *held_out, "evaluation.every=0")
    _, evaluated = run(tmp_path / "with", *held_out, "evaluation.every=3")
    found = read_metrics(evaluated.metrics)
    assert [row["loss"] for row in found] == [row["loss"] for row in read_metrics(without.metrics)]
    assert [row["step"] for row in found if "validation_loss" in row] == [3, 6, 9, 10]


def test_a_stop_request_saves_and_the_run_continues_bitwise(tmp_path):
    saving = ["checkpoint.mode=sync", "checkpoint.every=1000"]
    _, undisturbed = run(tmp_path / "undisturbed", *saving)
    folder = RunFolder(tmp_path / "stopped")
    tmp_path.joinpath("stopped").mkdir()
    folder.request_stop("a test")
    finished, _ = run(tmp_path / "stopped", *saving)
    assert not finished
    stopped_at = CheckpointFolder(folder.checkpoints).complete_steps()
    assert stopped_at == [1]
    folder.clear_stop()
    finished, _ = run(tmp_path / "stopped", *saving)
    assert finished
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    assert [[row[key] for key in keys] for row in read_metrics(folder.metrics)] == [
        [row[key] for key in keys] for row in read_metrics(undisturbed.metrics)
    ]


def test_random_draws_in_a_step_are_drawn_again_after_a_resume(tmp_path):
    settings = [
        "model.architecture=tests.models.own_model.Bigram",
        "+model.options.dropout=0.5",
        "checkpoint.mode=sync",
        "checkpoint.every=4",
    ]
    _, undisturbed = run(tmp_path / "undisturbed", *settings)
    (tmp_path / "resumed" / "checkpoints").mkdir(parents=True)
    shutil.copytree(tmp_path / "undisturbed/checkpoints/step-00000008", tmp_path / "resumed/checkpoints/step-00000008")
    torch.manual_seed(1234)
    _, resumed = run(tmp_path / "resumed", *settings)
    expected = [row["loss"] for row in read_metrics(undisturbed.metrics)][8:]
    assert [row["loss"] for row in read_metrics(resumed.metrics)] == expected
    _, without = run(tmp_path / "without", settings[0], "checkpoint=none")
    assert read_metrics(without.metrics)[-1]["loss"] != expected[-1], "nothing was dropped"


def test_a_run_that_is_over_trains_no_further(tmp_path):
    saving = ["checkpoint.mode=sync", "training.steps=2"]
    run(tmp_path, *saving)
    before = (tmp_path / "metrics.jsonl").read_text()
    finished, _ = run(tmp_path, *saving)
    assert finished
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_diverged_run_fails_and_saves_nothing(tmp_path):
    diverging = ["optimizer.lr=1e12", "checkpoint.mode=sync", "checkpoint.every=2", "lr_schedule.warmup_steps=1"]
    with pytest.raises(Diverged, match=r"at step \d+ the loss is [\s\S]*optimizer\.lr=3\.33e\+11"):
        run(tmp_path, "training.max_grad_norm=null", *diverging, "training.steps=40")
    last = read_metrics(RunFolder(tmp_path).metrics)[-1]
    assert not math.isfinite(last["loss"])  # type: ignore[arg-type]  # a number
    saved = CheckpointFolder(RunFolder(tmp_path).checkpoints).complete_steps()
    assert all(step < (last["step"] or 0) for step in saved)


def test_an_optimizer_and_a_model_of_the_users_own_train(tmp_path):
    own = [
        "model.architecture=tests.models.own_model.Bigram",
        "+model.options.scale=2.0",
        "optimizer.name=torch.optim.SGD",
        "+optimizer.options.momentum=0.9",
        "optimizer.lr=0.5",
        "lr_schedule.decay=tests.optim.own_decay.power",
        "+lr_schedule.options.exponent=2",
        "checkpoint.mode=sync",
    ]
    _, folder = run(tmp_path, *own)
    losses = [row["loss"] for row in read_metrics(folder.metrics)]
    assert losses[-1] < losses[0] - 0.1  # type: ignore[operator]  # numbers


def test_determinism_is_asked_of_torch(tmp_path):
    try:
        _, folder = run(tmp_path / "a", "training.deterministic=true")
        assert torch.are_deterministic_algorithms_enabled()
        _, again = run(tmp_path / "b", "training.deterministic=true")
        assert [row["loss"] for row in read_metrics(folder.metrics)] == [
            row["loss"] for row in read_metrics(again.metrics)
        ]
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_profile_is_recorded(tmp_path):
    run(tmp_path, "profiling=trace", "profiling.start=2", "profiling.steps=2", "training.steps=6")
    trace = tmp_path / "traces" / "steps-3-4-rank-00000.json"
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert any("AdamW" in name for name in names)


def test_another_seed_is_another_run(tmp_path):
    _, first = run(tmp_path / "0", "training.steps=2")
    _, second = run(tmp_path / "1", "training.steps=2", "experiment.seed=1")
    assert read_metrics(first.metrics)[0]["loss"] != read_metrics(second.metrics)[0]["loss"]
