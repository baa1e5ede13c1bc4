"""Training report: rows of metrics, heartbeat, throughput and memory."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.parallel.mesh import Mesh
from titan_exp.tracking.device_rates import mfu_peak
from titan_exp.tracking.expert_load import ExpertLoadLog
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.memory_stats import PeakMemory
from titan_exp.tracking.run_folder.group_events import record_event
from titan_exp.tracking.run_folder.metrics_jsonl import read_last_values
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.sinks.build_sinks import build_sinks
from titan_exp.tracking.sinks.sink import ImageSink, Sink, Value
from titan_exp.tracking.throughput import Throughput
from titan_exp.trainer.experts.load_metrics import ExpertMetrics
from titan_exp.trainer.metric_reduction import MetricReducer
from titan_exp.trainer.profiling.compile_cache import cache_of
from titan_exp.trainer.profiling.compile_report import CompileReport
from titan_exp.trainer.profiling.slow_option_warnings import SpareMemory, saving_options
from titan_exp.trainer.profiling.step_times import OwnTimes, StepTimes
from titan_exp.trainer.profiling.stragglers import ROWS, Stragglers
from titan_exp.trainer.replica_groups.replica_groups import ReplicaGroups
from titan_exp.trainer.train_step import StepResult


class Report:
    """Reduces metrics over the ranks and hands rows to the sinks on rank 0."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        mesh: Mesh,
        reducer: MetricReducer,
        flops_per_token: float,
        *,
        experts: ExpertMetrics,
        first_step: int,
        groups: ReplicaGroups | None = None,
    ) -> None:
        self.folder, self.mesh, self.flops_per_token, self._reducer = folder, mesh, flops_per_token, reducer
        self._experts, self._groups = experts, groups
        self.last_step = first_step
        """The last finished step."""
        self.leader = dist.get_rank() == 0
        """True on the first rank of a group, which knows the whole row."""
        self.last_rows: list[dict[str, Any]] = []
        """Newest rows, which another replica group may have died over; empty before the first."""
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
        self.sinks: list[Sink] = []
        """Open on the first rank, of the group that leads, like the record of experts' load."""
        self._load_log: ExpertLoadLog | None = None
        self._loads: dict[int, Mapping[str, list[int]]] = {}
        """Tokens per expert in the steps of `last_rows`, by layer; written with the rows."""
        if self.leader and groups is None:
            self._open_sinks()

    def step(self, step: int, tokens: int) -> None:
        """Count a finished step."""
        self.last_step = step
        self.throughput.step(tokens)
        self.compilation.after("step", step)
        if self.leader:
            self._beat(step)

    def join_groups(self, step: int) -> None:
        """Begin the step after `step` with the living groups: the oldest writes, and first the row that a leader died
        over."""
        assert self._groups is not None
        self.last_step = step
        self.throughput.devices = dist.get_world_size() * self._groups.size
        if not (self.leader and self._groups.leads):
            return
        if not self.sinks:
            self._open_sinks()
        if self._groups.changed:
            # Another leader may have written the row of this step before it died.
            logged = read_last_values(self.folder.metrics)
            if logged.get("attempt") == self.attempt:
                self._written = int(logged.get("step") or 0)
            record_event(
                self.folder,
                self.attempt,
                event="quorum",
                step=step,
                quorum=self._groups.quorum_id,
                groups=self._groups.numbers,
                joined=self._groups.joined,
            )
        self._write(self.last_rows)

    def _open_sinks(self) -> None:
        self.sinks = build_sinks(self._experiment, self.folder.path, self.folder.path.name, self.attempt)
        if self._experts:
            steps, every = self._experiment.training.last_step, self._experiment.tracking.log_every
            self._load_log = ExpertLoadLog(self.folder.expert_load, self.attempt, steps=steps, log_every=every)

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Write rows of steps that are committed; on the first rank."""
        self.last_rows = rows
        self._loads = {step: self._loads[step] for row in rows if (step := row["step"]) in self._loads}
        self._write(rows)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if self._groups is not None and (not self._groups.leads or row["step"] <= self._written):
                continue  # another group writes the row, or has before it died
            self._written = step = row["step"]
            if self._load_log is not None and step in self._loads:
                self._load_log.log(step, self._loads[step])
            for sink in self.sinks:
                sink.log(row)

    def warn(self, warning: str | None) -> None:
        """Show a warning in `status` and the progress display until it is None."""
        if self.leader and warning != self._warning:
            self._warning = warning
            self._beat(self.last_step, force=True)

    def image(self, name: str, step: int, image: np.ndarray) -> None:
        """Hand an image [height, width, 3] in uint8 to the sinks that take one."""
        for sink in self.sinks:
            if isinstance(sink, ImageSink):
                sink.image(name, step, image)

    def log(
        self,
        step: int,
        tokens: int,
        result: StepResult,
        *,
        lr: float,
        also: Mapping[str, float | int | None],
    ) -> float:
        """Reduce the metrics of a step and write its row; all ranks call it. Returns the mean loss."""
        if "validation_loss" in also:
            self.compilation.after("evaluation", step)
        values, row = self.row(step, tokens, result, lr=lr, also=also)
        if row is not None:
            groups = {} if self._groups is None else self._groups.row()
            experts = self.expert_row(step, values, self.expert_counts())
            self.write([row | experts | groups | {"attempt": self.attempt}])
        return values["loss"]

    def row(
        self, step: int, tokens: int, result: StepResult, *, lr: float, also: Mapping[str, float | int | None] = {}
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Reduce the metrics of a step; all ranks call it. Returns the numbers of the step's sequences, and the row on
        the first rank, without metrics of experts: `expert_row` makes them from these numbers and `expert_counts`."""
        own = dataclasses.astuple(self.times.take())
        reported, rows = self._reducer.reduce(result.metrics, own)
        times = [OwnTimes(*row) for row in rows]
        numbers = {
            "loss": reported.pop("loss"),
            "grad_norm": float(result.grad_norm),
            **{name: float(value) for name, value in result.clipping.items()},
        }
        others = {name: value for name, value in reported.items() if not name.startswith("experts/")}
        if not self.leader:
            return {**numbers, **others}, None
        memory = self.memory.read()
        row = {
            "step": step,
            "tokens": tokens,
            **numbers,
            "lr": lr,
            **self.throughput.read(),
            **memory,
            **self._step_times(step, times),
            **also,
            **others,
        }
        self._spare_memory.check(memory["memory_reserved"])
        self.memory.reset()
        return {**numbers, **reported}, row

    def expert_counts(self) -> dict[str, list[int]]:
        """Tokens per expert of the last step, by layer."""
        return self._experts.counts()

    def expert_row(self, step: int, values: Mapping[str, float], counts: Mapping[str, list[int]]) -> dict[str, Value]:
        """Metrics of experts from the numbers of a step and the tokens of each expert, which go to the record."""
        if not self._experts:
            return {}
        self._loads[step] = counts
        return self._experts.row(counts, values)

    def _step_times(self, step: int, times: Sequence[OwnTimes]) -> dict[str, float]:
        """Seconds of a step over the ranks: with waiting (`step_time`) and without (`own_time`)."""
        for straggler in self._stragglers.find(times):
            get_logger().warning(
                "rank %d is slow, for %d rows up to step %d: %s", straggler.rank, ROWS, step, straggler.reason
            )
        row = {}
        for name, values in (("step_time", [rank.step for rank in times]), ("own_time", [rank.own for rank in times])):
            row |= {f"{name}_max": max(values), f"{name}_median": statistics.median(values)}
        return row

    def close(self, state: str) -> None:
        """Close all sinks with the final state of the run.

        Raises:
            UserError: rows of metrics could not be written, although the run did not fail.
        """
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
        if self._groups is not None and not self._groups.leads:
            return
        try:
            if self.folder.beat(step, force=force, warning=self._warning):
                self._heartbeat_failed = False
        except OSError as error:
            if not self._heartbeat_failed:
                get_logger().error("%s cannot be written (%s)", self.folder.heartbeat, error.strerror or error)
            self._heartbeat_failed = True
