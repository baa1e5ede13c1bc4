"""A batch that grows: one device's curve in every layout, in the order of the data, and in a run that continues."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.runs import LINES, Curve, assert_same_curve, train
from tests.parity.test_continued import assert_continues, continued
from tests.patching import patch
from titan_exp.trainer.trainer import Trainer

RAMP = ["training.batch_ramp=[[2,2],[2,4]]", "training.global_batch_size=8", *LINES]
EXPERTS = "model=qwen3_moe_debug model.moe.balance.loss=sequence"
LAYOUTS = [
    ("", "parallelism.dp_shard=2 parallelism.pp=2"),
    ("", "parallelism=ddp training.micro_batch_size=1"),
    ("", "parallelism.tp=2 parallelism.cp=2"),
    ("", "parallelism.pp=2 parallelism.pp_schedule=Interleaved1F1B parallelism.dp_shard=2"),
    ("", "parallelism.pp=2 parallelism.pp_schedule=GPipe parallelism.pp_microbatches=2 training.micro_batch_size=1"),
    ("model.tied_embeddings=true", "parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble"),
    (EXPERTS, "parallelism.dp_shard=2 parallelism.ep=2"),
    (EXPERTS, "parallelism.pp=2 parallelism.dp_shard=2 parallelism.ep=2 training.micro_batch_size=1"),
    (EXPERTS, "compile=blocks compile.backend=aot_eager training.micro_batch_size=1"),
]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(*LAYOUTS[0], marks=pytest.mark.day),
        *(pytest.param(*layout, marks=pytest.mark.night) for layout in LAYOUTS[1:]),
    ],
)
def test_layouts(tmp_path: Path, model: str, layout: str):
    own = [*RAMP, *model.split()]
    assert_same_curve(train(tmp_path / "many", *own, *layout.split()), train(tmp_path / "one", *own))


def ramp_and_chain(path: Path, *words: str, mutate: Callable[[], None] | None = None) -> tuple[Curve, list[Curve]]:
    """A run with a ramp, and runs of one batch size each that continue each other, in equal micro-batches."""
    words = ("training.micro_batch_size=1", *words)
    curves = []
    for number, (size, end) in enumerate(((2, 2), (4, 4), (8, 6))):
        parent = [f"checkpoint.continue_from={path / str(number - 1)}"] if number else []
        own = [*LINES, f"training.global_batch_size={size}", f"training.stop_after={end}", "checkpoint.mode=sync"]
        curves.append(train(path / str(number), *own, *words, *parent))
    return train(path / "ramp", *RAMP, *words, mutate=mutate), curves


def assert_is_chain(found: Curve, curves: list[Curve]) -> None:
    """The same numbers to the bit, and the same counts of tokens."""
    rows = [row for curve in curves for row in curve.rows]
    for key in ("step", "tokens", "loss", "grad_norm", "lr"):
        assert [row[key] for row in found.rows] == [row[key] for row in rows], key
    assert all(torch.equal(found.weights[name], weight) for name, weight in curves[-1].weights.items())


BALANCED = f"{EXPERTS} model.moe.balance.coefficient=0.1"
"""Experts whose balance losses are means over the sequences of a step."""


@pytest.mark.parametrize(
    "model", [pytest.param("", marks=pytest.mark.night), pytest.param(BALANCED, marks=pytest.mark.day)]
)
def test_a_ramp_is_a_chain_of_runs(tmp_path: Path, model: str):
    assert_is_chain(*ramp_and_chain(tmp_path, *model.split()))


@pytest.mark.night
@pytest.mark.parametrize("layout", ["parallelism.dp_shard=2", "parallelism.pp=2"])
def test_a_ramp_is_a_chain_of_runs_in_layouts(tmp_path: Path, layout: str):
    assert_is_chain(*ramp_and_chain(tmp_path, *layout.split()))


@pytest.mark.night
@pytest.mark.parametrize(
    ("before", "after"),
    [("parallelism.dp_shard=2", "parallelism.pp=2"), ("parallelism.pp=2 training.micro_batch_size=1", "")],
)
def test_a_ramp_continues_in_another_layout(tmp_path: Path, before: str, after: str):
    own = ["training.batch_ramp=[[3,2],[4,4]]", *LINES]
    assert_continues(*continued(tmp_path, [*own, *before.split()], [*own, *after.split()]))


def rows_are_counted_by_the_steps_own_batch() -> None:
    """Step s begins at row (s - 1) · batch, as if all steps before had its batch."""

    def make(original: Any) -> Any:
        def one_step(self: Trainer) -> bool:
            size = self.experiment.training.batch_size_at(self.step + 1)
            self.loader.skip(self.step * size)
            return original(self)

        return one_step

    patch("titan_exp.trainer.trainer.Trainer._one_step", make)


def accumulation_ignores_the_ramp() -> None:
    patch(
        "titan_exp.config.layout.resolved_layout.ResolvedLayout.gradient_accumulation_at",
        lambda _: lambda self, step: self.gradient_accumulation,
    )


@pytest.mark.night
@pytest.mark.parametrize("mutate", [rows_are_counted_by_the_steps_own_batch, accumulation_ignores_the_ramp])
def test_mutations_are_noticed(tmp_path: Path, mutate):
    found = ramp_and_chain(tmp_path, mutate=mutate)
    with pytest.raises(AssertionError):
        assert_is_chain(*found)


def experts_are_balanced_over_the_last_batch() -> None:
    patch("titan_exp.trainer.experts.ExpertLoad.set_sequences", lambda _: lambda self, sequences: None)


@pytest.mark.night
def test_balance_over_the_last_batch_is_noticed(tmp_path: Path):
    found = ramp_and_chain(tmp_path, *BALANCED.split(), mutate=experts_are_balanced_over_the_last_batch)
    with pytest.raises(AssertionError):
        assert_is_chain(*found)
