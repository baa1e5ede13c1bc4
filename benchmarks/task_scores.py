"""Benchmark of the scorer of tasks, beside the lm-evaluation-harness on the export of the same model."""

import json
import random
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.bench import Output, benchmark, environment, option, seconds_of, titan_exp, trained

WORDS = ["red", "blue", "green", "tree", "house", "def", "class", "self", "return", "import", "value", "number"]


@dataclass(frozen=True)
class TaskScoresOptions:
    model: str = option("llama_laptop", "option of the group model", smallest="llama_debug")
    items: int = option(300, "items of four choices", smallest=8)
    batch: int = option(8, "sequences of a batch of lm-eval", smallest=4)


@benchmark
def task_scores(options: TaskScoresOptions, out: Output) -> None:
    """Items per second of `titan-exp evaluate --tasks`, and of lm-eval's hf backend on the exported model.

    Both score the same multiple-choice task in fp32 after the model is loaded; contexts have 5 to 120 words of bytes.
    lm-eval needs its package and transformers, and its line is left out without.
    """
    table = out.table({"scorer": "", "items": "d", "s": ".2f", "items/s": ".1f", "acc": ".4f"})
    with tempfile.TemporaryDirectory() as folder:
        task = _task(Path(folder), options.items)
        run = trained(Path(folder, "runs"), f"model={options.model}", "training.steps=2", "evaluation.every=0")
        ours: dict[str, Any] = {}
        seconds = seconds_of(lambda: ours.update(_ours(run, task, options.batch)))
        table.add("titan_exp", options.items, seconds, options.items / seconds, ours["acc"])
        if find_spec("lm_eval") is None:
            out.say("lm_eval is not installed: pip install 'titan_exp[lm-eval]'")
            return
        export = Path(folder, "export")
        subprocess.run(titan_exp("convert", str(run), str(export)), check=True, capture_output=True, env=environment())
        theirs: dict[str, Any] = {}
        model = _hf(export, options.batch)
        seconds = seconds_of(lambda: theirs.update(_lm_eval(model, task)))
        table.add("lm-eval, hf", options.items, seconds, options.items / seconds, theirs["acc"])


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


def _ours(run: Path, task: Path, batch: int) -> dict[str, float]:
    from titan_exp.extensions.tasks.checkpoint_scores import score_checkpoint

    request = {"tasks": [str(task)], "most": None, "trust": False, "averaged": False, "lm_eval": False}
    words = ["training.seq_len=1024", f"training.micro_batch_size={batch}"]
    found = score_checkpoint(run, words, request)
    return {"acc": found["tasks"]["bench"]["metrics"]["acc"]["value"]}


def _hf(export: Path, batch: int) -> Any:
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

    return HFLM(pretrained=str(export), batch_size=batch, dtype="float32", device="cpu", max_length=1024)


@torch.no_grad()
def _lm_eval(model: Any, task: Path) -> dict[str, float]:
    from lm_eval import simple_evaluate  # type: ignore[import-not-found]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    manager = TaskManager(include_path=str(task.parent), include_defaults=False)
    found = simple_evaluate(model=model, tasks=["bench"], task_manager=manager, bootstrap_iters=0)
    return {"acc": found["results"]["bench"]["acc,none"]}
