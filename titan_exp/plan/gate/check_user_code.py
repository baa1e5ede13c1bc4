"""Check of a run's user code before it is queued: imports, signatures, and the model built on the meta device.

Runs in a child process of the launcher, which itself imports neither torch nor user code.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from titan_exp.checkpoint.formats.mapping import check_tensors
from titan_exp.config.errors.explained_errors import UserCodeError, innermost_module, user_traceback
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.config.schema.foreign_code import import_paths, user_packages
from titan_exp.data.source_check import check_source
from titan_exp.models.build import build_model
from titan_exp.models.convert.hf_config import to_huggingface
from titan_exp.models.convert.state_dict_map import state_dict_map
from titan_exp.models.parametrization.parameter_scale import ParameterScale, scales_of
from titan_exp.models.spec.lookup import block_count, model_spec
from titan_exp.ops.loss.cross_entropy import VocabShard
from titan_exp.optim.lr_schedule import LRSchedule
from titan_exp.optim.optimizer import build_optimizer
from titan_exp.optim.parameter_groups import named_parameters
from titan_exp.optim.torch_optimizer import Config as TorchOptimizerConfig
from titan_exp.optim.torch_optimizer import optimizer_class
from titan_exp.parallel.module_requirements import module_violations, require_modules
from titan_exp.plan.gate.check_optimizer_state import optimizer_violations
from titan_exp.quantization.quantize import require_quantized_linears
from titan_exp.trainer.module_metrics.metric import chosen_metrics
from titan_exp.trainer.objective.build import build_objective
from titan_exp.trainer.parts import build_part

DECAY_SAMPLES = 1000
"""Largest number of steps at which a decay is evaluated."""


def check_user_code(experiment: Experiment) -> None:
    """Check every import path of a run with a resolved layout. Raises UserCodeError with every violation, and the
    user's frames of exceptions."""
    messages, found = list[str](), list[Violation]()
    for key, check in _CHECKS.items():
        paths = import_paths(experiment, [key]).values()
        if not paths:
            continue
        try:
            with failing_user_code(experiment, f"{key}={', '.join(paths)} fails before the run is started:"):
                found += check(experiment)
        except UserError as error:
            found += error.violations
            if not error.violations:
                messages.append(str(error))
    if messages or found:
        raise UserCodeError("\n".join(messages or ["This run cannot be started."]), found)


@contextmanager
def failing_user_code(experiment: Experiment, what: str) -> Iterator[None]:
    """Convert an exception of the run's user code into a UserCodeError that begins with `what`.

    Exceptions without a user's frame, and those of fake tensors where real ones would work, pass unchanged.
    """
    # Torch logs a traceback of every fake kernel that fails.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    except Exception as error:
        known = isinstance(error, UserError) or _is_limitation(error, experiment)
        frames = "" if known else user_traceback(error, user_packages(experiment))
        if not frames:
            raise
        raise UserCodeError(f"{what}\n{frames}") from error
    finally:
        logger.disabled = disabled


def _is_limitation(error: Exception, experiment: Experiment) -> bool:
    """True if planning raised an exception that training would not: values and memory of fake tensors, GPUs that are
    absent here, and errors of the planner itself."""
    kind, raised_in = type(error), innermost_module(error)
    if kind.__module__.startswith(("torch._subclasses", "torch.fx.experimental")):
        # A tensor that was left on the meta device is there in training too.
        return kind.__name__ != "FakeTensorDeviceMismatchError" or "meta" not in str(error)
    absent = ("torch.cuda",) if device_type(experiment.cluster) == "cuda" else ()
    if raised_in.split(".")[0] == "triton" or raised_in.startswith(("titan_exp.plan", *absent)):
        return True
    return any(text in str(error) for text in _FAKE_ONLY)


_FAKE_ONLY = ("numpy() is not supported for tensor subclasses", "data pointer of Tensor", "on meta tensors")
"""Messages of torch about tensors without values."""


