"""Training report: rows of metrics, heartbeat, throughput and memory."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.parallel.mesh import Mesh
from titan_exp.tracking.logging import PROGRESS, get_logger
from titan_exp.tracking.run_folder import metrics_jsonl
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.sinks import build_sinks
from titan_exp.tracking.throughput import PeakMemory, Throughput, mfu_peak
from titan_exp.trainer.experts import ExpertMetrics
from titan_exp.trainer.objective import Objective, Reduction
from titan_exp.trainer.profiling.slow_options import SpareMemory, saving_options
from titan_exp.trainer.profiling.step_times import ROWS, CompileReport, OwnTimes, StepTimes, Stragglers, cache_of
from titan_exp.trainer.train_state import TrainState

Numbers = Mapping[str, float | int | None]


@dataclass(frozen=True)
class StepResult:
    """Result of a step, still on the device: reading a tensor synchronizes."""

    metrics: Mapping[str, Tensor]
    """This rank's share of the mean `loss` and of the objective's metrics, not yet reduced over ranks."""
    grad_norm: Tensor  # global gradient norm before clipping
    tokens: int  # predicted tokens of the global batch
    clipping: Mapping[str, Tensor] = field(default_factory=dict)  # clipping metrics, the same on every rank


@dataclass
class Row:
    """Numbers of one step that a row holds."""

    values: dict[str, float]
    """Metrics of the step, reduced, the same on every rank: `loss`, `grad_norm`, and those of modules and experts."""
    row: dict[str, Any] | None  # the whole row on the first rank; None on others


MODEL = "model/"


class MetricReducer:
    """Reduces named scalars of all ranks, and gathers each rank's own numbers, in one message over the CPU.

    Metrics are logged as `loss`, `objective/NAME`, `model/NAME`, `optimizer/NAME` and, for routers, `experts/NAME` (see
    `trainer/experts.py`). Modules and optimizers report them by `metric_reductions`, a mapping from name to `mean`,
    `sum` or `max`, and by `metrics()`, which returns these scalars as tensors. Modules also have `reset_metrics()`,
    called before each step. They accumulate over the tokens of this rank's micro-batches, recomputation excluded
    (`is_recomputing`), and modules with the same name add up. A module's `mean` is a tensor [2] of sum and count, so it
    is the same whether tensor-parallel ranks see all tokens or, with sequence parallelism, their own. A module's `sum`
    is right only if they see all. An optimizer's metrics are reduced over ranks.

    `model` is the whole model, so that all ranks know all names; `parts` are the modules of this rank.
    """

    def __init__(
        self,
        objective: Objective,
        model: nn.Module,
        parts: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        *,
        experts: ExpertMetrics,
    ) -> None:
        self._mesh, self._optimizer, self.experts = mesh, optimizer, experts
        self._modules = [module for part in parts for module in part.modules() if hasattr(module, "metric_reductions")]
        model_metrics: dict[str, Reduction] = {}
        for module in model.modules():
            model_metrics |= getattr(module, "metric_reductions", {})
        optimizer_metrics: Mapping[str, Reduction] = getattr(optimizer, "metric_reductions", {})
        self.reductions: dict[str, Reduction] = {
            "loss": "mean",
            **{f"objective/{name}": reduction for name, reduction in objective.metrics.items()},
            **{f"{MODEL}{name}": reduction for name, reduction in model_metrics.items()},
            **{f"optimizer/{name}": reduction for name, reduction in optimizer_metrics.items()},
            **{f"experts/{name}": reduction for name, reduction in experts.reductions.items()},
        }
        self._counts = {
            name: f"count of {name}"
            for name, kind in self.reductions.items()
            if kind == "mean" and name.startswith((MODEL, "experts/"))
        }
        self._module_metric_names = {f"{of}{MODEL}{name}" for name in model_metrics for of in ("", "count of ")}

    @property
    def module_reductions(self) -> dict[str, Reduction]:
        """Reductions of `module_metrics` other than sums; the sum and the count of a mean are each summed."""
        return {name: kind for name, kind in self.reductions.items() if name.startswith(MODEL) and kind == "max"}

    def module_metrics(self) -> dict[str, Tensor]:
        """This rank's share of the modules' metrics so far; a mean's count has a name of its own. Worlds reduce it
        before the step is finished, and hand it to `reduce` among the metrics."""
        found: dict[str, Tensor] = {}
        for name, value in (item for module in self._modules for item in module.metrics().items()):  # type: ignore[operator]
            key = f"{MODEL}{name}"
            combine = torch.maximum if self.reductions[key] == "max" else torch.add
            names = [key, self._counts[key]] if key in self._counts else [key]
            for part, scalar in zip(names, value.reshape(-1), strict=True):
                found[part] = combine(found[part], scalar) if part in found else scalar
        return found

    def begin_step(self) -> None:
        """Reset the metrics of the model's modules before a step."""
        for module in self._modules:
            module.reset_metrics()  # type: ignore[operator]  # a method, not a submodule

    def reduce(self, metrics: Mapping[str, Tensor], own: Sequence[float]) -> tuple[dict[str, float], list[list[float]]]:
        """Reduce this rank's share `metrics` of a step, and gather every rank's `own` numbers; all ranks call it."""
        values = self._on_cpu(metrics)
        sums = [name for name, reduction in self.reductions.items() if reduction != "max"] + [*self._counts.values()]
        maxima = [name for name, reduction in self.reductions.items() if reduction == "max"]
        rank, size = dist.get_rank(), dist.get_world_size()
        # Every rank fills its own row and leaves the others zero, so that one sum gathers them.
        row = [*own, *(values.get(name, -math.inf) for name in maxima)]
        message = torch.zeros(len(sums) + size * len(row), dtype=torch.float64)
        message[: len(sums)] = torch.tensor([values.get(name, 0.0) for name in sums], dtype=torch.float64)
        message[len(sums) + rank * len(row) :][: len(row)] = torch.tensor(row, dtype=torch.float64)
        if size > 1:
            dist.all_reduce(message, group=self._mesh.cpu_group)
        rows = message[len(sums) :].view(size, len(row))
        totals = dict(zip(sums, message[: len(sums)].tolist(), strict=True))
        reduced = {name: total / self._copies(name) for name, total in totals.items()}
        reduced |= {name: totals[name] / max(totals[count], 1) for name, count in self._counts.items()}
        reduced |= dict(zip(maxima, rows[:, len(own) :].amax(0).tolist(), strict=True))
        return {name: reduced[name] for name in self.reductions}, rows[:, : len(own)].tolist()

    def _copies(self, name: str) -> int:
        """Number of ranks that contribute the same value to a sum."""
        if name.startswith("optimizer/"):
            return self._mesh.world.size() if self.reductions[name] == "mean" else 1
        return 1 if name.startswith("experts/") else self._mesh.loss_replicas

    def _on_cpu(self, metrics: Mapping[str, Tensor]) -> dict[str, float]:
        names = self._module_metric_names
        of_modules = {name: value for name, value in metrics.items() if name in names} or self.module_metrics()
        own = {name: value for name, value in metrics.items() if name not in names}
        found = {name if name == "loss" else f"objective/{name}": value for name, value in own.items()} | of_modules
        for name, value in self.experts.shares().items():
            key = f"experts/{name}"
            names = [key, self._counts[key]] if key in self._counts else [key]
            found |= dict(zip(names, value.reshape(-1), strict=True))
        if hasattr(self._optimizer, "metric_reductions"):
            found |= {f"optimizer/{name}": value for name, value in self._optimizer.metrics().items()}  # type: ignore[attr-defined]
        for name, value in found.items():
            if value.numel() != 1:
                raise UserError(f"{name} is a tensor of {list(value.shape)}, and a metric is one number.")
        # fp64, so that the order of ranks does not change the logged digits.
        scalars = [value.detach().to(self._mesh.device, torch.float64).reshape(()) for value in found.values()]
        return dict(zip(found, torch.stack(scalars).tolist(), strict=True))


