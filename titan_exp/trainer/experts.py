"""Expert load: tokens per expert, counted over ranks, and the metrics computed from it."""

import re
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.models.blocks.feed_forward import Router
from titan_exp.parallel.mesh import Mesh, all_reduce
from titan_exp.tracking.run_folder.metrics_jsonl import Value, load_statistics
from titan_exp.trainer.objective import Reduction


class ExpertLoad:
    """Reduces the token counts of all layers in one message, and hands each router its own. `model` is whole; `parts`
    are this rank's; `sequences` are those of the first batch."""

    def __init__(self, model: nn.Module, parts: Sequence[nn.Module], sequences: int, mesh: Mesh) -> None:
        self._sizes = {name: module.moe.experts for name, module in routers_of(model)}
        self._routers = dict(router for part in parts for router in routers_of(part))
        self._device = mesh.device
        self.counts: dict[str, Tensor] = {}
        """Tokens per expert of the last global batch, int64 [experts], by the router's full name; on every rank."""
        self.losses: dict[str, Tensor] = {}
        """This rank's share of each router's balance loss and z-loss in the last step, fp32 [2], by name."""
        axes = [axis for axis in ("cp_across", "cp_within", "tp") if mesh.world[axis].size() > 1]
        groups = [mesh.world.get_group(axis).group_name for axis in axes]
        ranks = mesh.sequence_shard.degree * mesh.world["tp"].size()
        self._sequences = torch.tensor(float(sequences), device=mesh.device)
        for router in self._routers.values():
            router.set_batch(self._sequences, ranks, partial(_sum, groups=groups) if groups else None)

    def set_sequences(self, sequences: int) -> None:
        """Set the number of sequences in the next global batch."""
        if self._routers:
            self._sequences.fill_(sequences)

    @property
    def step_sums(self) -> list[Tensor]:
        """This rank's counts and losses in the step so far; the same rank of each other world adds its own in place."""
        return [sums for router in self._routers.values() for sums in (router.counts, router.losses)]

    def discard(self) -> None:
        """Forget the counts of a step that will be repeated."""
        for sums in self.step_sums:
            sums.zero_()

    def update(self) -> None:
        """Finish an optimizer step: reduce the counts over all ranks and update each router."""
        if not self._sizes:
            return
        own = [
            self._routers[name].counts
            if name in self._routers
            else torch.zeros(size, dtype=torch.int64, device=self._device)
            for name, size in self._sizes.items()
        ]
        flat = torch.cat(own)
        if dist.get_world_size() > 1:
            dist.all_reduce(flat)
        self.counts = dict(zip(self._sizes, flat.split(list(self._sizes.values())), strict=True))
        self.losses = {name: router.losses.clone() for name, router in self._routers.items()}
        for name, router in self._routers.items():
            router.finish_step(self.counts[name])


