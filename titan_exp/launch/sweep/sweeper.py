"""Sweep: plans and checks every point, then submits the runs to their executors.

Finished runs are not repeated, so the same command continues an interrupted sweep.
"""

import contextlib
import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.machine.devices import device_type
from titan_exp.config.study.points import Point, require_swept_once, values_of
from titan_exp.launch.executor import Executor, Submission, SubmitOptions, executor_for, worst_exit_code
from titan_exp.launch.provenance.changes import report_stale
from titan_exp.launch.run_console import RunConsole
from titan_exp.launch.run_plan import RunPlan
from titan_exp.launch.sweep.rounds import Finished, Rounds
from titan_exp.launch.sweep.shipped_study import StudySweep
from titan_exp.launch.sweep.sweep_args import SweepOptions
from titan_exp.launch.sweep.sweep_plan import PlannedPoint, SweepPlan, plan_sweep, predict_sweep_memory
from titan_exp.launch.sweep.sweep_table import remarks_on, show_outcomes, show_plan

Compose = Callable[[list[str]], DictConfig]


class FastCompose:
    """Caching equivalent of `compose`."""

    def __init__(self, compose: Compose, parser: OverridesParser) -> None:
        self._compose, self._parser = compose, parser
        self._composed: dict[tuple[str, ...], bytes] = {}
        self._parsed: dict[str, Override] = {}
        self._failures: dict[tuple[str, ...], HydraException] = {}

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """Compose overrides. Raises HydraException if a key or option does not exist."""
        parsed = [self._parse(text) for text in overrides]
        later = [override for override in parsed if _is_plain_value(override)]
        first = [override for override in parsed if not _is_plain_value(override)]
        if _overlap(first, later):
            return self._compose(list(overrides))
        chosen = tuple(str(override.input_line) for override in first)
        if chosen not in self._composed:
            self._composed[chosen] = pickle.dumps(self._compose(list(chosen)))
        cfg: DictConfig = pickle.loads(self._composed[chosen])  # trusted bytes; five times as fast as deepcopy
        for override in later:
            try:
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
            except OmegaConfBaseException:
                return self._compose_again(overrides, (*chosen, str(override.input_line)))
        return cfg

    def _compose_again(self, overrides: Sequence[str], cause: tuple[str, ...]) -> DictConfig:
        """Compose overrides of which one fails, with Hydra's better message; once for all points of the same cause."""
        if cause in self._failures:
            raise self._failures[cause]
        try:
            return self._compose(list(overrides))
        except HydraException as error:
            self._failures[cause] = error
            raise

    def _parse(self, text: str) -> Override:
        if text not in self._parsed:
            self._parsed[text] = self._parser.parse_override(text)
        return self._parsed[text]


def _is_plain_value(override: Override) -> bool:
    """True if an override sets one key to one value, such as `optimizer.lr=1e-3`."""
    key = override.key_or_group
    changes = override.is_add() or override.is_force_add() or override.is_delete() or override.is_hydra_override()
    return not changes and override.package is None and "." in key and not isinstance(override.value(), dict)


def _overlap(first: Sequence[Override], later: Sequence[Override]) -> bool:
    """True if both kinds set the same key, so that their order could matter."""
    set_first = {override.key_or_group for override in first if "." in override.key_or_group}
    set_first |= {override.key_or_group for override in first if isinstance(override.value(), dict)}
    return any(
        key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
        for key in (override.key_or_group for override in later)
        for other in set_first
    )


def points(overrides: Sequence[Override]) -> list[Point]:
    """Cartesian product of the swept values, the last key varying fastest; the other overrides are in each point, in
    their order, as `train` applies them. Raises UserError about an interval, and a key that is swept and set again."""
    require_swept_once(overrides)
    choices = [[(text, override.is_sweep_override()) for text in values_of(override)] for override in overrides]
    found = []
    for combination in itertools.product(*choices):
        swept = " ".join(text for text, is_swept in combination if is_swept)
        found.append(Point(tuple(text for text, _ in combination), swept or "(nothing swept)"))
    return found


def sweep(
    points: Sequence[Point],
    compose: Callable[[Point], Experiment],
    options: SweepOptions | None = None,
    *,
    study: StudySweep | None = None,
) -> int:
    """Run every point, round by round, and print the outcomes, or print the plan; returns the exit code.

    A study has its own points. Its record is written before any run starts. A round whose runs are all done is followed
    by the next one; an executor that does not wait gets one round. The exit code is 0 if all runs are done or
    submitted, 130 after Ctrl-C, 1 if any failed, 85 if any stopped. Raises one UserError, before any start of a round,
    that lists all points that cannot run.
    """
    with contextlib.ExitStack() as held:
        return _Sweep(compose, options or SweepOptions(), study, held).run(points)


