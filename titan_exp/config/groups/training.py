"""Groups `training`, `batch_ramp`, `grad_clip`, `weight_average` and `parametrization`: what a step computes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Len

from titan_exp.config.extension import extended
from titan_exp.config.groups.types import Count, NonNegativeFloat, PositiveFloat, PositiveInt, Share

RampStage = Annotated[tuple[PositiveInt, ...], Len(2, 2)]
"""Steps of a stage, and sequences in each of them."""


def batch_size_at(ramp: Sequence[Sequence[int]], last: int, step: int) -> int:
    """Sequences of a step, counted from 1; `last` are those after the ramp."""
    for steps, sequences in ramp:
        if step <= steps:
            return sequences
        step -= steps
    return last


def sequences_after(ramp: Sequence[Sequence[int]], last: int, steps: int) -> int:
    """Sequences of the first `steps` steps together."""
    total = 0
    for length, sequences in ramp:
        total += min(length, steps) * sequences
        steps -= min(length, steps)
    return total + steps * last


def steps_for(ramp: Sequence[Sequence[int]], last: int, sequences: int) -> int:
    """Smallest number of steps with that many sequences together."""
    done = 0
    for length, size in ramp:
        if sequences <= length * size:
            return done - (-sequences // size)
        done, sequences = done + length, sequences - length * size
    return done - (-sequences // last)


@dataclass(frozen=True)
class PartConfig:
    """A part of training of your own."""

    name: str
    """Import path of its class, a subclass of `titan_exp.trainer.part.Part`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""


