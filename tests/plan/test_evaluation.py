"""Evaluations in a plan: their memory is that of real ranks, and its share in peaks and times."""

import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.extensions.tasks.made_tasks import made_task
from tests.parity.runs import PARAGRAPHS
from tests.patching import patch
from tests.plan.layouts import experiment_of
from tests.ranks import run_ranks
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import load_experiment, to_yaml
from titan_exp.data.tokenizers import build_tokenizer
from titan_exp.data.validation_loader import ValidationLoader
from titan_exp.extensions.tasks.encoding import encode
from titan_exp.extensions.tasks.tasks import tasks_of
from titan_exp.plan.devices import DEVICES
from titan_exp.plan.evaluation import evaluated, evaluations_of
from titan_exp.plan.extrapolate.eligibility import is_worthwhile
from titan_exp.plan.predict import Plan, predict
from titan_exp.plan.predictions import cache_key
from titan_exp.plan.tables import plan_to_json
from titan_exp.plan.trace.trace_step import pipeline_ranks
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
    evaluates = "evaluation.every=2 data.validation_fraction=0.1 data.validation_documents=9"
    return experiment_of(f"{words} {' '.join(PARAGRAPHS)} {evaluates} evaluation.tasks=['{task}']")


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
    from titan_exp.trainer.updates import evaluate_split

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