class _Sweep:
    """Sweep in progress; `held` holds the study lock from the first run on this machine to the end."""

    def __init__(
        self,
        compose: Callable[[Point], Experiment],
        options: SweepOptions,
        study: StudySweep | None,
        held: contextlib.ExitStack,
    ) -> None:
        self.compose, self.options, self.study, self.held = compose, options, study, held
        self.console, self.skip = RunConsole(), options.skip or study is not None
        self.where = "of the sweep" if study is None else f"of {study.study.path}"
        self.whole, self.finished = SweepPlan((), (), ()), list[Finished]()
        self.found: dict[Path, Submission] = {}
        self.started = self.locked = False

    def run(self, points: Sequence[Point]) -> int:
        """Run all rounds; returns the exit code."""
        rounds, options = Rounds(points) if self.study is None else self.study.rounds, self.options
        values: dict[Path, float] = {}
        while points := rounds.points(self.finished):
            if self.started and self.study is not None and self.study.stop_requested():
                break
            plan = plan_sweep(points, self.compose, skip=self.skip, where=self.where)
            rounds.check(plan)
            values = rounds.values(plan)
            self.found |= {entry.plan.folder.path: _known(entry.plan) for entry in _with_value(plan, values)}
            if len(values) < len(plan.planned):
                plan = self._predicted(plan)
                if options.dry_run:
                    self._show(self.whole + plan, rounds.upcoming(plan, self.finished))
                    return 0
                self._start(plan, values)
                values = rounds.values(plan)
            self.whole += plan
            if not rounds.metric or len(values) < len(plan.planned):
                break
            self.finished.append(Finished(plan, values))
            if not options.dry_run:
                self.console.echo(f"\n{rounds.result(self.finished[-1])}")
        if options.dry_run:
            self._show(self.whole, [])
            return 0
        if not self.started:
            self._record(self.whole)
        last = SweepPlan(tuple(entry for entry in self.whole.planned if entry.point.round > len(self.finished)), (), ())
        show_outcomes(self.whole, self.found, self.study, rounds.upcoming(last, self.finished) if last.planned else [])
        return worst_exit_code(list(self.found.values()))

    def _predicted(self, plan: SweepPlan) -> SweepPlan:
        """Plan with predicted memory, without the points that do not fit."""
        if self.study is not None:
            self.study.plan(self.whole + plan)  # study errors are raised before slow predictions
        return predict_sweep_memory(plan, self.console.echo, skip=self.skip, where=self.where)

    def _show(self, plan: SweepPlan, upcoming: Sequence[str]) -> None:
        if self.study is not None:
            self.study.plan(plan)
        show_plan(plan, self.study, upcoming)

    def _record(self, plan: SweepPlan) -> None:
        """Write the study record, and prune once."""
        if self.study is None:
            return
        self.study.plan(plan)
        self.study.record(plan, self.console.echo)
        if self.options.prune and not self.started:
            self.study.prune(self.console.echo, ask=not self.options.yes)
        self.started = True

    def _start(self, plan: SweepPlan, values: Mapping[Path, float]) -> None:
        """Submit the runs of a round that have no value yet, executors that wait last. The study is recorded before,
        once they can be submitted from here."""
        entries = [entry for entry in plan.planned if entry.plan.folder.path not in values]
        by_kind: dict[str, list[RunPlan]] = {}
        for entry in entries:
            by_kind.setdefault(entry.plan.experiment.cluster.kind, []).append(entry.plan)
        executors = sorted(map(executor_for, by_kind), key=lambda executor: executor.waits)
        for executor in executors:
            executor.require(by_kind[executor.kind])
        self._record(self.whole + plan)
        report_stale([entry.plan for entry in entries], self.console.echo)
        for line in remarks_on(entry.plan for entry in entries):
            self.console.echo(line)
        titles = {entry.plan.folder.path: entry.point.label for entry in entries}
        for executor in executors:
            self._submit(executor, by_kind[executor.kind], titles)

    def _submit(self, executor: Executor, plans: Sequence[RunPlan], titles: Mapping[Path, str]) -> None:
        on_cpu = all(device_type(plan.experiment.cluster) == "cpu" for plan in plans)
        if executor.waits and self.options.jobs > 1 and not on_cpu:
            self.console.echo("On GPUs every run may use all of them, so runs go one after another.")
        submit_options = SubmitOptions(
            echo=self.console.echo,
            title=lambda plan: titles[plan.folder.path],
            jobs=self.options.jobs if on_cpu else 1,
            stop_requested=(lambda: False) if self.study is None else self.study.stop_requested,
        )
        if executor.waits and self.study is not None and not self.locked:
            self.held.enter_context(self.study.lock())
            self.locked = True
        for submission in executor.submit(plans, submit_options):
            self.found[submission.plan.folder.path] = submission


def _with_value(plan: SweepPlan, values: Mapping[Path, float]) -> list[PlannedPoint]:
    return [entry for entry in plan.planned if entry.plan.folder.path in values]


def _known(plan: RunPlan) -> Submission:
    """Result of a run that ended before: done, or diverged, which would repeat itself."""
    state = plan.folder.read_state()
    if state is not None and state.state == "failed":
        return Submission(plan, "failed", reason=state.reason, exit_code=1)
    return Submission(plan, "done")