@extended("training")
@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch size, precision and objective of training."""

    steps: Count
    """Optimizer steps of the whole run; 0 saves the initial state as `step-00000000` and trains nothing.
    E.g. `training.steps=10000`."""
    seq_len: PositiveInt
    """Tokens in a sequence. E.g. `training.seq_len=8192`."""
    global_batch_size: PositiveInt
    """Sequences per optimizer step over the whole job, whatever the layout; after `batch_ramp`, if there is one.
    E.g. `training.global_batch_size=1024`."""
    micro_batch_size: PositiveInt | None
    """Sequences per forward pass of one data rank (with a pipeline, of one stage), from which gradient accumulation
    follows; null takes the rank's whole share of the global batch.

    With a pipeline, null is the share divided by `pp_microbatches`, or into the fewest micro-batches, at least 4 for
    each pipeline rank, that the schedule takes (the most where there are not so many): a bubble of about a fifth with
    1F1B, and micro-batches no smaller than that asks for. With a `batch_ramp`, the share is of the largest batch that
    divides all batches. E.g. `training.micro_batch_size=1`."""
    max_grad_norm: PositiveFloat | None
    """Global gradient norm above which gradients are scaled down to it; null never clips.
    E.g. `training.max_grad_norm=0.5`."""
    mixed_precision: Literal["bf16", "fp32"]
    """Type of compute: `bf16`, with master weights and sums of gradients over ranks in fp32, or `fp32`.
    E.g. `training.mixed_precision=fp32`."""
    fp32_modules: tuple[str, ...]
    """Modules that compute in fp32 though the rest is in bf16, by name or pattern (`embedding`, `blocks.0`,
    `blocks.*.attention_norm`); their outputs are bf16 again. E.g. `training.fp32_modules='[embedding]'`."""
    loss_chunk_tokens: PositiveInt | Literal["auto"] | None
    """Tokens whose logits are held at a time; null holds those of a whole micro-batch. `auto` is 16384 on CUDA, where
    model and objective compute a loss in chunks, else null. Changes rounding only.

    The head's matmul and the loss are one operation, and the gradient of logits overwrites them; with null it lies
    beside them. A micro-batch of fewer tokens is one chunk, which costs nothing, and every further one sums the head's
    gradient in fp32 (1.3 % of the head's time). E.g. `training.loss_chunk_tokens=2048`."""
    z_loss: NonNegativeFloat
    """Coefficient of log(Z)² added to every token's cross-entropy, Z being softmax's denominator; 0 adds nothing. The
    logged loss and the validation loss stay cross-entropy alone. E.g. `training.z_loss=1e-4`."""
    deterministic: bool
    """Use only kernels that give the same bits on every run, at some speed. E.g. `training.deterministic=true`."""
    evaluate_every: Count
    """Steps between evaluations over the whole validation split, and one at the end; 0 never evaluates.
    E.g. `training.evaluate_every=500`."""
    gc_every: Count
    """Steps between Python garbage collections, which are off in between so that no rank stalls the others; 0 leaves
    Python's own collection on. E.g. `training.gc_every=100`."""
    stop_on_nonfinite: bool
    """End the run as failed when the loss or the gradient norm is not finite, instead of training on.
    E.g. `training.stop_on_nonfinite=false`."""
    objective: str = "language_modeling"
    """Objective: `language_modeling`, the name of an extension's, or the import path of a class of your own.

    The class is a subclass of `titan_exp.trainer.objective.LanguageModeling`, or has the same
    methods. E.g. `training.objective=my_package.objective.Distill`."""
    objective_options: dict[str, Any] = field(default_factory=dict)
    """Options of an extension's objective, or extra keyword arguments for one of your own.
    E.g. `+training.objective_options.temperature=2`."""
    accumulation_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the sum of a rank's gradients over micro-batches, before ranks reduce it in fp32: `bf16` takes half
    the memory, and loses what is below 2^-9 of the sum. E.g. `training.accumulation_precision=bf16`."""
    batch_ramp: tuple[RampStage, ...] = ()
    """Smaller batches of the first steps, as pairs of steps and sequences: `[[100, 2], [200, 4]]` are 100 steps of 2
    sequences and 200 of 4, before those of `global_batch_size`.

    Sequences come in the same order as without a ramp, and the learning rate follows steps.
    E.g. `training.batch_ramp='[[100,2],[200,4]]'`."""
    stop_after: PositiveInt | None = None
    """Step after which the run ends and is done, with the learning rates of a run of `steps`; null trains all steps. A
    run with `checkpoint.continue_from` trains the rest. E.g. `training.stop_after=1000`."""

    parts: dict[str, PartConfig] = field(default_factory=dict)
    """Parts of training of your own, by a name of yours: classes that see every step, its update and its row, add
    numbers to rows as `NAME/...`, keep state, change batches, or end training.
    E.g. `+training.parts.probe='{name:my_package.parts.LogitProbe,options:{steps:[1000]}}'`."""

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


@dataclass(frozen=True)
class GradClipConfig:
    """Clipping of gradients, whose global norm `training.max_grad_norm` limits."""

    mode: Literal["norm", "value", "adagc"] = "norm"
    """Clipping: `norm` limits the global norm alone, `value` clamps every number of a gradient before that, `adagc`
    (Wang et al. 2025) limits the norm of each parameter's gradient.

    `adagc` scales a gradient down to a multiple of the average of its own earlier norms, and limits the global norm in
    its warm-up only. E.g. `grad_clip.mode=adagc`."""
    max_value: PositiveFloat = 0.01
    """Mode `value`: largest magnitude of a gradient's number. E.g. `grad_clip=value grad_clip.max_value=1e-3`."""
    relative: PositiveFloat = 1.05
    """Mode `adagc`: largest norm of a parameter's gradient, in multiples of its average.
    E.g. `grad_clip=adagc grad_clip.relative=1.2`."""
    decay: Share = 0.98
    """Mode `adagc`: factor of the average norm at every step. E.g. `grad_clip=adagc grad_clip.decay=0.99`."""
    warmup_steps: Count = 100
    """Mode `adagc`: first steps, which are clipped by the global norm; the average is their smallest norm.
    E.g. `grad_clip=adagc grad_clip.warmup_steps=200`."""


@dataclass(frozen=True)
class WeightAverageConfig:
    """Average of the weights after each step, with an evaluation of its own. It changes no training step."""

    mode: Literal["none", "ema", "tail"] = "none"
    """Average of the weights over steps, beside them: `none`, `ema`, an exponential moving average without bias towards
    the initial weights, or `tail`, the mean over the last `steps` steps.

    Evaluations log `averaged/validation_loss`; `convert`, `evaluate` and `generate` take the average of a checkpoint
    with `--averaged`. It takes 4 bytes per parameter, sharded like the weights. E.g. `weight_average.mode=ema`."""
    decay: Share = 0.999
    """Mode `ema`: factor of the average at every step. E.g. `weight_average=ema weight_average.decay=0.9999`."""
    steps: PositiveInt = 100
    """Mode `tail`: number of last steps of `training.steps` that are averaged.

    A run that stops earlier (`training.stop_after`) averages those that it has of them, and a run that continues it the
    others. E.g. `weight_average=tail weight_average.steps=500`."""

    @property
    def enabled(self) -> bool:
        """True if there is an average."""
        return self.mode != "none"

    def first_step(self, steps: int) -> int:
        """First averaged step of a whole run of `steps` steps."""
        return max(1, steps - self.steps + 1) if self.mode == "tail" else 1


@dataclass(frozen=True)
class ParametrizationConfig:
    """Fields of every parametrization. Each adds its own in `titan_exp/models/parametrization/<name>.py`."""

    name: str = "standard"
    """Parametrization (`standard`, `mup`, `completep`), or the import path of a module of your own with the same public
    names.

    `standard` initializes and trains every shape with the same numbers. E.g. `parametrization.name=standard`."""


@dataclass(frozen=True)
class BaseShapeConfig(ParametrizationConfig):
    """Fields of parametrizations by width, which leave a model of the base width unchanged."""

    name: str = field()
    """Parametrization.

    It has no default, so that it is part of the run id. E.g. `parametrization=mup`."""
    base_width: PositiveInt
    """`model.dim` at which the hyperparameters were tuned, and nothing is scaled.
    E.g. `parametrization=mup parametrization.base_width=256`."""
    base_head_dim: PositiveInt | None = None
    """Width of a query head at the base width; null if all widths have the model's, and more heads.

    Scores of attention are then scaled by 1 / width of a head, instead of its root.
    E.g. `parametrization=mup parametrization.base_head_dim=64`."""
    fixed: tuple[str, ...] = ()
    """Keys of the group `model` with the same value at every width (`moe.ffn_dim`, `kv_lora_rank`).

    Linear layers with as many inputs keep their initial weights and learning rate; the inputs of all others grow with
    `model.dim`. E.g. `parametrization=mup parametrization.fixed='[moe.ffn_dim]'`."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor of embeddings at every width. E.g. `parametrization=mup parametrization.embedding_multiplier=10`."""
    output_multiplier: PositiveFloat = 1.0
    """Factor of logits at every width, beside that of the parametrization.
    E.g. `parametrization=mup parametrization.output_multiplier=2`."""