def _model(experiment: Experiment) -> Iterable[Violation]:
    config, layout, model = experiment.model, ResolvedLayout.of(experiment), _build(experiment)
    checks = experiment.activation_checkpoint, experiment.compile
    violations = list(module_violations(model, model_spec(config), layout, *checks))
    for check in (
        lambda: require_modules(model, experiment.training.fp32_modules),
        lambda: require_quantized_linears(model, experiment.quantization, layers=block_count(config)),
    ):
        try:
            check()
        except UserError as error:
            violations += error.violations
    if not violations and experiment.checkpoint.export != "none":
        mapped = state_dict_map(config, "huggingface")
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        check_tensors(mapped.shapes, shapes, where=f"{config.architecture}.state_dict_map")
        to_huggingface(config, dtype="bfloat16", special_tokens={})
    return violations


def _build(experiment: Experiment) -> nn.Module:
    """Build the model as the trainer does. Attention kernels allocate nothing, so that any of them will do."""
    with torch.device("meta"):
        return build_model(experiment.model, seq_len=experiment.training.seq_len, attention_backend="math")


def _optimizer(experiment: Experiment) -> Iterable[Violation]:
    if isinstance(experiment.optimizer, TorchOptimizerConfig):
        optimizer_class(experiment.optimizer)
    model = _build(experiment)
    try:
        build_optimizer([model], experiment.optimizer)
    except Exception as error:
        # An optimizer may read the parameters' values; the gate's fake tensors have none either.
        if isinstance(error, UserError) or not _is_limitation(error, experiment):
            raise
    return optimizer_violations(named_parameters([model]), experiment)


def _parametrization(experiment: Experiment) -> Iterator[Violation]:
    spec, name = model_spec(experiment.model), experiment.parametrization.name
    scales = scales_of(experiment.parametrization, experiment.model)
    wrong = [key for key, scale in scales.items() if not isinstance(scale, ParameterScale)]
    unknown = [key for key in scales if spec is not None and key not in spec.shapes]
    if wrong or unknown:
        reason = (
            f"the value of {wrong[0]} is no ParameterScale" if wrong else f"the model has no parameter {unknown[0]}"
        )
        remedy = "return a ParameterScale by full parameter name, as in spec.shapes"
        yield Violation("parametrization.name", name, reason, remedy)


def _objective(experiment: Experiment) -> Iterator[Violation]:
    parallelism = experiment.parallelism
    sharded = parallelism.loss_parallel and parallelism.tp > 1
    shard = VocabShard(0, all_reduce_sum=torch.clone, all_reduce_max=torch.clone) if sharded else None
    objective = build_objective(experiment.training, experiment.compile, shard)
    if not callable(objective):
        reason, remedy = "its objects cannot be called", "define __call__(self, model, batch, hidden=None)"
        yield Violation("training.objective", experiment.training.objective, reason, remedy)
    elif "hidden" not in inspect.signature(objective).parameters and parallelism.pp > 1:
        reason, remedy = f"{type(objective).__name__}.__call__ takes no `hidden`", "parallelism.pp=1"
        yield Violation("parallelism.pp", parallelism.pp, reason, remedy)


def _parts(experiment: Experiment) -> Iterator[Violation]:
    for label, config in experiment.training.parts.items():
        try:
            build_part(label, config)
        except UserError as error:
            if not error.violations:
                raise
            yield from error.violations


def _metrics(experiment: Experiment) -> tuple[()]:
    chosen_metrics(experiment, _build(experiment))
    return ()


def _decay(experiment: Experiment) -> Iterator[Violation]:
    schedule = LRSchedule(experiment.lr_schedule, peak=1.0, steps=experiment.training.steps)
    steps, decayed = experiment.training.steps, experiment.lr_schedule.decay_steps
    for step in range(steps, steps - decayed, -max(1, decayed // DECAY_SAMPLES)):
        rate = schedule(step)
        if not 0 <= rate <= 1:
            reason = f"at step {step} its factor makes the learning rate {rate:g} of the peak"
            yield Violation("lr_schedule.decay", experiment.lr_schedule.decay, reason, "return a factor in [0, 1]")
            return


def _source(experiment: Experiment) -> tuple[()]:
    check_source(experiment.data, evaluates=bool(experiment.training.evaluate_every))
    return ()


_CHECKS: dict[str, Callable[[Experiment], Iterable[Violation]]] = {
    "model.architecture": _model,
    "optimizer.name": _optimizer,
    "parametrization.name": _parametrization,
    "training.objective": _objective,
    "training.parts": _parts,
    "tracking.metrics": _metrics,
    "lr_schedule.decay": _decay,
    "data.source": _source,
}
"""Violations of user code, by the key that names it. Its exceptions are those of the code."""
