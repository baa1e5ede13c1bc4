"""Plain reference of semi-synchronous training: copies of a model, an AdamW for each, and one outer SGD in fp64.

Streaming DiLoCo is Algorithm 2 of Douillard et al. 2025, an outer SGD for each fragment.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from tests.parity.runs import SMALL
from tests.ranks import run_ranks
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import load_experiment, to_experiment, to_yaml
from titan_exp.extensions.replica_groups.config import SemiSyncConfig, semi_sync_of
from titan_exp.models.blocks.feed_forward import Router
from titan_exp.tracking.run_folder.run_folder import RunFolder


@dataclass
class Reference:
    """Curve of the reference, and weights after the last synchronization."""

    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


Absences = Mapping[int, Sequence[int]]
"""Synchronizations by step, and groups that were away in the round before it. They come back in it, with the state of
the optimizer of the first group that was not, unless they are away in the next one, too."""

Lost = Mapping[int, tuple[int, int]]
"""First and last lost step by group, after which it comes back with weights and optimizer of group 0: streaming."""


def reference(
    path: Path, *overrides: str, absent: Absences = MappingProxyType({}), lost: Lost = MappingProxyType({})
) -> Reference:
    """Train with the settings of a run of replica groups."""
    chosen = {override.partition("=")[0] for override in overrides}
    small = [override for override in SMALL if override.partition("=")[0] not in chosen]
    path.mkdir(parents=True)
    experiment = resolve_layout(to_experiment(compose([*small, *overrides, "cluster.replica_groups=1"])), 1)
    RunFolder(path).config.write_text(to_yaml(experiment))
    (found,) = run_ranks(1, _train, str(path), dict(absent), dict(lost), limit=120)
    return found


def _train(path: str, absent: Absences, lost: Lost) -> Reference:
    from titan_exp.trainer.distributed import joined
    from titan_exp.trainer.trainer import Trainer

    experiment = load_experiment(RunFolder(path).config, trust=True)
    config, training = semi_sync_of(experiment), experiment.training
    with joined(experiment.cluster) as device:
        trainer = Trainer(experiment, RunFolder(path), device)  # for initial weights, order of data, and learning rates
        trainer.restore()
        model, objective, found = trainer.model.parts[0], trainer.model.objective, Reference()
        models = [copy.deepcopy(model) for _ in range(config.groups)]
        outer = [parameter.detach().double().requires_grad_() for parameter in model.parameters()]
        lr, momentum, nesterov = config.outer
        fragments = _fragments([name for name, _ in model.named_parameters()], config, experiment.model.layers)
        outer_optimizers = [
            torch.optim.SGD([outer[index] for index in fragment], lr=lr, momentum=momentum, nesterov=nesterov)
            for fragment in fragments
        ]
        apart, pseudo_gradients = config.interval // len(fragments), {}
        settings = {"betas": tuple(experiment.optimizer.betas), "eps": experiment.optimizer.eps, "weight_decay": 0.0}  # type: ignore[attr-defined]
        optimizers = [torch.optim.AdamW(worker.parameters(), lr=1.0, **settings) for worker in models]
        for step in range(1, training.steps + 1):
            batches = [next(trainer.loader) for _ in range(training.global_batch_size)]
            share, losses, counts, norms = len(batches) // config.groups, [], [], []
            end = -(-step // config.interval) * config.interval
            for number, (worker, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                if number in absent.get(end, ()) or number in _lost(lost, step):
                    continue
                own = batches[number * share : (number + 1) * share]
                for router in _routers(worker):
                    router.set_batch(share)
                loss, count = _loss(worker, objective, own)
                (loss / count).backward()
                for router in _routers(worker):
                    router.finish_step(router.counts.clone())
                norms.append(float(torch.nn.utils.clip_grad_norm_(worker.parameters(), training.max_grad_norm or 1e9)))
                optimizer.param_groups[0]["lr"] = trainer.schedule(step)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
                counts.append(count)
            found.loss.append(sum(losses) / sum(counts))
            found.grad_norm.append(sum(norms) / len(norms))
            away = [*absent.get(end, ()), *_lost(lost, step)]
            for number in _lost(lost, step):
                if step == lost[number][1]:
                    models[number].load_state_dict(models[0].state_dict())
                    optimizers[number].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            for number, fragment in enumerate(fragments):  # the outer step of fragment p is after (p + 1)·H/P
                shifted = step - (number + 1) * apart
                if (shifted + config.delay) % config.interval == 0 and shifted + config.delay >= 0:
                    pseudo_gradients[number] = _pseudo_gradients(outer, models, fragment, away)
                if shifted % config.interval == 0 and shifted >= 0:
                    for index, gradient in zip(fragment, pseudo_gradients.pop(number), strict=True):
                        outer[index].grad = gradient
                    outer_optimizers[number].step()
                    _mix(outer, models, fragment, config.mixing)
                    _average_buffers(models, away)
            if step == end:
                present = next(number for number in range(config.groups) if number not in absent.get(end, ()))
                for number in absent.get(end, ()):
                    optimizers[number].load_state_dict(copy.deepcopy(optimizers[present].state_dict()))
        names = [name for name, _ in model.named_parameters()]
        found.weights = {name: value.detach().float() for name, value in zip(names, outer, strict=True)}
        found.weights |= model_buffers(models[0])
        return found


def _routers(model: torch.nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def model_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers: biases of routers and what they remember of the last step."""
    parameters = dict(model.named_parameters())
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


