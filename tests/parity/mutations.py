"""Mutations of the trainer, each of which the parity tests must notice. Run on demand:

python -m pytest tests/parity/mutations.py -m "night or not night"
"""

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.runs import LINES, assert_same_curve, remembered, train
from tests.patching import patch

LAYOUT = ["parallelism=hsdp", "training.micro_batch_size=1", "training.loss_chunk_tokens=37", *LINES]
"""Shards, copies, accumulation and a loss in chunks at once, with token counts that differ between ranks."""


def gradients_are_averaged_once_more() -> None:
    def make(original: Any) -> Any:
        def apply_fsdp(model: Any, *rest: Any) -> None:
            original(model, *rest)
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(2.0)

        return apply_fsdp

    patch("titan_exp.parallel.apply.apply_fsdp", make)


def the_loss_is_divided_by_local_tokens() -> None:
    def make(original: Any) -> Any:
        return lambda objective, module, batch, tokens, *rest: original(
            objective, module, batch, (batch.labels >= 0).sum() * 8, *rest
        )

    patch("titan_exp.trainer.forward_backward.normalize_by_tokens", make)


def labels_are_shifted() -> None:
    def make(original: Any) -> Any:
        def following(self: Any) -> Any:
            batch = original(self)
            batch.labels.copy_(batch.labels.roll(1, dims=1))
            return batch

        return following

    patch("titan_exp.data.train_loader.TrainLoader.__next__", make)


def documents_see_each_other() -> None:
    patch(
        "titan_exp.ops.attention.sdpa.document_mask",
        lambda original: lambda documents: original(torch.zeros_like(documents)),
    )


def the_norm_is_not_summed_over_shards() -> None:
    patch("titan_exp.optim.grad_clip.dist", lambda original: _Without(original, "all_reduce"))


