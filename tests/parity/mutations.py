"""Mutations of the trainer, each of which the parity tests must notice. Run on demand:

python -m pytest tests/parity/mutations.py
"""

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import noop_context_fn

from tests.parity.runs import LINES, assert_noticed, assert_same_curve, remembered, train
from tests.parity.test_continued import assert_one_run, stopped_early
from tests.parity.test_loss_kernels import use_loss_kernels
from tests.parity.test_moe_execution import EP2, RECIPES
from tests.parity.test_one_rank import BF16, assert_same, loaded
from tests.parity.test_quantized import assert_same_recipe
from tests.patching import patch
from titan_exp.models.blocks.linear import GroupedLinear
from titan_exp.parallel.expert_parallel import mixtures

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
            objective, module, batch, [(batch.labels >= 0).sum() * 8], *rest
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
        "titan_exp.data.train_loader.TrainLoader",
        lambda original: lambda *args, **kwargs: original(*args, **{**kwargs, "dp_rank": 0}),
    )


def initial_weights_depend_on_the_rank() -> None:
    patch(
        "titan_exp.parallel.meta_init.init_weights",
        lambda original: (
            lambda model, specs, seed, *rest: original(model, specs, seed + int(os.environ["RANK"]), *rest)
        ),
    )


def initial_rows_ignore_the_shards_offset() -> None:
    def make(original: Any) -> Any:
        def init_shard_(values: Any, seed: Any, name: Any, init: Any, part: Any) -> None:
            original(values, seed, name, init, replace(part, start=(0, *part.start[1:])))

        return init_shard_

    patch("titan_exp.parallel.meta_init.init_shard_", make)


def initial_weights_ignore_the_name() -> None:
    patch(
        "titan_exp.parallel.meta_init.init_shard_",
        lambda original: lambda values, seed, name, init, part: original(values, seed, "", init, part),
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
        "titan_exp.ops.cross_entropy._ManyChunks.backward",
        lambda original: lambda ctx, *gradients: original(ctx, torch.ones(())),
    )


def the_last_chunk_is_lost() -> None:
    def make(original: Any) -> Any:
        def over_chunks(hidden: Any, weight: Any, chunks: int, labels: Any, *rest: Any, **options: Any) -> Any:
            labels = labels.clone()
            labels[37:] = -100
            return original(hidden, weight, chunks, labels, *rest, **options)

        return over_chunks

    patch("titan_exp.ops.cross_entropy._over_chunks", make)


def gradients_of_logits_are_taken_for_logits() -> None:
    """In the second part of a split backward pass."""

    def make(original: Any) -> Any:
        def backward(ctx: Any, *gradients: Any) -> Any:
            if ctx.gradient is not None:
                ctx.logits, ctx.gradient = ctx.gradient, None
            return original(ctx, *gradients)

        return backward

    patch("titan_exp.ops.cross_entropy._OneChunk.backward", make)


def one_chunk_ignores_the_gradient_from_above() -> None:
    patch(
        "titan_exp.ops.cross_entropy._OneChunk.backward",
        lambda original: lambda ctx, *gradients: original(ctx, torch.ones(())),
    )


def loss_kernels_ignore_the_shards_first_token() -> None:
    use_loss_kernels()
    patch(
        "titan_exp.ops.cross_entropy.write_row_gradient",
        lambda original: lambda *args, first, **options: original(*args, first=0, **options),
    )


def only_the_last_chunk_counts_in_the_heads_gradient() -> None:
    patch(
        "titan_exp.ops.cross_entropy._accumulate_outer",
        lambda original: lambda total, grad, hidden, first: original(total, grad, hidden, first=True),
    )


def what_is_recomputed_differs_a_little() -> None:
    """The norms' and SwiGLU's outputs, of which backward computes the weights' gradients."""

    def make(original: Any) -> Any:
        def recompute_input(cheap: Any, x: Any, consumer: Any) -> Any:
            # Backward recomputes without gradients.
            return original(lambda given: cheap(given) * (1 if torch.is_grad_enabled() else 1.01), x, consumer)

        return recompute_input

    patch("titan_exp.models.blocks.transformer.recompute_input", make)


def gradients_of_gate_and_up_are_swapped() -> None:
    def make(original: Any) -> Any:
        def backward(ctx: Any, gradient: Any) -> Any:
            fused, *others = original(ctx, gradient)
            return fused.unflatten(-1, (-1, 2, ctx.group)).flip(-2).flatten(-3), *others

        return backward

    patch("titan_exp.ops.swiglu._SwiGLU.backward", make)


