"""Updates of an optimizer in any layout, from gradients that are functions of the initial weights: no passes."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.parity.runs import SMALL
from tests.ranks import run_ranks
from titan_exp.checkpoint.optimizer_state import (
    optimizer_state_dict,
    optimizer_values,
    prepare_optimizer_state,
    saved_tensors,
)
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.config.schema.typed_config import to_experiment

Tensors = dict[str, Tensor]


def experiment_of(*overrides: str) -> Experiment:
    chosen = {override.partition("=")[0] for override in (*overrides, "optimizer.eps")}
    small = [override for override in SMALL if override.partition("=")[0] not in chosen]
    return resolve_layout(to_experiment(compose([*small, *overrides])), 1)


def optimizer_config(*overrides: str) -> OptimizerConfig:
    return experiment_of(*overrides).optimizer


def updated(
    experiment: Experiment,
    optimizers: Sequence[OptimizerConfig],
    *,
    steps: int = 3,
    restored_after: int | None = None,
    mutate: Callable[[], None] | None = None,
) -> list[tuple[Tensors, Tensors]]:
    """Whole weights and optimizer state after a few steps of each optimizer, in the layout of an experiment.

    After step `restored_after` the state goes into a new optimizer, which takes the other steps.
    """
    world = ResolvedLayout.of(experiment).world_size
    parts = run_ranks(world, _update_on_rank, experiment, tuple(optimizers), steps, restored_after, mutate)
    found = []
    for index in range(len(optimizers)):
        weights, state = dict[str, Tensor](), dict[str, Tensor]()
        for part in parts:
            for whole, own in zip((weights, state), part[index], strict=True):
                for name, value in own.items():
                    assert torch.equal(whole.setdefault(name, value), value), f"ranks disagree about {name}"
        found.append((weights, state))
    return found


def assert_same(found: tuple[Tensors, Tensors], expected: tuple[Tensors, Tensors], *, exact: bool = False) -> None:
    for kind, other in zip(found, expected, strict=True):
        assert kind.keys() == other.keys()
        for name, value in other.items():
            atol, rtol = (0, 0) if exact else (3e-6, 1e-4)
            torch.testing.assert_close(kind[name], value, atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def _update_on_rank(
    experiment: Experiment,
    optimizers: Sequence[OptimizerConfig],
    steps: int,
    restored_after: int | None,
    mutate: Callable[[], None] | None,
) -> list[tuple[Tensors, Tensors]]:
    if mutate is not None:
        mutate()
    from titan_exp.optim.optimizer import HasGradientPoint, build_optimizer
    from titan_exp.trainer.distributed import joined
    from titan_exp.trainer.train_state import assemble

    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    found = []
    with joined(experiment.cluster) as device:
        state = assemble(experiment, ResolvedLayout.of(experiment), device)
        parts = state.model.parts
        for config in optimizers:
            state.built.init_weights()
            initial = [parameter.detach().clone() for part in parts for parameter in part.parameters()]
            parameters = [parameter for part in parts for parameter in part.parameters()]
            optimizer = build_optimizer(parts, config)
            for step in range(steps):
                if step == restored_after:
                    kept = {name: value.clone() for name, value in optimizer_state_dict(parts, optimizer).items()}
                    values = json.loads(json.dumps(optimizer_values(parts, optimizer)))
                    optimizer = build_optimizer(parts, config)
                    prepare_optimizer_state(parts, optimizer, saved_tensors(kept), values)
                    for name, value in optimizer_state_dict(parts, optimizer).items():
                        value.copy_(kept[name])
                if isinstance(optimizer, HasGradientPoint):
                    optimizer.to_gradient_point()
                for parameter, value in zip(parameters, initial, strict=True):
                    # Weights are about 0.02.
                    parameter.grad = 0.01 * torch.sin(value * (997 * (step + 1)) + step)
                optimizer.step()
            weights = {name: value for part in parts for name, value in part.named_parameters()}
            found.append((_whole(weights), _whole(optimizer_state_dict(parts, optimizer))))
    return found


def _whole(tensors: Mapping[str, Tensor]) -> Tensors:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in tensors.items()
    }
