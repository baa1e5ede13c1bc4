"""Training rules: divisible batches, lengths in steps, fp32 modules, chunked loss."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from titan_exp.config.errors.user_error import Violation, divisors, listed, nearest_numbers
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.optimizer import LRScheduleConfig, OptimizerConfig
from titan_exp.config.groups.parallelism import CompileConfig, ParallelismConfig
from titan_exp.config.groups.run import ProfilingConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout, cuts_blocks, head_is_fp32
from titan_exp.config.schema.builtins import LANGUAGE_MODELING, described
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.rules.rule import Refuse, check_multiple, rules


def micro_batches_are_whole(training: TrainingConfig, layout: ResolvedLayout) -> Iterator[Violation]:
    """Every data-parallel rank runs the same whole number of micro-batches."""
    ranks, micro, size = layout.dp_degree, training.micro_batch_size or 1, training.global_batch_size
    sizes = listed(nearest_numbers(micro, divisors(size // ranks)))
    more = f"; or training.micro_batch_size={sizes}" if size % ranks == 0 else ""
    reason = f"it cannot be divided among {_ranks(ranks)}{f' in micro-batches of {micro}' if micro > 1 else ''}"
    yield from check_multiple("training.global_batch_size", size, ranks * micro, reason, more)


def schedule_fits(lr_schedule: LRScheduleConfig, training: TrainingConfig) -> Iterator[Violation]:
    """Warm-up and decay do not overlap."""
    warmup, decay, steps = lr_schedule.warmup_steps, lr_schedule.decay_steps, training.steps
    if warmup + decay <= steps or steps == 0:
        return
    if warmup > steps:
        key, value, largest = "lr_schedule.warmup_steps", warmup, steps - min(decay, steps)
        reason = f"warm-up is longer than the run of {steps} steps"
    else:
        key, value, largest = "lr_schedule.decay_steps", decay, steps - warmup
        reason = f"with a warm-up of {warmup} it is longer than the run of {steps} steps"
    yield Violation(key, value, reason, f"at most {key}={largest}, or training.steps={warmup + decay}")


def offloaded_weights_are_updated_alone(
    optimizer: OptimizerConfig, parallelism: ParallelismConfig, device: str
) -> Iterator[Violation]:
    """An optimizer that sends messages has its weights on the GPU, since NCCL sends nothing from CPU memory."""
    if device == "cuda" and parallelism.cpu_offload and optimizer.sends_messages:
        reason = "it exchanges parts of weights between GPUs, and parallelism.cpu_offload keeps them in CPU memory"
        yield Violation("optimizer.name", optimizer.name, reason, "parallelism.cpu_offload=false, or optimizer=adamw")


def trace_fits(profiling: ProfilingConfig, training: TrainingConfig) -> Iterator[Violation]:
    """The profiler window ends within the run; otherwise no trace is written."""
    steps = training.last_step
    if profiling.enabled and profiling.start + profiling.steps > steps:
        reason = f"a window of {profiling.steps} steps after it does not end within the run of {steps}"
        remedy = f"at most profiling.start={max(0, steps - profiling.steps)}, with profiling.steps at most {steps}"
        yield Violation("profiling.start", profiling.start, reason, remedy)


def tied_embedding_has_the_heads_precision(spec: ModelSpec, training: TrainingConfig) -> Iterator[Violation]:
    """A tied embedding has the head's precision, since they share a weight."""
    for pattern in training.fp32_modules if spec.tied else ():
        if fnmatchcase("embedding", pattern):
            reason = "the embedding is the head's weight as well (model.tied_embeddings=true)"
            remedy = "model.tied_embeddings=false, or leave the embedding out"
            yield Violation("training.fp32_modules", pattern, reason, remedy)


def compiled_blocks_have_one_precision(compile: CompileConfig, training: TrainingConfig) -> Iterator[Violation]:
    """A block compiled as one graph has one precision."""
    for pattern in training.fp32_modules if compile.compiles("blocks") else ():
        if cuts_blocks(pattern):
            reason = "it names modules inside blocks, and compile=blocks makes one graph of a block"
            remedy = "whole blocks (blocks.0), modules outside of them (embedding), or compile=none"
            yield Violation("training.fp32_modules", pattern, reason, remedy)


def _ranks(count: int) -> str:
    return f"{count} data-parallel rank{'s' * (count > 1)}"


