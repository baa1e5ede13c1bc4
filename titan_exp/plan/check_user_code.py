"""Check of your code before a run is queued: imports, signatures, and the model built on the meta device.

Runs in a child process of the launcher, which itself imports neither torch nor user code.
"""

import copy
import inspect
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from titan_exp.checkpoint import optimizer_state
from titan_exp.checkpoint.formats.mapping import check_tensors
from titan_exp.config.devices import device_type
from titan_exp.config.errors.explained_errors import UserCodeError, innermost_module, user_traceback
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.foreign_code import import_paths, user_packages
from titan_exp.data.source_check import check_source
from titan_exp.models.build import build_model
from titan_exp.models.convert.hf_config import to_huggingface
from titan_exp.models.convert.state_dict_map import state_dict_map
from titan_exp.models.parametrization.standard import ParameterScale, scales_of
from titan_exp.models.spec.lookup import block_count, model_spec
from titan_exp.ops.autograd import local_tensor
from titan_exp.ops.cross_entropy import VocabShard
from titan_exp.optim.lr_schedule import LRSchedule, set_lr
from titan_exp.optim.optimizer import HasGradientPoint, build_named, build_optimizer
from titan_exp.optim.parameter_groups import NamedParameter, named_parameters, same_value
from titan_exp.optim.torch_optimizer import Config as TorchOptimizerConfig
from titan_exp.optim.torch_optimizer import optimizer_class
from titan_exp.parallel.meta_init import module_violations, require_modules
from titan_exp.quantization.quantize import require_quantized_linears
from titan_exp.trainer.module_metrics.metric import chosen_metrics
from titan_exp.trainer.objective import build_objective
from titan_exp.trainer.parts import build_part

STEPS, RESTORED_AFTER = 12, (1, 9)
"""Steps of the trial, and the steps after which its state is restored into a new optimizer."""
LARGEST_SIDE = 32  # size to which parameter dims are cut
_WITHOUT = "or train without checkpoints (checkpoint=none)"


def optimizer_violations(named: Sequence[NamedParameter], experiment: Experiment) -> Iterator[Violation]:
    """Violations by an optimizer of a model's parameters, which may be on the meta device: its steps fail, or a
    checkpoint or another world would lose some of its state."""
    name, saves = experiment.optimizer.name, experiment.checkpoint.mode != "off" or experiment.cluster.worlds > 1
    trial = _Trial(_samples(named), experiment)
    taken = inspect.signature(trial.optimizer.step).parameters.values()
    given = [each for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD]
    if required := [each.name for each in given if each.default is each.empty]:
        reason = f"its step() needs {', '.join(required)}, and a run calls step() without arguments"
        yield Violation("optimizer.name", name, reason, "give each argument a default, or use optimizer=adamw")
        return
    try:
        others = list[_Trial]()
        with _fake_ranks(1):
            for step in range(1, STEPS + 1):
                for one in (trial, *others):
                    one.step(step)
                if step in RESTORED_AFTER and saves:
                    others.append(trial.restored())
    except optimizer_state.UnsavedStateError as error:
        yield Violation("optimizer.name", name, str(error), f"remove it from the optimizer, {_WITHOUT}")
        return
    except Exception:
        if device_type(experiment.cluster) == "cuda":  # the optimizer may need a GPU
            return
        raise
    yield from _sharded_violations(named, experiment)
    for other, after in zip(others, RESTORED_AFTER, strict=False):
        if trial.weights_differ(other):
            lost = _lost_attributes(named, experiment, after, trial.differing_attributes(other))
            kept = ", ".join(f"self.{key}" for key in lost) or "state"
            reason = (
                f"after a restart from the checkpoint of step {after} it takes other steps, because it keeps {kept} "
                "outside of optimizer.state and optimizer.param_groups, and a checkpoint holds only these two"
            )
            remedy = f"keep it in self.state[parameter] or in self.param_groups, {_WITHOUT}"
            yield Violation("optimizer.name", name, reason, remedy)
            return


