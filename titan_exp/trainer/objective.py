"""Training objective: the loss of a batch and the metrics that it reports."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import load, provided
from titan_exp.config.groups.parallelism import CompileConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.schema.component import Call, call_violations, import_dotted, is_dotted, require_members
from titan_exp.config.schema.foreign_code import LANGUAGE_MODELING
from titan_exp.config.secrets import revealed
from titan_exp.data.batch import Batch, MicroBatch
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.transformer import MTP_DEPTH
from titan_exp.ops.cross_entropy import IGNORE_INDEX, ChunkFunctions, LossSum, VocabShard, linear_loss_sum, loss_sum

Reduction = Literal["mean", "sum", "max"]
"""Reduction of a metric over micro-batches and ranks. `mean` divides the sum by the items of the global batch."""


class Loss(NamedTuple):
    """Loss and metrics of a micro-batch, summed over its items (or a maximum, for `max` metrics)."""

    total: Tensor
    """Loss summed over the items, an fp32 scalar; backward starts here."""
    metrics: Mapping[str, Tensor]
    """Detached scalars: `loss` (logged, and used in evaluation) and one per name in `Objective.metrics`."""
    further: Sequence["Loss"] = ()
    """Weighted losses of `Batch.further`, each summed over its own tokens."""


class Objective(Protocol):
    """Training objective, such as `LanguageModeling`. It defines the kind of batch that it trains on. Optional members:
    `prepare(batch, seed)` draws the random numbers of a CPU batch of whole rows, keyed by sample;
    `prepare_evaluation(batch)` does so for evaluation; `bind(spec)` returns the objective of a model; `has_perplexity`,
    False if exp(loss) means nothing."""

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """Metrics reported beside `loss`, each logged as `objective/NAME`. The same on all ranks."""
        ...

    def count(self, batch: Any) -> int:
        """Number of items (tokens) of a CPU batch of unsharded sequences, over which the loss is averaged."""
        ...

    def __call__(self, model: nn.Module, batch: Any, hidden: Tensor | None = None) -> Loss:
        """Run the model, or the last pipeline stage given `hidden`, on a batch sharded for this rank."""
        ...


class MetricSums:
    """Metrics of one rank in one optimizer step, accumulated on the device over micro-batches."""

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self._reductions: Mapping[str, Reduction] = {"loss": "mean", **objective.metrics}
        self.values = {
            name: torch.full((), -math.inf, device=device) if reduction == "max" else torch.zeros((), device=device)
            for name, reduction in self._reductions.items()
        }

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Accumulate the metrics of a micro-batch, normalized by `normalize_by_tokens`."""
        for name, value in metrics.items():
            if self._reductions[name] == "max":
                self.values[name].copy_(torch.maximum(self.values[name], value))
            else:
                self.values[name].add_(value)

    def reset(self) -> None:
        """Clear the sums in place: CUDA graphs hold their addresses."""
        for name, value in self.values.items():
            value.fill_(-math.inf if self._reductions[name] == "max" else 0)


