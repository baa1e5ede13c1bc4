"""Train with the real trainer in any layout, and read back curve and weights."""

import logging
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.proofs import note_training
from tests.ranks import run_ranks
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.config.schema.typed_config import load_experiment, to_experiment, to_yaml
from titan_exp.rules import check
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder

SMALL = [
    "model=llama_debug",
    "training.steps=6",
    "training.seq_len=64",
    "training.global_batch_size=8",
    "evaluation.every=0",
    "tracking.log_every=1",
    "checkpoint=none",
    # AdamW divides by the root of the second moment: where that is rounding noise, so is the update. A larger epsilon
    # keeps the comparison of weights about gradients.
    "optimizer.eps=1e-4",
    # Rounding grows from step to step with the learning rate.
    "optimizer.lr=2e-3",
    "cluster.device=cpu",
]
"""Six steps of a tiny model."""

EVALUATE = "evaluation.every=6 data.validation_fraction=0.1 data.validation_documents=40"
"""A little of what is held out, of a corpus of short documents."""

PARAGRAPHS = ["data=text", f"data.paths=[{sysconfig.get_path('stdlib')}/json]", "data.document=paragraph"]
"""Documents that see each other, a few in a row."""

LINES = [
    "data=text",
    f"data.paths=[{sysconfig.get_path('stdlib')}/json]",
    "data.document=line",
    "data.document_mask=true",
    "data.reset_positions=true",
]
"""Documents so short that every row holds several, and ranks predict different numbers of tokens."""


@dataclass(frozen=True)
class Curve:
    """Curve and final weights of a run."""

    loss: list[float]
    """Loss of each step."""
    grad_norm: list[float]
    """Gradient norm of each step, before clipping."""
    rows: list[dict]
    """All rows of metrics."""
    weights: dict[str, torch.Tensor]
    """Final weights, whole."""
    disputed: list[str]
    """Names of those that not all ranks agree about."""


def train(path: Path, *overrides: str, timeout: float = 120.0, mutate: Callable[[], None] | None = None) -> Curve:
    """Train `SMALL` with overrides in the run folder `path`, on as many ranks as the layout asks for.

    `mutate` is called first on each rank, to break something on purpose.
    """
    chosen = {override.partition("=")[0] for override in overrides}
    if "optimizer" in chosen:
        chosen.add("optimizer.eps")  # AdamW's
    small = [override for override in SMALL if override.partition("=")[0] not in chosen]
    experiment = check(resolve_layout(to_experiment(compose([*small, *overrides])), 1))
    note_training(experiment)
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    folder.config.write_text(to_yaml(experiment))
    parts = run_ranks(ResolvedLayout.of(experiment).world_size, _train_on_rank, str(path), mutate, limit=timeout)
    weights: dict[str, torch.Tensor] = {}
    disputed: list[str] = []
    for part in parts:
        for name, weight in part.items():
            if not torch.equal(weights.setdefault(name, weight), weight):
                disputed.append(name)
    rows = read_metrics(folder.metrics)
    return Curve([row["loss"] for row in rows], [row["grad_norm"] for row in rows], rows, weights, disputed)  # type: ignore[misc]


def remembered(make_folder: Callable[[], Path], experiments: Mapping[str, str]) -> Callable[[str], Curve]:
    """The curve of a named experiment on one device, trained once."""

    @cache
    def run(name: str) -> Curve:
        return train(make_folder(), *experiments[name].split())

    return run


def assert_same_curve(found: Curve, expected: Curve) -> None:
    """To fp32 rounding: the sums are the same numbers in another order."""
    assert len(found.loss) == len(expected.loss)
    assert found.disputed == []
    assert found.loss == pytest.approx(expected.loss, rel=2e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=2e-5)
    assert [row["tokens"] for row in found.rows] == [row["tokens"] for row in expected.rows]
    losses = ("experts/balance_loss", "experts/z_loss")  # of counts, one token may fall on the other side of a near tie
    reported = [key for key in expected.rows[0] if key.startswith(("objective/", "model/", "optimizer/", *losses))]
    for found_row, row in zip(found.rows, expected.rows, strict=True):
        assert [found_row[key] for key in reported] == pytest.approx([row[key] for key in reported], rel=1e-4)
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        if name.endswith(".previous_load") and _is_one_token_off(found.weights[name], weight):
            continue
        torch.testing.assert_close(found.weights[name], weight, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def _is_one_token_off(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if one token is another expert's: it may fall on the other side of a near tie, by the machine's rounding.
    Then two experts' shares of tokens [experts] differ, by opposite amounts."""
    moved = (found - expected)[~torch.isclose(found, expected, atol=2e-5, rtol=1e-4)].tolist()
    return len(moved) == 2 and abs(sum(moved)) < 1e-6 and max(moved) < 1e-2


def assert_noticed(path: Path, words: Sequence[str], mutate: Callable[[], None], expected: Curve) -> None:
    """Train with a mutation, whose curve must differ from the expected one."""
    found = train(path, *words, "training.stop_on_nonfinite=false", mutate=mutate)
    with pytest.raises(AssertionError):
        assert_same_curve(found, expected)


def mutation_test(experiments: Mapping[str, str], cases: Sequence[tuple[str, str, Callable[[], None]]]) -> Callable:
    """Test that each of the cases, an experiment by name, a layout and a mutation, is noticed."""
    curves: dict[str, Curve] = {}

    @pytest.mark.parametrize(
        ("experiment", "layout", "mutate"), cases, ids=lambda case: getattr(case, "__name__", str(case))
    )
    def test(tmp_path: Path, experiment: str, layout: str, mutate: Callable[[], None]) -> None:
        words = experiments[experiment].split()
        if experiment not in curves:
            curves[experiment] = train(tmp_path / "one", *words)
        assert_noticed(tmp_path / "many", [*words, *layout.split()], mutate, curves[experiment])

    return test


def _train_on_rank(path: str, mutate: Callable[[], None] | None) -> dict[str, torch.Tensor]:
    if mutate is not None:
        mutate()
    return trained_weights(RunFolder(path))


def trained_weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Train the run of a folder as one of its ranks; returns the whole weights of this rank's modules."""
    from titan_exp.trainer.commit import commit_of
    from titan_exp.trainer.distributed import joined
    from titan_exp.trainer.trainer import Trainer

    experiment = load_experiment(folder.config, trust=True)
    with joined(experiment.cluster) as device:
        trainer = Trainer(experiment, folder, device, commit_of(experiment))
        trainer.restore()
        trainer.run()
        trainer.report.close("done")
        # Putting a weight together again may take two collectives, of which torch warns.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
            for part in trainer.model.parts
            for name, value in part.state_dict().items()
        }
