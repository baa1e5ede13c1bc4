"""Mutations of classes of transformers in parallel, each of which the parity tests must notice.

python -m pytest tests/extensions/transformers/parity_mutations.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.transformers.hf_folders import CLASSES, write_config
from tests.parity.runs import assert_noticed, remembered
from tests.patching import patch

TENSOR, CLASS = "titan_exp.parallel.tensor_parallel", "titan_exp.extensions.transformers"


def gathered_outputs_take_the_first_ranks_gradient() -> None:
    def make(original: Any) -> Any:
        def forward(ctx: Any, part: Any, region: Any, outputs: int) -> Any:
            out = original(ctx, part, region, outputs)
            ctx.mine = slice(0, part.shape[-1])
            return out

        return staticmethod(forward)

    patch(f"{TENSOR}.layers._GatherOutputs.forward", make)


def split_inputs_keep_their_gradient() -> None:
    def make(_: Any) -> Any:
        def backward(ctx: Any, *gradients: Any) -> Any:
            import torch

            parts = [torch.zeros_like(gradients[0]) for _ in range(ctx.region.degree)]
            parts[ctx.region.rank] = gradients[0]
            return torch.cat(parts, dim=-1), None

        return staticmethod(backward)

    patch(f"{TENSOR}.layers._SplitInputs.backward", make)


def norms_of_the_class_are_taken_for_whole_ones() -> None:
    patch(f"{CLASS}.decoder.SEQUENCE_PARALLEL", lambda _: None)


def inputs_are_gathered_by_every_linear_again() -> None:
    def make(original: Any) -> Any:
        def gather(region: Any, module: Any, args: Any, kwargs: Any) -> Any:
            # Without the collective's backward: each rank's gradient is its own linears' only.
            import torch

            new_args, new_kwargs = original(region, module, args, kwargs)
            if args:
                return (args[0] + (new_args[0] - args[0]).detach(), *new_args[1:]), new_kwargs
            hidden = kwargs["hidden_states"]
            return args, {**kwargs, "hidden_states": torch.add(hidden, (new_kwargs["hidden_states"] - hidden).detach())}

        return gather

    patch(f"{TENSOR}.styles._gather_hidden_states", make)


def windows_are_left_out_of_recorded_calls() -> None:
    def make(original: Any) -> Any:
        def add(self: Any, *args: Any, **kwargs: Any) -> Any:
            import torch.distributed as dist

            first = not dist.is_initialized() or dist.get_rank() == 0
            return original(
                self, *args, **{**kwargs, "sliding_window": kwargs.get("sliding_window") if first else None}
            )

        return add

    patch(f"{CLASS}.anatomy.AttentionCalls.add", make)


def experts_are_summed_over_ranks_as_other_replicated_weights() -> None:
    patch(f"{CLASS}.decoder.ClassMixture", lambda _: type("NoMixture", (), {}))


def other_ranks_weigh_their_experts_twice() -> None:
    def make(original: Any) -> Any:
        def down(self: Any, fused: Any, ends: Any, weights: Any, *, padded: bool = False) -> Any:
            import torch.distributed as dist

            assert weights is not None
            return original(self, fused, ends, weights * (1 + dist.get_rank()), padded=padded)

        return down

    patch(f"{CLASS}.experts.ClassExperts._down", make)


def each_rank_keeps_the_first_ranks_tokens() -> None:
    patch(f"{TENSOR}.layers.TensorParallelGroup.own_tokens", lambda _: lambda self, x: x.chunk(self.degree, dim=1)[0])


def positions_of_a_shard_are_taken_for_restarting_ones() -> None:
    def make(original: Any) -> Any:
        def forward(self: Any, x: Any, positions: Any = None, *rest: Any, **named: Any) -> Any:
            return original(self, x, None if positions is None else positions - positions[:, :1], *rest, **named)

        return forward

    patch(f"{CLASS}.decoder.ClassDecoder.forward", make)


def a_stage_begins_with_the_states_of_other_tokens() -> None:
    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            received = original(self, *args, **kwargs)
            return received.roll(1, dims=1)

        return forward

    patch(f"{CLASS}.decoder._OtherStage.forward", make)


WHOLE = "parallelism.tp=2 parallelism.sequence_parallel=false"
NOTICED: list[tuple[str, str, Callable[[], None]]] = [
    ("olmo2", WHOLE, gathered_outputs_take_the_first_ranks_gradient),
    ("phi3", WHOLE, split_inputs_keep_their_gradient),
    ("gpt_neox", "parallelism.tp=2", norms_of_the_class_are_taken_for_whole_ones),
    ("gemma", WHOLE, inputs_are_gathered_by_every_linear_again),
    ("mistral", "parallelism.tp=2", windows_are_left_out_of_recorded_calls),
    ("qwen3_moe", "parallelism.tp=2", experts_are_summed_over_ranks_as_other_replicated_weights),
    ("qwen3_moe", "parallelism.dp_shard=2 parallelism.ep=2", other_ranks_weigh_their_experts_twice),
    ("deepseek_v3", "parallelism.tp=2", each_rank_keeps_the_first_ranks_tokens),
    ("mistral", "parallelism.cp=2", positions_of_a_shard_are_taken_for_restarting_ones),
    ("olmo2", "parallelism.pp=2 training.micro_batch_size=2", a_stage_begins_with_the_states_of_other_tokens),
]
"""Class, layout and mutation."""


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("repositories")
    return {name: f"model=huggingface model.repository={write_config(folder, name)}" for name in CLASSES}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory, words: dict[str, str]):
    return remembered(lambda: tmp_path_factory.mktemp("one"), words)


@pytest.mark.parametrize("case", NOTICED, ids=lambda case: case[2].__name__)
def test_mutation_is_noticed(
    tmp_path: Path, one_device, words: dict[str, str], case: tuple[str, str, Callable[[], None]]
):
    name, layout, mutate = case
    assert_noticed(tmp_path / "many", [*words[name].split(), *layout.split()], mutate, one_device(name))
