"""Group `training`: length, batch size, precision, objective."""

from dataclasses import dataclass, field
from typing import Any, Literal

from titan_exp.config.groups.batch_ramp import RampStage, batch_size_at, sequences_after
from titan_exp.config.groups.types import Count, NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class PartConfig:
    """A part of training of your own."""

    name: str
    """Import path of its class, a subclass of `titan_exp.trainer.part.Part`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch size, precision and objective of training."""

    steps: Count
    """Optimizer steps of the whole run; 0 saves the initial state as `step-00000000` and trains nothing."""
    seq_len: PositiveInt
    """Tokens in a sequence."""
    global_batch_size: PositiveInt
    """Sequences per optimizer step over the whole job, whatever the layout; after `batch_ramp`, if there is one."""
    micro_batch_size: PositiveInt | None
    """Sequences per forward pass of one data rank (with a pipeline, of one stage). Gradient accumulation follows from
    it. null takes the rank's whole share of the global batch; with a pipeline, the share divided by `pp_microbatches`,
    or into the fewest micro-batches, at least 4 for each pipeline rank, that the schedule takes (the most where there
    are not so many): a bubble of about a fifth with 1F1B, and micro-batches no smaller than that asks for. With a
    `batch_ramp`, the share is of the largest batch that divides all batches."""
    max_grad_norm: PositiveFloat | None
    """Global gradient norm above which gradients are scaled down to it; null never clips."""
    mixed_precision: Literal["bf16", "fp32"]
    """Type of compute: bf16 keeps fp32 master weights and reduces gradients in fp32."""
    fp32_modules: tuple[str, ...]
    """Modules that compute in fp32 though the rest is in bf16, by name or pattern (`embedding`, `blocks.0`,
    `blocks.*.attention_norm`); their outputs are bf16 again."""
    loss_chunk_tokens: PositiveInt | Literal["auto"] | None
    """Tokens whose logits are held at a time, the head's matmul and the loss being one operation, and their gradient
    overwriting them; null holds the logits of the whole micro-batch beside their gradient. auto is 16384 on CUDA, where
    model and objective compute a loss in chunks, else null: a micro-batch of fewer tokens is one chunk, which costs
    nothing, and every further one sums the head's gradient in fp32 (1.3 % of the head's time). Changes rounding
    only."""
    z_loss: NonNegativeFloat
    """Coefficient of log(Z)² added to every token's cross-entropy, Z being softmax's denominator; 0 adds nothing.
    The logged loss and the validation loss stay cross-entropy alone."""
    deterministic: bool
    """Use only kernels that give the same bits on every run, at some speed."""
    evaluate_every: Count
    """Steps between evaluations over the whole validation split, and one at the end; 0 never evaluates."""
    gc_every: Count
    """Steps between Python garbage collections, which are off in between so that no rank stalls the others;
    0 leaves Python's own collection on."""
    stop_on_nonfinite: bool
    """End the run as failed when the loss or the gradient norm is not finite, instead of training on."""
    objective: str = "language_modeling"
    """`language_modeling`; `rectified_flow`, which trains models of latents; or the import path of an objective class
    in your own package, a subclass of `titan_exp.trainer.objective.language_modeling.LanguageModeling` or with the
    same methods."""
    objective_options: dict[str, Any] = field(default_factory=dict)
    """Options of `rectified_flow` (`times`, `shift`, `text_dropout`, `pooled_dropout`, `guidance`), or extra keyword
    arguments for an objective of your own."""
    accumulation_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the sum of a rank's gradients over micro-batches, before ranks reduce it in fp32: `bf16` takes half
    the memory, and loses what is below 2^-9 of the sum."""
    batch_ramp: tuple[RampStage, ...] = ()
    """Smaller batches of the first steps, as pairs of steps and sequences: `[[100, 2], [200, 4]]` are 100 steps of 2
    sequences and 200 of 4, before those of `global_batch_size`. Sequences come in the same order as without a ramp, and
    the learning rate follows steps."""
    stop_after: PositiveInt | None = None
    """Step after which the run ends and is done, with the learning rates of a run of `steps`; null trains all steps. A
    run with `checkpoint.continue_from` trains the rest."""

    parts: dict[str, PartConfig] = field(default_factory=dict)
    """Parts of training of your own, by a name of yours: classes that see every step, its update and its row, add
    numbers to rows as `NAME/...`, keep state, change batches, or end training."""

    @property
    def last_step(self) -> int:
        """Step after which the run ends."""
        return self.steps if self.stop_after is None else self.stop_after

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Sequences per optimizer step in each stage of the ramp, and after it."""
        return *(sequences for _, sequences in self.batch_ramp), self.global_batch_size

    def batch_size_at(self, step: int) -> int:
        """Sequences of an optimizer step, counted from 1."""
        return batch_size_at(self.batch_ramp, self.global_batch_size, step)

    def sequences_after(self, steps: int) -> int:
        """Sequences of the first `steps` optimizer steps together."""
        return sequences_after(self.batch_ramp, self.global_batch_size, steps)

    @property
    def has_given_chunks(self) -> bool:
        """True if `loss_chunk_tokens` is a number."""
        return isinstance(self.loss_chunk_tokens, int)