class _Trial:
    """Optimizer of small parameters whose gradients are a function of the step."""

    def __init__(self, named: Sequence[NamedParameter], experiment: Experiment) -> None:
        self._named, self._experiment = named, experiment
        self._model = nn.Module()
        for one in named:
            *path, leaf = one.name.split(".")
            module = self._model
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, one.parameter)
        self.optimizer = build_named(named, experiment.optimizer)

    def step(self, step: int) -> None:
        """Take a step, counted from 1."""
        torch.manual_seed(step)
        set_lr(self.optimizer, self._experiment.optimizer.lr / step)
        if isinstance(self.optimizer, HasGradientPoint):
            self.optimizer.to_gradient_point()
        for one in self._named:
            parameter = one.parameter
            gradient = 0.1 * torch.randn_like(local_tensor(parameter.detach()))
            if isinstance(parameter, DTensor):
                gradient = DTensor.from_local(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, Any]:
        """Values of the optimizer that a checkpoint has."""
        return json.loads(json.dumps(optimizer_state.optimizer_values([self._model], self.optimizer)))

    def restored(self) -> "_Trial":
        """New trial with this one's weights and state, as if through a checkpoint."""
        tensors, values = optimizer_state.optimizer_state_dict([self._model], self.optimizer), self.values()
        copies = (nn.Parameter(one.parameter.detach().clone()) for one in self._named)
        named = [replace(one, parameter=copied) for one, copied in zip(self._named, copies, strict=True)]
        other = _Trial(named, self._experiment)
        optimizer_state.prepare_optimizer_state(
            [other._model], other.optimizer, optimizer_state.saved_tensors(tensors), values
        )
        found = optimizer_state.optimizer_state_dict([other._model], other.optimizer)
        for key, value in tensors.items():
            found[key].copy_(value)
        return other

    def weights_differ(self, other: "_Trial") -> bool:
        """True if any weight differs."""
        parameters = ((one.parameter, two.parameter) for one, two in zip(self._named, other._named, strict=True))
        return not all(bool(((one == two) | (one.isnan() & two.isnan())).all()) for one, two in parameters)

    def differing_attributes(self, other: "_Trial") -> list[str]:
        """Attributes that differ between two trials: numbers, tensors, and containers of them without parameters."""
        others, kinds = vars(other.optimizer), (bool, int, float, list, tuple, dict, Tensor)
        own = {key: value for key, value in vars(self.optimizer).items() if type(value) in kinds}
        return [
            key
            for key, value in own.items()
            if key not in ("state", "param_groups", "defaults")
            and not any(isinstance(leaf, nn.Parameter) for leaf in tree_leaves(value))
            and not same_value(value, others.get(key))
        ]


def _lost_attributes(
    named: Sequence[NamedParameter], experiment: Experiment, after: int, differing: list[str]
) -> list[str]:
    """Attributes without which an optimizer, restored after a step, takes other steps. Each step computes the others
    anew, and they differ because the weights do. Returns all if the differing ones do not explain the difference."""

    def agrees(carried: Collection[str]) -> bool:
        with _fake_ranks(1):
            trial = _Trial(_samples(named), experiment)
            for step in range(1, after + 1):
                trial.step(step)
            other, mine = trial.restored(), vars(trial.optimizer)
            vars(other.optimizer).update({key: copy.deepcopy(mine[key]) for key in carried if key in mine})
            for step in range(after + 1, STEPS + 1):
                trial.step(step)
                other.step(step)
            return not trial.weights_differ(other)

    with suppress(Exception):  # a value that has no copy
        if len(differing) > 1 and agrees(differing):
            return [key for key in differing if not agrees({*differing} - {key})] or differing
    return differing


def _sharded_violations(named: Sequence[NamedParameter], experiment: Experiment) -> Iterator[Violation]:
    degrees = experiment.parallelism.dp_shard, experiment.parallelism.tp
    if max(degrees) == 1:
        return
    key, degree = ("dp_shard", degrees[0]) if degrees[0] > 1 else ("tp", degrees[1])
    name = experiment.optimizer.name
    with _fake_ranks(2):
        mesh, samples = init_device_mesh("cpu", (2,)), _samples(named)
        shards = [DTensor.from_local(one.parameter.detach(), mesh, [Shard(0)]) for one in samples]
        sharded = [replace(one, parameter=nn.Parameter(shard)) for one, shard in zip(samples, shards, strict=True)]
        trial = _Trial(sharded, experiment)
        try:
            for step in (1, 2):
                trial.step(step)
            trial.values()
        except optimizer_state.UnsavedStateError as error:
            yield Violation("optimizer.name", name, str(error), f"remove it from the optimizer, {_WITHOUT}")
        except Exception as error:
            # Other errors may come from data that other ranks would have sent.
            if "sharding" in str(error).lower():
                reason = f"torch cannot shard an operation of its step: {str(error).partition(chr(10))[0][:200]}"
                remedy = f"use parallelism.{key}=1, or compute on parameter.to_local()"
                yield Violation(f"parallelism.{key}", degree, f"{name}: {reason}", remedy)