def objective_has_inputs(spec: ModelSpec, model: ModelConfig, training: TrainingConfig) -> Iterator[Violation]:
    """The model reads the tokens that language modeling predicts."""
    if training.objective == LANGUAGE_MODELING and not spec.vocab_size:
        reason = f"it predicts tokens, and {model.name} reads none"
        remedy = "" if spec.inputs is None else f"{spec.inputs.trained_by}; or "
        remedy += "a language model, as model=llama_laptop"
        yield Violation("training.objective", training.objective, reason, remedy)


RULES = rules(
    objective_has_inputs,
    offloaded_weights_are_updated_alone,
    schedule_fits,
    trace_fits,
    Refuse(
        "training.stop_after",
        lambda training: training.last_step > training.steps,
        "the run has {training.steps} steps",
        "at most training.stop_after={training.steps}, or null",
    ),
    Refuse(
        "weight_average.steps",
        lambda weight_average, training: (
            weight_average.mode == "tail" and training.steps and weight_average.steps > training.steps
        ),
        "the run has {training.steps} steps",
        "at most weight_average.steps={training.steps}",
    ),
    Refuse(
        "weight_average.mode",
        lambda weight_average, optimizer: weight_average.enabled and optimizer.averages_weights,
        "the weights of optimizer.name={optimizer.name} are an average already",
        "weight_average=none, or another optimizer",
    ),
    Refuse(
        "optimizer.nesterov",
        lambda optimizer: getattr(optimizer, "nesterov", False) and not optimizer.momentum,
        "without momentum there is nothing to look ahead by (optimizer.momentum=0)",
        "optimizer.nesterov=false, or optimizer.momentum=0.9",
    ),
    Refuse(
        "profiling.memory_step",
        lambda profiling, training: (profiling.memory_step or 0) > training.last_step,
        "the run ends at step {training.last_step}",
        "at most profiling.memory_step={training.last_step}",
    ),
    Refuse(
        "training.evaluate_every",
        lambda data, training: (
            not described(data.source).is_store
            and training.evaluate_every
            and data.validation_fraction == 0
            and data.validation_split is None
        ),
        "there is no validation split: data.validation_fraction is 0",
        "hold documents out (data.validation_fraction=0.02), or never evaluate (training.evaluate_every=0)",
    ),
    Refuse(
        "training.fp32_modules",
        lambda training: training.fp32_modules and training.mixed_precision == "fp32",
        "everything computes in fp32 already",
        "training.mixed_precision=bf16, or leave it out",
    ),
    Refuse(
        "training.accumulation_precision",
        lambda training: training.accumulation_precision == "bf16" and training.mixed_precision == "fp32",
        "gradients are computed in fp32",
        "training.mixed_precision=bf16, or training.accumulation_precision=fp32",
    ),
    Refuse(
        "training.accumulation_precision",
        lambda training, compile: training.accumulation_precision == "bf16" and compile.cuda_graphs,
        "a captured pass sums gradients at fixed addresses, in fp32",
        "compile.cuda_graphs=false, or training.accumulation_precision=fp32",
    ),
    Refuse(
        "training.accumulation_precision",
        lambda training, parallelism, spec: (
            training.accumulation_precision == "bf16" and parallelism.pp > 1 and spec.tied
        ),
        "the tied embedding and head are in two stages of the pipeline, whose gradients are summed in fp32",
        "model.tied_embeddings=false, parallelism.pp=1, or training.accumulation_precision=fp32",
    ),
    tied_embedding_has_the_heads_precision,
    compiled_blocks_have_one_precision,
    Refuse(
        "training.loss_chunk_tokens",
        lambda training, model: training.has_given_chunks and model_spec(model) is None,
        "model.architecture={model.architecture} returns all logits at once",
        "training.loss_chunk_tokens=null",
    ),
    # The chunked loss takes the head's weight in the precision of hidden states.
    Refuse(
        "training.loss_chunk_tokens",
        lambda training: training.has_given_chunks and head_is_fp32(training),
        "the head is one of the modules in fp32 (training.fp32_modules)",
        "training.loss_chunk_tokens=null, or leave the head out of training.fp32_modules; softmax and the loss are "
        "computed in fp32 anyway",
    ),
)
LAYOUT_RULES = rules(micro_batches_are_whole)
