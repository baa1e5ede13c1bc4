"""Mutations of latent attention in tensor and context parallelism, each of which the parity tests must notice.

python -m pytest tests/parity/deepseek_mutations.py
"""

from collections.abc import Callable
from typing import Any

from tests.parity.runs import mutation_test
from tests.parity.test_deepseek import EXPERIMENTS
from tests.patching import patch

TENSOR = "titan_exp.parallel.tensor_parallel"
CONTEXT = "titan_exp.parallel.context_parallel"


def gradients_of_replicated_linears_are_taken_for_whole_ones() -> None:
    from torch import nn

    patch(
        f"{TENSOR}.styles.mark_partial",
        lambda original: lambda module, *names: None if isinstance(module, nn.Linear) else original(module, *names),
    )


def gradients_of_latent_norms_are_taken_for_whole_ones() -> None:
    patch(
        f"{TENSOR}.styles.mark_partial",
        lambda original: lambda module, *names: None if module.weight.numel() == 32 else original(module, *names),
    )


def gradients_of_latents_are_one_ranks() -> None:
    patch(f"{TENSOR}.layers.GatheredTokens.forward", lambda _: lambda self, x: x)


def gradients_of_gathered_latents_are_one_ranks() -> None:
    def make(_: Any) -> Any:
        def backward(ctx: Any, gradient: Any) -> Any:
            import torch.distributed as dist

            from titan_exp.parallel.mesh import group_named

            return gradient.chunk(ctx.degree, dim=1)[dist.get_rank(group_named(ctx.group))].contiguous(), None, None

        return staticmethod(backward)

    patch(f"{CONTEXT}.attention._GatherLatents.backward", make)


def scores_have_the_usual_scale_in_parts() -> None:
    def make(original: Any) -> Any:
        return lambda self, backend, method, group, device, scale, *rest: original(
            self, backend, method, group, device, None, *rest
        )

    patch(f"{CONTEXT}.attention.ContextAttention.__init__", make)


def latents_are_rotated_by_the_positions_of_the_part() -> None:
    def make(original: Any) -> Any:
        return lambda self, seq, positions: original(self, seq, None)

    patch("titan_exp.ops.attention.rope.RotaryEmbedding.forward", make)


NOTICED: list[tuple[str, str, Callable[[], None]]] = [
    ("dense", "parallelism.tp=2", gradients_of_replicated_linears_are_taken_for_whole_ones),
    ("dense", "parallelism.tp=2", gradients_of_latent_norms_are_taken_for_whole_ones),
    ("lite", "parallelism.tp=2 parallelism.sequence_parallel=false", gradients_of_latents_are_one_ranks),
    ("lite", "parallelism.cp=2 parallelism.cp_method=allgather", gradients_of_gathered_latents_are_one_ranks),
    ("lite", "parallelism.cp=2 parallelism.cp_method=ring", scores_have_the_usual_scale_in_parts),
    ("lite", "parallelism.cp=2 parallelism.cp_method=ulysses", latents_are_rotated_by_the_positions_of_the_part),
]
"""Experiment, layout and mutation."""

test_mutation_is_noticed = mutation_test(EXPERIMENTS, NOTICED)
