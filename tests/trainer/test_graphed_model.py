"""Passes that are recorded and replayed train as passes that are not: to the bit, and with nothing of Python in them.

A CUDA graph is not there on a CPU; in its place a tape of the same operators on the same tensors. What differs between
the two, streams and the memory pool, only a GPU shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.config.composing import experiment as composed
from tests.models.shapes import TINY, real_model
from tests.parity.runs import LINES, SMALL
from tests.patching import patch
from tests.ranks import run_ranks
from tests.tape_recorder import HostWatch, TapeRecorder, place
from tests.trainer.test_no_device_sync import refuse
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.parallelism import ActivationCheckpointConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.config.schema.typed_config import load_experiment, to_yaml
from titan_exp.data.batch import Batch
from titan_exp.models.build import build_model
from titan_exp.parallel.activation_checkpoint import apply_activation_checkpointing
from titan_exp.parallel.compute_weights import ComputeWeights
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.forward_backward import GraphedModel
from titan_exp.trainer.objective import LanguageModeling

CHANGING = [*LINES, "lr_schedule.warmup_steps=4", "lr_schedule.decay_steps=4", "training.max_grad_norm=0.3"]
"""Every micro-batch has positions and documents, and predicts another number of tokens; rates change, and it clips."""


@dataclass(frozen=True)
class Trained:
    """What a run leaves behind."""

    rows: list[tuple[Any, ...]]
    """Of each step its loss, norm, learning rate and validation loss."""
    weights: dict[str, torch.Tensor]
    """At the end."""
    passes: dict[str, int]
    """How many were rehearsed, recorded and replayed."""


def train(path: Path, *overrides: str, graphs: bool = True, mutate: Callable[[], None] | None = None) -> Trained:
    """Train in a run folder, on one rank, with a tape for the GPU's graphs."""
    run = composed(*SMALL, "training.steps=10", *overrides, f"compile.cuda_graphs={str(graphs).lower()}")
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    folder.config.write_text(to_yaml(resolve_layout(run, 1)))
    weights, passes = run_ranks(1, _on_rank, str(path), mutate)[0]
    names = ("step", "tokens", "loss", "grad_norm", "lr", "validation_loss")
    rows = [tuple(row.get(name) for name in names) for row in read_metrics(folder.metrics)]
    return Trained(rows, weights, passes)


def _on_rank(path: str, mutate: Callable[[], None] | None) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    from titan_exp.trainer.distributed import joined
    from titan_exp.trainer.trainer import Trainer

    passes = {"rehearsed": 0, "recorded": 0, "replayed": 0}

    class Counting(TapeRecorder):
        def warmup(self, work: Callable[[], None]) -> None:
            passes["rehearsed"] += 1
            super().warmup(work)

        def record(self, work: Callable[[], None]) -> Any:
            passes["recorded"] += 1
            found = super().record(work)

            def replay() -> None:
                passes["replayed"] += 1
                found.replay()

            return replace(found, replay=replay)

    patch("titan_exp.trainer.train_state.CudaRecorder", lambda _: Counting)
    if mutate is not None:
        mutate()
    folder = RunFolder(path)
    experiment = load_experiment(folder.config)
    with joined(experiment.cluster) as device:
        trainer = Trainer(experiment, folder, device)
        trainer.restore()
        trainer.run()
        trainer.report.close("done")
        from torch.distributed.tensor import DTensor

        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
            for name, value in trainer.model.parts[0].state_dict().items()
        }, passes


def assert_same(found: Trained, expected: Trained) -> None:
    assert found.rows == expected.rows
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name


