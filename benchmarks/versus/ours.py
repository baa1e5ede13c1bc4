"""Our side: a rank process of ours, with a clock around its training step."""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.versus.clock import Clock
from benchmarks.versus.job import Job
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer import rank_main
from titan_exp.trainer import trainer as trainer_module


def ours(job: Job, cache: Path) -> dict[str, Any]:
    """Train as a launched rank does; returns the clock's result. What it compiles or tunes stays in the cache."""
    run, clock = job.experiment(), Clock(job.warmup)
    train_step = trainer_module.train_step

    def timed(*args: Any, **kwargs: Any) -> Any:
        clock.begin_step()
        result = train_step(*args, **kwargs)
        clock.end_step(result.metrics["loss"])
        return result

    trainer_module.train_step = timed
    # The place of a run folder: caches lie two levels above it.
    runs = cache / "runs" / run.experiment.name
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs) as path:
        folder = RunFolder(path)
        folder.config.write_text(to_yaml(run))
        folder.add_attempt(world_size=1, hosts=["localhost"])
        rank_main.main(path)
    return clock.result(run.training.global_batch_size * run.training.seq_len)
