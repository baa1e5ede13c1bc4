"""Study benchmark: planning, memory gate and commit; `titan-exp status` on a thousand run folders.

`python benchmarks/sweep.py` prints seconds, all measured in this run, with versions and the machine's load. Submission
to a scheduler is not included. `--folders 100` uses fewer run folders.
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from titan_exp.config.extension import CONF_DIR, CONFIG_NAME
from titan_exp.config.hydra.compose import HYDRA_VERSION, default_overrides, register_resolvers
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.config.study.points import study_points
from titan_exp.config.study.study_file import read_study
from titan_exp.launch.provenance.provenance import read_provenance
from titan_exp.launch.run_plan import create_run_folder, plan_run
from titan_exp.launch.state.run_lookup import find_runs
from titan_exp.launch.state.run_status import status_rows
from titan_exp.launch.sweep.sweep_plan import SweepPlan, plan_sweep, predict_sweep_memory
from titan_exp.launch.sweep.sweeper import FastCompose
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

STUDY = """\
question: How long does this take?
held_fixed: [model=llama_debug, cluster.device=cpu, "paths.runs={runs}"]
axes:
  - grid: {{optimizer.lr: [{rates}], optimizer.weight_decay: [{decays}], lr_schedule: [{schedules}]}}
"""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--folders", type=int, default=1000)
    folders = arguments.parse_args().folders
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", end="; "
    )
    print(f"Python {platform.python_version()}, hydra {metadata.version('hydra-core')}")
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, 16, 256):
            time_planning(Path(folder), count)
        time_status(Path(folder) / "many", folders)


def time_planning(folder: Path, count: int) -> None:
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
        with timed(f"{count:4d} points: plan"):
            made = planned(file, composer)
        assert len(made.planned) == count
        with timed(f"{count:4d} points: memory"):
            made = predict_sweep_memory(made, print, skip=True)
        assert len(made.planned) == count
        with timed(f"{count:4d} points: commit"):
            scene = read_provenance()
            for one in made.planned:
                create_run_folder(one.plan, scene)


def planned(file: Path, composer: FastCompose) -> SweepPlan:
    """Run the sweeper on a study."""
    points = study_points(read_study(file), "")
    return plan_sweep(points, lambda point: to_experiment(composer(point.overrides)), skip=True)


def time_status(runs: Path, count: int) -> None:
    """Read run folders with a thousand metric rows each."""
    from titan_exp.config.hydra.compose import compose

    experiment = to_experiment(compose([f"paths.runs={runs}", "cluster.device=cpu", "model=llama_debug"]))
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
    with timed(f"{count:4d} run folders: status"):
        assert len(status_rows(find_runs([], runs))) == count


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long the block takes."""
    before = time.perf_counter()
    yield
    print(f"{what:28s} {time.perf_counter() - before:7.2f} s")


if __name__ == "__main__":
    main()