def gradients_of_keys_and_values_are_swapped() -> None:
    patch(
        "titan_exp.ops.attention.rope._SplitRotated.backward",
        lambda original: lambda ctx, query, key, value: original(ctx, query, value, key),
    )


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
            share = tokens[0] / ((batch.labels >= 0).sum() * 8)
            return loss, {name: value * share for name, value in metrics.items()}

        return normalize_by_tokens

    patch("titan_exp.trainer.forward_backward.normalize_by_tokens", make)


def metrics_of_modules_are_averaged_over_ranks() -> None:
    patch(
        "titan_exp.trainer.metrics.MetricReducer._copies",
        lambda original: (
            lambda self, name: self._mesh.world.size() if name.startswith("model/") else original(self, name)
        ),
    )


def metrics_of_modules_add_up_over_steps() -> None:
    patch("titan_exp.trainer.metrics.MetricReducer.begin_step", lambda _: _once)


def partial_gradients_are_taken_for_whole_ones() -> None:
    patch("titan_exp.trainer.train_step.reduce_partial_gradients", lambda _: lambda model, mesh: None)


def gradients_of_hidden_states_are_not_summed() -> None:
    def make(original: Any) -> Any:
        def backward(ctx: Any, *gradients: Any) -> Any:
            return (gradients[0], None, None, None) if ctx.of_gradient == "sum" else original(ctx, *gradients)

        return backward

    patch("titan_exp.parallel.tensor_parallel.layers._Dual.backward", make)


def partial_outputs_are_taken_for_whole_ones() -> None:
    patch(
        "titan_exp.parallel.tensor_parallel.layers.all_reduce",
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

    patch("titan_exp.parallel.tensor_parallel.styles._rows_of", make)


def a_rank_gets_every_other_kv_head() -> None:
    def make(original: Any) -> Any:
        def forward(self: Any, query: Any, *keys_and_values: Any) -> Any:
            mixed = [
                heads.unflatten(1, (-1, self.degree)).transpose(1, 2).flatten(1, 2) for heads in keys_and_values[:2]
            ]
            return original(self, query, *mixed, *keys_and_values[2:])

        return forward

    patch("titan_exp.parallel.context_parallel.apply.UlyssesAttention.forward", make)


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

    patch("titan_exp.trainer.forward_backward.normalize_by_tokens", make)


def tied_copies_diverge() -> None:
    patch("titan_exp.parallel.pipeline_runtime.TiedWeights.sum_gradients", lambda _: lambda self: None)


def the_norm_is_not_summed_over_stages() -> None:
    patch(
        "titan_exp.trainer.train_step.global_grad_norm",
        lambda original: lambda parameters, stages: original(parameters),
    )


def the_tied_weight_counts_twice() -> None:
    from titan_exp.trainer.forward_backward import PipelineModel

    patch(
        "titan_exp.trainer.forward_backward.PipelineModel.unique_parameters",
        lambda _: PipelineModel.parameters,
    )


def gradients_of_head_norms_are_taken_for_whole_ones() -> None:
    from titan_exp.models.spec.tp_plan import HeadParallel

    def make(original: Any) -> Any:
        def mark_partial(module: Any) -> None:
            if not isinstance(getattr(module, "tp_style", None), HeadParallel):
                original(module)

        return mark_partial

    patch("titan_exp.parallel.tensor_parallel.styles.mark_partial", make)


def norms_over_all_heads_are_over_those_of_a_rank() -> None:
    patch("titan_exp.parallel.tensor_parallel.layers._mean", lambda _: lambda x, region: x.mean(-1, keepdim=True))


def gradients_of_norms_over_shared_heads_are_taken_for_whole_ones() -> None:
    def make(original: Any) -> Any:
        def mark_partial(module: Any, *names: str) -> None:
            if type(module).__name__ != "RMSNormAcrossRanks":
                original(module, *names)

        return mark_partial

    patch("titan_exp.parallel.tensor_parallel.styles.mark_partial", make)


def heads_are_normalized_after_rope() -> None:
    """Rotation keeps a head's norm, so this is the same until the norms' weights have learned."""

    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any, **settings: Any) -> Any:
            norms = [self.q_norm, self.k_norm]
            turns = itertools.cycle(norms)
            self.q_norm = self.k_norm = torch.nn.Identity()
            patch("titan_exp.models.blocks.transformer.rotate", lambda _: lambda *given: next(turns)(rotate(*given)))
            found = original(self, *args, **settings)
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

    patch("titan_exp.parallel.pipeline_stage.Stage.forward", make)


