"""Mutations of the scorer, each of which its tests must notice.

python -m pytest tests/extensions/tasks/scorer_mutations.py
"""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extensions.tasks.test_scorer import DENSE, EXPERTS, scored
from tests.parity.runs import Curve, train
from tests.patching import patch

SCORER = "titan_exp.extensions.tasks.scorer"


def _of_batch(change: Callable[[Any, Any], Any]) -> None:
    patch(f"{SCORER}._batch", lambda original: lambda rows, batch: change(original(rows, batch), batch))


def padding_counts() -> None:
    def change(made: Any, batch: Any) -> Any:
        last = torch.tensor([[made.tokens.numel() - 1], [0], [made.scored[2].max()]])
        return replace(made, scored=torch.cat((made.scored, last), dim=1))

    _of_batch(change)


def the_last_batch_is_lost() -> None:
    patch(f"{SCORER}.Scorer.batches", lambda original: lambda self, rows: iter([*original(self, rows)][:-1]))


def every_rank_scores_all_rows() -> None:
    patch(f"{SCORER}.row_batches", lambda original: lambda rows, run, _: original(rows, run, (0, 1)))


def targets_are_those_of_the_token_before() -> None:
    _of_batch(lambda made, _: replace(made, scored=made.scored + torch.tensor([[1], [0], [0]])))


def only_the_first_of_equal_inputs_is_scored() -> None:
    def change(made: Any, batch: Any) -> Any:
        kept = torch.tensor([group[0] for group in batch.groups])
        return replace(made, scored=made.scored[:, torch.isin(made.scored[2], kept)])

    _of_batch(change)


def equal_lengths_are_taken_for_equal_inputs() -> None:
    patch(f"{SCORER}.row_batches", lambda original: lambda rows, *rest: original(
        [replace(row, tokens=row.tokens * 0 + 7) for row in rows], *rest))  # fmt: skip


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
    (only_the_first_of_equal_inputs_is_scored, DENSE, ""),
    (equal_lengths_are_taken_for_equal_inputs, DENSE, ""),
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
    patch(f"{SCORER}.evaluating", lambda _: lambda model: nullcontext())


def test_counts_of_scored_rows_are_noticed(tmp_path: Path):
    words = [*EXPERTS, "training.steps=4", "optimizer.lr=2e-3"]
    plain: Curve = train(tmp_path / "plain", *words)
    _, curve = scored(tmp_path / "scored", *words, mutate=router_stays_in_training)
    same = all(curve.weights[name].equal(weight) for name, weight in plain.weights.items())
    assert not (same and curve.loss == plain.loss)
