"""Initial weights of a run: the same bits in every layout, and none drawn that are replaced."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks
from tests.trainer.test_trainer import experiment, run
from titan_exp.checkpoint import optimizer_state
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.parallel import meta_init
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer import restore
from titan_exp.trainer.distributed import joined_process_group
from titan_exp.trainer.train_state import assemble

CPU = torch.device("cpu")


def initial_weights(*overrides: str) -> dict[str, torch.Tensor]:
    """Whole initial weights of this rank's stages."""
    composed = experiment(*overrides)
    with joined_process_group(CPU):
        state = assemble(composed, ResolvedLayout.of(composed), CPU)
        state.built.init_weights()
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()
            for part in state.model.parts
            for name, value in part.named_parameters()
        }


TIED = "model.tied_embeddings=true"
EXPERTS = "model.architecture=tests.models.own_experts.Mixture"
LAYOUTS = {
    "hsdp": ([], ["parallelism.dp_replicate=2", "parallelism.dp_shard=2"]),
    "tp": ([], ["parallelism.tp=2", "parallelism.dp_shard=2"]),
    "more tp ranks than kv heads": ([], ["parallelism.tp=4", "parallelism.dp_shard=1"]),
    "pp, tied": ([TIED], ["parallelism.pp=2", "parallelism.dp_shard=1", TIED]),
    "experts": ([EXPERTS], ["parallelism.dp_shard=2", EXPERTS]),
}


def differing(layout: str) -> list[str]:
    """Names of the weights that differ from those of one device."""
    alone, many = LAYOUTS[layout]
    (expected,) = run_ranks(1, initial_weights, *alone)
    found: list[dict[str, torch.Tensor]] = run_ranks(
        ResolvedLayout.of(experiment(*many)).world_size, initial_weights, *many
    )
    assert {name for part in found for name in part} == expected.keys()
    return [name for part in found for name, value in part.items() if not torch.equal(value, expected[name])]


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[] if layout == "tp" else pytest.mark.night) for layout in LAYOUTS]
)
def test_every_layout_has_the_bits_of_one_device(layout):
    assert differing(layout) == []


class Recorder:
    """Names of the weights that are drawn; the others are poisoned, so that a use of unset memory shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn: list[str] = []
        fill, allocate = meta_init.init_shard_, meta_init.materialize_parameters

        def record(values, seed, name, init, part):
            self.drawn.append(name)
            fill(values, seed, name, init, part)

        def poison(model, *args, **kwargs):
            unfilled = allocate(model, *args, **kwargs)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(torch.nan)
            return unfilled

        def require_loaded(parts, optimizer):
            assert all(parameter.isfinite().all() for part in parts for parameter in part.parameters())
            allocate_state(parts, optimizer)

        allocate_state = optimizer_state.init_optimizer_state
        monkeypatch.setattr(optimizer_state, "init_optimizer_state", require_loaded)
        monkeypatch.setattr(meta_init, "init_shard_", record)
        monkeypatch.setattr(meta_init, "materialize_parameters", poison)

    def of(self, path: Path, *overrides: str) -> tuple[list[str], list[float]]:
        """Weights drawn by a run, and all losses that it has written."""
        self.drawn = []
        _, folder = run(path, "checkpoint.mode=sync", "checkpoint.every=2", "checkpoint.keep=9", *overrides)
        return self.drawn, [json.loads(row)["loss"] for row in folder.metrics.read_text().splitlines()]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def test_no_weight_is_drawn_that_is_replaced(tmp_path, recorder, monkeypatch):
    first = tmp_path / "first"
    drawn, losses = recorder.of(first, "training.steps=4")
    assert len(drawn) == len(set(drawn)) > 10, "each once"
    (first / "checkpoints/step-00000004").rename(tmp_path / "gone")
    assert recorder.of(first, "training.steps=4") == ([], [*losses, *losses[2:]]), "resumed after step 2"

    drawn, continued = recorder.of(tmp_path / "child", f"checkpoint.continue_from={first}", "training.steps=6")
    assert drawn == []
    assert len(continued) == 2

    weights = {}
    load = restore._load_initial_weights

    def keep(trainer):
        load(trainer)
        weights.update({name: value.detach().clone() for name, value in trainer.model.parts[0].named_parameters()})

    monkeypatch.setattr(restore, "_load_initial_weights", keep)
    initial = [f"checkpoint.initial={first}", "training.steps=1", "experiment.seed=5"]
    assert recorder.of(tmp_path / "started", *initial)[0] == []
    loaded = dict(weights)
    exclude = "checkpoint.initial_exclude=['head.*','*.0.*down*']"
    excluded = ["blocks.0.feed_forward.down.weight", "head.weight"]
    assert sorted(recorder.of(tmp_path / "excluding", *initial, exclude)[0]) == excluded
    assert sorted(name for name in weights if not torch.equal(weights[name], loaded[name])) == excluded
    mixed = dict(weights)
    recorder.of(tmp_path / "drawn", "training.steps=1", "experiment.seed=5")
    assert all(torch.equal(mixed[name], weights[name]) for name in excluded)

    RunFolder(first).config.write_text(to_yaml(experiment()))
    export_weights(open_checkpoint(first), tmp_path / "export", ExportOptions("huggingface"))
    assert recorder.of(tmp_path / "hf", *initial[1:], f"checkpoint.initial={tmp_path / 'export'}")[0] == []
    assert all(torch.equal(weights[name], value) for name, value in loaded.items())


def test_weights_of_another_function_are_refused_and_named(tmp_path, caplog):
    """Their names and shapes agree: only the checkpoint's own description tells them apart."""
    run(tmp_path / "first", "checkpoint.mode=sync", "training.steps=1")
    other = [f"checkpoint.initial={tmp_path / 'first'}", "training.steps=1", "model.heads=8", "model.kv_heads=4"]
    other += ["model.head_dim=8"]
    with pytest.raises(UserError, match=r"(?s)another model.*model\.heads=8.*has 4.*model\.head_dim=8"):
        run(tmp_path / "other", *other)
    caplog.set_level("INFO")
    accepting = "checkpoint.accept_changes=[model.heads,model.kv_heads,model.head_dim]"
    run(tmp_path / "accepted", *other, accepting, "model.context=4096", "model.init_std=0.5")
    (line,) = [text for text in caplog.messages if "another model" in text]
    heads = "model.heads=8 (4 there), model.kv_heads=4 (2 there), model.head_dim=8 (16 there)"
    assert line.endswith(f"model.context=4096 (512 there), {heads}")


def test_a_model_that_declares_nothing_is_not_built_again_on_resume(tmp_path, monkeypatch):
    built = []
    make = meta_init._build_whole
    monkeypatch.setattr(meta_init, "_build_whole", lambda build, seed: built.append(seed) or make(build, seed))
    settings = ["model.architecture=tests.trainer.test_initial_weights.NoBuffers", "checkpoint.mode=sync"]
    run(tmp_path, *settings, "training.steps=1")
    assert built == [0]
    run(tmp_path, *settings, "training.steps=2")
    assert built == [0]


class NoBuffers(torch.nn.Module):
    """A user's model without declarations."""

    def __init__(self, config) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def forward(self, tokens, positions=None, documents=None):
        return self.table(tokens)
