"""Run folders as the launcher leaves them, without a launcher; and what of a run's rows belongs to the experiment."""

from collections.abc import Sequence
from pathlib import Path

from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment, to_yaml
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder

KEYS = ("step", "tokens", "loss", "grad_norm", "lr", "validation_loss")


def committed(path: Path, overrides: Sequence[str]) -> RunFolder:
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.config.write_text(to_yaml(resolve_layout(to_experiment(compose(list(overrides))), 1)))
    return folder


def numbers(folder: RunFolder) -> list[dict]:
    return [{key: row.get(key) for key in KEYS} for row in read_metrics(folder.metrics)]
