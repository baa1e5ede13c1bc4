"""Passes that are recorded and replayed train as passes that are not: to the bit, and with nothing of Python in them.

A CUDA graph is not there on a CPU; in its place a tape of the same operators on the same tensors. What differs between
the two, streams and the memory pool, only a GPU shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.composing import experiment as composed
from tests.parity.runs import LINES, SMALL
from tests.ranks import run_ranks
from tests.tape_recorder import Tape, TapeRecorder
from titan_exp.config.convert import load_experiment, to_yaml
from titan_exp.config.layout import resolve_layout
from titan_exp.tracking.metrics_file import read_metrics
from titan_exp.tracking.run_folder import RunFolder

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
    run = composed(*SMALL, *overrides, f"compile.cuda_graphs={str(graphs).lower()}")
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    folder.config.write_text(to_yaml(resolve_layout(run, 1)))
    weights, passes = run_ranks(1, _on_rank, str(path), mutate)[0]
    names = ("step", "tokens", "loss", "grad_norm", "lr", "validation_loss")
    rows = [tuple(row.get(name) for name in names) for row in read_metrics(folder.metrics)]
    return Trained(rows, weights, passes)


def _on_rank(path: str, mutate: Callable[[], None] | None) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    from titan_exp.trainer import assemble
    from titan_exp.trainer.distributed import joined
    from titan_exp.trainer.train import Trainer

    passes = {"rehearsed": 0, "recorded": 0, "replayed": 0}

    class Counting(TapeRecorder):
        def rehearse(self, work: Callable[[], None]) -> None:
            passes["rehearsed"] += 1
            super().rehearse(work)

        def record(self, work: Callable[[], None]) -> Any:
            passes["recorded"] += 1
            found = super().record(work)

            def replay() -> None:
                passes["replayed"] += 1
                found.replay()

            return replace(found, replay=replay)

    assemble.CudaRecorder = Counting  # type: ignore[misc]
    if mutate is not None:
        mutate()
    folder = RunFolder(path)
    experiment = load_experiment(folder.config)
    with joined(experiment.cluster) as device:
        trainer = Trainer(experiment, folder, device)
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
        (10, ""),
        (10, "training.micro_batch_size=4 training.loss_chunk_tokens=37 training.z_loss=1e-4"),
        (10, "training.mixed_precision=bf16 training.global_batch_size=9 training.micro_batch_size=3"),
        (10, "training.mixed_precision=bf16 training.loss_chunk_tokens=37 model.tied_embeddings=true"),
        (10, "training.mixed_precision=bf16 activation_checkpoint=full training.micro_batch_size=4"),
        (10, "activation_checkpoint=selective"),
        (10, "training.mixed_precision=bf16 training.evaluate_every=3 data.validation_fraction=0.1"),
        (10, "training.mixed_precision=bf16 quantization=float8_tensorwise quantization.precomputed_scales=true"),
        (10, "training.mixed_precision=bf16 quantization=float8_rowwise_gw_hp optimizer.state_precision=bf16"),
        (6, "training.mixed_precision=bf16 compile=all compile.backend=aot_eager activation_checkpoint=full"),
    ],
)
def test_replays_train_the_same(tmp_path: Path, steps: int, overrides: str):
    words = [*CHANGING, *overrides.split(), f"training.steps={steps}"]
    plain = train(tmp_path / "plain", *words, graphs=False)
    found = train(tmp_path / "graphs", *words)
    assert plain.passes == {"rehearsed": 0, "recorded": 0, "replayed": 0}
    a_step = len({it for it in words if "micro_batch_size=4" in it}) + 1
    a_step = 3 if "training.micro_batch_size=3" in words else a_step
    assert found.passes == {"rehearsed": 3, "recorded": 1, "replayed": steps * a_step - 4}
    assert len({row[1] for row in plain.rows}) > 1
    assert_same(found, plain)
