"""A run that begins with the whole state of another: in another layout, with other steps, or on other data."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity.runs import SMALL, Curve, train
from tests.parity.test_continued import SAVING, assert_continues
from tests.patching import patch
from tests.trainer.test_trainer import experiment, run
from titan_exp.checkpoint.load_state import read_json_entries
from titan_exp.checkpoint.storage_reader import tensor_shapes
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment, to_yaml
from titan_exp.launch.run_plan import plan_run
from titan_exp.rules import violations
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run import Lineage, read_history


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Curve]:
    """A run of ten steps in a folder of runs, with checkpoints of steps 5 and 10."""
    path = tmp_path_factory.mktemp("runs") / "first" / "0123456789ab"
    return path, train(path, *SAVING)


STEP_5 = ("checkpoint.continue_step=5",)


def child(parent: Path, *overrides: str, step: int = 5) -> list[str]:
    return [*SAVING, f"checkpoint.continue_from={parent}", f"checkpoint.continue_step={step}", *overrides]


def test_in_the_same_layout_it_is_bitwise(tmp_path: Path, parent: tuple[Path, Curve]):
    path, whole = parent
    found = train(tmp_path / "child", *child(path))
    assert_continues(whole, found)
    assert found.loss == whole.loss[5:]
    assert all(torch.equal(found.weights[name], weight) for name, weight in whole.weights.items())


def test_in_another_layout_the_curve_goes_on(tmp_path: Path, parent: tuple[Path, Curve]):
    path, whole = parent
    found = train(tmp_path / "child", *child(path, "parallelism.tp=2", "parallelism.dp_shard=2"))
    assert_continues(whole, found)
    assert Lineage.read(tmp_path / "child") == Lineage(str(path), 5, 5 * 8 * 64)
    history = read_history(tmp_path / "child")
    assert [row["step"] for row in history] == list(range(1, 11))
    assert [row["loss"] for row in history] == pytest.approx(whole.loss, rel=2e-6)


def data_begins_again() -> None:
    patch("titan_exp.data.train_loader.TrainLoader.load_state_dict", lambda original: lambda self, state: None)


def moments_are_forgotten() -> None:
    patch("titan_exp.checkpoint.load_state.optimizer_state_dict", lambda original: lambda parts, optimizer: {})


@pytest.mark.night
@pytest.mark.parametrize("mutate", [data_begins_again, moments_are_forgotten])
def test_mutation_is_noticed(tmp_path: Path, parent: tuple[Path, Curve], mutate: Callable[[], None]):
    path, whole = parent
    with pytest.raises(AssertionError):
        assert_continues(whole, train(tmp_path / "child", *child(path), mutate=mutate))


def test_steps_schedule_and_batch_size_may_differ(tmp_path: Path, parent: tuple[Path, Curve]):
    path, _ = parent
    more = ["training.steps=14", "lr_schedule=constant", "training.global_batch_size=16", "optimizer.weight_decay=0"]
    _, folder = run(tmp_path / "child", *child(path, *more, step=10))
    rows = read_metrics(folder.metrics)
    assert [row["step"] for row in rows] == [11, 12, 13, 14]
    assert [row["tokens"] for row in rows] == [(80 + 16 * steps) * 64 for steps in (1, 2, 3, 4)]
    grandchild = child(folder.path, "training.steps=16", "lr_schedule=constant", step=14)
    _, last = run(tmp_path / "grandchild", *grandchild)
    assert [row["step"] for row in read_history(last.path)] == list(range(1, 17))


def data_position(path: Path) -> dict[str, Any]:
    """Position of every virtual shard in a checkpoint."""
    return read_json_entries(path, tensor_shapes(path), "data.")


def test_data_may_begin_again_and_be_other_data(tmp_path: Path, parent: tuple[Path, Curve]):
    path, whole = parent
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("another text, line by line\n" * 2000)
    (tmp_path / "text" / "b.txt").write_text("and a second one\n" * 2000)
    other = ["data=text", f"data.paths=[{tmp_path}/text]"]
    with pytest.raises(UserError, match=r"cannot continue on other data|other data"):
        run(tmp_path / "refused", *child(path, *other))
    _, folder = run(tmp_path / "other", *child(path, *other, "checkpoint.continue_data=restart"))
    rows = read_metrics(folder.metrics)
    assert [row["step"] for row in rows] == [6, 7, 8, 9, 10]
    assert rows[0]["loss"] != pytest.approx(whole.loss[5], rel=1e-3)
    _, again = run(tmp_path / "again", *child(path, "checkpoint.continue_data=restart"))
    assert data_position(again.checkpoints / "step-00000010") == data_position(path / "checkpoints" / "step-00000005")


def test_a_start_before_the_first_checkpoint_takes_the_same_step_again(tmp_path: Path, parent: tuple[Path, Curve]):
    path, whole = parent
    copied = tmp_path / "runs" / "parent"
    shutil.copytree(path, copied)
    shutil.rmtree(copied / "checkpoints" / "step-00000010")
    (tmp_path / "child").mkdir()
    words = [*SAVING, f"checkpoint.continue_from={copied}", "checkpoint.every=1000", "checkpoint.mode=off"]
    run(tmp_path / "child", *words)
    shutil.copytree(path / "checkpoints" / "step-00000010", copied / "checkpoints" / "step-00000010")
    run(tmp_path / "child", *words, "training.steps=11")
    rows = read_metrics(tmp_path / "child" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [6, 7, 8, 9, 10, 11]
    assert rows[0]["loss"] == whole.loss[5]


@pytest.mark.parametrize(
    ("override", "field", "says"),
    [
        ("model.dim=96", "model.dim", "/0123456789ab has 64"),
        ("model.tied_embeddings=true", "model.tied_embeddings", "has false"),
        ("model.rope.theta=1e6", "model.rope.theta", "has 10000.0"),
        ("experiment.seed=1", "experiment.seed", "by seed 0"),
        ("training.steps=5", "training.steps", "has already trained 5 steps"),
        ("checkpoint.continue_step=7", "checkpoint.continue_from", "no complete checkpoint of step 7"),
        ("checkpoint.continue_from=nowhere", "checkpoint.continue_from", "no complete checkpoint"),
        ("checkpoint.initial=PARENT", "checkpoint.continue_from", "gives the weights as well"),
        ("checkpoint.continue_from=null", "checkpoint.continue_step", "continue_from is null"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(
    parent: tuple[Path, Curve], override: str, field: str, says: str
):
    path, _ = parent
    found = violations(experiment(*child(path), override.replace("PARENT", str(path))))
    assert [violation.field for violation in found if says in violation.reason] == [field]


def test_a_declared_scaling_stretches_the_parents_context(parent: tuple[Path, Curve]):
    words = ["model.rope.scaling=yarn", "model.rope.factor=4", "training.seq_len=2048", "model.context=512"]
    assert [found.field for found in violations(experiment(*child(parent[0]), *words)) if "model" in found.field] == []


def test_rows_of_another_length_begin_anew(parent: tuple[Path, Curve], tmp_path: Path):
    """Known before the launch from what the parent's attempt recorded."""
    words = [*child(parent[0]), "training.seq_len=32"]
    attempts = parent[0] / "attempts.jsonl"
    for recorded in ("[" * 100_000, '{"data": 1}\n', '{"data": {"data.virtual_shards": 64}}\n', "\0"):
        attempts.write_text(recorded)
        assert violations(experiment(*words)) == []
    attempts.write_text('{"data": {"training.seq_len": 64}}\n{"data": null}\n')
    (found,) = violations(experiment(*words))
    assert (found.field, "rows of 64 tokens" in found.reason) == ("training.seq_len", True)
    assert violations(experiment(*words, "checkpoint.continue_data=restart")) == []
    assert violations(experiment(*child(parent[0]))) == []
    attempts.unlink()
    with pytest.raises(UserError, match=r"training\.seq_len=32: this checkpoint read 64"):
        run(tmp_path / "refused", *words)
    _, folder = run(tmp_path / "anew", *words, "checkpoint.continue_data=restart")
    assert read_metrics(folder.metrics)[0]["step"] == 6


