"""Benchmark of the scorer of tasks, beside the lm-evaluation-harness on the export of the same model."""

import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.bench import Output, benchmark, environment, option, titan_exp, trained
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.data.tokenizers import build_tokenizer
from titan_exp.extensions.tasks.encoding import encode
from titan_exp.extensions.tasks.scorer import Scorer, scores_of
from titan_exp.extensions.tasks.tasks import read_all
from titan_exp.inference.evaluate import evaluation_experiment, load_model, mesh_of, own_device
from titan_exp.trainer.distributed import joined_process_group

WORDS = ["red", "blue", "green", "tree", "house", "def", "class", "self", "return", "import", "value", "number"]


@dataclass(frozen=True)
class TaskScoresOptions:
    model: str = option("llama_laptop", "option of the group model", smallest="llama_debug")
    items: int = option(300, "items of four choices", smallest=8)
    batch: int = option(8, "sequences of 1,024 tokens of a batch", smallest=4)
    rounds: int = option(3, "times that each scores the task", smallest=1)


@benchmark
def task_scores(options: TaskScoresOptions, out: Output) -> None:
    """Items per second of our scorer, and of lm-eval's hf backend on the exported model, in turn.

    Both read, encode and score the same multiple-choice task in fp32, with the model loaded before; contexts have 5 to
    120 words of bytes. `load` is the time to load the model, and CPU seconds hardly depend on what else runs. lm-eval
    needs its package and transformers, and its lines are left out without.
    """
    heads = {"scorer": "", "load s": ".2f", "items": "d", "s": ".2f", "items/s": ".1f", "CPU s": ".2f", "acc": ".4f"}
    table = out.table(heads)
    with tempfile.TemporaryDirectory() as folder:
        task = _task(Path(folder), options.items)
        run = trained(Path(folder, "runs"), f"model={options.model}", "training.steps=2", "evaluation.every=0")
        with joined_process_group(device := own_device()):
            ours = _Timed("titan_exp", lambda: _ours(run, options.batch, device))
            scorers = [ours, *_theirs(run, Path(folder, "export"), options.batch, out)]
            for _ in range(options.rounds):
                for scorer in scorers:
                    seconds, cpu, accuracy = scorer.score(task)
                    each = options.items, seconds, options.items / seconds, cpu, accuracy
                    table.add(scorer.name, scorer.load_seconds, *each)


class _Timed:
    """Scorer that is loaded, and times what it scores."""

    def __init__(self, name: str, load: Callable[[], Callable[[Path], float]]) -> None:
        began = time.perf_counter()
        self.name, self._score = name, load()
        self.load_seconds = time.perf_counter() - began

    def score(self, task: Path) -> tuple[float, float, float]:
        """Seconds, seconds of all cores, and the accuracy."""
        began, worked = time.perf_counter(), time.process_time()
        accuracy = self._score(task)
        return time.perf_counter() - began, time.process_time() - worked, accuracy


def _theirs(run: Path, export: Path, batch: int, out: Output) -> list[_Timed]:
    if find_spec("lm_eval") is None:
        out.say("lm_eval is not installed: pip install 'titan_exp[lm-eval]'")
        return []
    subprocess.run(titan_exp("convert", str(run), str(export)), check=True, capture_output=True, env=environment())
    return [_Timed("lm-eval, hf", lambda: partial(_lm_eval, _hf(export, batch)))]


def _task(folder: Path, items: int) -> Path:
    draw, file = random.Random(0), folder / "items.jsonl"
    lines = []
    for _ in range(items):
        question = " ".join(draw.choices(WORDS, k=draw.randint(5, 120)))
        lines.append({"q": question[:900], "choices": draw.sample(WORDS, 4), "gold": draw.randrange(4)})
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    values = {
        "task": "bench",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{q}}\nA:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    }
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def _ours(run: Path, batch: int, device: torch.device) -> Callable[[Path], float]:
    words = ["training.seq_len=1024", f"training.micro_batch_size={batch}"]
    source = open_checkpoint(run)
    experiment = evaluation_experiment(run, source, words, True)
    mesh, tokenizer = mesh_of(experiment, device), build_tokenizer(experiment.data)
    scorer = Scorer(load_model(source, experiment, mesh), mesh, experiment)

    def score(task: Path) -> float:
        encoded = [encode(one, tokenizer, experiment.training.seq_len) for one in read_all([str(task)])]
        return scores_of(scorer, encoded)[0].metrics["acc"].value

    return score


def _hf(export: Path, batch: int) -> Any:
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

    return HFLM(pretrained=str(export), batch_size=batch, dtype="float32", device="cpu", max_length=1024)


@torch.no_grad()
def _lm_eval(model: Any, task: Path) -> float:
    from lm_eval import simple_evaluate  # type: ignore[import-not-found]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    manager = TaskManager(include_path=str(task.parent), include_defaults=False)
    found = simple_evaluate(model=model, tasks=["bench"], task_manager=manager, bootstrap_iters=0)
    return found["results"]["bench"]["acc,none"]