def shared_shards_advance_by_own_rows() -> None:
    patch("titan_exp.data.virtual_shards.PackedStream.skip_row", lambda _: lambda self: None)


def looked_up_rows_are_truncated() -> None:
    """To bf16, instead of rounded."""

    def make(original: Any) -> Any:
        def embedding_rows(ids: Any, weight: Any, dtype: Any = None) -> Any:
            rows = original(ids, weight, dtype)
            if dtype is None:
                return rows
            exact = torch.nn.functional.embedding(ids, weight.detach())
            return rows + (exact.view(torch.int32) & -65536).view(torch.float32).to(dtype) - rows.detach()

        return embedding_rows

    patch("titan_exp.models.blocks.transformer.embedding_rows", make)


def the_embeddings_gradient_is_of_distinct_tokens() -> None:
    """Rows that are looked up several times get the gradient of one of them."""

    def make(original: Any) -> Any:
        def backward(ctx: Any, gradient: Any) -> Any:
            found = original(ctx, gradient)
            (ids,) = ctx.saved_tensors
            return found[0] / ids.flatten().bincount(minlength=len(found[0])).clamp(min=1)[:, None], None, None

        return backward

    patch("titan_exp.ops.autograd._RoundedRows.backward", make)


def copies_stay_behind_their_masters() -> None:
    def make(original: Any) -> Any:
        def step(state: Any, *rest: Any, **options: Any) -> Any:
            state.model.weights.refresh = lambda: None
            return original(state, *rest, **options)

        return step

    patch("titan_exp.trainer.trainer.train_step", make)


def copies_are_not_refreshed_after_loading() -> None:
    def make(original: Any) -> Any:
        def restore(self: Any) -> None:
            self.model.weights.refresh = lambda: None
            original(self)
            del self.model.weights.refresh

        return restore

    patch("titan_exp.trainer.trainer.Trainer.restore", make)


def micro_batches_are_summed_in_bf16() -> None:
    patch("titan_exp.parallel.compute_weights.ComputeWeights._add_gradient", lambda _: lambda self, copy: None)


def partial_gradients_are_summed_in_bf16() -> None:
    patch("titan_exp.parallel.compute_weights.partial_parameters", lambda _: lambda _: ())


def float8_weights_are_those_of_the_step_before() -> None:
    """Quantized before the update instead of after it."""

    def make(original: Any) -> Any:
        def on_gradients(parts: Any, update: Any) -> None:
            state, quantize = update.state, update.state.quantize_weights
            quantize()
            # Once, in the place after the update.
            object.__setattr__(
                state, "quantize_weights", lambda: object.__setattr__(state, "quantize_weights", quantize)
            )
            original(parts, update)

        return on_gradients

    patch("titan_exp.trainer.part.Parts.on_gradients", make)


def float8_scales_are_of_a_ranks_shard() -> None:
    patch("titan_exp.quantization.quantize.Float8Weights._reduced", lambda _: lambda self, amax: amax)


def _after_expert_parallel(change: Callable[[Any], None]) -> None:
    """Change each mixture of experts once it is parallel."""

    def make(original: Any) -> Any:
        def apply_fsdp(model: Any, *rest: Any) -> None:
            original(model, *rest)
            for mixture in mixtures(model):
                change(mixture)

        return apply_fsdp

    patch("titan_exp.parallel.apply.apply_fsdp", make)


def gradients_of_routers_are_taken_for_whole_ones() -> None:
    _after_expert_parallel(lambda mixture: setattr(mixture.router, "partial_gradients", ()))


def gradients_of_experts_are_averaged() -> None:
    _after_expert_parallel(lambda mixture: mixture.experts.set_gradient_divide_factor(2.0))


def received_rows_stay_sorted_by_rank() -> None:
    def make(original: Any) -> Any:
        def by_expert(counts: Any, size: int) -> Any:
            rows = torch.arange(size)
            return replace(original(counts, size), source=rows, target=rows)

        return by_expert

    patch("titan_exp.parallel.expert_parallel.RowOrder.by_expert", make)


