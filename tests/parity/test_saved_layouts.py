"""Any layout writes a checkpoint, any other reads it: the gathered state is the same to the last bit."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.parity.runs import SMALL, train
from tests.ranks import run_ranks
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.storage_reader import load_into, tensor_shapes
from titan_exp.cli.convert import run as convert_command
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.config.schema.typed_config import load_experiment, to_experiment, to_yaml
from titan_exp.rules import check
from titan_exp.tracking.run_folder.run_folder import RunFolder

LAYOUTS = {
    "one": "",
    "dp": "parallelism.dp_shard=2",
    "tp": "parallelism.tp=2",
    "pp": "parallelism.pp=2 parallelism.pp_schedule=1F1B",
    "zbv": "parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble",
    "cp": "parallelism.cp=2",
    "hsdp": "parallelism=hsdp training.micro_batch_size=1",
    "offload": "parallelism.dp_shard=2 parallelism.cpu_offload=true",
    "tp, zbv": "parallelism.tp=2 parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble",
    "dp, cp": "parallelism.dp_shard=2 parallelism.cp=2",
}
RING = ["one", "dp", "tp", "pp", "zbv", "cp", "hsdp", "offload", "tp, zbv", "dp, cp", "one"]
"""Each writes for the next: all are writers and readers of the same state, so that any can follow any."""
SAVING = ["training.steps=2", "checkpoint.mode=sync", "checkpoint.every=2"]


@pytest.mark.parametrize(("writer", "reader"), [*pairwise(RING)])
def test_written_by_one_and_read_by_another(tmp_path, writer, reader):
    assert_read_by_another(tmp_path, LAYOUTS[writer].split(), LAYOUTS[reader].split())


def assert_read_by_another(tmp_path: Path, writer: list[str], reader: list[str]) -> None:
    """What one layout writes, another reads and writes again, to the last bit."""
    train(tmp_path / "run", *SAVING, *writer)
    written = state_of(CheckpointFolder(tmp_path / "run/checkpoints").path_of(2))
    small = [*SMALL, *SAVING, "training.steps=4", *reader]
    experiment = check(resolve_layout(to_experiment(compose(small)), 1))
    RunFolder(tmp_path / "run").config.write_text(to_yaml(experiment))
    run_ranks(ResolvedLayout.of(experiment).world_size, read_and_write, str(tmp_path / "run"), str(tmp_path / "again"))
    found = state_of(CheckpointFolder(tmp_path / "again").path_of(2))
    assert found.keys() == written.keys()
    assert any(key.startswith("optimizer.") for key in written)
    assert any(key.startswith("data.") for key in written)
    for key, value in written.items():
        assert torch.equal(found[key], value), key


EXPERT_LAYOUTS = {
    "one": "",
    "ep": "parallelism.dp_shard=2 parallelism.ep=2",
    "tp": "parallelism.tp=2",
    "etp": "parallelism.tp=2 parallelism.etp=2",
    "ep, tp, dp": "parallelism.tp=2 parallelism.dp_shard=2 parallelism.ep=2",
    "ep, etp, dp": "parallelism.tp=2 parallelism.etp=2 parallelism.dp_shard=4 parallelism.ep=2",
    "ep, hsdp": "parallelism=hsdp parallelism.ep=2 training.micro_batch_size=1",
    "ep, pp": "parallelism.dp_shard=2 parallelism.ep=2 parallelism.pp=2 parallelism.pp_schedule=1F1B",
    # Two experts of a rank are sharded by their channels.
    "channels": "parallelism.dp_shard=8 parallelism.ep=4",
}
EXPERT_RING = ["ep", "tp", "ep, tp, dp", "one", "ep, etp, dp", "ep, hsdp", "channels", "ep, pp", "etp", "one", "ep"]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(*pair, marks=pytest.mark.day if number == 0 else pytest.mark.night)
        for number, pair in enumerate(pairwise(EXPERT_RING))
    ],
)
def test_experts_are_written_by_one_and_read_by_another(tmp_path, writer, reader):
    experts = ["model=qwen3_moe_debug", "model.layers=2"]
    layouts = [[*experts, *EXPERT_LAYOUTS[name].split()] for name in (writer, reader)]
    assert_read_by_another(tmp_path, *layouts)


def state_of(path: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint, whole, but for the counters, which name the layout."""
    shapes = {key: shape for key, shape in tensor_shapes(path).items() if key != "progress"}
    state = {
        key: torch.empty(shape, dtype=torch.uint8 if key.startswith("data.") else torch.float32)
        for key, shape in shapes.items()
    }
    load_into(path, state)
    return state


def read_and_write(run: str, again: str) -> None:
    """Restore, and save at once, elsewhere."""
    from titan_exp.checkpoint.checkpointer import Checkpointer
    from titan_exp.trainer.distributed import joined
    from titan_exp.trainer.trainer import Trainer

    folder = RunFolder(run)
    experiment = load_experiment(folder.config, trust=True)
    with joined(experiment.cluster) as device:
        trainer = Trainer(experiment, folder, device)
        trainer.restore()
        assert trainer.step == 2
        elsewhere = Checkpointer(experiment.checkpoint, Path(again))
        elsewhere.save(2, trainer.model.parts, trainer.optimizer, trainer.loader.state_dict(), {"step": 2})
        trainer.loader.close()
        trainer.report.close("done")


def test_initial_weights_come_from_any_layout(tmp_path):
    first = train(tmp_path / "first", *SAVING, *LAYOUTS["tp"].split())
    settings = [f"checkpoint.initial={tmp_path / 'first'}", "training.steps=1", "optimizer.lr=1e-30"]
    begun = train(tmp_path / "second", *settings, *LAYOUTS["pp"].split())
    for name, weight in first.weights.items():
        assert torch.equal(begun.weights[name], weight), name
    drawn = train(tmp_path / "third", "checkpoint.initial_exclude=[blocks.1.*]", *settings)
    changed = [name for name, weight in first.weights.items() if not torch.equal(drawn.weights[name], weight)]
    assert changed
    assert all(name.startswith("blocks.1.") for name in changed)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_or_from_a_hugging_face_folder(tmp_path, tied):
    model = [f"model.tied_embeddings={tied}"]
    first = train(tmp_path / "first", *SAVING, *model)
    assert convert_command([str(tmp_path / "first"), str(tmp_path / "export")]) == 0
    settings = [f"checkpoint.initial={tmp_path / 'export'}", "training.steps=1", "optimizer.lr=1e-30", *model]
    begun = train(tmp_path / "second", *settings, "parallelism.tp=2", "parallelism.pp=2", "parallelism.dp_shard=2")
    for name, weight in first.weights.items():
        assert torch.equal(begun.weights[name], weight), name
    drawn = train(tmp_path / "third", "checkpoint.initial_exclude=[blocks.1.*]", *settings)
    changed = [name for name, weight in first.weights.items() if not torch.equal(drawn.weights[name], weight)]
    assert changed
    assert all(name.startswith("blocks.1.") for name in changed)


def test_a_pipeline_complains_of_what_any_rank_misses(tmp_path):
    train(tmp_path / "first", *SAVING)
    # The model that is described has them, so that the names of the weights decide.
    (tmp_path / "first" / "config.yaml").write_text("model: {architecture: llama, layers: 6}")
    settings = [f"checkpoint.initial={tmp_path / 'first'}", "model.layers=6", "parallelism.pp=2"]
    with pytest.raises(AssertionError, match=r"the checkpoint lacks: .*blocks\.4\.") as caught:
        train(tmp_path / "second", *settings)
    assert "the model lacks" not in str(caught.value)
