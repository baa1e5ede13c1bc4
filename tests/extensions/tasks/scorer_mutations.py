"""Mutations of the scorer, each of which its tests must notice.

python -m pytest tests/extensions/tasks/scorer_mutations.py
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extensions.tasks.test_scorer import DENSE, EXPERTS, scored
from tests.parity.runs import Curve, train
from tests.patching import patch

SCORER = "titan_exp.extensions.tasks.scorer"


def padding_counts() -> None:
    def make(original: Any) -> Any:
        def batch(rows: Any, size: int, length: int) -> Any:
            made = original(rows, size, length)
            filled = torch.where(made.numbers < 0, made.numbers.amax(1, keepdim=True), made.numbers)
            return replace(made, numbers=filled)

        return batch

    patch(f"{SCORER}._batch", make)


def the_last_batch_is_lost() -> None:
    patch(f"{SCORER}.Scorer._batches", lambda original: lambda self, rows: iter([*original(self, rows)][:-1]))


def every_rank_scores_all_rows() -> None:
    def make(original: Any) -> Any:
        class Alone:
            def __init__(self, mesh: Any) -> None:
                self.mesh = mesh
                self.dp_rank, self.dp_degree = 0, 1

            def __getattr__(self, name: str) -> Any:
                return getattr(self.mesh, name)

        return lambda self, rows: original(replace(self, mesh=Alone(self.mesh)), rows)

    patch(f"{SCORER}.Scorer._batches", make)


def targets_are_those_of_the_token_before() -> None:
    def make(original: Any) -> Any:
        def batch(rows: Any, size: int, length: int) -> Any:
            made = original(rows, size, length)
            return replace(made, numbers=made.numbers.roll(1, dims=1))

        return batch

    patch(f"{SCORER}._batch", make)


def shards_of_the_vocabulary_are_taken_for_all_of_it() -> None:
    patch(
        f"{SCORER}.log_normalizer_and_target",
        lambda original: lambda logits, target, shard: original(logits, target % logits.shape[1], None),
    )


def a_tie_of_shards_goes_to_the_last() -> None:
    def largest(logits: Any, shard: Any) -> Any:
        return logits.argmax(-1) + (0 if shard is None else shard.first)

    patch(f"{SCORER}._largest", lambda _: largest)


CASES: list[tuple[Callable[[], None], list[str], str]] = [
    (padding_counts, DENSE, ""),
    (the_last_batch_is_lost, DENSE, ""),
    (every_rank_scores_all_rows, DENSE, "parallelism.dp_shard=2"),
    (targets_are_those_of_the_token_before, DENSE, ""),
    (shards_of_the_vocabulary_are_taken_for_all_of_it, DENSE, "parallelism.tp=2"),
    (a_tie_of_shards_goes_to_the_last, DENSE, "parallelism.tp=2"),
]


@pytest.mark.parametrize(("mutate", "words", "layout"), CASES, ids=[case[0].__name__ for case in CASES])
def test_the_mutation_is_noticed(tmp_path: Path, mutate: Callable[[], None], words: list[str], layout: str):
    expected = scored(tmp_path / "one", *words)[0]
    found = {"total": None, "greedy": None}
    with suppress(Exception):  # an assert, which notices it, too
        found = scored(tmp_path / "many", *words, *layout.split(), mutate=mutate)[0]
    same = found["total"] == pytest.approx(expected["total"], abs=1e-5, rel=3e-7)
    assert not (same and found["greedy"] == expected["greedy"])


def router_stays_in_training() -> None:
    """Evaluation mode and `no_grad` are left out, so that routers count scored rows for their bias."""
    patch("torch.nn.Module.eval", lambda _: lambda self: self)
    patch(f"{SCORER}.Scorer.log_likelihoods", lambda original: torch.enable_grad()(original.__wrapped__))


def test_counts_of_scored_rows_are_noticed(tmp_path: Path):
    words = [*EXPERTS, "training.steps=4", "optimizer.lr=2e-3"]
    plain: Curve = train(tmp_path / "plain", *words)
    _, curve = scored(tmp_path / "scored", *words, mutate=router_stays_in_training)
    same = all(curve.weights[name].equal(weight) for name, weight in plain.weights.items())
    assert not (same and curve.loss == plain.loss)