def batches_of_tasks_are_half() -> None:
    def make(original: Any) -> Any:
        return lambda *given: (batch._replace(size=batch.size // 2) for batch in original(*given))

    patch("titan_exp.extensions.tasks.planned.row_batches", make)


def gradients_are_kept() -> None:
    patch("titan_exp.trainer.forward_backward.evaluating", lambda _: lambda model: nullcontext())


def a_batch_is_half() -> None:
    patch("titan_exp.plan.trace.trace_step.fake_batches", lambda original: lambda run, **more: [
        batch.map(lambda tensor: tensor[:, : tensor.shape[1] // 2]) for batch in original(run, **more)
    ])  # fmt: skip


MUTATIONS = {"validation": [gradients_are_kept, a_batch_is_half], "tasks": [batches_of_tasks_are_half]}


@pytest.mark.night
@pytest.mark.parametrize(("kind", "mutate"), [(kind, one) for kind, several in MUTATIONS.items() for one in several])
def test_a_pass_that_is_planned_otherwise_is_noticed(kind: str, mutate: Callable[[], None], tmp_path: Path):
    guesses, facts = both("", tmp_path, mutate)
    (guess,), (fact,) = ([size for name, size, _ in of_rank if name == kind] for of_rank in (guesses[0], facts[0]))
    assert guess != pytest.approx(fact, rel=0.02)


def plan_on_gpus(words: str, *, full: bool = False) -> Plan:
    return predict(experiment_of(f"{H100} evaluation.every=2 {words}"), DEVICES["h100"], full=full, cores=1)


@pytest.mark.parametrize(
    "words",
    [
        "model.layers=12 parallelism.dp_shard=2",
        "model.layers=12 parallelism.dp_shard=2 parallelism.reshard_after_forward=never training.micro_batch_size=2",
        "model.layers=24 parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_microbatches=4",
    ],
)
def test_an_extrapolated_evaluation_is_that_of_all_layers(words: str):
    short, whole = plan_on_gpus(words), plan_on_gpus(words, full=True)
    assert is_worthwhile(short.layout, short.experiment.activation_checkpoint, len(short.ranks))
    assert not short.why_full
    for few, every in zip(short.ranks, whole.ranks, strict=True):
        for one, other in zip(few.evaluations, every.evaluations, strict=True):
            assert one.passing == other.passing
            assert (one.costs.flops, one.costs.messages) == (other.costs.flops, other.costs.messages)
        assert few.bytes == every.bytes
    for one, other in zip(short.evaluations, whole.evaluations, strict=True):
        assert one.pass_seconds == pytest.approx(other.pass_seconds, rel=1e-9)


def test_an_evaluation_may_be_the_peak_and_refuse_a_run(tmp_path: Path):
    """Training recomputes and makes the logits of 16 tokens at a time; a document is scored 4,096 tokens at a time."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "documents.jsonl").write_text(json.dumps({"text": "word " * 4000}))
    task = {"task": "documents", "output_type": "loglikelihood_rolling", "doc_to_target": "text", "test_split": "test"}
    files = {"data_files": {"test": str(folder / "documents.jsonl")}}
    task |= {
        "dataset_path": "json",
        "dataset_kwargs": files,
        "doc_to_text": "",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (folder / "documents.yaml").write_text(yaml.safe_dump(task))
    words = f"{RECOMPUTED} training.micro_batch_size=8 parallelism.dp_shard=1"
    without = plan_on_gpus(words)
    scored = plan_on_gpus(f"{words} evaluation.tasks=['{folder}/documents.yaml']")
    assert not without.largest.trace.peak.where.startswith("tasks")
    assert scored.largest.trace.peak.where == "tasks, forward, head and loss"
    assert scored.largest.trace.peak.bytes - without.largest.trace.peak.bytes > 8 * 128 * 4096 * 2
    assert scored.prediction.largest.peak > without.prediction.largest.peak
    assert scored.prediction.largest.during == "tasks, forward, head and loss"
    keys = [cache_key(plan.experiment, DEVICES["h100"]) for plan in (without, scored)]
    assert keys[0] != keys[1]


def test_time_of_evaluations_is_part_of_the_run(tmp_path: Path):
    made_task(tmp_path / "task", items=40)
    sets = "+evaluation.sets.short={data:{validation_fraction:0.02,validation_documents:2},seq_len:32}"
    words = f"training.steps=10 data.validation_documents=3 {sets} evaluation.tasks=['{tmp_path}/task']"
    plan = plan_on_gpus(words)
    assert plan.evaluation_times == 5
    assert [one.kind.name for one in plan.evaluations] == ["validation", "validation/short", "tasks"]
    loader = ValidationLoader(plan.experiment.data, 64, dp_rank=0, dp_degree=1, micro_batch_size=8)
    assert plan.evaluations[0].passes == len(loader) > 1
    assert plan.evaluations[2].passes == 2
    seconds = [one.seconds for one in plan.evaluations]
    assert plan.evaluation_seconds == pytest.approx(5 * sum(filter(None, seconds)))
    assert plan.step_seconds is not None
    assert plan.evaluation_seconds is not None
    assert plan.gpu_hours == pytest.approx((10 * plan.step_seconds + plan.evaluation_seconds) / 3600)
    found = plan_to_json(plan)["evaluations"]
    assert (found["number"], found["seconds"]) == (5, plan.evaluation_seconds)
    assert [one["passes"] for one in found["kinds"]] == [one.passes for one in plan.evaluations]


def test_what_is_unknown_is_said():
    plan = plan_on_gpus("data=c4 data.validation_documents=100")
    (one,) = plan_to_json(plan)["evaluations"]["kinds"]
    assert (one["passes"], one["passes_unknown_because"]) == (None, "its documents are read when training begins")
    assert one["pass_seconds"] > 0


@pytest.mark.parametrize(
    ("words", "number"), [("every=3", 4), ("every=5", 2), ("every_tokens=1000", 5), ("every=0", 0)]
)
def test_evaluations_are_counted(words: str, number: int):
    experiment = experiment_of(f"training.steps=10 evaluation.every=500 evaluation.{words}")
    due = {step for step in range(1, 10) if experiment.evaluation.due(experiment.training, step)}
    assert evaluations_of(experiment) == number == (len(due) + 1 if experiment.evaluation.enabled else 0)
    assert bool(evaluated(experiment)) is experiment.evaluation.enabled
