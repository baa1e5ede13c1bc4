"""Sweep: plans and checks every point, then submits the runs to their executors.

Finished runs are not repeated, so the same command continues an interrupted sweep.
"""

import contextlib
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titan_exp.config.command_line.output import answer
from titan_exp.config.devices import device_type
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.study.points import Point, require_swept_once, values_of
from titan_exp.launch.executor import Executor, Submission, SubmitOptions, executor_for, worst_exit_code
from titan_exp.launch.memory_gate import request_lines
from titan_exp.launch.provenance import report_stale
from titan_exp.launch.run_console import RunConsole
from titan_exp.launch.run_plan import RunPlan
from titan_exp.launch.run_status import run_statuses
from titan_exp.launch.sweep import sweep_table
from titan_exp.launch.sweep.rounds import Finished, Rounds
from titan_exp.launch.sweep.shipped_study import StudySweep, cancel_runs
from titan_exp.launch.sweep.sweep_args import SweepOptions
from titan_exp.launch.sweep.sweep_plan import SweepPlan, plan_sweep, predict_sweep_memory

Compose = Callable[[list[str]], DictConfig]
NOTHING = "(nothing swept)"  # label of the only point of a sweep without a list
WATCH_INTERVAL = 15.0  # seconds between looks at the running pairs of a question


class FastCompose:
    """Composition of overrides with a cache, equivalent to `compose`."""

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
        cfg: DictConfig = pickle.loads(self._composed[chosen])  # trusted bytes, five times as fast as deepcopy
        for override in later:
            try:
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
            except OmegaConfBaseException:
                return self._compose_again(overrides, (*chosen, str(override.input_line)))
        return cfg

    def _compose_again(self, overrides: Sequence[str], cause: tuple[str, ...]) -> DictConfig:
        """Compose overrides again after a failure, for Hydra's better message, but only once for each cause."""
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
    pairs = itertools.product((override.key_or_group for override in later), set_first)
    return any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for key, other in pairs)


def points(overrides: Sequence[Override]) -> list[Point]:
    """Cartesian product of the swept values, the last key varying fastest, with the other overrides in order. Raises
    UserError about an interval, or about a key that is swept and also set."""
    require_swept_once(overrides)
    choices = [[(text, override.is_sweep_override()) for text in values_of(override)] for override in overrides]
    found = []
    for combination in itertools.product(*choices):
        swept = " ".join(text for text, is_swept in combination if is_swept)
        found.append(Point(tuple(text for text, _ in combination), swept or NOTHING))
    return found


def sweep(
    points: Sequence[Point],
    compose: Callable[[Point], Experiment],
    options: SweepOptions | None = None,
    *,
    study: StudySweep | None = None,
) -> int:
    """Run every point, round by round, and print the outcomes, or print the plan; returns the exit code.

    A study has its own points, and is recorded before any run starts. Once all runs of a round are done, the next round
    follows; an executor that does not wait gets one. The exit code is 0 if all runs are done or submitted, or the
    question is answered; else 130 after Ctrl-C, 1 if any failed, 85 if any stopped. Raises one UserError, before any
    start of a round, that lists all points that cannot run.
    """
    with contextlib.ExitStack() as held:
        rounds = Rounds(points) if study is None else study.rounds
        return _Sweep(rounds, compose, options or SweepOptions(), study, held).run()