def test_another_optimizers_state_is_refused(parent: tuple[Path, Curve]):
    path, _ = parent
    small = [override for override in SMALL if not override.startswith("optimizer.")]
    other = to_experiment(compose([*small, *child(path), "optimizer=sgd"]))
    (found,) = [violation for violation in violations(other) if violation.field == "optimizer.name"]
    assert "was trained by adamw" in found.reason
    assert f"checkpoint.initial={path}" in found.remedy


def test_and_at_the_start_where_the_parent_was_not_at_hand(tmp_path: Path, parent: tuple[Path, Curve]):
    path, _ = parent
    with pytest.raises(UserError, match=r"(?s)cannot continue.*model\.dim=96.*has 64"):
        run(tmp_path / "shape", *child(path, "model.dim=96"))
    with pytest.raises(UserError, match="no complete checkpoint of step 3"):
        run(tmp_path / "step", *child(path, step=3))


def test_a_parent_in_remote_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: tuple[Path, Curve]):
    _, whole = parent
    monkeypatch.chdir(tmp_path)
    (tmp_path / "remote").mkdir()
    _, folder = run(tmp_path / "runs" / "first" / "parent", *SAVING, f"checkpoint.remote=file://{tmp_path}/remote")
    (url,) = [f"file://{path}" for path in (tmp_path / "remote").glob("*/*")]
    shutil.rmtree(folder.path)
    run(tmp_path / "runs" / "first" / "longer", *SAVING, f"checkpoint.continue_from={url}", "training.steps=11")
    # Both steps are in the cache by now.
    _, found = run(tmp_path / "runs" / "first" / "child", *SAVING, f"checkpoint.continue_from={url}", *STEP_5)
    assert [row["loss"] for row in read_metrics(found.metrics)] == whole.loss[5:]
    assert Lineage.read(found.path) == Lineage(url, 5, 5 * 8 * 64)
    # Started again before its first checkpoint, from the URL of the checkpoint itself.
    step_url = [*SAVING, "checkpoint.mode=off", f"checkpoint.continue_from={url}/step-00000005"]
    for _ in range(2):
        (tmp_path / "runs" / "first" / "again").mkdir(exist_ok=True)
        _, again = run(tmp_path / "runs" / "first" / "again", *step_url)
        assert [row["loss"] for row in read_metrics(again.metrics)] == whole.loss[5:]


