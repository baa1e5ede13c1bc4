"""Name and path rules: the run's folder, built-in names or existing import paths."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import Violation, did_you_mean, listed
from titan_exp.config.groups.optimizer import LRScheduleConfig, OptimizerConfig
from titan_exp.config.groups.parallelism import CompileConfig
from titan_exp.config.groups.run import ClusterConfig, DataConfig, PathsConfig, RunConfig, TrackingConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.schema.component import find_dotted, is_builtin, is_dotted, unknown_name
from titan_exp.config.schema.foreign_code import (
    COMPILE_BACKENDS,
    LANGUAGE_MODELING,
    decay_names,
    described,
    executor_names,
    metric_names,
    objective_names,
    sources,
)
from titan_exp.rules.rule import rules


def name_is_a_folder_name(run: RunConfig) -> Iterator[Violation]:
    """The experiment's name is a portable folder name."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", run.name) or len(run.name) > 128:
        cleaned = re.sub(r"[^A-Za-z0-9._-]+", "_", run.name).lstrip(".-")[:128] or "my_idea"
        reason = (
            "it becomes the name of a folder, so use letters, digits, `.`, `_` and `-`, at most 128, and "
            "begin with a letter, a digit or `_`"
        )
        yield Violation("experiment.name", run.name, reason, f"use experiment.name={cleaned}")


def runs_folder_is_a_folder(paths: PathsConfig) -> Iterator[Violation]:
    """The folder of runs is a folder or does not exist."""
    nearest = _nearest(paths)
    if not paths.runs:
        yield Violation("paths.runs", "''", "the path is empty", "use paths.runs=runs")
    elif not nearest.is_dir():
        yield Violation("paths.runs", paths.runs, f"{nearest} is a file", "give the path of a folder")


def runs_folder_is_writable(paths: PathsConfig) -> Iterator[Violation]:
    """The folder of runs can be created or written to."""
    nearest = _nearest(paths)
    if nearest.is_dir() and not os.access(nearest, os.W_OK | os.X_OK):
        yield Violation(
            "paths.runs",
            paths.runs,
            f"you cannot write to {nearest}",
            "choose a folder that you can write to: paths.runs=/scratch/$USER/runs",
        )


def _nearest(paths: PathsConfig) -> Path:
    folder = Path(paths.runs).expanduser().absolute()
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


PATH_RULES = rules(name_is_a_folder_name, runs_folder_is_a_folder)
PATH_LAUNCH_RULES = rules(runs_folder_is_writable)


CPP_COMPILERS = ("g++", "clang++", "c++")
"""C++ compilers that inductor can use."""


def source_is_known(data: DataConfig) -> Iterator[Violation]:
    """The data source is built in or can be imported."""
    options = {} if described(data.source).has_options else data.options
    yield from _known("data.source", data.source, tuple(sources()), options, "my_package.data.Corpus")


def components_are_known(
    training: TrainingConfig, optimizer: OptimizerConfig, lr_schedule: LRScheduleConfig, cluster: ClusterConfig
) -> Iterator[Violation]:
    """Objective, decay and executor are built in or can be imported; those of the core have no options."""
    objective = "my_package.objectives.Distillation"
    options = training.objective_options if training.objective == LANGUAGE_MODELING else {}
    yield from _known("training.objective", training.objective, objective_names(), options, objective)
    if is_builtin("optimizer", optimizer.name):  # `component` has checked that it exists
        yield from _known("optimizer.name", optimizer.name, (optimizer.name,), optimizer.options)
    decay = "my_package.schedules.exponential"
    yield from _known("lr_schedule.decay", lr_schedule.decay, decay_names(), lr_schedule.options, decay)
    yield from _known("cluster.kind", cluster.kind, executor_names(), {}, "my_package.launch.MyExecutor")


def parts_are_known(training: TrainingConfig) -> Iterator[Violation]:
    """Parts of the user's are import paths, by names that are words."""
    for label, part in training.parts.items():
        key = f"training.parts.{label}"
        if not label.isidentifier():
            word = re.sub(r"\W|^(?=\d)", "_", label)
            yield Violation(
                key,
                label,
                "the name of a part is a word of letters, digits and `_`",
                f"use +training.parts.{word}.name={part.name}",
            )
        elif not is_dotted(part.name):
            yield Violation(
                f"{key}.name",
                part.name,
                "this is not an import path",
                f"write it as in +{key}.name=my_package.parts.Probe",
            )
        elif (violation := find_dotted(part.name, f"{key}.name")) is not None:
            yield violation


def metrics_are_known(tracking: TrackingConfig) -> Iterator[Violation]:
    """Metrics of modules are built in or can be imported."""
    for name in tracking.metrics:
        yield from _known("tracking.metrics", name, metric_names(), {}, "[my_package.metrics.BlockSquares]")


def compiler_exists(compile: CompileConfig, device: str) -> Iterator[Violation]:
    """The compile backend exists in torch, and the C++ compiler that it needs on CPU is installed."""
    backend, field = compile.backend, "compile.backend"
    if backend not in COMPILE_BACKENDS:
        offer = did_you_mean(backend, COMPILE_BACKENDS) or f"use one of {listed(COMPILE_BACKENDS)}"
        yield Violation(field, backend, "torch.compile has no such backend", offer)
    elif compile.enabled and device == "cpu" and backend == "cudagraphs":
        yield Violation(
            field,
            backend,
            "CUDA graphs need a GPU, and this run trains on the CPU",
            "use compile.backend=inductor or aot_eager",
        )
    elif compile.enabled and device == "cpu" and backend == "inductor" and not any(map(shutil.which, CPP_COMPILERS)):
        reason = "on a CPU inductor needs a C++ compiler, and none is on your PATH"
        yield Violation(field, backend, reason, "install g++, or use compile=none")


def _known(
    field: str, name: str, builtin: tuple[str, ...], options: dict[str, Any], example: str = ""
) -> Iterator[Violation]:
    """The name is built in, without options, or an existing import path."""
    group, _, key = field.partition(".")
    if name in builtin:
        if options:
            option_key = f"{group}.objective_options" if key == "objective" else f"{group}.options"
            reason = f"{field}={name} is built in, and options are for your own code"
            remedy = f"leave options out and set keys of {group}, or give the import path of your own code as {field}"
            yield Violation(option_key, options, reason, remedy)
    elif is_dotted(name):
        violation = find_dotted(name, field)
        if violation is not None:
            yield violation
    else:
        yield unknown_name(field, name, builtin, example)


NAME_RULES = rules(components_are_known, source_is_known, parts_are_known, metrics_are_known, compiler_exists)
