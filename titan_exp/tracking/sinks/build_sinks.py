"""Build the metric sinks of a run from its configuration."""

from pathlib import Path

from titan_exp.config.groups.experiment import Experiment
from titan_exp.tracking.run_folder.metrics_jsonl import JsonlSink
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.sinks.best_effort import BestEffortSink
from titan_exp.tracking.sinks.sink import Sink
from titan_exp.tracking.sinks.tensorboard import TensorBoardSink


def build_sinks(experiment: Experiment, folder_path: Path, run_id: str, attempt: int) -> list[Sink]:
    """Sinks of rank 0, metrics.jsonl first; the others are best-effort. `attempt` starts at 1."""
    folder = RunFolder(folder_path)
    sinks: list[Sink] = [JsonlSink(folder.metrics, attempt)]
    if experiment.tracking.tensorboard:
        sinks.append(
            BestEffortSink("TensorBoard", "tracking.tensorboard", lambda: TensorBoardSink(folder.path / "tensorboard"))
        )
    if experiment.tracking.wandb:
        from titan_exp.tracking.sinks.wandb_run import describe_wandb_run
        from titan_exp.tracking.sinks.wandb_sink import WandbSink

        def start() -> Sink:
            return WandbSink(describe_wandb_run(experiment, folder, run_id), folder.path, folder.metrics)

        sinks.append(BestEffortSink("W&B", "tracking.wandb", start))
    return sinks