@pytest.mark.parametrize(
    ("steps", "overrides"),
    [
        pytest.param(10, "", marks=pytest.mark.night),
        (10, "training.micro_batch_size=4 training.loss_chunk_tokens=37 training.z_loss=1e-4"),
        pytest.param(
            10,
            "training.mixed_precision=bf16 training.global_batch_size=9 training.micro_batch_size=3 "
            "evaluation.every=3 data.validation_fraction=0.1 data.validation_documents=40",
            marks=pytest.mark.night,
        ),
        pytest.param(
            10,
            "training.mixed_precision=bf16 training.loss_chunk_tokens=37 model.tied_embeddings=true "
            "activation_checkpoint=full training.micro_batch_size=4",
            marks=pytest.mark.night,
        ),
        pytest.param(10, "activation_checkpoint=selective model.layers=2", marks=pytest.mark.night),
        pytest.param(
            8,
            "training.mixed_precision=bf16 quantization=float8_tensorwise quantization.precomputed_scales=true "
            "optimizer.state_precision=bf16 model.layers=2",
            marks=pytest.mark.night,
        ),
        pytest.param(
            6,
            "training.mixed_precision=bf16 compile=all compile.backend=aot_eager activation_checkpoint=selective "
            "model.layers=2",
            marks=pytest.mark.night,
        ),
        (
            8,
            "model=qwen3_moe_debug model.layers=2 model.moe.router_bias=true model.moe.balance.bias_rate=1e-2 "
            "training.micro_batch_size=4",
        ),
    ],
)
def test_replay_trains_bitwise_the_same(tmp_path: Path, steps: int, overrides: str):
    words = [*CHANGING, *overrides.split(), f"training.steps={steps}"]
    plain = train(tmp_path / "plain", *words, graphs=False)
    found = train(tmp_path / "graphs", *words)
    assert plain.passes == {"rehearsed": 0, "recorded": 0, "replayed": 0}
    a_step = ResolvedLayout.of(resolve_layout(composed(*SMALL, *words), 1)).gradient_accumulation
    assert found.passes == {"rehearsed": 3, "recorded": 1, "replayed": steps * a_step - 4}
    assert len({row[1] for row in plain.rows}) > 1
    assert_same(found, plain)


def test_a_resumed_run_replays_the_same(tmp_path: Path):
    """Killed after a step that was replayed and before one that is: it rehearses anew, and ends with the same bits."""
    words = [*CHANGING, "training.mixed_precision=bf16", "training.micro_batch_size=4"]
    whole = train(tmp_path / "whole", *words)
    saved = [*words, "checkpoint=sync", "checkpoint.every=6"]
    train(tmp_path / "parts", *saved, mutate=stop_after_six)
    found = train(tmp_path / "parts", *saved)
    assert found.passes == {"rehearsed": 3, "recorded": 1, "replayed": 4}
    assert_same(found, whole)


def test_nothing_waits_in_a_step_of_replays(tmp_path: Path):
    """Nor in what surrounds them; a rank fails where something does."""
    words = [*CHANGING, "training.mixed_precision=bf16", "training.steps=6"]
    assert len(train(tmp_path, *words, mutate=refuse).rows) == 6


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("unbroken"), *CHANGING, graphs=False)


@pytest.mark.parametrize("mutate", ["the_count_is_a_number_of_pythons", "gradients_are_dropped", "inputs_stay"])
def test_values_frozen_in_a_capture_are_noticed(tmp_path: Path, unbroken: Trained, mutate: str):
    found = train(tmp_path, *CHANGING, "training.stop_on_nonfinite=false", mutate=globals()[mutate])
    assert found.passes["replayed"] == 6
    assert found.rows[0] == unbroken.rows[0]
    with pytest.raises(AssertionError):
        assert_same(found, unbroken)


def rows(count: int, length: int = 16, *, seed: int = 0) -> Batch:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (count, length + 1), generator=random)
    places = torch.arange(length).expand(count, length).contiguous()
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), places % 7, places // 7)