def normalize_by_tokens(
    objective: Objective, module: nn.Module, batch: MicroBatch, tokens: Sequence[Tensor], hidden: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a micro-batch and return its share of the global mean loss and of each metric. Each share is divided by the
    tokens of the global batch (`loss_divisors`), so that gradients summed over micro-batches and ranks are those of the
    global mean, however tokens are distributed."""
    found = objective(module, batch, hidden)
    total, metrics = _normalized(objective, found, tokens[0])
    for further, count in zip(found.further, tokens[1:], strict=True):
        share, reported = _normalized(objective, further, count)
        total, metrics = total + share, {**metrics, **reported}
    return total, metrics


def _normalized(objective: Objective, found: Loss, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    means = {name for name in found.metrics if objective.metrics.get(name, "mean") == "mean"}
    metrics = {name: value / tokens if name in means else value for name, value in found.metrics.items()}
    return found.total / tokens, metrics


def token_counts(objective: Objective, batch: MicroBatch) -> list[int]:
    """Predicted tokens of a CPU batch, then those of each of its further predictions."""
    return [objective.count(part) for part in (batch, *getattr(batch, "further", ()))]


def loss_divisors(tokens: Sequence[int], device: torch.device) -> list[Tensor]:
    """Numbers of tokens, at least 1, as fp32 scalars on the device: CUDA divides by Python numbers inexactly."""
    return [torch.full((), max(count, 1), dtype=torch.float32, device=device) for count in tokens]


@dataclass(frozen=True)
class LanguageModeling:
    """Next-token cross-entropy. Subclasses override `loss`, and `metrics` if they report more."""

    takes_vocab_shard: ClassVar[bool] = False
    """True in a subclass whose own `loss` or `__call__` computes with `vocab_shard`; others take whole logits only."""
    chunk_tokens: int | None = None
    """Tokens per chunk of logits; None computes all logits at once."""
    z_loss: float = 0.0
    """Coefficient of log(Z)²."""
    vocab_shard: VocabShard | None = None
    """This rank's shard of the logits under loss parallelism."""
    loss_sum: Callable[..., LossSum] = loss_sum
    """Loss of whole logits, compiled or eager."""
    chunk_functions: ChunkFunctions = field(default_factory=ChunkFunctions)
    """Loss and gradient of a chunk's logits, compiled or eager."""

    @classmethod
    def build(
        cls,
        config: TrainingConfig,
        vocab_shard: VocabShard | None = None,
        *,
        compile_backend: str | None = None,
        **options: Any,
    ) -> Self:
        """Build from the training group; `options` are fields of a subclass."""
        chunk_tokens = config.loss_chunk_tokens
        assert chunk_tokens != "auto", "resolved by build_objective"
        objective = cls(chunk_tokens, config.z_loss, vocab_shard, **options)
        return objective if compile_backend is None else objective.compiled(compile_backend)

    def compiled(self, backend: str) -> Self:
        """Return the same objective with compiled loss functions: a graph per chunk length, as dynamic ones are
        slow."""
        compile_ = partial(torch.compile, backend=backend, fullgraph=True, dynamic=False)
        return replace(self, loss_sum=compile_(self.loss_sum), chunk_functions=self.chunk_functions.compiled(compile_))

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """Reduction of the z-loss term, if any: the differentiated loss is `loss` plus this term."""
        return {"z_loss": "mean"} if self.z_loss else {}

    def count(self, batch: Batch) -> int:
        """Predicted tokens."""
        return int((batch.labels != IGNORE_INDEX).sum())

    def __call__(self, model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Loss:
        """Compute the loss of a batch. Chunks run inside the model's forward, where FSDP has gathered the LM head."""
        inputs = (batch.tokens if hidden is None else hidden, batch.positions, batch.documents)
        if self.chunk_tokens is None:
            return self.loss(model(*inputs), batch)
        return self.with_metrics(model(*inputs, loss=partial(self.chunked_loss, batch=batch)))

    def chunked_loss(self, hidden: Tensor, weight: Tensor, batch: Batch) -> LossSum:
        """Compute the loss by chunks from last hidden states [batch, seq, dim] and the head's weight [vocab, dim]."""
        assert self.chunk_tokens is not None, "whole logits are given to `loss`"
        return linear_loss_sum(
            hidden,
            weight,
            batch.labels,
            chunk_tokens=self.chunk_tokens,
            z_loss=self.z_loss,
            shard=self.vocab_shard,
            functions=self.chunk_functions,
        )

    def loss(self, logits: Tensor, batch: Batch) -> Loss:
        """Compute the loss from logits [batch, seq, vocab], or this rank's vocabulary shard of them."""
        return self.with_metrics(self.loss_sum(logits, batch.labels, self.z_loss, self.vocab_shard))

    def with_metrics(self, found: LossSum) -> Loss:
        """Attach the metrics that this objective reports."""
        z_loss = {} if found.z_loss is None else {"z_loss": found.z_loss}
        return Loss(found.objective, {"loss": found.cross_entropy, **z_loss})


@dataclass(frozen=True)
class MultiTokenPrediction:
    """Multi-token prediction (MTP): adds the losses of the model's MTP modules to a main objective. The objective is
    main + weight / depth * (sum of the modules' means), every mean over the tokens that its module predicts in the
    global batch. The logged loss is the main one. Batches without `further`, as in evaluation, do not run the
    modules."""

    main: LanguageModeling
    depth: int
    weight: float
    """Factor of the modules' mean loss."""

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """Metrics of the main objective, and each module's cross-entropy without the weight."""
        return {**self.main.metrics, **{f"mtp_loss_{number}": "mean" for number in range(1, self.depth + 1)}}

    def count(self, batch: Batch) -> int:
        """Items of the main objective."""
        return self.main.count(batch)

    def __call__(self, model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Loss:
        """Compute the losses of a batch from one call of the head."""
        if not batch.further:
            return self.main(model, batch, hidden)
        parts = (batch, *batch.further)
        inputs = (batch.tokens if hidden is None else hidden, batch.positions, batch.documents)
        further = torch.stack([part.tokens for part in batch.further])

        def loss(states: Tensor, weight: Tensor) -> tuple[LossSum, ...]:
            pairs = zip(states.chunk(len(parts)), parts, strict=True)
            return tuple(self.main.chunked_loss(state, weight, part) for state, part in pairs)

        if self.main.chunk_tokens is None:
            logits = model(*inputs, further=further).chunk(len(parts))
            main, *others = [self.main.loss(part, of) for part, of in zip(logits, parts, strict=True)]
        else:
            main, *others = map(self.main.with_metrics, model(*inputs, loss=loss, further=further))
        factor = self.weight / self.depth
        named = {f"mtp_loss_{number}": module for number, module in enumerate(others, 1)}
        modules = [Loss(factor * module.total, {name: module.metrics["loss"]}) for name, module in named.items()]
        return Loss(main.total, main.metrics, modules)


def build_objective(
    training: TrainingConfig,
    compile_: CompileConfig,
    vocab_shard: VocabShard | None,
    automatic_chunk: int | None = None,
    spec: ModelSpec | None = None,
) -> Objective:
    """Build `language_modeling`, an extension's objective, or your class, given by its import path.

    `automatic_chunk` is the chunk of `training.loss_chunk_tokens=auto`, for objectives that compute a loss in chunks.
    With multi-token prediction in the model's `spec`, the objective is also that of its modules.

    Your class has a classmethod `build(training, vocab_shard, *, compile_backend, **options)`, like `LanguageModeling`.
    Raises UserError if the import path cannot be imported, a subclass with its own `loss` cannot compute it in chunks
    or from a shard of the vocabulary, or the class cannot compute the loss of further predictions.
    """
    name, backend = training.objective, compile_.backend if compile_.compiles("loss") else None
    kind: Any = LanguageModeling
    if name != LANGUAGE_MODELING:
        kind = _own_class(training) if is_dotted(name) else load(provided("objectives")[name])
    is_language = issubclass(kind, LanguageModeling)
    own_loss = is_language and kind.loss is not LanguageModeling.loss
    own_call = is_language and kind.__call__ is not LanguageModeling.__call__
    takes_whole_logits = own_loss and not own_call
    if training.loss_chunk_tokens == "auto":
        training = replace(training, loss_chunk_tokens=None if takes_whole_logits else automatic_chunk)
    options = revealed(training.objective_options, "training.objective_options")
    objective: Any = kind.build(training, vocab_shard, compile_backend=backend, **options)
    if spec is not None and hasattr(objective, "bind"):
        objective = objective.bind(spec)
    if training.loss_chunk_tokens is not None and takes_whole_logits:
        raise UserError(
            f"training.loss_chunk_tokens={training.loss_chunk_tokens}: {name} overrides `loss`, which takes whole "
            "logits. Use training.loss_chunk_tokens=null, or override `__call__` as well."
        )
    if vocab_shard is not None and (own_loss or own_call) and not kind.takes_vocab_shard:
        raise UserError(
            f"parallelism.loss_parallel=true: {name} has its own loss, which would take this rank's shard of the "
            "vocabulary for all of it. Use parallelism.loss_parallel=false, or set `takes_vocab_shard = True` in the "
            "class if it computes with `self.vocab_shard`."
        )
    if spec is None or not spec.mtp_layers:
        return objective
    if not isinstance(objective, LanguageModeling) or own_call:
        raise UserError(
            f"{MTP_DEPTH}={len(spec.mtp_layers)}: {name} has its own `__call__`, which computes no loss of further "
            f"predictions. Use {MTP_DEPTH}=0, or extend LanguageModeling and override `loss` alone."
        )
    return MultiTokenPrediction(objective, len(spec.mtp_layers), spec.mtp_weight)


def _own_class(training: TrainingConfig) -> Any:
    name, field = training.objective, "training.objective"
    kind = import_dotted(name, field)
    require_members(kind, name, field, ("build", "metrics", "count"), "titan_exp/trainer/objective.py")
    options = training.objective_options
    call = Call(("training", "vocab_shard"), ("compile_backend",), "training.objective_options", options)
    violations = call_violations(kind.build, f"{name}.build", field, call)
    if violations:
        raise UserError("This run cannot start.", violations)
    return kind