def rows_come_back_in_the_order_of_the_experts() -> None:
    patch(
        "titan_exp.parallel.expert_parallel.RowOrder.undo",
        lambda _: lambda self, rows: rows,
    )


def weights_of_received_rows_stay_sorted_by_rank() -> None:
    def make(original: Any) -> Any:
        return lambda self, rows: original(self, rows) if rows.ndim > 1 else rows

    patch("titan_exp.parallel.expert_parallel.RowOrder.apply", make)


def experts_are_weighted_twice() -> None:
    patch(
        "titan_exp.parallel.expert_parallel.permute_weights",
        lambda original: lambda weights, order, inverse: original(weights * weights, order, inverse),
    )


def gradients_of_gathered_tokens_are_one_ranks() -> None:
    def make(original: Any) -> Any:
        def gather(self: Any, part: Any) -> Any:
            parts = [*original(self, part.detach()).chunk(self.degree)]
            parts[self.rank] = part
            return torch.cat(parts)

        return gather

    patch("titan_exp.parallel.expert_parallel.TokenGroup.gather", make)


def gradients_of_split_tokens_are_one_ranks() -> None:
    def make(original: Any) -> Any:
        def backward(ctx: Any, gradient: Any) -> Any:
            return original(ctx, gradient)[0] * torch.linspace(0, 1, ctx.length)[:, None].round(), None

        return backward

    patch("titan_exp.parallel.expert_parallel._Split.backward", make)


def experts_are_chosen_by_other_scores_again() -> None:
    """Recomputation chooses anew, as many of each expert."""
    patch("titan_exp.parallel.activation_checkpoint.routing_cache", lambda _: noop_context_fn)

    def make(original: Any) -> Any:
        from titan_exp.ops.autograd import is_recomputing

        return lambda scores, k: original(scores, k).roll(1 if is_recomputing() else 0, 1)

    patch("titan_exp.ops.moe.routing.topk_lowest_index", make)


def weight_gradients_of_experts_are_lost_in_the_second_half() -> None:
    def make(original: Any) -> Any:
        def needs(ctx: Any) -> tuple[bool, bool]:
            found = original(ctx)
            return found[0], found[1] and found[0]

        return needs

    patch("titan_exp.ops.moe.grouped_mm.needs_input_grad", make)


def the_output_of_swiglu_is_recomputed_without_weights() -> None:
    """The gradient of the down projection in the second half of a backward pass."""

    def make(original: Any) -> Any:
        from titan_exp.ops.autograd import is_recomputing

        return lambda gate_up, weights, group, variant: original(
            gate_up, torch.ones_like(weights) if is_recomputing() else weights, group, variant
        )

    patch("titan_exp.ops.moe.grouped_mm.weighted_swiglu", make)


def experts_are_multiplied_in_high_precision() -> None:
    def make(original: Any) -> Any:
        def quantize(model: Any, *rest: Any, **options: Any) -> None:
            plain = {module: module.linear_impl for module in model.modules() if isinstance(module, GroupedLinear)}
            original(model, *rest, **options)
            for module, linear_impl in plain.items():
                module.linear_impl = linear_impl

        return quantize

    patch("titan_exp.quantization.quantize.quantize", make)


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
    initial_rows_ignore_the_shards_offset,
    initial_weights_ignore_the_name,
    copies_do_not_exchange_gradients,
    chunks_ignore_the_gradient_from_above,
    the_last_chunk_is_lost,
    only_the_last_chunk_counts_in_the_heads_gradient,
    what_is_recomputed_differs_a_little,
    gradients_of_gate_and_up_are_swapped,
    gradients_of_keys_and_values_are_swapped,
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

SPLIT_BACKWARD = [
    *("parallelism.pp=2", "parallelism.pp_schedule=ZBVZeroBubble"),
    *("training.micro_batch_size=1", "training.loss_chunk_tokens=16384", *LINES),
]
"""Gradients of inputs and of weights apart, of a loss in one chunk."""

HEAD_NORMS = ["model=qwen3_debug", "parallelism.tp=4", "parallelism.sequence_parallel=false", *LINES]
"""Norms over heads, of which each rank has one."""

ALL_HEADS = ["model=olmo2_debug", *HEAD_NORMS[1:]]
"""Norms over all heads, of which two ranks share each key's."""

