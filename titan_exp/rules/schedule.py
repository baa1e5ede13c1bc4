"""Lengths in steps: learning-rate schedule, profiler window, evaluation."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.groups.optimizer import LRScheduleConfig
from titan_exp.config.groups.tracking import ProfilingConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.rules.rule import rules


def schedule_fits(lr_schedule: LRScheduleConfig, training: TrainingConfig) -> Iterator[Violation]:
    """Warm-up and decay do not overlap."""
    warmup, decay, steps = lr_schedule.warmup_steps, lr_schedule.decay_steps, training.steps
    longer = f"or training.steps={warmup + decay}"
    if warmup + decay <= steps or steps == 0:
        return
    if warmup > steps:
        reason = f"warm-up is longer than the run of {steps} steps"
        remedy = f"at most lr_schedule.warmup_steps={steps - min(decay, steps)}, {longer}"
        yield Violation("lr_schedule.warmup_steps", warmup, reason, remedy)
    else:
        reason = f"with a warm-up of {warmup} it is longer than the run of {steps} steps"
        yield Violation(
            "lr_schedule.decay_steps", decay, reason, f"at most lr_schedule.decay_steps={steps - warmup}, {longer}"
        )


def trace_fits(profiling: ProfilingConfig, training: TrainingConfig) -> Iterator[Violation]:
    """The profiler's window closes before the run ends; an open one writes no trace."""
    steps = training.steps
    if profiling.enabled and profiling.start + profiling.steps > steps:
        yield Violation(
            "profiling.start",
            profiling.start,
            f"a window of {profiling.steps} steps after it does not end within the run of {steps}",
            f"at most profiling.start={max(0, steps - profiling.steps)}, with profiling.steps at most {steps}",
        )
    if profiling.memory_step is not None and profiling.memory_step > steps:
        remedy = f"at most profiling.memory_step={steps}"
        yield Violation("profiling.memory_step", profiling.memory_step, f"the run has {steps} steps", remedy)


def validation_split_exists(data: DataConfig, training: TrainingConfig) -> Iterator[Violation]:
    """Evaluation has a validation split; a token store has its own, or says that it has none."""
    if data.source == "tokens":
        return
    if training.evaluate_every and data.validation_fraction == 0 and data.validation_split is None:
        yield Violation(
            "training.evaluate_every",
            training.evaluate_every,
            "there is nothing to evaluate on: data.validation_fraction is 0",
            "hold documents out (data.validation_fraction=0.02), or never evaluate (training.evaluate_every=0)",
        )


RULES = rules(schedule_fits, trace_fits, validation_split_exists)
