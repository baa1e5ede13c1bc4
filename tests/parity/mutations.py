"""Things broken on purpose, each of which the parity tests must notice. Run on demand:

python -m pytest tests/parity/mutations.py
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.runs import LINES, assert_same_curve, remembered, train

LAYOUT = ["parallelism=hsdp", "training.micro_batch_size=1", "training.loss_chunk_tokens=37", *LINES]
"""Shards, copies, accumulation and a loss in chunks at once, with token counts that differ between ranks."""


def gradients_are_averaged_once_more() -> None:
    from titan_exp.parallel.fsdp import apply as data

    original = data.apply_fsdp

    def shard(model: Any, *rest: Any) -> None:
        original(model, *rest)
        for module in data._sharded(model):
            module.set_gradient_divide_factor(2.0)

    _replace("titan_exp.parallel.apply.apply_fsdp", shard)


def the_loss_is_divided_by_local_tokens() -> None:
    from titan_exp.trainer import forward_backward as model

    original = model.normalize_by_tokens

    def normalize_by_tokens(objective: Any, module: Any, batch: Any, tokens: Any, *rest: Any) -> Any:
        return original(objective, module, batch, (batch.labels >= 0).sum() * 8, *rest)

    _replace("titan_exp.trainer.forward_backward.normalize_by_tokens", normalize_by_tokens)


def labels_are_shifted() -> None:
    _change_batches(lambda batch: batch.labels.copy_(batch.labels.roll(1, dims=1)))


def documents_see_each_other() -> None:
    from titan_exp.ops.attention import sdpa as attention

    original = attention.document_mask
    _replace("titan_exp.ops.attention.sdpa.document_mask", lambda documents: original(torch.zeros_like(documents)))


def the_norm_is_not_summed_over_shards() -> None:
    import torch.distributed as dist

    _replace("titan_exp.optim.grad_clip.dist", _Without(dist, "all_reduce"))


def ranks_clip_by_their_own_norm() -> None:
    from titan_exp.optim import grad_clip as clip

    def scale(parameters: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
        own = torch.stack([p.grad.to_local().norm() for p in parameters]).norm()  # type: ignore[union-attr]
        original(parameters, own, max_norm)

    original = clip.scale_gradients
    _replace("titan_exp.optim.grad_clip.scale_gradients", scale)


def only_the_last_micro_batch_counts() -> None:
    from titan_exp.trainer import forward_backward as model

    original, calls = model.normalize_by_tokens, itertools.count()

    def normalize_by_tokens(*args: Any) -> Any:
        loss, metrics = original(*args)
        return (loss, metrics) if next(calls) % 2 else (loss * 0, metrics)

    _replace("titan_exp.trainer.forward_backward.normalize_by_tokens", normalize_by_tokens)


def every_data_rank_reads_the_same() -> None:
    from titan_exp.data.train_loader import TrainLoader

    def loader(*args: Any, **kwargs: Any) -> TrainLoader:
        return TrainLoader(*args, **{**kwargs, "dp_rank": 0})

    _replace("titan_exp.trainer.trainer.TrainLoader", loader)


def initial_weights_depend_on_the_rank() -> None:
    import os

    from titan_exp.parallel import meta_init as materialize_parameters

    def draw(model: Any, table: Any, seed: int) -> None:
        original(model, table, seed + int(os.environ["RANK"]))

    original = materialize_parameters.init_weights
    _replace("titan_exp.trainer.build_model.init_weights", draw)


def copies_do_not_exchange_gradients() -> None:
    from titan_exp.parallel.fsdp import apply as data

    original = data.set_gradient_sync

    def synchronize(model: Any, *, last: bool) -> None:
        original(model, last=last)
        model.set_requires_all_reduce(False)

    _replace("titan_exp.trainer.forward_backward.set_gradient_sync", synchronize)


def chunks_ignore_the_gradient_from_above() -> None:
    from titan_exp.ops.loss.linear_cross_entropy import _LinearLoss

    original = _LinearLoss.backward
    _LinearLoss.backward = lambda ctx, *gradients: original(ctx, torch.ones(()))  # type: ignore[method-assign]


def the_last_chunk_is_lost() -> None:
    from titan_exp.ops.loss import linear_cross_entropy

    original = linear_cross_entropy._over_chunks

    def over_chunks(hidden: Any, weight: Any, labels: Any, *rest: Any, **options: Any) -> Any:
        labels = labels.clone()
        labels[37:] = -100
        return original(hidden, weight, labels, *rest, **options)

    _replace("titan_exp.ops.loss.linear_cross_entropy._over_chunks", over_chunks)


def partial_gradients_are_taken_for_whole_ones() -> None:
    _replace("titan_exp.trainer.train_step.reduce_partial_gradients", lambda model, mesh: None)


def gradients_of_hidden_states_are_not_summed() -> None:
    from titan_exp.parallel.tensor_parallel.collectives import _CopyToTP

    _CopyToTP.backward = lambda ctx, *gradients: (gradients[0], None)  # type: ignore[method-assign]


def partial_outputs_are_taken_for_whole_ones() -> None:
    _replace(
        "titan_exp.parallel.tensor_parallel.collectives.all_reduce", lambda tensor, operation, group: tensor.clone()
    )


def softmax_is_of_the_own_words() -> None:
    from titan_exp.parallel.tensor_parallel import apply as tensor

    original = tensor.vocab_shard

    def part(mesh: Any, vocabulary: int) -> Any:
        found = original(mesh, vocabulary)
        assert found is not None
        return replace(found, all_reduce_sum=lambda tensor: tensor)

    _replace("titan_exp.trainer.trainer.vocab_shard", part)


def labels_are_looked_for_among_other_words() -> None:
    from titan_exp.parallel.tensor_parallel import apply as tensor

    original = tensor.vocab_shard

    def part(mesh: Any, vocabulary: int) -> Any:
        found = original(mesh, vocabulary)
        assert found is not None
        return replace(found, first=found.first and found.first - 1)

    _replace("titan_exp.trainer.trainer.vocab_shard", part)


def a_head_is_computed_with_another_ranks_queries() -> None:
    from titan_exp.parallel.tensor_parallel import apply as tensor

    original = tensor._rows_of

    def rows(region: Any, *rest: Any) -> Any:
        queries, _ = original(region, *rest)
        _, keys = original(replace(region, rank=(region.rank + 2) % 4), *rest)
        yield from (queries, keys)

    _replace("titan_exp.parallel.tensor_parallel.apply._rows_of", rows)


def positions_are_those_of_the_part() -> None:
    from titan_exp.trainer import batch_placement as shard_batch

    original = shard_batch.shard_batch

    def placed(batch: Any, mesh: Any) -> Any:
        part = original(batch, mesh)
        return replace(part, positions=torch.arange(part.tokens.shape[1]).expand_as(part.tokens))

    _replace("titan_exp.trainer.forward_backward.shard_batch", placed)


def parts_of_the_softmax_are_merged_unweighed() -> None:
    from titan_exp.parallel.context_parallel import attention as context_attention

    def merge_lse(out: Any, lse: Any, part: Any, part_lse: Any) -> None:
        out.add_(part).div_(2)

    assert context_attention.merge_lse
    _replace("titan_exp.parallel.context_parallel.attention.merge_lse", merge_lse)


def tokens_of_context_ranks_are_counted_again() -> None:
    from titan_exp.parallel.mesh import Mesh

    Mesh.batch_replicas = property(lambda self: 1)  # type: ignore[method-assign, assignment]


def gradients_are_scaled_by_micro_batches() -> None:
    from titan_exp.trainer import pipeline_forward_backward as pipelined

    original = pipelined.normalize_by_tokens

    def normalize_by_tokens(*args: Any) -> Any:
        loss, metrics = original(*args)
        return loss / 4, metrics

    _replace("titan_exp.trainer.pipeline_forward_backward.normalize_by_tokens", normalize_by_tokens)


def tied_copies_go_their_own_ways() -> None:
    from titan_exp.parallel.pipeline_parallel.tied_weights import TiedWeights

    TiedWeights.sum_gradients = lambda self: None  # type: ignore[method-assign]


def the_norm_is_not_summed_over_stages() -> None:
    from titan_exp.optim import grad_clip as clip

    original = clip.global_grad_norm
    _replace("titan_exp.trainer.train_step.global_grad_norm", lambda parameters, stages: original(parameters))


def the_tied_weight_counts_twice() -> None:
    from titan_exp.trainer.pipeline_forward_backward import PipelineModel

    PipelineModel.unique_parameters = PipelineModel.parameters  # type: ignore[method-assign]


def gradients_of_head_norms_are_taken_for_whole_ones() -> None:
    from titan_exp.parallel.tensor_parallel import apply

    original = apply._mark_partial

    def mark_partial(module: Any) -> None:
        if not isinstance(getattr(module, "tp_style", None), apply.HeadParallel):
            original(module)

    _replace("titan_exp.parallel.tensor_parallel.apply._mark_partial", mark_partial)


def heads_are_normalized_after_rope() -> None:
    """Rotation keeps a head's norm, so this is the same until the norms' weights have learned."""
    from titan_exp.models.blocks import transformer

    rotate, heads = transformer.rotate, transformer.Attention.forward

    def forward(self: Any, *args: Any) -> Any:
        norms = [self.q_norm, self.k_norm]
        turns = itertools.cycle(norms)
        self.q_norm = self.k_norm = torch.nn.Identity()
        _replace("titan_exp.models.blocks.transformer.rotate", lambda *given: next(turns)(rotate(*given)))
        found = heads(self, *args)
        self.q_norm, self.k_norm = norms
        return found

    transformer.Attention.forward = forward  # type: ignore[method-assign]


def micro_batches_are_taken_for_each_other() -> None:
    from titan_exp.parallel.pipeline_parallel.stage import Stage

    original = Stage.forward
    Stage.forward = lambda self, number, hidden, compute: original(  # type: ignore[method-assign]
        self, number, hidden, lambda stage, it, given: compute(stage, it ^ 1 if stage.last else it, given)
    )


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
]


TENSOR = ["parallelism.tp=2", "parallelism.dp_shard=2", "training.loss_chunk_tokens=37", *LINES]
"""Tokens, matrices and the vocabulary divided, and parameters sharded."""
WHOLE_TOKENS = ["parallelism.tp=4", "parallelism.sequence_parallel=false", *LINES]
"""More ranks than key and value heads, every token on all of them."""
CONTEXT = ["parallelism.cp=2", "data.reset_positions=false", *LINES[:-1]]
"""Sequences shared, positions counted through them."""

PIPELINE = [
    *("parallelism.pp=2", "parallelism.dp_shard=2", "training.micro_batch_size=1"),
    *("model.tied_embeddings=true", *LINES),
]
"""Stages on several ranks, sharded, with a weight that two of them use."""

HEAD_NORMS = ["model=qwen3_debug", "parallelism.tp=4", "parallelism.sequence_parallel=false", *LINES]
"""Norms over heads, of which each rank has one."""

OF_A_LAYOUT: list[tuple[list[str], Callable[[], None]]] = [
    *((LAYOUT, mutate) for mutate in MUTATIONS),
    (TENSOR, partial_gradients_are_taken_for_whole_ones),
    (TENSOR, softmax_is_of_the_own_words),
    (TENSOR, labels_are_looked_for_among_other_words),
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
    (PIPELINE, gradients_are_scaled_by_micro_batches),
    (PIPELINE, tied_copies_go_their_own_ways),
    (PIPELINE, the_norm_is_not_summed_over_stages),
    (PIPELINE, the_tied_weight_counts_twice),
    (PIPELINE, micro_batches_are_taken_for_each_other),
]
"""What is broken, in the layout in which it must be noticed."""


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    experiments = {_experiment(layout) for layout, _ in OF_A_LAYOUT}
    return remembered(lambda: tmp_path_factory.mktemp("one"), dict(zip(experiments, experiments, strict=True)))


@pytest.mark.parametrize("layout", [LAYOUT, TENSOR, WHOLE_TOKENS, HEAD_NORMS, CONTEXT, PIPELINE], ids=" ".join)
def test_nothing_broken_is_the_same_curve(tmp_path: Path, one_device, layout):
    assert_same_curve(train(tmp_path, *layout), one_device(_experiment(layout)))


@pytest.mark.parametrize(("layout", "mutate"), OF_A_LAYOUT, ids=lambda it: it.__name__ if callable(it) else it[0])
def test_it_is_noticed(tmp_path: Path, one_device, layout, mutate):
    found = train(tmp_path, *layout, "training.stop_on_nonfinite=false", mutate=mutate)
    with pytest.raises(AssertionError):
        assert_same_curve(found, one_device(_experiment(layout)))


def _experiment(layout: list[str]) -> str:
    """What of a layout's overrides changes what is computed."""
    return " ".join(override for override in layout if override.startswith(("data", "model")))


class _Without:
    """A module, one function of which does nothing."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = module, name

    def __getattr__(self, name: str) -> Any:
        return (lambda *_, **__: None) if name == self._name else getattr(self._module, name)


def _replace(name: str, value: Any) -> None:
    """Replace a module's attribute in this process, for good."""
    import importlib

    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)
    setattr(importlib.import_module(module), attribute, value)


def _change_batches(change: Callable[[Any], object]) -> None:
    from titan_exp.data.train_loader import TrainLoader

    original = TrainLoader.__next__

    def changed(self: TrainLoader, following: Callable[[TrainLoader], Any]) -> Any:
        batch = following(self)
        change(batch)
        return batch

    TrainLoader.__next__ = lambda self: changed(self, partial(original))  # type: ignore[method-assign]
