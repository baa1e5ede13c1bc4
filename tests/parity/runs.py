"""Runs of the real trainer in any layout, and what came out of them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks
from titan_exp.config.compose import compose
from titan_exp.config.convert import load_experiment, to_experiment, to_yaml
from titan_exp.config.layout import resolve_layout, world_size
from titan_exp.config.rules import check
from titan_exp.tracking.metrics_file import read_metrics
from titan_exp.tracking.run_folder import RunFolder

SMALL = [
    "model=llama_debug",
    "training.steps=10",
    "training.seq_len=64",
    "training.global_batch_size=8",
    "training.evaluate_every=0",
    "tracking.log_every=1",
    "checkpoint=none",
    # AdamW divides by the root of the second moment: where that is rounding noise, so is the update. A larger epsilon
    # keeps the comparison of weights about gradients.
    "optimizer.eps=1e-4",
    "cluster.device=cpu",
]
"""Ten steps of a tiny model."""


@dataclass(frozen=True)
class Curve:
    """What a run leaves behind."""

    loss: list[float]
    """Loss of each step."""
    grad_norm: list[float]
    """Gradient norm of each step, before clipping."""
    rows: list[dict]
    """All rows of metrics."""
    weights: dict[str, torch.Tensor]
    """Final weights, whole."""


def train(path: Path, *overrides: str, timeout: float = 120.0) -> Curve:
    """Train `SMALL` with overrides in the run folder `path`, on as many ranks as the layout asks for."""
    experiment = check(resolve_layout(to_experiment(compose([*SMALL, *overrides])), 1))
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    folder.config.write_text(to_yaml(experiment))
    weights = run_ranks(world_size(experiment), _train_on_rank, str(path), limit=timeout)[0]
    rows = read_metrics(folder.metrics)
    return Curve([row["loss"] for row in rows], [row["grad_norm"] for row in rows], rows, weights)  # type: ignore[misc]


def _train_on_rank(path: str) -> dict[str, torch.Tensor]:
    from titan_exp.trainer.distributed import joined
    from titan_exp.trainer.train import Trainer

    folder = RunFolder(path)
    experiment = load_experiment(folder.config)
    with joined(experiment.cluster) as device:
        trainer = Trainer(experiment, folder, device)
        trainer.run()
        trainer.report.close("done")
        state = trainer.model.state_dict()
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value.clone() for name, value in state.items()
        }