@torch.no_grad()
def _average_buffers(models: Sequence[torch.nn.Module], away: Sequence[int]) -> None:
    buffers = [model_buffers(model) for model in models]
    for name in buffers[0]:
        mean = torch.stack([own[name] for number, own in enumerate(buffers) if number not in away]).mean(0)
        for own in buffers:
            own[name].copy_(mean)


def _lost(lost: Lost, step: int) -> list[int]:
    return [number for number, (first, last) in lost.items() if first <= step <= last]


def _loss(model: torch.nn.Module, objective: object, batches: Sequence) -> tuple[torch.Tensor, int]:
    losses = [objective(model, batch).total for batch in batches]  # type: ignore[operator]
    return torch.stack(losses).sum(), sum(objective.count(batch) for batch in batches)  # type: ignore[attr-defined]


def _fragments(names: Sequence[str], config: SemiSyncConfig, blocks: int) -> list[list[int]]:
    """Indices of the parameters of each fragment: embedding with block 0, norm and head with the last."""
    numbers = [int(found[1]) if (found := re.match(r"blocks\.(\d+)\.", name)) else None for name in names]
    first, last = numbers.index(0), len(numbers) - 1 - numbers[::-1].index(blocks - 1)
    numbers = [0 if index < first else blocks - 1 if index > last else number for index, number in enumerate(numbers)]
    size = blocks // config.fragments
    members = [
        {fragment + config.fragments * i for i in range(blocks)}
        if config.fragment_pattern == "strided"
        else set(range(fragment * size, (fragment + 1) * size))
        for fragment in range(config.fragments)
    ]
    return [[index for index, number in enumerate(numbers) if number in blocks_] for blocks_ in members]


@torch.no_grad()
def _pseudo_gradients(
    outer: list[torch.Tensor], models: Sequence[torch.nn.Module], fragment: Sequence[int], away: Sequence[int]
) -> list[torch.Tensor]:
    present = [list(model.parameters()) for number, model in enumerate(models) if number not in away]
    return [torch.stack([outer[index] - local[index].double() for local in present]).mean(0) for index in fragment]


@torch.no_grad()
def _mix(outer: list[torch.Tensor], models: Sequence[torch.nn.Module], fragment: Sequence[int], mixing: float) -> None:
    for model in models:
        local = list(model.parameters())
        for index in fragment:
            local[index].copy_(mixing * local[index].double() + (1 - mixing) * outer[index])
