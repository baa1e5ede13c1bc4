"""Groups `training`, `batch_ramp`, `grad_clip`, `weight_average`, `parametrization` and `evaluation`: what a step
computes, and what is measured while training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Len

from titan_exp.config.errors.user_error import UserError, Violation, shown
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
    """Import path of the part's class, a subclass of `titan_exp.trainer.part.Part`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""


@extended("training")
@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch size, precision and objective of training."""

    steps: Count
    """Number of optimizer steps of the whole run. 0 trains nothing, and saves the initial state as `step-00000000`.
    E.g. `training.steps=10000`."""
    seq_len: PositiveInt
    """Sequence length in tokens. E.g. `training.seq_len=8192`."""
    global_batch_size: PositiveInt
    """Number of sequences per optimizer step over the whole job, the same in every layout. If there is a `batch_ramp`,
    it is the number after the ramp. E.g. `training.global_batch_size=1024`."""
    micro_batch_size: PositiveInt | None
    """Number of sequences per forward pass of one data-parallel rank (with a pipeline, of one stage). Gradient
    accumulation follows from it. null takes the rank's whole share of the global batch.

    With a pipeline, null divides the share by `pp_microbatches`. Without that key, it makes the fewest micro-batches
    that the schedule takes and that are at least 4 for each pipeline rank, or the most if there are not so many. 1F1B
    then has a bubble of about a fifth, and micro-batches are no smaller than that asks for. With a `batch_ramp`, the
    share is that of the largest batch that divides all batches. E.g. `training.micro_batch_size=1`."""
    max_grad_norm: PositiveFloat | None
    """Global gradient norm above which gradients are scaled down to it; null never clips.
    E.g. `training.max_grad_norm=0.5`."""
    mixed_precision: Literal["bf16", "fp32"]
    """Compute dtype: `bf16` with fp32 master weights and fp32 gradient reduction over ranks, or `fp32` for everything.
    E.g. `training.mixed_precision=fp32`."""
    fp32_modules: tuple[str, ...]
    """Modules that compute in fp32 while the rest computes in bf16, by name or pattern (`embedding`, `blocks.0`,
    `blocks.*.attention_norm`). Their outputs are cast back to bf16. E.g. `training.fp32_modules='[embedding]'`."""
    loss_chunk_tokens: PositiveInt | Literal["auto"] | None
    """Number of tokens whose logits are in memory at a time; null holds those of a whole micro-batch. `auto` is 16384
    on CUDA if layout, model and objective can compute a loss in chunks, else null. It changes only rounding.

    In a chunk, the head's matmul and the loss are one operation, and the gradient of the logits overwrites them. With
    null it lies beside them. A micro-batch of fewer tokens is one chunk, which costs nothing. Every further chunk sums
    the head's gradient in fp32, which takes 1.3 % of the head's time at 16384 tokens.
    E.g. `training.loss_chunk_tokens=2048`."""
    z_loss: NonNegativeFloat
    """Coefficient of the z-loss: log(Z)² is added to every token's cross-entropy, where Z is the denominator of the
    softmax. 0 adds nothing. The logged loss and the validation loss stay cross-entropy alone.
    E.g. `training.z_loss=1e-4`."""
    deterministic: bool
    """True if only kernels run that give the same bits on every run, which costs some speed.
    E.g. `training.deterministic=true`."""
    gc_every: Count
    """Steps between Python garbage collections. They are off in between, so that no rank stalls the others. 0 leaves
    Python's own collection on. E.g. `training.gc_every=100`."""
    stop_on_nonfinite: bool
    """True if the run ends as failed when a row of metrics (one each `tracking.log_every` steps) has a loss or gradient
    norm that is not finite; false trains on. E.g. `training.stop_on_nonfinite=false`."""
    objective: str = "language_modeling"
    """Training objective: `language_modeling`, the name of an extension's, or the import path of a class of your own.

    The class is a subclass of `titan_exp.trainer.objective.LanguageModeling`, or has the same methods.
    E.g. `training.objective=my_package.objective.Distill`."""
    objective_options: dict[str, Any] = field(default_factory=dict)
    """Options of an extension's objective, or keyword arguments for a class of your own.
    E.g. `+training.objective_options.temperature=2`."""
    accumulation_precision: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the sum of a rank's gradients over micro-batches, which ranks then reduce in fp32. `bf16` takes half the
    memory, and loses what is below 2^-9 of the sum. E.g. `training.accumulation_precision=bf16`."""
    batch_ramp: tuple[RampStage, ...] = ()
    """Batch ramp: the first steps have smaller batches, given as pairs of steps and sequences. `[[100, 2], [200, 4]]`
    trains 100 steps of 2 sequences and 200 of 4, and then those of `global_batch_size`.

    Each batch must be larger than the one before. Sequences come in the same order as without a ramp, and the learning
    rate follows steps. E.g. `training.batch_ramp='[[100,2],[200,4]]'`."""
    stop_after: PositiveInt | None = None
    """Step after which the run ends as done, with the learning rates of a run of `steps`; null trains all steps. A run
    with `checkpoint.continue_from` trains the rest. E.g. `training.stop_after=1000`."""

    parts: dict[str, PartConfig] = field(default_factory=dict)
    """Parts of training of your own, each under a name that you choose. A part is a class that sees every step, its
    update and its row. It can add numbers to rows as `NAME/...`, keep state, change batches, or end training.
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
    """Gradient clipping: `norm` limits only the global norm, `value` first clamps every number of a gradient, and
    `adagc` (Wang et al. 2025) limits the norm of each parameter's gradient instead.

    `adagc` scales a gradient down to a multiple of the average of the parameter's earlier norms. It limits the global
    norm during its warm-up only. E.g. `grad_clip.mode=adagc`."""
    max_value: PositiveFloat = 0.01
    """Largest magnitude of a gradient's numbers in mode `value`. E.g. `grad_clip=value grad_clip.max_value=1e-3`."""
    relative: PositiveFloat = 1.05
    """Largest norm of a parameter's gradient in mode `adagc`, in multiples of its average norm.
    E.g. `grad_clip=adagc grad_clip.relative=1.2`."""
    decay: Share = 0.98
    """Decay rate of the average norm per step in mode `adagc`. E.g. `grad_clip=adagc grad_clip.decay=0.99`."""
    warmup_steps: Count = 100
    """Warm-up steps of mode `adagc`, in which gradients are clipped by their global norm. A parameter's average begins
    as its smallest norm in them. E.g. `grad_clip=adagc grad_clip.warmup_steps=200`."""


