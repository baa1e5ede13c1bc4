"""Plain reference of semi-synchronous training: copies of a model, an AdamW for each, and one outer SGD in fp64."""

import copy
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
from titan_exp.tracking.run_folder.run_folder import RunFolder


@dataclass
class Reference:
    """Curve of the reference, and weights after the last synchronization."""

    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


Absences = Mapping[int, Sequence[int]]
"""Synchronizations by step, and groups that were away in the round before it. They come back in it, with the state of
the optimizer of group 0, unless they are away in the next one, too."""


def reference(path: Path, *overrides: str, absent: Absences = MappingProxyType({})) -> Reference:
    """Train with the settings of a run of replica groups."""
    chosen = {override.partition("=")[0] for override in overrides}
    small = [override for override in SMALL if override.partition("=")[0] not in chosen]
    path.mkdir(parents=True)
    experiment = resolve_layout(to_experiment(compose([*small, *overrides, "cluster.replica_groups=1"])), 1)
    RunFolder(path).config.write_text(to_yaml(experiment))
    (found,) = run_ranks(1, _train, str(path), dict(absent), limit=120)
    return found


def _train(path: str, absent: Absences) -> Reference:
    from titan_exp.trainer.distributed import joined
    from titan_exp.trainer.trainer import Trainer

    experiment = load_experiment(RunFolder(path).config, trust=True)
    config, training = experiment.semi_sync, experiment.training
    with joined(experiment.cluster) as device:
        trainer = Trainer(experiment, RunFolder(path), device)  # for initial weights, order of data, and learning rates
        trainer.restore()
        model, objective, found = trainer.model.parts[0], trainer.model.objective, Reference()
        models = [copy.deepcopy(model) for _ in range(config.groups)]
        outer = [parameter.detach().double().requires_grad_() for parameter in model.parameters()]
        lr, momentum, nesterov = config.outer
        outer_optimizer = torch.optim.SGD(outer, lr=lr, momentum=momentum, nesterov=nesterov)
        settings = {"betas": tuple(experiment.optimizer.betas), "eps": experiment.optimizer.eps, "weight_decay": 0.0}  # type: ignore[attr-defined]
        optimizers = [torch.optim.AdamW(worker.parameters(), lr=1.0, **settings) for worker in models]
        for step in range(1, training.steps + 1):
            batches = [next(trainer.loader) for _ in range(training.global_batch_size)]
            share, losses, counts, norms = len(batches) // config.groups, [], [], []
            end = -(-step // config.interval) * config.interval
            for number, (worker, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                if number in absent.get(end, ()):
                    continue
                own = batches[number * share : (number + 1) * share]
                loss, count = _loss(worker, objective, own)
                (loss / count).backward()
                norms.append(float(torch.nn.utils.clip_grad_norm_(worker.parameters(), training.max_grad_norm or 1e9)))
                optimizer.param_groups[0]["lr"] = trainer.schedule(step)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
                counts.append(count)
            found.loss.append(sum(losses) / sum(counts))
            found.grad_norm.append(sum(norms) / len(norms))
            if step == end:
                away = absent.get(end, ())
                _synchronize(outer, outer_optimizer, models, away)
                for number in away:
                    optimizers[number].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        found.weights = {name: value.detach().clone() for name, value in models[0].named_parameters()}
        return found


def _loss(model: torch.nn.Module, objective: object, batches: Sequence) -> tuple[torch.Tensor, int]:
    losses = [objective(model, batch).total for batch in batches]  # type: ignore[operator]
    return torch.stack(losses).sum(), sum(objective.count(batch) for batch in batches)  # type: ignore[attr-defined]


@torch.no_grad()
def _synchronize(
    outer: list[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    models: Sequence[torch.nn.Module],
    away: Sequence[int],
) -> None:
    present = [model for number, model in enumerate(models) if number not in away]
    for kept, *local in zip(outer, *(model.parameters() for model in present), strict=True):
        kept.grad = torch.stack([kept - weight.double() for weight in local]).mean(0)
    optimizer.step()
    for kept, *local in zip(outer, *(model.parameters() for model in models), strict=True):
        for weight in local:
            weight.copy_(kept)
