"""Mutations of routing and balance, each of which the parity tests must notice: bugs that trainers of others had.

python -m pytest tests/parity/expert_mutations.py
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ops.test_routing import test_experts_of_the_best_groups as assert_best_groups
from tests.parity.runs import mutation_test
from tests.parity.test_qwen3_moe import EXPERIMENTS
from tests.patching import patch
from titan_exp.ops.moe import routing

ROUTER = "titan_exp.models.blocks.feed_forward"
Mutation = Callable[[], None]


def the_balance_is_that_of_a_ranks_tokens() -> None:
    patch(f"{ROUTER}.Router.set_batch", lambda original: lambda self, rows, ranks, _: original(self, rows, 1, None))


def the_balance_is_that_of_a_micro_batch() -> None:
    def make(original: Any) -> Any:
        def balanced(self: Any, weights: Any, logits: Any, scores: Any, experts: torch.Tensor) -> Any:
            counts = experts.flatten().bincount(minlength=self.moe.experts)
            self.previous_load = counts * (self.moe.experts / counts.sum())
            return original(self, weights, logits, scores, experts)

        return balanced

    patch(f"{ROUTER}.Router._balanced", make)


def the_balance_is_averaged_over_micro_batches_again() -> None:
    patch(
        "titan_exp.trainer.experts.ExpertLoad.set_sequences",
        lambda original: lambda self, rows: original(self, rows // dist.get_world_size()),
    )


def z_loss_is_that_of_a_ranks_tokens() -> None:
    patch(f"{ROUTER}.Router.set_batch", lambda original: lambda self, rows, _, total: original(self, rows, 1, total))


def counts_stay_on_their_rank() -> None:
    patch("titan_exp.trainer.experts.dist", lambda _: _OneRank)


def counts_of_sequences_are_one_tensor_ranks() -> None:
    patch(
        "titan_exp.trainer.experts._sum",
        lambda original: lambda counts, groups: original(counts, groups[:-1]),
    )


def counts_are_of_all_steps() -> None:
    def make(original: Any) -> Any:
        def finish(self: Any, counts: torch.Tensor) -> None:
            kept = self.counts.clone()
            original(self, counts)
            self.counts.copy_(kept)

        return finish

    patch(f"{ROUTER}.Router.finish_step", make)


def recomputation_counts_again() -> None:
    patch("titan_exp.ops.moe.routing.is_recomputing", lambda _: lambda: False)


def biases_never_change() -> None:
    patch("titan_exp.trainer.experts.ExpertLoad.update", lambda _: lambda self: None)


def the_bias_weighs_too() -> None:
    patch(
        "titan_exp.ops.moe.routing.expert_weights",
        lambda original: (
            lambda scores, experts, **options: original(scores + 0.05 * (experts[..., :1] == 0), experts, **options)
        ),
    )


def the_router_gets_no_gradient_of_the_balance() -> None:
    patch("titan_exp.ops.moe.routing.attach_loss", lambda _: lambda x, loss: x)


def routers_stop_at_a_layer_without_experts() -> None:
    """Only those before the first such layer are updated."""

    def make(original: Any) -> Any:
        def routers_of(model: Any) -> Any:
            dense = [name for name, _ in model.named_modules() if name.endswith("feed_forward.down")]
            return [found for found in original(model) if not dense or found[0] < dense[0]]

        return routers_of

    patch("titan_exp.trainer.experts.routers_of", make)


def tokens_are_joined_as_those_of_one_sequence() -> None:
    """Right for micro-batches of one sequence only."""

    def make(original: Any) -> Any:
        def joined(part: Any, region: Any, length: int) -> Any:
            batch, _, dim = part.shape
            return original(part.reshape(1, -1, dim), region, batch * length).reshape(batch, length, dim)

        return joined

    patch("titan_exp.parallel.expert_parallel._joined", make)


def gradients_of_routers_are_one_tensor_ranks() -> None:
    patch("titan_exp.parallel.expert_parallel.mark_partial", lambda _: lambda module, *names: None)


def the_norm_leaves_experts_out() -> None:
    def make(original: Any) -> Any:
        return lambda parameters, group: original([weight for weight in parameters if weight.ndim != 3], group)

    patch("titan_exp.trainer.train_step.global_grad_norm", make)


def tensor_ranks_split_tokens_across_sequences() -> None:
    patch("titan_exp.models.spec.model_spec.ModelSpec.computes_per_sequence", lambda _: property(lambda self: False))


class _OneRank:
    @staticmethod
    def get_world_size() -> int:
        return 1


TWO_PARTS = "parallelism.cp=2"
TENSOR = "parallelism.tp=2"
WHOLE_TOKENS = f"{TENSOR} parallelism.sequence_parallel=false"
MICRO = "training.micro_batch_size=2"
SHARDS = "parallelism.dp_shard=2"

DENSE_FIRST = "model=deepseek_debug optimizer.lr=1e-3"

NOTICED: list[tuple[str, str, Mutation]] = [
    ("sequence", TWO_PARTS, the_balance_is_that_of_a_ranks_tokens),
    ("global", MICRO, the_balance_is_that_of_a_micro_batch),
    ("sequence", SHARDS, the_balance_is_averaged_over_micro_batches_again),
    ("global", TWO_PARTS, z_loss_is_that_of_a_ranks_tokens),
    ("sequence", SHARDS, counts_stay_on_their_rank),
    ("global", SHARDS, counts_stay_on_their_rank),
    ("sequence", TENSOR, counts_stay_on_their_rank),
    ("sequence", TENSOR, counts_of_sequences_are_one_tensor_ranks),
    ("sequence", TENSOR, tensor_ranks_split_tokens_across_sequences),
    ("global", SHARDS, counts_are_of_all_steps),
    ("sequence", "activation_checkpoint=full", recomputation_counts_again),
    ("sequence", SHARDS, biases_never_change),
    ("sequence", SHARDS, the_bias_weighs_too),
    ("global", SHARDS, the_router_gets_no_gradient_of_the_balance),
    ("global", TENSOR, gradients_of_routers_are_one_tensor_ranks),
    ("global", WHOLE_TOKENS, gradients_of_routers_are_one_tensor_ranks),
    ("global", WHOLE_TOKENS, tokens_are_joined_as_those_of_one_sequence),
    ("dense first", SHARDS, routers_stop_at_a_layer_without_experts),
    ("global", SHARDS, the_norm_leaves_experts_out),
    ("global", f"{TENSOR} parallelism.ep=2", the_norm_leaves_experts_out),
]
"""Experiment, layout and mutation."""

test_mutation_is_noticed = mutation_test({**EXPERIMENTS, "dense first": DENSE_FIRST}, NOTICED)


def test_closed_groups_of_score_zero_are_noticed(monkeypatch: pytest.MonkeyPatch):
    """Biased scores may all be negative; those of a training's first steps are not."""
    changed, plain = dict(vars(routing)), inspect.getsource(routing.choose_experts)
    exec(plain.replace("-torch.inf", "0.0"), changed)
    assert "0.0" not in plain
    monkeypatch.setattr("tests.ops.test_routing.choose_experts", changed["choose_experts"])
    with pytest.raises(AssertionError):
        assert_best_groups(top2=False, shift=-1.0)