class _Sweep:
    """Sweep in progress; `held` holds the study lock from the first run on this machine until the end."""

    def __init__(
        self,
        rounds: Rounds,
        compose: Callable[[Point], Experiment],
        options: SweepOptions,
        study: StudySweep | None,
        held: contextlib.ExitStack,
    ) -> None:
        self.rounds, self.compose, self.options, self.study, self.held = rounds, compose, options, study, held
        self.console, self.skip = RunConsole(), options.skip or study is not None
        self.where = "of the sweep" if study is None else f"of {study.study.path}"
        self.whole, self.finished = SweepPlan(), list[Finished]()
        self.found: dict[Path, Submission] = {}
        self.started = self.locked = False
        self.dropped, self.cancelled = "", set[Path]()

    def run(self) -> int:
        """Run all rounds; returns the exit code."""
        rounds, options = self.rounds, self.options
        values: dict[Path, float] = {}
        if [point.label for point in rounds.first] == [NOTHING]:
            remedy = "List several values, such as optimizer.lr=1e-3,3e-3, or leave -m out."
            self.console.echo(f"-m sweeps nothing here, so this is one run. {remedy}")
        while points := rounds.points(self.finished):
            if self.started and self.study is not None and self.study.stop_requested():
                break
            plan = plan_sweep(points, self.compose, skip=self.skip, where=self.where)
            rounds.check(plan)
            if self.study is not None:
                self.study.plan(self.whole + plan)  # study errors are raised before results and slow predictions
            values = rounds.values(plan)
            self.found |= {entry.path: _known(entry.plan) for entry in plan.planned if entry.path in values}
            if len(values) < len(plan.planned):
                self.dropped = rounds.hopeless(self.whole + plan)
            if len(values) < len(plan.planned) and not self.dropped:
                if not options.dry_run:
                    self._require(plan, values)
                plan = predict_sweep_memory(plan, self.console.echo, skip=self.skip, where=self.where)
                rounds.check(plan)
                if options.dry_run:
                    return self._show(self.whole + plan, rounds.upcoming(plan, self.finished))
                self._start(plan, values)
                values = rounds.values(plan)
            self.whole += plan
            if not rounds.metric or len(values) < len(plan.planned):
                break
            self.finished.append(Finished(plan, values))
            self.dropped = ""  # the last run ended before it was cancelled
            if self.started and self.study is not None:
                self.study.enter(self.whole, "", self.console.echo)
            if not options.dry_run:
                self.console.echo(f"\n{rounds.result(self.finished[-1])}")
        if options.dry_run:
            return self._show(self.whole, list(filter(None, [rounds.conclusion(self.whole, self.dropped)])))
        return self._end()

    def _end(self) -> int:
        rounds = self.rounds
        for path, submission in self.found.items():  # of another launcher, and may have ended since
            state = submission.plan.folder.read_state() if submission.outcome in ("queued", "running") else None
            if state is not None and state.state in ("done", "failed"):
                self.found[path] = _known(submission.plan)
        if not self.started or self.dropped:
            self._record(self.whole)
            self._cancel(self.whole)
        last = SweepPlan(tuple(entry for entry in self.whole.planned if entry.point.round > len(self.finished)), (), ())
        conclusion = rounds.conclusion(self.whole, self.dropped)
        later = rounds.upcoming(last, self.finished) if last.planned and not conclusion else []
        sweep_table.show_outcomes(self.whole, self.found, self.study, later, conclusion)
        code = 0 if conclusion else worst_exit_code(list(self.found.values()))
        if self.options.json:
            answered = {"conclusion": conclusion, "standing": rounds.standing(self.whole, self.dropped)}
            answer(
                sweep_table.outcome_document(self.whole, self.found, self.study, upcoming=later, code=code, **answered)
            )
        return code

    def _show(self, plan: SweepPlan, upcoming: Sequence[str]) -> int:
        if self.study is not None:
            self.study.plan(plan)
        table, lines = self.rounds.cost(plan)
        sweep_table.show_plan(plan, self.study, [*upcoming, *lines], table)
        if self.options.json:
            answer(sweep_table.plan_document(plan, self.study, [*upcoming, *lines]))
        return 0

    def _record(self, plan: SweepPlan) -> None:
        """Write the study record and the ledger, and prune once."""
        if self.study is None:
            return
        self.study.plan(plan, self.dropped)
        self.study.record(plan, self.console.echo)
        self.study.enter(plan, self.dropped, self.console.echo)
        if self.options.prune and not self.started:
            self.study.prune(self.console.echo, ask=not self.options.yes)
        self.started = True

    def _require(self, plan: SweepPlan, values: Mapping[Path, float]) -> None:
        """Raise UserError if runs cannot be submitted from here, before anything is predicted or written."""
        for kind, plans in _by_kind(plan, values).items():
            executor_for(kind).require(plans)

    def _start(self, plan: SweepPlan, values: Mapping[Path, float]) -> None:
        """Submit the runs of a round that have no value yet, executors that wait last. The study is recorded before."""
        by_kind = _by_kind(plan, values)
        executors = sorted(map(executor_for, by_kind), key=lambda executor: executor.waits)
        self._record(self.whole + plan)
        entries = [entry for entry in plan.planned if entry.path not in values]
        report_stale([entry.plan for entry in entries], self.console.echo)
        for line in sweep_table.remarks_on(entry.plan for entry in entries):
            self.console.echo(line)
        titles = {entry.path: entry.point.label for entry in entries}
        for executor in executors:
            with self._watched(self.whole + plan) if executor.waits else contextlib.nullcontext():
                self._submit(executor, by_kind[executor.kind], titles)

    def _submit(self, executor: Executor, plans: Sequence[RunPlan], titles: Mapping[Path, str]) -> None:
        on_cpu = all(device_type(plan.experiment.cluster) == "cpu" for plan in plans)
        if executor.waits and self.options.jobs > 1 and not on_cpu:
            self.console.echo("Every run may use all GPUs, so the runs go one after another.")
        submit_options = SubmitOptions(
            echo=self.console.echo,
            title=lambda plan: titles[plan.folder.path],
            jobs=self.options.jobs if on_cpu else 1,
            stop_requested=lambda: bool(self.dropped) or (self.study is not None and self.study.stop_requested()),
        )
        if executor.waits and self.study is not None and not self.locked:
            self.held.enter_context(self.study.lock())
            self.locked = True
        submissions = executor.submit(plans, submit_options)
        self.found |= {submission.plan.folder.path: submission for submission in submissions}
        for line in request_lines([each.plan for each in submissions if each.outcome == "submitted"]):
            self.console.echo(line)

    @contextlib.contextmanager
    def _watched(self, plan: SweepPlan) -> Iterator[None]:
        """Watch the runs of a question during the block, and cancel them once it needs no more of them."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(WATCH_INTERVAL):
                with contextlib.suppress(UserError, OSError):  # a file that is being written
                    self.dropped = self.dropped or self.rounds.hopeless(plan)
                    self._cancel(plan)

        if self.rounds.registration is None:
            yield
            return
        thread = threading.Thread(target=watch, name="looks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _cancel(self, plan: SweepPlan) -> None:
        """Cancel the queued and running runs of a question that was dropped, each once."""
        entries = [entry for entry in plan.planned if self.dropped and entry.path not in self.cancelled]
        states = run_statuses([entry.plan.folder for entry in entries])
        active = [entry for entry in entries if states[entry.path].active]
        self.cancelled |= {entry.path for entry in active}
        labels = {entry.plan.run_id: entry.point.label for entry in active}
        reason = "the question needs no more of it"
        cancel_runs([entry.plan.folder for entry in active], labels, self.console.echo, reason)


def _by_kind(plan: SweepPlan, values: Mapping[Path, float]) -> dict[str, list[RunPlan]]:
    by_kind: dict[str, list[RunPlan]] = {}
    for entry in plan.planned:
        if entry.path not in values:
            by_kind.setdefault(entry.plan.experiment.cluster.kind, []).append(entry.plan)
    return by_kind


def _known(plan: RunPlan) -> Submission:
    """Result of a run that has already ended: it is done, or it diverged and would diverge again."""
    state = plan.folder.read_state()
    if state is not None and state.state == "failed":
        return Submission(plan, "failed", reason=state.reason, exit_code=1)
    return Submission(plan, "done")
