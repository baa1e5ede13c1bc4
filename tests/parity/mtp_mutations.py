"""Mutations of multi-token prediction, each of which a test must notice.

python -m pytest tests/parity/mtp_mutations.py
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import test_mtp
from tests.parity.expert_mutations import tensor_ranks_split_tokens_across_sequences
from tests.parity.runs import mutation_test
from tests.parity.test_mtp import EXPERIMENTS
from tests.patching import patch
from tests.ranks import run_ranks

OBJECTIVE = "titan_exp.trainer.objective"


def targets_are_those_of_the_depth_before() -> None:
    def make(original: Any) -> Any:
        def ahead(self: Any, places: int) -> Any:
            return replace(
                original(self, places), labels=original(self, places - 1).labels if places > 1 else self.labels
            )

        return ahead

    patch("titan_exp.data.batch.Batch._ahead", make)


def documents_predict_each_other() -> None:
    patch(
        "titan_exp.data.batch.Batch._ahead",
        lambda original: lambda self, places: original(replace(self, documents=None), places),
    )


def hidden_states_are_those_before_the_final_norm() -> None:
    """The input of the norm, in place of its output."""

    def make(original: Any) -> Any:
        def forward(self: Any, x: Any, *rest: Any, **named: Any) -> Any:
            kept: list[torch.Tensor] = []
            hook = self.norm.register_forward_hook(lambda _, inputs, output: kept.append(inputs[0]))
            modules = [block for number, block in self.blocks.items() if int(number) >= len(self.spec.layers)]
            before = modules[0].register_forward_pre_hook(lambda _, inputs: (kept[0], *inputs[1:]))
            try:
                return original(self, x, *rest, **named)
            finally:
                hook.remove()
                before.remove()

        return forward

    patch("titan_exp.models.decoder.Decoder.forward", make)


def the_hidden_state_comes_first() -> None:
    def make(original: Any) -> Any:
        def forward(self: Any, x: Any, rope: Any, mask: Any, embedded: Any) -> Any:
            norms = self.embedding_norm, self.hidden_norm
            self.embedding_norm, self.hidden_norm = norms[::-1]
            try:
                return original(self, embedded, rope, mask, x)
            finally:
                self.embedding_norm, self.hidden_norm = norms

        return forward

    patch("titan_exp.models.blocks.transformer.MTPModule.forward", make)


REFERENCE = [
    targets_are_those_of_the_depth_before,
    documents_predict_each_other,
    hidden_states_are_those_before_the_final_norm,
    the_hidden_state_comes_first,
]
"""Mutations of what is computed, which the comparison with the reference notices."""


def modules_are_divided_by_the_tokens_of_the_micro_batch() -> None:
    def make(original: Any) -> Any:
        def normalize_by_tokens(objective: Any, module: Any, batch: Any, tokens: Any, *rest: Any) -> Any:
            own = [(part.labels >= 0).sum() * 8 for part in batch.further]
            return original(objective, module, batch, [tokens[0], *own], *rest)

        return normalize_by_tokens

    patch("titan_exp.trainer.forward_backward.normalize_by_tokens", make)


def modules_are_divided_by_the_tokens_of_the_model() -> None:
    patch(
        "titan_exp.trainer.commit.token_counts",
        lambda original: lambda objective, batch: original(objective, batch)[:1] * (1 + len(batch.further)),
    )


def gradients_of_the_embedding_are_those_of_one_stage() -> None:
    patch("titan_exp.parallel.pipeline_runtime.TiedWeights.sum_gradients", lambda _: lambda self: None)


def gradients_of_the_projection_are_taken_for_whole_ones() -> None:
    patch(
        "titan_exp.parallel.tensor_parallel.styles.mark_partial",
        lambda original: (
            lambda module, *names: None if getattr(module, "in_features", 0) == 128 else original(module, *names)
        ),
    )


def tokens_ahead_are_those_of_the_part() -> None:
    """Of the tokens that a context-parallel rank has, where two chunks of the sequence meet."""

    def make(original: Any) -> Any:
        def shard_batch(batch: Any, mesh: Any) -> Any:
            return original(replace(batch, further=()), mesh).with_further(len(batch.further))

        return shard_batch

    patch("titan_exp.trainer.forward_backward.shard_batch", make)


CURVES: list[tuple[str, str, Callable[[], None]]] = [
    (
        "documents",
        "parallelism.dp_shard=2 training.micro_batch_size=1",
        modules_are_divided_by_the_tokens_of_the_micro_batch,
    ),
    ("documents", "parallelism.dp_shard=2", modules_are_divided_by_the_tokens_of_the_model),
    ("v3", "parallelism.pp=2", gradients_of_the_embedding_are_those_of_one_stage),
    ("v3", "parallelism.tp=2", gradients_of_the_projection_are_taken_for_whole_ones),
    ("unbalanced", "parallelism.tp=2", tensor_ranks_split_tokens_across_sequences),
    ("v3", "parallelism.cp=2", tokens_ahead_are_those_of_the_part),
]
"""Experiment, layout and mutation."""


@pytest.mark.parametrize("mutate", REFERENCE)
def test_mutation_is_noticed_beside_the_reference(tmp_path: Path, mutate: Callable[[], None]):
    (outcome,) = run_ranks(1, _compare_with_reference, str(tmp_path), mutate)
    assert outcome == "noticed"


def _compare_with_reference(path: str, mutate: Callable[[], None]) -> str:
    mutate()
    try:
        test_mtp.test_losses_and_gradients_equal(Path(path), "v3", True, None)
    except AssertionError:
        return "noticed"
    return "not noticed"


UNBALANCED = f"{EXPERIMENTS['v3']} model.moe.balance.coefficient=0"

test_mutation_is_noticed = mutation_test({**EXPERIMENTS, "unbalanced": UNBALANCED}, CURVES)