class Report:
    """Training report: reduces metrics over ranks and hands rows to the sinks on rank 0."""

    def __init__(
        self, experiment: Experiment, folder: RunFolder, state: TrainState, *, first_step: int, writes: bool = True
    ) -> None:
        mesh, flops_per_token = state.mesh, state.built.flops_per_token
        self.folder, self.mesh, self.flops_per_token = folder, mesh, flops_per_token
        self.experts = ExpertMetrics(state.model.load, state.built.module, state.model.parts)
        model = state.model
        self.reducer = MetricReducer(
            model.objective, state.built.module, model.parts, state.optimizer, mesh, experts=self.experts
        )
        self.writes = writes
        """True if this world writes rows and heartbeats."""
        self.last_step = first_step
        self.leader = dist.get_rank() == 0
        """True on the first rank of a world, which knows the whole row."""
        self.last_rows: list[dict[str, Any]] = []
        """Newest rows, which another world may not have written before it died; empty before the first."""
        self._heartbeat_failed = False
        self._warning: str | None = None
        attempts = folder.read_attempts()
        self.attempt = attempts[-1].attempt if attempts else 1
        self.cache = cache_of(folder, experiment.experiment.name)
        self.peak = mfu_peak(mesh.device, experiment.cluster.peak_tflops, self.cache) if self.leader else None
        self.throughput = Throughput(
            devices=dist.get_world_size(),
            flops_per_token=flops_per_token,
            peak_tflops=None if self.peak is None else self.peak.tflops,
            synchronize=torch.cuda.synchronize if mesh.device.type == "cuda" else lambda: None,
        )
        self.memory = PeakMemory(mesh.device)
        self._spare_memory = SpareMemory(saving_options(experiment), mesh.device)
        self.compilation = CompileReport()
        self.times = StepTimes(mesh.device)
        self._stragglers = Stragglers(dist.get_world_size() // mesh.world["pp"].size(), mesh.device.type)
        self._experiment, self._written = experiment, 0
        self.sinks: list[metrics_jsonl.Sink] = []
        """Metric sinks; only the first rank of the world that writes opens them, like the record of expert load."""
        self._load_log: metrics_jsonl.ExpertLoadLog | None = None
        self._loads: dict[int, Mapping[str, list[int]]] = {}
        """Tokens per expert in the steps of `last_rows`, by layer; written with the rows."""
        if writes:
            self._open_sinks()

    def begin_step(self) -> None:
        """Begin a step."""
        self.times.begin()
        self.reducer.begin_step()

    def end_step(self, step: int, tokens: int) -> None:
        """Count a finished step and its tokens."""
        self.times.end()
        self.last_step = step
        self.throughput.step(tokens)
        self.compilation.after("step", step)
        if self.leader:
            self._beat(step)

    def take_over(self, step: int, *, devices: int, writes: bool, changed: bool) -> None:
        """Take over reporting after `step` in a run of several worlds, whose `devices` share it. A world that writes
        first adds the rows that a dead world left unwritten. `changed` is True if another world wrote before."""
        self.last_step, self.throughput.devices, self.writes = step, devices, writes
        if not writes:
            return
        if not self.sinks:
            self._open_sinks()
        if changed and self.leader:
            logged = metrics_jsonl.read_last_values(self.folder.metrics)
            if logged.get("attempt") == self.attempt:
                self._written = int(logged.get("step") or 0)
        self._write(self.last_rows)

    def _open_sinks(self) -> None:
        if not self.leader:
            return
        self.sinks = build_sinks(self._experiment, self.folder.path, self.folder.path.name, self.attempt)
        if self.experts:
            path, steps = self.folder.expert_load, self._experiment.training.last_step
            every = self._experiment.tracking.log_every
            self._load_log = metrics_jsonl.ExpertLoadLog(path, self.attempt, steps=steps, log_every=every)

    def write(self, rows: Sequence[Row], numbers: Numbers) -> None:
        """Write rows of committed steps, at least one; the last also gets `numbers`."""
        if rows[-1].row is not None:
            _require_new(numbers, rows[-1].row)
            rows[-1].row |= numbers
        self.last_rows = [row.row for row in rows if row.row is not None]
        self._loads = {step: self._loads[step] for row in self.last_rows if (step := row["step"]) in self._loads}
        self._write(self.last_rows)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if not self.writes or row["step"] <= self._written:
                continue  # another world writes this row, or wrote it before it died
            self._written = step = row["step"]
            if self._load_log is not None and step in self._loads:
                self._load_log.log(step, self._loads[step])
            for sink in self.sinks:
                sink.log(row)

    @contextmanager
    def pause(self, activity: str) -> Iterator[None]:
        """Exclude the `with` block from training's throughput, and tell the watchdog what it does."""
        with PROGRESS.phase(f"the {activity}"), self.throughput.pause(activity):
            yield

    def warn(self, warning: str | None) -> None:
        """Show a warning in `status` and the progress display until it is None."""
        if self.leader and warning != self._warning:
            self._warning = warning
            self._beat(self.last_step, force=True)

    def image(self, name: str, step: int, image: np.ndarray) -> None:
        """Hand an image, uint8 [height, width, 3], to the sinks that take images."""
        for sink in self.sinks:
            if isinstance(sink, metrics_jsonl.ImageSink):
                sink.image(name, step, image)

    def late(self, axis: str, row: Mapping[str, metrics_jsonl.Value]) -> None:
        """Hand values of an earlier step, which the key `axis` has, to the sinks that take them."""
        for sink in self.sinks:
            if isinstance(sink, metrics_jsonl.LateSink):
                sink.late(axis, row)

    def row(
        self, step: int, tokens: int, result: StepResult, *, lr: float, also: Numbers = MappingProxyType({})
    ) -> Row:
        """Reduce the metrics of a step to its row; all ranks call it."""
        found = self.share(step, tokens, result, lr=lr, also=also)
        if found.row is not None:
            found.row |= {**self.expert_row(step, found.values, self.experts.counts()), "attempt": self.attempt}
        return found

    def share(
        self, step: int, tokens: int, result: StepResult, *, lr: float, also: Numbers = MappingProxyType({})
    ) -> Row:
        """Reduce a step's metrics over this world, without those of experts (`expert_row`); all ranks call it."""
        own = astuple(self.times.take())
        reported, rows = self.reducer.reduce(result.metrics, own)
        times = [OwnTimes(*row) for row in rows]
        numbers = {
            "loss": reported.pop("loss"),
            "grad_norm": float(result.grad_norm),
            **{name: float(value) for name, value in result.clipping.items()},
        }
        others = {name: value for name, value in reported.items() if not name.startswith("experts/")}
        if not self.leader:
            return Row({**numbers, **others}, None)
        memory = self.memory.read()
        _require_new(also, {**numbers, **others})
        row = {"step": step, "tokens": tokens, **numbers, "lr": lr, **self.throughput.read(), **memory}
        row |= {**self._step_times(step, times), **also, **others}
        self._spare_memory.check(memory["memory_reserved"])
        self.memory.reset()
        return Row({**numbers, **reported}, row)

    def expert_row(
        self, step: int, values: Mapping[str, float], counts: Mapping[str, list[int]]
    ) -> dict[str, metrics_jsonl.Value]:
        """Expert metrics from a step's numbers and the tokens of each expert, which go to the record."""
        if not self.experts:
            return {}
        self._loads[step] = counts
        return self.experts.row(counts, values)

    def _step_times(self, step: int, times: Sequence[OwnTimes]) -> dict[str, float]:
        """Seconds of a step over the ranks: with waiting (`step_time`) and without (`own_time`)."""
        for rank, reason in self._stragglers.find(times):
            get_logger().warning("rank %d is slow, for %d rows up to step %d: %s", rank, ROWS, step, reason)
        row = {}
        for name, values in (("step_time", [rank.step for rank in times]), ("own_time", [rank.own for rank in times])):
            row |= {f"{name}_max": max(values), f"{name}_median": statistics.median(values)}
        return row

    def close(self, state: str) -> None:
        """Close all sinks with the run's final state. Raises UserError if rows of a run that did not fail are lost."""
        if self.leader:
            self._beat(self.last_step, force=True)
        files = [(self.folder.metrics, sink) for sink in self.sinks]
        for path, sink in [*files, *([(self.folder.expert_load, self._load_log)] if self._load_log else [])]:
            try:
                sink.close(state)
            except OSError as error:
                missing = f"{path} lacks its last rows ({error.strerror or error})."
                if state != "failed":
                    raise UserError(f"{missing} The rest of the run is complete.") from error
                get_logger().error("%s", missing)

    def _beat(self, step: int, *, force: bool = False) -> None:
        """Write the heartbeat; an error is logged once and does not end the run."""
        if not self.writes:
            return
        try:
            if self.folder.beat(step, force=force, warning=self._warning):
                self._heartbeat_failed = False
        except OSError as error:
            if not self._heartbeat_failed:
                get_logger().error("cannot write %s (%s)", self.folder.heartbeat, error.strerror or error)
            self._heartbeat_failed = True


def _require_new(numbers: Numbers, row: Mapping[str, Any]) -> None:
    """Refuse a part's numbers whose names the row already has."""
    if taken := sorted(numbers.keys() & row.keys()):
        label, _, name = taken[0].partition("/")
        raise UserError(f"training.parts.{label}: rows already have {taken[0]}. Return {name} by another name.")