def ranks_see_other_checkpoints() -> None:
    """A parent that is still training saves between one rank's look and another's."""
    patch(
        "titan_exp.config.checkpoint_files.parent_checkpoint",
        lambda original: lambda path, step: original(path, (5, 10)[dist.get_rank()]),
    )


def test_ranks_continue_from_one_checkpoint(tmp_path: Path, parent: tuple[Path, Curve]):
    path, whole = parent
    found = train(tmp_path / "child", *child(path, "parallelism.dp_shard=2"), mutate=ranks_see_other_checkpoints)
    assert_continues(whole, found)


def test_weights_alone_cannot_be_continued(tmp_path: Path):
    _, folder = run(tmp_path / "parent", *SAVING, "checkpoint.last=weights")
    with pytest.raises(UserError, match=r"holds weights only.*checkpoint\.continue_from=null checkpoint\.initial="):
        run(tmp_path / "child", *child(folder.path, "training.steps=12", step=10))


def planned(runs: Path, *overrides: str) -> Experiment:
    saving = ["checkpoint.mode=sync", "training.steps=20"]
    small = [override for override in SMALL if not override.startswith(("checkpoint", "training.steps"))]
    return plan_run(to_experiment(compose([*small, *saving, f"paths.runs={runs}", *overrides]))).experiment


def test_a_parent_has_one_name_however_it_is_typed(parent: tuple[Path, Curve], monkeypatch: pytest.MonkeyPatch):
    path, _ = parent
    runs = path.parent.parent
    monkeypatch.chdir(runs.parent)
    (path / "config.yaml").write_text(to_yaml(replace(experiment(*SAVING))))
    for typed in (
        str(path),
        f"{runs.name}/first/{path.name}",
        f"first/{path.name}",
        path.name[:6],
        f"{path}/checkpoints",
    ):
        config = planned(runs, f"checkpoint.continue_from={typed}").checkpoint
        assert (config.continue_from, config.continue_step) == (f"first/{path.name}", None), typed
    config = planned(runs, f"checkpoint.continue_from={path}/checkpoints/step-00000005").checkpoint
    assert (config.continue_from, config.continue_step) == (f"first/{path.name}", 5)