@dataclass(frozen=True)
class WeightAverageConfig:
    """Average of the weights after each step, with an evaluation of its own. It changes no training step."""

    mode: Literal["none", "ema", "tail"] = "none"
    """Average of the weights over steps, kept beside them: `none`, `ema`, an exponential moving average without bias
    towards the initial weights, or `tail`, the mean over the last `steps` steps.

    Evaluations then log `averaged/validation_loss`, too. `convert`, `evaluate` and `generate` read the average of a
    checkpoint with `--averaged`. It takes 4 bytes per parameter, and is sharded like the weights.
    E.g. `weight_average.mode=ema`."""
    decay: Share = 0.999
    """Decay rate of the average per step in mode `ema`. E.g. `weight_average=ema weight_average.decay=0.9999`."""
    steps: PositiveInt = 100
    """Number of averaged steps in mode `tail`, the last of `training.steps`.

    A run that stops earlier (`training.stop_after`) averages those of them that it trains, and a run that continues it
    averages the others. E.g. `weight_average=tail weight_average.steps=500`."""

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
    """Parametrization: `standard`, `mup` or `completep`, or the import path of a module of your own with the same
    public names.

    `standard` initializes and trains every shape with the same numbers. E.g. `parametrization.name=standard`."""


@dataclass(frozen=True)
class BaseShapeConfig(ParametrizationConfig):
    """Fields of parametrizations by width, which leave a model of the base width unchanged."""

    name: str = field()
    """Parametrization: `mup` scales with the width, and `completep` also with the depth.

    The key has no default, so that it is part of the run id. E.g. `parametrization=mup`."""
    base_width: PositiveInt
    """Base width: the `model.dim` at which the hyperparameters were tuned, and at which nothing is scaled.
    E.g. `parametrization=mup parametrization.base_width=256`."""
    base_head_dim: PositiveInt | None = None
    """Width of a query head at the base width; null if wider models have more heads instead of wider ones.

    Attention scores are then scaled by 1 / head width instead of by its root.
    E.g. `parametrization=mup parametrization.base_head_dim=64`."""
    fixed: tuple[str, ...] = ()
    """Keys of the group `model` that have the same value at every width, such as `moe.ffn_dim` or `kv_lora_rank`.

    Linear layers whose inputs depend on one of them keep their initial weights and learning rate. The inputs of all
    others grow with `model.dim`. E.g. `parametrization=mup parametrization.fixed='[moe.ffn_dim]'`."""
    embedding_multiplier: PositiveFloat = 1.0
    """Multiplier of the embeddings at every width.
    E.g. `parametrization=mup parametrization.embedding_multiplier=10`."""
    output_multiplier: PositiveFloat = 1.0
    """Multiplier of the logits at every width, besides that of the parametrization.
    E.g. `parametrization=mup parametrization.output_multiplier=2`."""


