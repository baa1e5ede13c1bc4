"""Study benchmarks: planning and starting many runs, their status, and their comparison."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from benchmarks.bench import Output, Table, benchmark, composed, option, seconds_of, trained
from titan_exp.compare.comparison import compare
from titan_exp.compare.output.pages import to_html
from titan_exp.compare.runs import select
from titan_exp.config.extension import CONF_DIR, CONFIG_NAME
from titan_exp.config.hydra.compose import HYDRA_VERSION, default_overrides, register_resolvers
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.config.study.points import study_points
from titan_exp.config.study.study_file import read_study
from titan_exp.launch.provenance import read_provenance
from titan_exp.launch.run_lookup import find_runs
from titan_exp.launch.run_plan import create_run_folder, plan_run
from titan_exp.launch.run_status import status_rows
from titan_exp.launch.sweep.sweep_plan import SweepPlan, plan_sweep, predict_sweep_memory
from titan_exp.launch.sweep.sweeper import FastCompose
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

SEEDS = 4
STUDY = """\
question: How long does this take?
held_fixed: [model=llama_debug, cluster.device=cpu, "paths.runs={runs}"]
axes:
  - grid: {{optimizer.lr: [{rates}], optimizer.weight_decay: [{decays}], lr_schedule: [{schedules}]}}
"""


@dataclass(frozen=True)
class StudyOptions:
    points: tuple[int, ...] = option((1, 16, 256), "points of studies", smallest=(1, 4))
    folders: int = option(1000, "run folders whose status is read", smallest=4)


@benchmark
def studies(options: StudyOptions, out: Output) -> None:
    """Planning, memory gate and commit of a study's points; `titan-exp status` on a thousand run folders.

    Submission to a scheduler is not included.
    """
    table = out.table({"work": "", "s": ".2f"})
    with tempfile.TemporaryDirectory() as folder:
        for count in options.points:
            time_planning(table, Path(folder), count)
        time_status(table, Path(folder) / "many", options.folders)


def time_planning(table: Table, folder: Path, count: int) -> None:
    """Compose, check and name the points of a study; then write their run folders."""
    file = folder / f"points_{count}.yaml"
    schedules = ["wsd", "cosine", "linear", "constant"][: min(4, count)]
    side = int((count // len(schedules)) ** 0.5)
    rates = ", ".join(f"{index + 1}e-4" for index in range(side))
    decays = ", ".join(f"0.{index + 1:02d}" for index in range(side))
    runs = folder / f"runs_{count}"
    file.write_text(STUDY.format(rates=rates, decays=decays, schedules=", ".join(schedules), runs=runs))
    register_resolvers()
    with initialize_config_dir(str(CONF_DIR), **HYDRA_VERSION):
        composer = FastCompose(
            lambda overrides: hydra_compose(CONFIG_NAME, [*default_overrides(), *overrides]), OverridesParser.create()
        )
        with timed(table, f"{count:,} points: plan"):
            made = planned(file, composer)
        assert len(made.planned) == count
        with timed(table, f"{count:,} points: memory"):
            made = predict_sweep_memory(made, print, skip=True)
        assert len(made.planned) == count
        with timed(table, f"{count:,} points: commit"):
            scene = read_provenance()
            for one in made.planned:
                create_run_folder(one.plan, scene)


def planned(file: Path, composer: FastCompose) -> SweepPlan:
    """Run the sweeper on a study."""
    points = study_points(read_study(file), "")
    return plan_sweep(points, lambda point: to_experiment(composer(point.overrides)), skip=True)


def time_status(table: Table, runs: Path, count: int) -> None:
    """Read run folders with a thousand metric rows each."""
    experiment = composed(f"paths.runs={runs}", "cluster.device=cpu", "model=llama_debug")
    row = '{{"step": {}, "tokens": 4096, "loss": 2.5, "grad_norm": 0.5, "tokens_per_second": 10000.0, "attempt": 1}}\n'
    rows = "".join(row.format(step + 1) for step in range(1000))
    scene = read_provenance()
    for seed in range(count):
        seeded = replace(experiment, experiment=replace(experiment.experiment, seed=seed))
        made = plan_run(seeded)
        create_run_folder(made, scene)
        folder: RunFolder = made.folder
        attempt = folder.add_attempt(world_size=1, hosts=["here"]).attempt
        state = "done" if seed % 2 else "failed"
        folder.write_state(RunState(state, 1000, time.time(), attempt, None if seed % 2 else "out of luck"))
        folder.metrics.write_text(rows)
    with timed(table, f"{count:,} run folders: status"):
        assert len(status_rows(find_runs([], runs))) == count


@contextmanager
def timed(table: Table, name: str) -> Iterator[None]:
    """Add the time of the block to the table."""
    before = time.perf_counter()
    yield
    table.add(name, time.perf_counter() - before)


@dataclass(frozen=True)
class ComparisonOptions:
    runs: int = option(1000, "run folders", smallest=8)


@benchmark
def comparison(options: ComparisonOptions, out: Output) -> None:
    """Reading, comparing and drawing many run folders, as `titan-exp compare` does.

    The folders are copies of one real run of 50 steps with other seeds and learning rates; each is the best of three,
    in this process.
    """
    with tempfile.TemporaryDirectory() as place:
        runs = Path(place)
        copies(trained(runs, "+experiment=smoke", "training.steps=50", "checkpoint=none"), runs / "many", options.runs)
        reading, selection = best(lambda: select(["many"], runs))
        comparing, found = best(lambda: compare(selection))
        drawing, page = best(lambda: to_html(found))
    form = {"read, s": ".2f", "compare, s": ".2f", "page, s": ".2f", "page, MiB": ".1f"}
    table = out.table({"runs of 50 rows": ",", "rows": ","} | form, f"Rows of {SEEDS} seeds")
    table.add(options.runs, len(found.rows), reading, comparing, drawing, len(page) / 2**20)


def copies(model: Path, folder: Path, count: int) -> None:
    """Write copies of a run folder."""
    config = yaml.safe_load((model / "config.yaml").read_text())
    code = json.loads((model / "code.json").read_text())
    small = ("env.json", "state.json", "attempts.jsonl", "metrics.jsonl", "overrides.yaml")
    texts = {name: (model / name).read_text() for name in small}
    for number in range(count):
        config["experiment"]["seed"], config["optimizer"]["lr"] = number % SEEDS, 1e-4 * (1 + number // SEEDS)
        run = folder / f"{number:012x}"
        run.mkdir(parents=True)
        texts["config.yaml"] = yaml.safe_dump(config, sort_keys=False)
        texts["code.json"] = json.dumps({**code, "run_id": run.name, "experiment_id": run.name})
        for name, text in texts.items():
            (run / name).write_text(text)


def best(work: Callable[[], Any]) -> tuple[float, Any]:
    """Fewest seconds of three calls, and the last result."""
    results: list[Any] = []
    times = [seconds_of(lambda: results.append(work())) for _ in range(3)]
    return min(times), results[-1]