@contextmanager
def _fake_ranks(count: int) -> Iterator[None]:
    """Join a process group whose other ranks send nothing."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _samples(named: Sequence[NamedParameter]) -> list[NamedParameter]:
    """Two parameters of each role and number of dims, cut to a small size, with random values."""
    torch.manual_seed(0)
    taken, samples = Counter[tuple[str, int]](), []
    for one in named:
        key = one.role, one.parameter.dim()
        taken[key] += 1
        if taken[key] <= 2:
            shape = [min(size, LARGEST_SIDE) for size in one.parameter.shape]
            samples.append(replace(one, parameter=nn.Parameter(0.1 * torch.randn(shape)), rows=None))
    return samples


DECAY_SAMPLES = 1000  # largest number of steps at which a decay is evaluated


def check_user_code(experiment: Experiment) -> None:
    """Raise UserCodeError with every violation of a run's import paths, and the frames of exceptions in your code."""
    messages, found = list[str](), list[Violation]()
    for key, check in _CHECKS.items():
        paths = import_paths(experiment, [key]).values()
        if not paths:
            continue
        try:
            with failing_user_code(experiment, f"{key}={', '.join(paths)} fails before the run starts:"):
                found += check(experiment) or ()
        except UserError as error:
            found += error.violations
            if not error.violations:
                messages.append(str(error))
    if messages or found:
        raise UserCodeError("\n".join(messages or ["This run cannot start."]), found)


@contextmanager
def failing_user_code(experiment: Experiment, what: str) -> Iterator[None]:
    """Convert an exception of the run's user code into a UserCodeError that begins with `what`. Exceptions without a
    frame in your code, and exceptions that only fake tensors raise, pass unchanged."""
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
    """True if planning raised an exception that training would not: values and memory that fake tensors lack, GPUs that
    are absent here, errors of the planner itself."""
    kind, raised_in = type(error), innermost_module(error)
    if kind.__module__.startswith(("torch._subclasses", "torch.fx.experimental")):
        # A tensor left on the meta device is there in training, too.
        return kind.__name__ != "FakeTensorDeviceMismatchError" or "meta" not in str(error)
    absent = ("torch.cuda",) if device_type(experiment.cluster) == "cuda" else ()
    if raised_in.split(".")[0] == "triton" or raised_in.startswith(("titan_exp.plan", *absent)):
        return True
    return any(text in str(error) for text in _FAKE_ONLY)


_FAKE_ONLY = ("numpy() is not supported for tensor subclasses", "data pointer of Tensor", "on meta tensors")
"""Messages of torch about tensors that have no values."""


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
    """Build the model as the trainer does. Attention kernels allocate nothing here, so any of them will do."""
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
            f"the value of {wrong[0]} is not a ParameterScale" if wrong else f"the model has no parameter {unknown[0]}"
        )
        remedy = "return a dict from parameter names, as in spec.shapes, to ParameterScale"
        yield Violation("parametrization.name", name, reason, remedy)


def _objective(experiment: Experiment) -> Iterator[Violation]:
    parallelism = experiment.parallelism
    sharded = parallelism.loss_parallel and parallelism.tp > 1
    shard = VocabShard(0, all_reduce_sum=torch.clone, all_reduce_max=torch.clone) if sharded else None
    objective = build_objective(experiment.training, experiment.compile, shard)
    if not callable(objective):
        reason, remedy = "an object of it cannot be called", "define __call__(self, model, batch, hidden=None)"
        yield Violation("training.objective", experiment.training.objective, reason, remedy)
    elif "hidden" not in inspect.signature(objective).parameters and parallelism.pp > 1:
        reason = f"a pipeline passes hidden states as `hidden`, which {type(objective).__name__}.__call__ does not take"
        remedy = "add the argument hidden=None, or use parallelism.pp=1"
        yield Violation("parallelism.pp", parallelism.pp, reason, remedy)


def _parts(experiment: Experiment) -> Iterator[Violation]:
    for label, config in experiment.training.parts.items():
        try:
            build_part(label, config)
        except UserError as error:
            if not error.violations:
                raise
            yield from error.violations


def _metrics(experiment: Experiment) -> None:
    chosen_metrics(experiment, _build(experiment))


def _decay(experiment: Experiment) -> Iterator[Violation]:
    schedule = LRSchedule(experiment.lr_schedule, peak=1.0, steps=experiment.training.steps)
    steps, decayed = experiment.training.steps, experiment.lr_schedule.decay_steps
    for step in range(steps, steps - decayed, -max(1, decayed // DECAY_SAMPLES)):
        rate = schedule(step)
        if not 0 <= rate <= 1:
            reason = f"at step {step} its factor makes the learning rate {rate:g} times the peak"
            yield Violation("lr_schedule.decay", experiment.lr_schedule.decay, reason, "return a factor in [0, 1]")
            return


_CHECKS: dict[str, Callable[[Experiment], Iterable[Violation] | None]] = {
    "model.architecture": _model,
    "optimizer.name": _optimizer,
    "parametrization.name": _parametrization,
    "training.objective": _objective,
    "training.parts": _parts,
    "tracking.metrics": _metrics,
    "lr_schedule.decay": _decay,
    "data.source": lambda run: check_source(run.data, evaluates=run.evaluation.enabled),
}
"""Checks of user code, by the key that names it. Exceptions in them come from that code."""
