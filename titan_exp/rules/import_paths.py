"""Rules about names: what comes with the package, and what a dotted name points at."""

import shutil
from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import did_you_mean, listed
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.builtins import (
    ARCHITECTURES,
    COMPILE_BACKENDS,
    DECAYS,
    OPTIMIZERS,
    SOURCES,
    executor_names,
)
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.layout import device_type
from titan_exp.config.schema.import_path import find_dotted, is_dotted


def names_are_known(experiment: Experiment) -> Iterator[Violation]:
    """A name is built in, or is dotted and found; the built-in ones take no options of one's own."""
    for group, key, name, builtin, options in (
        ("model", "architecture", experiment.model.architecture, ARCHITECTURES, experiment.model.options),
        ("optimizer", "name", experiment.optimizer.name, OPTIMIZERS, experiment.optimizer.options),
        ("lr_schedule", "decay", experiment.lr_schedule.decay, DECAYS, experiment.lr_schedule.options),
        ("data", "source", experiment.data.source, SOURCES, experiment.data.options),
        ("cluster", "kind", experiment.cluster.kind, executor_names(), {}),
    ):
        field = f"{group}.{key}"
        if name in builtin:
            if options:
                yield Violation(
                    f"{group}.options",
                    options,
                    f"{field}={name} comes with the package and takes no options",
                    f"its settings are keys of {group}; options are for code of your own, by a dotted {field}",
                )
        elif is_dotted(name):
            trouble = find_dotted(name, field)
            if trouble is not None:
                yield trouble
        else:
            offer = did_you_mean(name, builtin) or f"there is {listed(builtin, 'and')}."
            yield Violation(
                field,
                name,
                "nothing of this name comes with the package",
                f"{offer} A name of your own is dotted: package.module.Name",
            )


def compiler_exists(experiment: Experiment) -> Iterator[Violation]:
    """The compile backend is one of torch's, and finds the C++ compiler that it needs on CPU."""
    compile_, field = experiment.compile, "compile.backend"
    if compile_.backend not in COMPILE_BACKENDS:
        there = f"it is one of {listed(COMPILE_BACKENDS)}"
        yield Violation(
            field,
            compile_.backend,
            "torch.compile has no such backend",
            did_you_mean(compile_.backend, COMPILE_BACKENDS) or there,
        )
    elif compile_.enabled and compile_.backend == "inductor" and device_type(experiment.cluster) == "cpu":
        if not any(map(shutil.which, ("g++", "clang++", "c++"))):
            yield Violation(
                field,
                compile_.backend,
                "on CPU it needs a C++ compiler, and none is on PATH",
                "install g++, or compile=none",
            )
    elif compile_.enabled and compile_.backend == "cudagraphs" and device_type(experiment.cluster) == "cpu":
        yield Violation(field, compile_.backend, "a CPU has no CUDA graphs", "compile.backend=inductor or aot_eager")


RULES = (names_are_known, compiler_exists)
