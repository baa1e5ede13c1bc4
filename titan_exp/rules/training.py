"""Training rules: batches and their ramp, lengths in steps, keys of modes, fp32 modules, chunked loss."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from titan_exp.config.errors.user_error import Violation, divisors, listed, multiples_near, nearest_numbers
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.optimizer import LRScheduleConfig
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.groups.run import ProfilingConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout.pipeline_schedules import is_file, takes
from titan_exp.config.layout.resolved_layout import ResolvedLayout, cuts_blocks, head_is_fp32
from titan_exp.config.schema.foreign_code import LANGUAGE_MODELING, described
from titan_exp.config.schema.identity_keys import COUNTS_BESIDE
from titan_exp.config.schema.schema import choices_of, hints
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.rules.pipeline_parallel import accepted_numbers, fits, schedule_is_known
from titan_exp.rules.rule import Refuse, check_multiple, rules


def micro_batches_are_whole(training: TrainingConfig, layout: ResolvedLayout) -> Iterator[Violation]:
    """Every data-parallel rank runs the same whole number of micro-batches."""
    unit, reason, more = _share(training.global_batch_size, training, layout)
    yield from check_multiple("training.global_batch_size", training.global_batch_size, unit, f"it {reason}", more)


def schedule_fits(lr_schedule: LRScheduleConfig, training: TrainingConfig) -> Iterator[Violation]:
    """Warm-up and decay do not overlap."""
    warmup, decay, steps = lr_schedule.warmup_steps, lr_schedule.decay_steps, training.steps
    if warmup + decay <= steps or steps == 0:
        return
    if warmup > steps:
        key, value, largest = "lr_schedule.warmup_steps", warmup, steps - min(decay, steps)
        reason = f"this warm-up is longer than the run of {steps} steps"
    else:
        key, value, largest = "lr_schedule.decay_steps", decay, steps - warmup
        reason = f"together with the warm-up of {warmup} steps this is longer than the run of {steps} steps"
    yield Violation(key, value, reason, f"use {key}={largest} or less, or training.steps={warmup + decay}")


def trace_fits(profiling: ProfilingConfig, training: TrainingConfig) -> Iterator[Violation]:
    """The profiler window ends within the run; otherwise no trace is written."""
    steps = training.last_step
    if profiling.enabled and profiling.start + profiling.steps > steps:
        reason = f"the run ends at step {steps}, before the {profiling.steps} profiled steps are over"
        remedy = f"use profiling.start={max(0, steps - profiling.steps)} or less, and at most {steps} profiling.steps"
        yield Violation("profiling.start", profiling.start, reason, remedy)


def _share(size: int, training: TrainingConfig, layout: ResolvedLayout) -> tuple[int, str, str]:
    """Number that divides a batch if ranks can share it, the reason if it does not, and micro-batches with which it
    does."""
    ranks, micro = layout.dp_degree, training.micro_batch_size or 1
    parts = f" in micro-batches of {micro}" if micro > 1 else ""
    sizes = nearest_numbers(micro, divisors(size // ranks)) if size % ranks == 0 else []
    more = f", or use training.micro_batch_size={listed(sizes)}" if sizes else ""
    return ranks * micro, f"does not divide evenly among {ranks} data-parallel rank{'s' * (ranks > 1)}{parts}", more


def objective_has_inputs(spec: ModelSpec, model: ModelConfig, training: TrainingConfig) -> Iterator[Violation]:
    """The model reads the tokens that language modeling predicts."""
    if training.objective == LANGUAGE_MODELING and not spec.vocab_size:
        reason = f"this objective predicts tokens, and {model.name} reads none"
        remedy = "" if spec.inputs is None else f"use {spec.inputs.trained_by}, or "
        remedy += "choose a language model such as model=llama_laptop"
        yield Violation("training.objective", training.objective, reason, remedy)


TRAINING_RULES = rules(
    objective_has_inputs,
    # NCCL sends nothing from CPU memory.
    Refuse(
        "optimizer.name",
        lambda optimizer, parallelism, device: (
            device == "cuda" and parallelism.cpu_offload and optimizer.sends_messages
        ),
        "this optimizer exchanges parts of weights between GPUs, and parallelism.cpu_offload keeps them in CPU memory",
        "use parallelism.cpu_offload=false, or optimizer=adamw",
    ),
    schedule_fits,
    trace_fits,
    Refuse(
        "training.stop_after",
        lambda training: training.last_step > training.steps,
        "the run has only {training.steps} steps",
        "use training.stop_after={training.steps} or less, or null",
    ),
    Refuse(
        "weight_average.steps",
        lambda weight_average, training: (
            weight_average.mode == "tail" and training.steps and weight_average.steps > training.steps
        ),
        "the run has only {training.steps} steps",
        "use weight_average.steps={training.steps} or less",
    ),
    Refuse(
        "weight_average.mode",
        lambda weight_average, optimizer: weight_average.enabled and optimizer.averages_weights,
        "optimizer.name={optimizer.name} already averages the weights",
        "use weight_average=none, or another optimizer",
    ),
    Refuse(
        "optimizer.nesterov",
        lambda optimizer: getattr(optimizer, "nesterov", False) and not optimizer.momentum,
        "Nesterov looks ahead along the momentum, and optimizer.momentum is 0",
        "use optimizer.nesterov=false, or optimizer.momentum=0.9",
    ),
    Refuse(
        "profiling.memory_step",
        lambda profiling, training: (profiling.memory_step or 0) > training.last_step,
        "the run ends at step {training.last_step}",
        "use profiling.memory_step={training.last_step} or less",
    ),
    Refuse(
        "evaluation.every",
        lambda data, evaluation: (
            not described(data.source).is_store
            and evaluation.enabled
            and data.validation_fraction == 0
            and data.validation_split is None
        ),
        "with data.validation_fraction=0 there is no validation split to evaluate on",
        "hold documents out with data.validation_fraction=0.02, or never evaluate with evaluation.every=0",
    ),
    Refuse(
        "training.fp32_modules",
        lambda training: training.fp32_modules and training.mixed_precision == "fp32",
        "with training.mixed_precision=fp32 all modules compute in fp32 anyway",
        "use training.mixed_precision=bf16, or leave it out",
    ),
    Refuse(
        "training.accumulation_precision",
        lambda training: training.accumulation_precision == "bf16" and training.mixed_precision == "fp32",
        "with training.mixed_precision=fp32 the gradients to accumulate are in fp32",
        "use training.mixed_precision=bf16, or training.accumulation_precision=fp32",
    ),
    Refuse(
        "training.accumulation_precision",
        lambda training, compile: training.accumulation_precision == "bf16" and compile.cuda_graphs,
        "with compile.cuda_graphs=true a captured pass sums gradients at fixed addresses, in fp32",
        "use compile.cuda_graphs=false, or training.accumulation_precision=fp32",
    ),
    Refuse(
        "training.accumulation_precision",
        lambda training, parallelism, spec: (
            training.accumulation_precision == "bf16" and parallelism.pp > 1 and spec.tied
        ),
        "the tied embedding and head lie in two stages of the pipeline, and we add up their gradients in fp32",
        "use model.tied_embeddings=false, parallelism.pp=1, or training.accumulation_precision=fp32",
    ),
    Refuse(
        "training.fp32_modules",
        lambda spec, training: [one for one in training.fp32_modules if spec.tied and fnmatchcase("embedding", one)],
        "with model.tied_embeddings=true the embedding shares its weight with the head",
        "use model.tied_embeddings=false, or leave the embedding out",
    ),
    Refuse(
        "training.fp32_modules",
        lambda compile, training: compile.compiles("blocks") and [*filter(cuts_blocks, training.fp32_modules)],
        "this names modules inside a block, and compile=blocks makes one graph of a whole block",
        "name whole blocks (blocks.0) or modules outside of them (embedding), or use compile=none",
    ),
    Refuse(
        "training.loss_chunk_tokens",
        lambda training, model: training.has_given_chunks and model_spec(model) is None,
        "model.architecture={model.architecture} returns all logits at once, so there are no chunks",
        "use training.loss_chunk_tokens=null",
    ),
    # The chunked loss takes the head's weight in the precision of hidden states.
    Refuse(
        "training.loss_chunk_tokens",
        lambda training: training.has_given_chunks and head_is_fp32(training),
        "training.fp32_modules puts the head in fp32, and the loss in chunks takes hidden states and head in one "
        "precision",
        "use training.loss_chunk_tokens=null, or leave the head out of training.fp32_modules (softmax and the loss "
        "are in fp32 anyway)",
    ),
)


RAMP = "training.batch_ramp"


def run_reaches_the_last_batch(training: TrainingConfig) -> Iterator[Violation]:
    """The ramp ends before the run does."""
    length = sum(steps for steps, _ in training.batch_ramp)
    if length >= training.steps > 0:
        last = f"training.global_batch_size={training.global_batch_size}"
        reason = f"the ramp lasts {length} steps, so the run of {training.steps} never reaches {last}"
        yield _violation(training, reason, f"use training.steps={length + 1} or more, or a shorter ramp")


def ramped_micro_batches_are_whole(training: TrainingConfig, layout: ResolvedLayout) -> Iterator[Violation]:
    """Every data-parallel rank runs the same whole number of micro-batches in each batch of the ramp."""
    for _, size in training.batch_ramp:
        unit, reason, more = _share(size, training, layout)
        if size % unit:
            remedy = f"nearest: {listed(multiples_near(size, unit))} sequences{more}"
            yield _violation(training, f"its batch of {size} {reason}", remedy)


def passes_are_whole(
    parallelism: ParallelismConfig, training: TrainingConfig, layout: ResolvedLayout
) -> Iterator[Violation]:
    """Every batch of the ramp is a whole number of passes through the pipeline."""
    ranks, micro, number = layout.dp_degree, training.micro_batch_size, parallelism.pp_microbatches
    indivisible = any(size % (ranks * (micro or 1)) for size in training.batch_sizes)
    if indivisible or any(schedule_is_known(parallelism)):
        return
    shares = [size // ranks for size in training.batch_sizes]
    if micro is None:
        works = _sizes(shares, layout.common_share, lambda count: takes(parallelism, count))
        if not works if number is None else layout.common_share % number:
            reason = f"no size of micro-batch divides all of a data rank's shares of {listed(shares, 'and')} sequences"
            remedy = _remedy(parallelism, shares, layout.common_share)
            yield _violation(training, f"{reason}: {_taken(parallelism)}", remedy)
        return
    for share in shares[:-1]:
        if not _is_whole(parallelism, share // micro):
            reason = f"a batch of {share * ranks} gives each data rank {share // micro} micro-batches, and "
            remedy = _remedy(parallelism, shares, layout.common_share)
            yield _violation(training, reason + _taken(parallelism), remedy)


def _is_whole(parallelism: ParallelismConfig, count: int) -> bool:
    number = parallelism.pp_microbatches
    return fits(parallelism, count) if number is None else count % number == 0


def _taken(parallelism: ParallelismConfig) -> str:
    number = parallelism.pp_microbatches
    if number is not None:
        return f"parallelism.pp_microbatches={number} must divide them"
    return f"{parallelism.pp_schedule} takes {accepted_numbers(parallelism)}"


def _remedy(parallelism: ParallelismConfig, shares: Iterable[int], common: int) -> str:
    sizes = _sizes(shares, common, lambda count: _is_whole(parallelism, count))
    other = "another parallelism.pp_schedule, or other batches"
    if sizes:
        return f"use training.micro_batch_size={listed(sizes[-3:])}, or choose {other}"
    return f"use larger batches, {'' if is_file(parallelism.pp_schedule) else 'a smaller parallelism.pp, '}or {other}"


def _sizes(shares: Iterable[int], common: int, takes_count: Callable[[int], bool]) -> list[int]:
    """Micro-batch sizes that divide every share into a number of micro-batches that is taken."""
    return [size for size in divisors(common) if all(takes_count(share // size) for share in shares)]


def _violation(training: TrainingConfig, reason: str, remedy: str) -> Violation:
    return Violation(RAMP, [list(stage) for stage in training.batch_ramp], reason, remedy)


def keys_of_other_modes(group: str, config: Any) -> Iterator[Violation]:
    """Keys that the `mode` of a group's `config` does not read, and that are not at their defaults."""
    modes = choices_of(hints(type(config))["mode"])
    for field in dataclasses.fields(config):
        key, value = f"{group}.{field.name}", getattr(config, field.name)
        switch, idle = COUNTS_BESIDE.get(key, ("", ()))
        if switch == f"{group}.mode" and config.mode in idle and value != field.default:
            others = listed(f"{group}={mode}" for mode in modes if mode not in idle)
            reason = f"{group}={config.mode} does not read this key"
            yield Violation(key, value, reason, f"leave it out, or use it with {others}")


RULES = (
    *TRAINING_RULES,
    *rules(
        Refuse(
            RAMP,
            lambda training: next(
                (
                    f"{after}{' (training.global_batch_size)' * (after == training.global_batch_size)} follows {before}"
                    for before, after in pairwise(training.batch_sizes)
                    if before >= after
                ),
                "",
            ),
            "each batch must be larger than the one before, and {found}",
            "give pairs of steps and sequences, each with more sequences than the last",
        ),
        run_reaches_the_last_batch,
        when=lambda training: training.batch_ramp,
    ),
    *rules(
        lambda grad_clip: keys_of_other_modes("grad_clip", grad_clip),
        lambda weight_average: keys_of_other_modes("weight_average", weight_average),
    ),
)
LAYOUT_RULES = (
    *rules(micro_batches_are_whole),
    *rules(ramped_micro_batches_are_whole, when=lambda training: training.batch_ramp),
    *rules(passes_are_whole, when=lambda training, parallelism: training.batch_ramp and parallelism.pp > 1),
)
