"""Evaluations in a plan: their memory is that of real ranks, and its share in peaks and times."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extensions.tasks.made_tasks import made_task
from tests.patching import patch
from tests.plan.layouts import experiment_of
from tests.ranks import run_ranks
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import load_experiment, to_yaml
from titan_exp.data.tokenizers import build_tokenizer
from titan_exp.extensions.tasks.encoding import encode
from titan_exp.extensions.tasks.tasks import tasks_of
from titan_exp.plan.cuda.devices import DEVICES
from titan_exp.plan.evaluation import evaluated, evaluations_of
from titan_exp.plan.gate.predictions import cache_key
from titan_exp.plan.predict import Plan, predict
from titan_exp.plan.tables import plan_to_json
from titan_exp.plan.trace.fake_world import pipeline_ranks
from titan_exp.tracking.run_folder.run_folder import RunFolder

RECOMPUTED = "activation_checkpoint=full training.loss_chunk_tokens=16 model.vocab_size=4096 training.seq_len=128"
"""Training keeps little, and never more than 16 tokens' logits."""
LAYOUTS = {
    "one device": "",
    "one device, bf16": "training.mixed_precision=bf16",
    "fsdp 2": "parallelism.dp_shard=2",
    "tp 2": "parallelism.tp=2 parallelism.dp_shard=1",
    "cp 2": "parallelism.cp=2",
    "pp 2": "parallelism.pp=2 parallelism.pp_microbatches=4",
}
H100 = "cluster=slurm_h100 compile=none training.mixed_precision=bf16 cluster.device=cuda"


def run_of(words: str, task: Path) -> Any:
    evaluates = "evaluation.every=2 data.validation_documents=3"
    return experiment_of(f"{words} {evaluates} evaluation.tasks=['{task}']")


def predicted(path: str, mutate: Callable[[], None] | None) -> list[list[tuple[str, int, int]]]:
    """Name, bytes and FLOPs of each evaluation, by pipeline rank."""
    if mutate is not None:
        mutate()
    plan = predict(load_experiment(RunFolder(path).config, trust=True), None, full=True, cores=1)
    return [[(one.name, one.passing.bytes, one.costs.flops) for one in rank.evaluations] for rank in plan.ranks]


def measured(path: str) -> list[tuple[str, int, int]]:
    """The same of the trainer's own evaluations on real data."""
    from titan_exp.plan.trace.trace_step import trace_step
    from titan_exp.trainer.distributed import joined
    from titan_exp.trainer.trainer import Trainer
    from titan_exp.trainer.validate import evaluate_split

    torch.set_num_threads(1)
    folder = RunFolder(path)
    experiment = load_experiment(folder.config, trust=True)
    found = []
    with joined(experiment.cluster) as device:
        trainer = Trainer(experiment, folder, device)
        trainer.restore()
        parts: Any = {part.name: part for part in trainer.parts}
        loader, scorer = parts["evaluation"]._loader, parts["tasks"]._scorer
        tokenizer, length = build_tokenizer(experiment.data), experiment.training.seq_len
        rows = [row for one in tasks_of(experiment) for row in encode(one, tokenizer, length).rows]
        works = {
            "validation": lambda: evaluate_split(trainer.model, loader, trainer.mesh),
            "tasks": lambda: scorer.log_likelihoods(rows),
        }
        for name, work in works.items():
            gc.collect()
            # Gloo's threads release sent tensors late at times, and then the peak is too high.
            traces = [trace_step(trainer.state, work) for _ in range(3)]
            sizes = [trace.peak.bytes - sum(trace.persistent.values()) for trace in traces]
            found.append((name, min(sizes), traces[0].costs.flops))
        trainer.report.close("done")
    return found


def both(words: str, path: Path, mutate: Callable[[], None] | None = None) -> tuple[list[Any], list[Any]]:
    made_task(path / "task", items=9)
    for name in ("plan", "run"):
        (path / name).mkdir()
        RunFolder(path / name).config.write_text(to_yaml(run_of(words, path / "task")))
    layout = ResolvedLayout.of(load_experiment(RunFolder(path / "run").config))
    (guesses,) = run_ranks(1, predicted, str(path / "plan"), mutate)
    facts = run_ranks(layout.world_size, measured, str(path / "run"))
    return guesses, [facts[rank] for rank in pipeline_ranks(layout)]


@pytest.mark.parametrize(
    "name", ["one device", *(pytest.param(name, marks=pytest.mark.night) for name in list(LAYOUTS)[1:])]
)
def test_a_pass_needs_what_ranks_need(name: str, tmp_path: Path):
    guesses, facts = both(LAYOUTS[name], tmp_path)
    for of_rank, measured_on_rank in zip(guesses, facts, strict=True):
        for (kind, guess, _), (fact_kind, fact, _) in zip(of_rank, measured_on_rank, strict=True):
            assert kind == fact_kind
            print(kind, guess, fact)
            assert guess == pytest.approx(fact, rel=0.02)