def ranks_clip_by_their_own_norm() -> None:
    def make(original: Any) -> Any:
        def scale(parameters: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
            own = torch.stack([p.grad.to_local().norm() for p in parameters]).norm()  # type: ignore[union-attr]
            original(parameters, own, max_norm)

        return scale

    patch("titan_exp.optim.grad_clip.scale_gradients", make)


def only_the_last_micro_batch_counts() -> None:
    calls = itertools.count()

    def make(original: Any) -> Any:
        def normalize_by_tokens(*args: Any) -> Any:
            loss, metrics = original(*args)
            return (loss, metrics) if next(calls) % 2 else (loss * 0, metrics)

        return normalize_by_tokens

    patch("titan_exp.trainer.forward_backward.normalize_by_tokens", make)


def every_data_rank_reads_the_same() -> None:
    patch(
        "titan_exp.trainer.trainer.TrainLoader",
        lambda original: lambda *args, **kwargs: original(*args, **{**kwargs, "dp_rank": 0}),
    )


def initial_weights_depend_on_the_rank() -> None:
    patch(
        "titan_exp.trainer.build_model.init_weights",
        lambda original: lambda model, specs, seed: original(model, specs, seed + int(os.environ["RANK"])),
    )


def copies_do_not_exchange_gradients() -> None:
    def make(original: Any) -> Any:
        def synchronize(model: Any, *, last: bool) -> None:
            original(model, last=last)
            model.set_requires_all_reduce(False)

        return synchronize

    patch("titan_exp.trainer.forward_backward.set_gradient_sync", make)


def chunks_ignore_the_gradient_from_above() -> None:
    patch(
        "titan_exp.ops.loss.linear_cross_entropy._LinearLoss.backward",
        lambda original: lambda ctx, *gradients: original(ctx, torch.ones(())),
    )


def the_last_chunk_is_lost() -> None:
    def make(original: Any) -> Any:
        def over_chunks(hidden: Any, weight: Any, labels: Any, *rest: Any, **options: Any) -> Any:
            labels = labels.clone()
            labels[37:] = -100
            return original(hidden, weight, labels, *rest, **options)

        return over_chunks

    patch("titan_exp.ops.loss.linear_cross_entropy._over_chunks", make)


def norms_are_decayed() -> None:
    patch(
        "titan_exp.optim.parameter_groups.parameter_groups",
        lambda original: (
            lambda parameters, config, **options: original(parameters, replace(config, decay_vectors=True), **options)
        ),
    )


def a_sharded_embedding_is_taken_for_a_matrix() -> None:
    patch("titan_exp.parallel.tensor_parallel.layers.VocabParallelEmbedding.parameter_role", lambda _: None)


def metrics_are_means_of_micro_batches() -> None:
    """Averaged over micro-batches and ranks, each by its own tokens; the differentiated loss stays right."""

    def make(original: Any) -> Any:
        def normalize_by_tokens(objective: Any, module: Any, batch: Any, tokens: Any, *rest: Any) -> Any:
            loss, metrics = original(objective, module, batch, tokens, *rest)
            share = tokens / ((batch.labels >= 0).sum() * 8)
            return loss, {name: value * share for name, value in metrics.items()}

        return normalize_by_tokens

    patch("titan_exp.trainer.forward_backward.normalize_by_tokens", make)


def metrics_of_modules_are_averaged_over_ranks() -> None:
    patch(
        "titan_exp.trainer.metric_reduction.MetricReducer._copies",
        lambda original: (
            lambda self, name: self._mesh.world.size() if name.startswith("model/") else original(self, name)
        ),
    )


def metrics_of_modules_add_up_over_steps() -> None:
    patch("titan_exp.trainer.metric_reduction.MetricReducer.begin_step", lambda _: _once)


def partial_gradients_are_taken_for_whole_ones() -> None:
    patch("titan_exp.trainer.train_step.reduce_partial_gradients", lambda _: lambda model, mesh: None)


def gradients_of_hidden_states_are_not_summed() -> None:
    patch(
        "titan_exp.parallel.tensor_parallel.collectives._CopyToTP.backward",
        lambda _: lambda ctx, *gradients: (gradients[0], None),
    )


def partial_outputs_are_taken_for_whole_ones() -> None:
    patch(
        "titan_exp.parallel.tensor_parallel.collectives.all_reduce",
        lambda _: lambda tensor, operation, group: tensor.clone(),
    )


def softmax_is_of_the_own_vocabulary() -> None:
    patch(
        "titan_exp.trainer.train_state.vocab_shard",
        lambda original: lambda *args: replace(original(*args), all_reduce_sum=lambda tensor: tensor),
    )


def labels_are_looked_up_one_row_off() -> None:
    def make(original: Any) -> Any:
        def vocab_shard(*args: Any) -> Any:
            shard = original(*args)
            return replace(shard, first=shard.first and shard.first - 1)

        return vocab_shard

    patch("titan_exp.trainer.train_state.vocab_shard", make)


def a_head_is_computed_with_another_ranks_queries() -> None:
    def make(original: Any) -> Any:
        def rows(region: Any, *rest: Any) -> Any:
            queries, _ = original(region, *rest)
            _, keys = original(replace(region, rank=(region.rank + 2) % 4), *rest)
            yield from (queries, keys)

        return rows

    patch("titan_exp.parallel.tensor_parallel.apply._rows_of", make)


def a_rank_gets_every_other_kv_head() -> None:
    def make(original: Any) -> Any:
        def forward(self: Any, query: Any, *keys_and_values: Any) -> Any:
            mixed = [
                heads.unflatten(1, (-1, self.degree)).transpose(1, 2).flatten(1, 2) for heads in keys_and_values[:2]
            ]
            return original(self, query, *mixed, *keys_and_values[2:])

        return forward

    patch("titan_exp.parallel.context_parallel.ulysses.UlyssesAttention.forward", make)


def positions_are_those_of_the_part() -> None:
    def make(original: Any) -> Any:
        def shard_batch(batch: Any, mesh: Any) -> Any:
            part = original(batch, mesh)
            return replace(part, positions=torch.arange(part.tokens.shape[1]).expand_as(part.tokens))

        return shard_batch

    patch("titan_exp.trainer.forward_backward.shard_batch", make)


def parts_of_the_softmax_are_merged_unweighed() -> None:
    patch(
        "titan_exp.parallel.context_parallel.attention.merge_lse",
        lambda _: lambda out, lse, part, part_lse: out.add_(part).div_(2),
    )


def tokens_of_context_ranks_are_counted_again() -> None:
    patch("titan_exp.parallel.mesh.Mesh.loss_replicas", lambda _: property(lambda self: 1))
    patch("titan_exp.parallel.mesh.Mesh.batch_replicas", lambda _: property(lambda self: 1))


def gradients_are_scaled_by_micro_batches() -> None:
    def make(original: Any) -> Any:
        def normalize_by_tokens(*args: Any) -> Any:
            loss, metrics = original(*args)
            return loss / 4, metrics

        return normalize_by_tokens

    patch("titan_exp.trainer.pipeline_forward_backward.normalize_by_tokens", make)


def tied_copies_diverge() -> None:
    patch("titan_exp.parallel.pipeline_parallel.tied_weights.TiedWeights.sum_gradients", lambda _: lambda self: None)


def the_norm_is_not_summed_over_stages() -> None:
    patch(
        "titan_exp.trainer.train_step.global_grad_norm",
        lambda original: lambda parameters, stages: original(parameters),
    )


def the_tied_weight_counts_twice() -> None:
    from titan_exp.trainer.pipeline_forward_backward import PipelineModel

    patch(
        "titan_exp.trainer.pipeline_forward_backward.PipelineModel.unique_parameters",
        lambda _: PipelineModel.parameters,
    )


def gradients_of_head_norms_are_taken_for_whole_ones() -> None:
    from titan_exp.models.spec.tp_plan import HeadParallel

    def make(original: Any) -> Any:
        def mark_partial(module: Any) -> None:
            if not isinstance(getattr(module, "tp_style", None), HeadParallel):
                original(module)

        return mark_partial

    patch("titan_exp.parallel.tensor_parallel.apply._mark_partial", make)


def heads_are_normalized_after_rope() -> None:
    """Rotation keeps a head's norm, so this is the same until the norms' weights have learned."""

    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any) -> Any:
            norms = [self.q_norm, self.k_norm]
            turns = itertools.cycle(norms)
            self.q_norm = self.k_norm = torch.nn.Identity()
            patch("titan_exp.models.blocks.transformer.rotate", lambda _: lambda *given: next(turns)(rotate(*given)))
            found = original(self, *args)
            self.q_norm, self.k_norm = norms
            return found

        return forward

    from titan_exp.models.blocks.transformer import rotate

    patch("titan_exp.models.blocks.transformer.Attention.forward", make)