def routers_of(model: nn.Module) -> list[tuple[str, Router]]:
    """Routers of a module by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Router)]


def _sum(counts: Tensor, groups: Sequence[str]) -> Tensor:
    for group in groups:
        counts = all_reduce(counts, "sum", group)
    return counts


TOTALS = {
    "load_max": max,
    "dead": sum,
    "entropy": lambda values: sum(values) / len(values),
    "bias_range": max,
    "balance_loss": sum,
    "z_loss": sum,
}
"""Reduction over layers of each metric."""


LOAD = "load of experts/"  # prefix of token counts among a step's numbers; the layer and the expert's index follow


class ExpertMetrics:
    """Expert metrics of the last step: each rank's tensors for the single message, and the row computed from them.
    `model` is the whole model, so that all ranks know all names; `parts` are the modules of this rank."""

    def __init__(self, load: ExpertLoad | None, model: nn.Module, parts: Sequence[nn.Module]) -> None:
        self._load = load
        self._routers = dict(router for part in parts for router in routers_of(part))
        self._layers = {name: layer_label(name) for name, _ in routers_of(model)}
        self.reductions: dict[str, Reduction] = {
            f"{self._layers[name]}/{metric}": reduction
            for name, router in routers_of(model)
            for metric, reduction in _reductions(router).items()
        }
        """Reductions over ranks of the metrics that only some ranks know, by name."""

    def __bool__(self) -> bool:
        """True if the model has experts."""
        return bool(self._layers)

    def shares(self) -> dict[str, Tensor]:
        """This rank's share of each metric: a scalar for a sum, sum and count [2] for a mean."""
        found: dict[str, Tensor] = {}
        for name, router in self._routers.items():
            assert self._load is not None, "a model with routers has their load"
            layer = self._layers[name]
            losses = self._load.losses.get(name, router.losses)
            values = {"balance_loss": losses[0], "z_loss": losses[1]}
            if router.moe.router_bias:
                width = router.bias.max() - router.bias.min()
                # Each rank that has the layer has the same biases.
                values["bias_range"] = torch.stack((width, torch.ones_like(width)))
            found |= {f"{layer}/{metric}": values[metric] for metric in _reductions(router)}
        return found

    def counts(self) -> dict[str, list[int]]:
        """Tokens per expert of the last global batch, by layer. Waits for the device."""
        if self._load is None or not self._load.counts:
            return {}
        found = self._load.counts
        flat = torch.cat([*found.values()]).cpu().split([len(counts) for counts in found.values()])
        return {self._layers[name]: counts.tolist() for name, counts in zip(found, flat, strict=True)}

    def row(self, counts: Mapping[str, Sequence[int]], reduced: Mapping[str, float]) -> dict[str, Value]:
        """All metrics by logged name, totals first, from the counts and the reduced shares."""
        layers: dict[str, dict[str, float]] = {}
        for layer, loads in counts.items():
            found = load_statistics(loads)._asdict()
            own = {metric: reduced[key] for metric in TOTALS if (key := f"experts/{layer}/{metric}") in reduced}
            layers[layer] = {**found, **own}
        totals = {
            metric: total(values)
            for metric, total in TOTALS.items()
            if (values := [found[metric] for found in layers.values() if metric in found])
        }
        row = {f"experts/{metric}": value for metric, value in totals.items()}
        for layer, found in layers.items():
            row |= {f"experts/{layer}/{metric}": value for metric, value in found.items()}
        return row


def is_of_experts(name: str) -> bool:
    """True if one of a step's numbers is an expert metric."""
    return name.startswith(("experts/", LOAD))


def load_numbers(counts: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Flatten tokens per expert and layer into numbers of a step, which the worlds sum."""
    return {f"{LOAD}{layer}/{expert}": count for layer, loads in counts.items() for expert, count in enumerate(loads)}


def counts_of(values: Mapping[str, float]) -> dict[str, list[int]]:
    """Tokens per expert by layer, from a step's numbers; inverse of `load_numbers`."""
    counts: dict[str, list[int]] = {}
    for name, value in values.items():
        if name.startswith(LOAD):
            counts.setdefault(name.split("/")[1], []).append(int(value))
    return counts


def layer_label(router: str) -> str:
    """Short label of a router's layer: `layer_3` for a block of the skeleton, else the path without its last parts."""
    if match := re.match(r"blocks\.(\d+)\.", router):
        return f"layer_{match[1]}"
    return router.removesuffix(".router").removesuffix(".feed_forward").replace(".", "_")


def _reductions(router: Router) -> dict[str, Reduction]:
    """Reductions of a router's metrics that are not computed from counts."""
    moe = router.moe
    present: dict[str, tuple[bool, Reduction]] = {
        "bias_range": (moe.router_bias, "mean"),
        "balance_loss": (moe.balance.coefficient > 0 and moe.balance.loss != "none", "sum"),
        "z_loss": (moe.balance.z_loss > 0, "sum"),
    }
    return {metric: reduction for metric, (has, reduction) in present.items() if has}