BY_ROLE = [
    *("optimizer.name=tests.optim.matrix_momentum", "+optimizer.momentum=0.8", "optimizer.lr=0.02"),
    *("parallelism.tp=2", *LINES),
]
"""An optimizer that treats matrices apart, and a sharded embedding."""

SHARED_SHARDS = ["parallelism.dp_shard=3", "training.global_batch_size=12", "data.streaming=true"]
"""Three ranks that read 64 virtual shards together."""

STATISTICS = ["model.architecture=tests.trainer.own_statistics", "parallelism.dp_shard=2", *LINES]
"""A model whose blocks report metrics."""

EXPERTS = ["model=qwen3_moe_debug", "parallelism.dp_shard=4", "parallelism.ep=2", "model.moe.shared_experts=1"]
"""Four experts on each rank, sharded by two."""

EXPERTS_OF_TP = ["model=qwen3_moe_debug", "parallelism.tp=2", "parallelism.ep=2", "parallelism.sequence_parallel=false"]
"""Tokens of all tensor-parallel ranks, of which each routes a part."""

CHANNELS_OF_EXPERTS = ["model=qwen3_moe_debug", "parallelism.tp=2", "parallelism.etp=2", *LINES]
"""Channels of every expert on two ranks."""

EXPERTS_RECOMPUTED = [*EXPERTS, "activation_checkpoint=full"]
"""Experts whose choice is kept from forward to backward."""

EXPERTS_IN_STAGES = ["model=qwen3_moe_debug", "parallelism.pp=2", *SPLIT_BACKWARD[1:]]
"""Gradients of rows and of experts' weights apart."""

OF_A_LAYOUT: list[tuple[list[str], Callable[[], None]]] = [
    *((LAYOUT, mutate) for mutate in MUTATIONS),
    (TENSOR, partial_gradients_are_taken_for_whole_ones),
    (TENSOR, softmax_is_of_the_own_vocabulary),
    (TENSOR, labels_are_looked_up_one_row_off),
    (TENSOR, loss_kernels_ignore_the_shards_first_token),
    (TENSOR, the_norm_is_not_summed_over_shards),
    (WHOLE_TOKENS, partial_gradients_are_taken_for_whole_ones),
    (WHOLE_TOKENS, gradients_of_hidden_states_are_not_summed),
    (WHOLE_TOKENS, partial_outputs_are_taken_for_whole_ones),
    (WHOLE_TOKENS, a_head_is_computed_with_another_ranks_queries),
    (HEAD_NORMS, gradients_of_head_norms_are_taken_for_whole_ones),
    (HEAD_NORMS, heads_are_normalized_after_rope),
    (ALL_HEADS, norms_over_all_heads_are_over_those_of_a_rank),
    (ALL_HEADS, gradients_of_norms_over_shared_heads_are_taken_for_whole_ones),
    (CONTEXT, positions_are_those_of_the_part),
    (CONTEXT, parts_of_the_softmax_are_merged_unweighed),
    (CONTEXT, tokens_of_context_ranks_are_counted_again),
    (ULYSSES, a_rank_gets_every_other_kv_head),
    (PIPELINE, gradients_are_scaled_by_micro_batches),
    (PIPELINE, tied_copies_diverge),
    (PIPELINE, the_norm_is_not_summed_over_stages),
    (PIPELINE, the_tied_weight_counts_twice),
    (PIPELINE, micro_batches_are_taken_for_each_other),
    (SPLIT_BACKWARD, gradients_of_logits_are_taken_for_logits),
    (SPLIT_BACKWARD, one_chunk_ignores_the_gradient_from_above),
    (EXPERTS, gradients_of_experts_are_averaged),
    (EXPERTS, received_rows_stay_sorted_by_rank),
    (EXPERTS, rows_come_back_in_the_order_of_the_experts),
    (EXPERTS, weights_of_received_rows_stay_sorted_by_rank),
    (EXPERTS, experts_are_weighted_twice),
    (EXPERTS, the_norm_is_not_summed_over_shards),
    (EXPERTS_RECOMPUTED, experts_are_chosen_by_other_scores_again),
    (EXPERTS_IN_STAGES, weight_gradients_of_experts_are_lost_in_the_second_half),
    (EXPERTS_IN_STAGES, the_output_of_swiglu_is_recomputed_without_weights),
    (EXPERTS_OF_TP, gradients_of_routers_are_taken_for_whole_ones),
    (EXPERTS_OF_TP, gradients_of_split_tokens_are_one_ranks),
    (CHANNELS_OF_EXPERTS, gradients_of_routers_are_taken_for_whole_ones),
    (CHANNELS_OF_EXPERTS, gradients_of_gathered_tokens_are_one_ranks),
    (BY_ROLE, a_sharded_embedding_is_taken_for_a_matrix),
    (SHARED_SHARDS, shared_shards_advance_by_own_rows),
    (STATISTICS, metrics_of_modules_are_averaged_over_ranks),
    (STATISTICS, metrics_of_modules_add_up_over_steps),
]
"""Mutations, each in a layout in which it must be noticed."""