def micro_batches_are_taken_for_each_other() -> None:
    def make(original: Any) -> Any:
        return lambda self, number, hidden, compute: original(
            self, number, hidden, lambda stage, index, x: compute(stage, index ^ 1 if stage.last else index, x)
        )

    patch("titan_exp.parallel.pipeline_parallel.stage.Stage.forward", make)


def shared_shards_advance_by_own_rows() -> None:
    patch("titan_exp.data.virtual_shards.packing.PackedStream.skip_row", lambda _: lambda self: None)


MUTATIONS: list[Callable[[], None]] = [
    gradients_are_averaged_once_more,
    the_loss_is_divided_by_local_tokens,
    labels_are_shifted,
    documents_see_each_other,
    the_norm_is_not_summed_over_shards,
    ranks_clip_by_their_own_norm,
    only_the_last_micro_batch_counts,
    every_data_rank_reads_the_same,
    initial_weights_depend_on_the_rank,
    copies_do_not_exchange_gradients,
    chunks_ignore_the_gradient_from_above,
    the_last_chunk_is_lost,
    norms_are_decayed,
    metrics_are_means_of_micro_batches,
]


TENSOR = ["parallelism.tp=2", "parallelism.dp_shard=2", "training.loss_chunk_tokens=37", *LINES]
"""Tokens, matrices and the vocabulary divided, and parameters sharded."""
WHOLE_TOKENS = ["parallelism.tp=4", "parallelism.sequence_parallel=false", *LINES]
"""More ranks than key and value heads, every token on all of them."""
CONTEXT = ["parallelism.cp=2", "data.reset_positions=false", *LINES[:-1]]
"""Sequences shared, positions counted through them."""
ULYSSES = ["parallelism.cp=2", "parallelism.cp_method=ulysses", "model.heads=8", "model.kv_heads=4"]
"""Two key and value heads on each rank."""

PIPELINE = [
    *("parallelism.pp=2", "parallelism.dp_shard=2", "training.micro_batch_size=1"),
    *("model.tied_embeddings=true", *LINES),
]
"""Stages on several ranks, sharded, with a weight that two of them use."""

HEAD_NORMS = ["model=qwen3_debug", "parallelism.tp=4", "parallelism.sequence_parallel=false", *LINES]
"""Norms over heads, of which each rank has one."""

