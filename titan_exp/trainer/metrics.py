"""Training report: rows of metrics, heartbeat, throughput and memory."""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.tracking.device_rates import mfu_peak
from titan_exp.tracking.expert_load import ExpertLoadLog
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.memory_stats import PeakMemory
from titan_exp.tracking.progress_tracker import PROGRESS
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
from titan_exp.trainer.row import Numbers, Row, StepResult
from titan_exp.trainer.train_state import TrainState


class Report:
    """Reduces metrics over the ranks and hands rows to the sinks on rank 0."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        state: TrainState,
        *,
        first_step: int,
        writes: bool = True,
    ) -> None:
        mesh, flops_per_token = state.mesh, state.built.flops_per_token
        self.folder, self.mesh, self.flops_per_token = folder, mesh, flops_per_token
        self._experts = ExpertMetrics(state.model.load, state.built.module, state.model.parts)
        self.reducer = MetricReducer(
            state.model.objective,
            state.built.module,
            state.model.parts,
            state.optimizer,
            mesh,
            experts=self._experts,
        )
        self.writes = writes
        """True if this world writes rows and heartbeats."""
        self.last_step = first_step
        """The last finished step."""
        self.leader = dist.get_rank() == 0
        """True on the first rank of a world, which knows the whole row."""
        self.last_rows: list[dict[str, Any]] = []
        """Newest rows, which another world may have died over; empty before the first."""
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
        """Open on the first rank, of the world that writes, like the record of experts' load."""
        self._load_log: ExpertLoadLog | None = None
        self._loads: dict[int, Mapping[str, list[int]]] = {}
        """Tokens per expert in the steps of `last_rows`, by layer; written with the rows."""
        if writes:
            self._open_sinks()

    def begin_step(self) -> None:
        """Begin a step."""
        self.times.begin()
        self.reducer.begin_step()

    def end_step(self, step: int, tokens: int) -> None:
        """Count a finished step."""
        self.times.end()
        self.last_step = step
        self.throughput.step(tokens)
        self.compilation.after("step", step)
        if self.leader:
            self._beat(step)

    def take_over(self, step: int, *, devices: int, writes: bool, changed: bool) -> None:
        """Begin the step after `step` in a run of several writers, whose `devices` share it. One that writes begins
        with the rows that another died over, unless they are written; it was not the writer before if `changed`."""
        self.last_step, self.throughput.devices, self.writes = step, devices, writes
        if not writes:
            return
        if not self.sinks:
            self._open_sinks()
        if changed and self.leader:
            logged = read_last_values(self.folder.metrics)
            if logged.get("attempt") == self.attempt:
                self._written = int(logged.get("step") or 0)
        self._write(self.last_rows)

    def _open_sinks(self) -> None:
        if not self.leader:
            return
        self.sinks = build_sinks(self._experiment, self.folder.path, self.folder.path.name, self.attempt)
        if self._experts:
            steps, every = self._experiment.training.last_step, self._experiment.tracking.log_every
            self._load_log = ExpertLoadLog(self.folder.expert_load, self.attempt, steps=steps, log_every=every)

    def write(self, rows: Sequence[Row], numbers: Numbers) -> None:
        """Write rows of steps that are committed, at least one, the last with further numbers."""
        if rows[-1].row is not None:
            _require_new(numbers, rows[-1].row)
            rows[-1].row |= numbers
        self.last_rows = [row.row for row in rows if row.row is not None]
        self._loads = {step: self._loads[step] for row in self.last_rows if (step := row["step"]) in self._loads}
        self._write(self.last_rows)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if not self.writes or row["step"] <= self._written:
                continue  # another world writes the row, or has before it died
            self._written = step = row["step"]
            if self._load_log is not None and step in self._loads:
                self._load_log.log(step, self._loads[step])
            for sink in self.sinks:
                sink.log(row)

    @contextmanager
    def pause(self, activity: str) -> Iterator[None]:
        """Leave the `with` block out of training's throughput, and tell the watchdog what it is."""
        with PROGRESS.phase(f"the {activity}"), self.throughput.pause(activity):
            yield

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

    def row(
        self, step: int, tokens: int, result: StepResult, *, lr: float, also: Numbers = MappingProxyType({})
    ) -> Row:
        """Reduce the metrics of a step to its row; all ranks call it."""
        found = self.share(step, tokens, result, lr=lr, also=also)
        if found.row is not None:
            found.row |= {**self.expert_row(step, found.values, self.expert_counts()), "attempt": self.attempt}
        return found

    def share(
        self, step: int, tokens: int, result: StepResult, *, lr: float, also: Numbers = MappingProxyType({})
    ) -> Row:
        """Reduce the metrics of a step of this world's sequences, without those of experts, which `expert_row` makes
        from its values and `expert_counts`; all ranks call it."""
        own = dataclasses.astuple(self.times.take())
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
        return Row({**numbers, **reported}, row)

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
        if not self.writes:
            return
        try:
            if self.folder.beat(step, force=force, warning=self._warning):
                self._heartbeat_failed = False
        except OSError as error:
            if not self._heartbeat_failed:
                get_logger().error("%s cannot be written (%s)", self.folder.heartbeat, error.strerror or error)
            self._heartbeat_failed = True


def _require_new(numbers: Numbers, row: Mapping[str, Any]) -> None:
    """Refuse numbers of a part that stand in the row already."""
    if taken := sorted(numbers.keys() & row.keys()):
        label, _, name = taken[0].partition("/")
        raise UserError(f"training.parts.{label}: rows have {taken[0]} already. Return {name} by another name.")