FORMER = {"training.evaluate_every": "evaluation.every"}
"""Keys by their former names, which may still be typed and stand in files."""


@dataclass(frozen=True)
class ValidationSetConfig:
    """A validation set beside the run's own split."""

    data: dict[str, Any]
    """Keys of the group `data` that differ from the run's, such as `{paths: [code/*.py]}`.

    All documents are read, up to `validation_documents`. If the keys have a `validation_fraction` or a
    `validation_split`, only those are read that they hold out."""
    seq_len: PositiveInt | None = None
    """Sequence length in tokens, at most `training.seq_len`, which is the default."""

    @property
    def holds_out(self) -> bool:
        """True if only a part of the documents is read, which a run on the same source does not train on."""
        return bool(self.data.get("validation_fraction") or self.data.get("validation_split"))


@extended("evaluation")
@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluations while training. They change no training step."""

    every: Count = 500
    """Steps between evaluations on the whole validation split and the sets. The last step always has one. 0 never
    evaluates. E.g. `evaluation.every=1000`."""
    every_tokens: PositiveInt | None = None
    """Tokens of the global batches between evaluations, in place of `every`; null counts steps.
    E.g. `evaluation.every_tokens=1000000000`."""
    sets: dict[str, ValidationSetConfig] = field(default_factory=dict)
    """Further validation sets by name, each logged as `validation_loss/NAME`. They do not enter `validation_loss`.
    E.g. `+evaluation.sets.code='{data:{source:text,paths:[code],validation_documents:200}}'`."""

    @property
    def in_run_id(self) -> tuple[str, ...]:
        """Keys that are part of the run id at their default, too, as they were under their former names."""
        return ("every",)

    @property
    def enabled(self) -> bool:
        """True if there are evaluations."""
        return bool(self.every)

    def due(self, training: TrainingConfig, step: int) -> bool:
        """True if an evaluation follows this step, not counting the last step's."""
        if not self.every:
            return False
        if self.every_tokens is None:
            return step % self.every == 0
        now, before = (training.sequences_after(steps) * training.seq_len for steps in (step, step - 1))
        return now // self.every_tokens > before // self.every_tokens


def with_current_keys(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values of a configuration with current keys in place of former ones, and a sentence about each that was there.
    Raises UserError if a former key and its current one are both set, to different values."""
    found = dict(values)
    said = []
    for former, current in FORMER.items():
        (group, key), (to, name) = former.split("."), current.split(".")
        if not isinstance(found.get(group), dict) or key not in found[group]:
            continue
        found[group] = dict(found[group])
        if (value := found[group].pop(key)) is not None and isinstance(found.get(to, {}), dict):
            default = getattr(EvaluationConfig, name)
            if (own := found.get(to, {}).get(name, default)) not in (default, value):
                reason = f"this is the former name of {current}, which is set to {shown(own)}"
                remedy = f"use {former}=null, or {current}={shown(value)}"
                raise UserError("Two names of one key differ.", [Violation(former, value, reason, remedy)])
            found[to] = {**found.get(to, {}), name: value}
            said.append(f"{former}={value} is {current}={value} now.")
    return found, said