ONE_RANK: list[tuple[list[str], Callable[[], None]]] = [
    ([], copies_stay_behind_their_masters),
    ([], looked_up_rows_are_truncated),
    ([], the_embeddings_gradient_is_of_distinct_tokens),
    (["training.micro_batch_size=2"], micro_batches_are_summed_in_bf16),
    (["parallelism.tp=2"], partial_gradients_are_summed_in_bf16),
    (["quantization=float8_tensorwise"], float8_weights_are_those_of_the_step_before),
    (
        ["quantization=float8_rowwise", "quantization.power_of_two_scales=false", "parallelism.tp=2"],
        float8_scales_are_of_a_ranks_shard,
    ),
]
"""Mutations of one data rank in bf16, which must change bits."""


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    experiments = {_experiment(layout) for layout, _ in OF_A_LAYOUT}
    return remembered(lambda: tmp_path_factory.mktemp("one"), dict(zip(experiments, experiments, strict=True)))


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT,
        TENSOR,
        WHOLE_TOKENS,
        HEAD_NORMS,
        CONTEXT,
        ULYSSES,
        PIPELINE,
        SPLIT_BACKWARD,
        EXPERTS,
        EXPERTS_RECOMPUTED,
        EXPERTS_IN_STAGES,
        EXPERTS_OF_TP,
        CHANNELS_OF_EXPERTS,
        BY_ROLE,
        SHARED_SHARDS,
        STATISTICS,
    ],
    ids=" ".join,
)
def test_without_mutation_the_curve_is_the_same(tmp_path: Path, one_device, layout):
    assert_same_curve(train(tmp_path, *layout), one_device(_experiment(layout)))


@pytest.mark.parametrize(
    ("layout", "mutate"), OF_A_LAYOUT, ids=lambda case: case.__name__ if callable(case) else case[0]
)
def test_mutation_is_noticed(tmp_path: Path, one_device, layout, mutate):
    assert_noticed(tmp_path, layout, mutate, one_device(_experiment(layout)))


@pytest.mark.parametrize(("layout", "mutate"), ONE_RANK, ids=lambda case: case.__name__ if callable(case) else "")
def test_mutation_of_one_rank_is_noticed(tmp_path: Path, layout, mutate):
    expected = train(tmp_path / "right", *BF16, *layout)
    found = train(tmp_path / "wrong", *BF16, *layout, mutate=mutate)
    with pytest.raises(AssertionError):
        assert_same(found, expected)


@pytest.mark.parametrize("recipe", ["float8_tensorwise", "mxfp8"])
def test_experts_in_high_precision_are_noticed(tmp_path: Path, recipe: str):
    words = RECIPES[recipe].split()
    expected = train(tmp_path / "right", *words)
    found = train(tmp_path / "wrong", *words, *EP2.split(), mutate=experts_are_multiplied_in_high_precision)
    with pytest.raises(AssertionError):
        assert_same_recipe(found, expected)


def test_stale_copies_after_loading_are_noticed(tmp_path: Path):
    # Stale copies are memory without values, which may be NaN.
    words = ["training.stop_on_nonfinite=false"]
    whole, found = loaded(tmp_path, *words, mutate=copies_are_not_refreshed_after_loading)
    assert found.loss != whole.loss[5:]


def the_schedule_ends_where_the_run_stops() -> None:
    def make(original: Any) -> Any:
        return lambda config, peak, steps: original(config, peak=peak, steps=5)

    patch("titan_exp.trainer.trainer.LRSchedule", make)


def test_a_schedule_of_the_stopped_run_is_noticed(tmp_path: Path):
    with pytest.raises(AssertionError):
        assert_one_run(*stopped_early(tmp_path, mutate=the_schedule_ends_where_the_run_stops))


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
