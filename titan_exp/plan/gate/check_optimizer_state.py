"""Check of an own optimizer's state before a launch: saved, restored and compared, on a model of small parameters."""

import inspect
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_exp.checkpoint.optimizer_state import (
    optimizer_state_dict,
    optimizer_values,
    prepare_optimizer_state,
    saved_tensors,
)
from titan_exp.checkpoint.state_values import UnsavedStateError
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.machine.devices import device_type
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.optim.lr_schedule import set_lr
from titan_exp.optim.optimizer import HasGradientPoint, build_named
from titan_exp.optim.parameter_groups import NamedParameter, same_value

STEPS, RESTORED_AFTER = 12, (1, 9)
"""Steps of the trial, and those after which its state is restored into a new optimizer."""
LARGEST_SIDE = 32
"""Size to which the dims of parameters are cut."""
_WITHOUT = "or train without checkpoints: checkpoint=none"


def optimizer_violations(named: Sequence[NamedParameter], experiment: Experiment) -> Iterator[Violation]:
    """Violations of an optimizer of a model's parameters, which may be on the meta device: steps that fail, and state
    that a checkpoint or another world would lose."""
    name, saves = (
        experiment.optimizer.name,
        experiment.checkpoint.mode != "off" or experiment.cluster.worlds > 1,
    )
    trial = _Trial(_samples(named), experiment)
    required = [
        parameter.name
        for parameter in inspect.signature(trial.optimizer.step).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if required:
        reason = f"its step() needs {', '.join(required)}, and a run calls step() after the gradients of a batch"
        yield Violation("optimizer.name", name, reason, "optimizer=adamw, or another whose step() needs no argument")
        return
    try:
        others = list[_Trial]()
        with _fake_ranks(1):
            for step in range(1, STEPS + 1):
                for one in (trial, *others):
                    one.step(step)
                if step in RESTORED_AFTER and saves:
                    others.append(trial.restored())
    except UnsavedStateError as error:
        yield Violation("optimizer.name", name, str(error), f"keep none of it in the optimizer, {_WITHOUT}")
        return
    except Exception:
        if device_type(experiment.cluster) == "cuda":  # an optimizer may need a GPU
            return
        raise
    yield from _sharded_violations(named, experiment)
    for other, after in zip(others, RESTORED_AFTER, strict=False):
        if trial.weights_differ(other):
            kept = ", ".join(f"self.{key}" for key in trial.hidden_state(other)) or "state"
            reason = (
                f"restored after step {after}, it takes other steps than without: it keeps {kept} outside of "
                "optimizer.state and optimizer.param_groups, which a checkpoint does not carry"
            )
            remedy = f"keep it in self.state[parameter] or in self.param_groups, {_WITHOUT}"
            yield Violation("optimizer.name", name, reason, remedy)
            return


class _Trial:
    """An optimizer of small parameters with gradients that are a function of the step."""

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
        """Values of the optimizer as a checkpoint has them."""
        return json.loads(json.dumps(optimizer_values([self._model], self.optimizer)))

    def restored(self) -> "_Trial":
        """Another trial with this one's weights and state, as through a checkpoint."""
        tensors, values = optimizer_state_dict([self._model], self.optimizer), self.values()
        other = _Trial([replace(one, parameter=_copy(one.parameter)) for one in self._named], self._experiment)
        prepare_optimizer_state([other._model], other.optimizer, saved_tensors(tensors), values)
        found = optimizer_state_dict([other._model], other.optimizer)
        for key, value in tensors.items():
            found[key].copy_(value)
        return other

    def weights_differ(self, other: "_Trial") -> bool:
        """True if a parameter is another."""
        pairs = zip(self._named, other._named, strict=True)
        return not all(_equal(one.parameter, two.parameter) for one, two in pairs)

    def hidden_state(self, other: "_Trial") -> list[str]:
        """Attributes that differ, of numbers, tensors and containers of them."""
        mine, others = vars(self.optimizer), vars(other.optimizer)
        kinds = (bool, int, float, list, tuple, dict, Tensor)
        known = ("state", "param_groups", "defaults")
        return [
            key
            for key, value in mine.items()
            if key not in known and type(value) in kinds and not same_value(value, others.get(key))
        ]


def _sharded_violations(named: Sequence[NamedParameter], experiment: Experiment) -> Iterator[Violation]:
    """Violations of steps on sharded parameters, whose numbers mean nothing here."""
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
        except UnsavedStateError as error:
            yield Violation("optimizer.name", name, str(error), f"keep none of it in the optimizer, {_WITHOUT}")
        except Exception as error:
            # Other errors may be of what other ranks would have sent.
            if "sharding" in str(error).lower():
                reason = f"torch cannot shard an operation of its step: {str(error).partition(chr(10))[0][:200]}"
                remedy = f"parallelism.{key}=1; or compute on parameter.to_local()"
                yield Violation(f"parallelism.{key}", degree, f"{name}: {reason}", remedy)


@contextmanager
def _fake_ranks(count: int) -> Iterator[None]:
    """Process group of ranks of which the others send nothing."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _samples(named: Sequence[NamedParameter]) -> list[NamedParameter]:
    """Two parameters of each role and number of dims, cut and with random values."""
    torch.manual_seed(0)
    taken, samples = Counter[tuple[str, int]](), []
    for one in named:
        key = one.role, one.parameter.dim()
        taken[key] += 1
        if taken[key] <= 2:
            shape = [min(size, LARGEST_SIDE) for size in one.parameter.shape]
            samples.append(replace(one, parameter=nn.Parameter(0.1 * torch.randn(shape)), rows=None))
    return samples


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone())


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
