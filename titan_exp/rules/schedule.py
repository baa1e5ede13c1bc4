"""Rules about lengths in steps."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.experiment import Experiment


def schedule_fits(experiment: Experiment) -> Iterator[Violation]:
    """Warm-up and decay do not overlap."""
    schedule, steps = experiment.lr_schedule, experiment.training.steps
    if schedule.warmup_steps + schedule.decay_steps <= steps or steps == 0:
        return
    if schedule.warmup_steps > steps:
        yield Violation(
            "lr_schedule.warmup_steps",
            schedule.warmup_steps,
            f"warm-up is longer than the run of {steps} steps",
            f"at most lr_schedule.warmup_steps={steps - min(schedule.decay_steps, steps)}, "
            f"or training.steps={schedule.warmup_steps + schedule.decay_steps}",
        )
        return
    yield Violation(
        "lr_schedule.decay_steps",
        schedule.decay_steps,
        f"with a warm-up of {schedule.warmup_steps} it is longer than the run of {steps} steps",
        f"at most lr_schedule.decay_steps={steps - schedule.warmup_steps}, "
        f"or training.steps={schedule.warmup_steps + schedule.decay_steps}",
    )


def trace_fits(experiment: Experiment) -> Iterator[Violation]:
    """The profiler's window closes before the run ends; an open one writes no trace."""
    profiling, steps = experiment.profiling, experiment.training.steps
    if profiling.enabled and profiling.start + profiling.steps > steps:
        yield Violation(
            "profiling.start",
            profiling.start,
            f"a window of {profiling.steps} steps after it does not end within the run of {steps}",
            f"at most profiling.start={max(0, steps - profiling.steps)}, with profiling.steps at most {steps}",
        )
    if profiling.memory_step is not None and profiling.memory_step > steps:
        yield Violation(
            "profiling.memory_step",
            profiling.memory_step,
            f"the run has {steps} steps",
            f"at most profiling.memory_step={steps}",
        )


def something_to_evaluate(experiment: Experiment) -> Iterator[Violation]:
    """Where evaluation is asked for, there is a validation split."""
    data, every = experiment.data, experiment.training.evaluate_every
    if data.source == "tokens":
        return  # a store holds its own documents to evaluate on, or says that it has none
    if every and data.validation_fraction == 0 and data.validation_split is None:
        yield Violation(
            "training.evaluate_every",
            every,
            "there is nothing to evaluate on: data.validation_fraction is 0",
            "hold documents out (data.validation_fraction=0.02), or never evaluate (training.evaluate_every=0)",
        )


RULES = (schedule_fits, trace_fits, something_to_evaluate)