def replayed(
    model: torch.nn.Module, recorder: Any, loss: LanguageModeling | None = None, dtype: torch.dtype | None = None
) -> GraphedModel:
    """Of the mesh it is only asked on which device it is."""
    mesh: Any = SimpleNamespace(device=next(model.parameters()).device)
    weights = ComputeWeights([model], dtype, accumulate=True, fixed=True)
    return GraphedModel(model, loss or LanguageModeling(), mesh, weights, recorder)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a step has left, taken away as an optimizer does."""
    found = {name: it.grad.clone() for name, it in model.named_parameters() if it.grad is not None}
    model.zero_grad()
    return found


def test_other_shapes_are_computed_without_the_recording():
    recorder = TapeRecorder(torch.device("cpu"))
    model = replayed(real_model(vocab_size=64), recorder)
    module = model.parts[0]
    model.forward_backward([rows(2)] * 4, [128])
    gradients(module)
    assert (recorder.rehearsals, len(recorder.tapes)) == (3, 1)
    mixed = [rows(2, seed=1), rows(3, seed=2), rows(2, 8, seed=3), rows(2, seed=4)]
    loss = model.forward_backward(mixed, [100])
    found = gradients(module)
    assert (recorder.rehearsals, len(recorder.tapes)) == (5, 1)
    expected = torch.stack([LanguageModeling()(module, batch).total / 100 for batch in mixed]).sum()
    expected.backward()
    assert float(loss["loss"]) == pytest.approx(expected.item(), rel=1e-6)
    for name, gradient in gradients(module).items():
        torch.testing.assert_close(found[name], gradient, atol=1e-7, rtol=1e-4)


def test_the_loss_of_a_step_outlives_the_next():
    model = replayed(real_model(vocab_size=64), TapeRecorder(torch.device("cpu")))
    losses = [model.forward_backward([rows(2, seed=seed)] * 4, [128]) for seed in range(3)]
    assert len({float(loss["loss"]) for loss in losses}) == 3


def test_weights_that_were_put_elsewhere_are_an_error():
    model = replayed(real_model(vocab_size=64), TapeRecorder(torch.device("cpu")))
    model.forward_backward([rows(2)] * 4, [128])
    weight = next(model.parameters())
    weight.data = weight.data.clone()
    with pytest.raises(UserError, match="cuda_graphs=false"):
        model.forward_backward([rows(2)], [32])


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_pass_takes_nothing_from_the_host(chunk: int | None, dtype: torch.dtype | None):
    """On the meta device, which has no data: what comes from the host's memory shows, and so does what goes there."""
    with torch.device("meta"):
        module = build_model(replace(TINY, vocab_size=64), seq_len=16, attention_backend="math")
    recompute = ActivationCheckpointConfig("full", 1, [], 0.5)
    apply_activation_checkpointing(module, recompute, random=False)
    model = replayed(module, HostWatch(), LanguageModeling(chunk, 1e-4), dtype=dtype)
    assert model.forward_backward([rows(2)] * 5, [128])["loss"].is_meta


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_capture_uses_only_memory_that_the_model_keeps(chunk: int | None, dtype: torch.dtype | None):
    """A graph knows addresses: those of weights, gradients, buffers, inputs, count and loss, which the model keeps."""
    recorder = TapeRecorder(torch.device("cpu"))
    model = replayed(real_model(vocab_size=64), recorder, LanguageModeling(chunk, 1e-4), dtype=dtype)
    model.forward_backward([rows(2)] * 4, [128])
    inputs, (module,) = model._inputs, model.parts
    assert inputs is not None
    kept = [*(model.weights._leaves.values() or module.parameters()), *module.buffers()]
    kept += [*model.weights._sums.values(), *(gradient for _, gradient in model._gradients)]
    kept += [*inputs.tensors, *model._tokens, *model._sums.values.values()]
    assert recorder.tapes[0].taken() == {place(tensor) for tensor in kept}


def test_what_comes_from_the_host_is_seen():
    """The watch of the test above can fail."""
    here, there = torch.ones(3), torch.ones(3, device="meta")
    for work in (lambda: there + torch.ones(()), lambda: here.to("meta"), lambda: there.copy_(here)):
        with pytest.raises(AssertionError, match="from the host"):
            HostWatch().warmup(work)  # type: ignore[arg-type]  # what it returns is left alone


def stop_after_six() -> None:
    patch("titan_exp.trainer.trainer.Trainer._one_step", lambda step: lambda self: step(self) or self.step == 6)


def the_count_is_a_number_of_pythons() -> None:
    patch(
        "titan_exp.trainer.forward_backward.normalize_by_tokens",
        lambda original: lambda *args: original(*args[:3], [int(count.tolist()) for count in args[3]]),
    )
    patch("tests.tape_recorder.ASKING", lambda _: ())  # reading the number asks the device


def gradients_are_dropped() -> None:
    patch("titan_exp.trainer.forward_backward.GraphedModel._restore_gradients", lambda _: lambda self: None)


def inputs_stay() -> None:
    patch("titan_exp.data.batch.Batch.tensors", lambda _: property(lambda batch: []))