BY_ROLE = [
    *("optimizer.name=tests.optim.matrix_momentum", "+optimizer.momentum=0.8", "optimizer.lr=0.02"),
    *("parallelism.tp=2", *LINES),
]
"""An optimizer that treats matrices apart, and a sharded embedding."""

SHARED_SHARDS = ["parallelism.dp_shard=3", "training.global_batch_size=12"]
"""Three ranks that read 64 virtual shards together."""

STATISTICS = ["model.architecture=tests.trainer.own_statistics", "parallelism.dp_shard=2", *LINES]
"""A model whose blocks report metrics."""

OF_A_LAYOUT: list[tuple[list[str], Callable[[], None]]] = [
    *((LAYOUT, mutate) for mutate in MUTATIONS),
    (TENSOR, partial_gradients_are_taken_for_whole_ones),
    (TENSOR, softmax_is_of_the_own_vocabulary),
    (TENSOR, labels_are_looked_up_one_row_off),
    (TENSOR, the_norm_is_not_summed_over_shards),
    (WHOLE_TOKENS, partial_gradients_are_taken_for_whole_ones),
    (WHOLE_TOKENS, gradients_of_hidden_states_are_not_summed),
    (WHOLE_TOKENS, partial_outputs_are_taken_for_whole_ones),
    (WHOLE_TOKENS, a_head_is_computed_with_another_ranks_queries),
    (HEAD_NORMS, gradients_of_head_norms_are_taken_for_whole_ones),
    (HEAD_NORMS, heads_are_normalized_after_rope),
    (CONTEXT, positions_are_those_of_the_part),
    (CONTEXT, parts_of_the_softmax_are_merged_unweighed),
    (CONTEXT, tokens_of_context_ranks_are_counted_again),
    (ULYSSES, a_rank_gets_every_other_kv_head),
    (PIPELINE, gradients_are_scaled_by_micro_batches),
    (PIPELINE, tied_copies_diverge),
    (PIPELINE, the_norm_is_not_summed_over_stages),
    (PIPELINE, the_tied_weight_counts_twice),
    (PIPELINE, micro_batches_are_taken_for_each_other),
    (BY_ROLE, a_sharded_embedding_is_taken_for_a_matrix),
    (SHARED_SHARDS, shared_shards_advance_by_own_rows),
    (STATISTICS, metrics_of_modules_are_averaged_over_ranks),
    (STATISTICS, metrics_of_modules_add_up_over_steps),
]
"""Mutations, each in a layout in which it must be noticed."""


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    experiments = {_experiment(layout) for layout, _ in OF_A_LAYOUT}
    return remembered(lambda: tmp_path_factory.mktemp("one"), dict(zip(experiments, experiments, strict=True)))


@pytest.mark.parametrize(
    "layout",
    [LAYOUT, TENSOR, WHOLE_TOKENS, HEAD_NORMS, CONTEXT, ULYSSES, PIPELINE, BY_ROLE, SHARED_SHARDS, STATISTICS],
    ids=" ".join,
)
def test_without_mutation_the_curve_is_the_same(tmp_path: Path, one_device, layout):
    assert_same_curve(train(tmp_path, *layout), one_device(_experiment(layout)))


@pytest.mark.parametrize(
    ("layout", "mutate"), OF_A_LAYOUT, ids=lambda case: case.__name__ if callable(case) else case[0]
)
def test_mutation_is_noticed(tmp_path: Path, one_device, layout, mutate):
    found = train(tmp_path, *layout, "training.stop_on_nonfinite=false", mutate=mutate)
    with pytest.raises(AssertionError):
        assert_same_curve(found, one_device(_experiment(layout)))


def _experiment(layout: list[str]) -> str:
    """Overrides that change the curve."""
    return " ".join(
        override
        for override in layout
        if override.startswith(("data", "model", "optimizer", "+optimizer", "training.global_batch"))
    )


class _Without:
    """A module, one function of which does nothing."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = module, name

    def __getattr__(self, name: str) -> Any:
        return (lambda *_, **__: None) if name == self._name else getattr(self._module, name)


def _once(reducer: Any) -> None:
    """Reset metrics before the first step only."""
    if not reducer.__dict__.setdefault("_begun", False):
        reducer._begun = True
        for module in reducer._modules:
            module.reset_metrics()
