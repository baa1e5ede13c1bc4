"""Log-likelihoods of rows: those of brute force, in every layout, and no trace of them in training."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.runs import Curve, train
from tests.ranks import run_ranks

# Weights hardly move, so that those of all layouts are equal.
SHORT = ["training.steps=2", "optimizer.lr=1e-9"]
DENSE = [*SHORT, "model.layers=4", "model.heads=4", "model.kv_heads=4"]
EXPERTS = [*SHORT, "model=qwen3_moe_debug"]
LATENT = [*SHORT, "model=deepseek_debug"]


def scored(
    path: Path, *words: str, alone: bool = False, mutate: Callable[[], None] | None = None
) -> tuple[dict, Curve]:
    out = path / "scores.json"
    part = f"{{name:tests.extensions.tasks.scoring_part.Scores,options:{{out:'{out}',alone:{str(alone).lower()}}}}}"
    curve = train(path / "run", *words, f"+training.parts.scores={part}", mutate=mutate)
    return json.loads(out.read_text()), curve


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def one(path: Path) -> dict[str, tuple[dict, Curve]]:
    words = {"dense": DENSE, "experts": EXPERTS, "latent": LATENT}
    return {name: scored(path / name, *given, "checkpoint=sync", alone=True) for name, given in words.items()}


@pytest.mark.parametrize("name", ["dense", "experts", "latent"])
def test_rows_in_batches_score_as_each_alone(one: dict[str, tuple[dict, Curve]], name: str):
    found = one[name][0]
    assert found["total"] == pytest.approx(found["alone"], abs=1e-5, rel=1e-6)
    assert found["greedy"] == found["hits"]
    assert sum(found["greedy"]) >= 1
    assert len({*map(round, found["total"])}) > 10


def by_night(*case: str) -> object:
    return pytest.param(*case, marks=pytest.mark.night)


LAYOUTS = [
    ("dense", "parallelism.dp_shard=2"),
    ("dense", "parallelism.tp=2 parallelism.dp_shard=2"),
    by_night("dense", "parallelism.tp=2 parallelism.loss_parallel=false parallelism.sequence_parallel=false"),
    ("dense", "parallelism.pp=2 training.micro_batch_size=1"),
    ("dense", "parallelism.cp=2"),
    ("experts", "parallelism.dp_shard=2 parallelism.ep=2"),
    by_night("experts", "parallelism.pp=2 parallelism.tp=2 training.micro_batch_size=2"),
    by_night("dense", "compile=blocks compile.backend=aot_eager parallelism=ddp parallelism.dp_replicate=2"),
]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_every_layout_scores_as_one_device(one: dict[str, tuple[dict, Curve]], tmp_path: Path, name: str, layout: str):
    words = {"dense": DENSE, "experts": EXPERTS}[name]
    found, curve = scored(tmp_path, *words, *layout.split())
    expected, plain = one[name]
    assert found["total"] == pytest.approx(expected["total"], abs=1e-5, rel=3e-7)
    assert found["greedy"] == expected["greedy"]
    assert curve.loss == pytest.approx(plain.loss, rel=2e-6)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("dense", "parallelism.pp=2"),
        by_night("dense", "parallelism.pp=2 parallelism.tp=2"),
        by_night("dense", "parallelism.pp=2 parallelism.cp=2"),
        by_night("latent", "parallelism.pp=2 parallelism.dp_shard=2"),
        by_night("experts", "parallelism.pp=2 parallelism.dp_shard=2 parallelism.ep=2"),
        by_night("experts", "parallelism.tp=2"),
    ],
)
def test_a_checkpoint_scores_as_brute_force(
    one: dict[str, tuple[dict, Curve]], path: Path, name: str, layout: str
):  # 2 s
    expected, ranks = one[name][0], 4 if layout.count("=2") - layout.count("ep=2") == 2 else 2
    for found in run_ranks(ranks, score_on_rank, str(path / name / "run"), layout.split()):
        assert found["total"] == pytest.approx(expected["alone"], abs=1e-5, rel=3e-7)
        assert found["greedy"] == expected["hits"]


def score_on_rank(run: str, words: list[str]) -> dict[str, list]:
    import torch

    from tests.extensions.tasks.scoring_part import rows
    from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
    from titan_exp.extensions.tasks.scorer import Scorer
    from titan_exp.inference.evaluate import evaluation_experiment, load_model, mesh_of
    from titan_exp.trainer.distributed import joined_process_group

    source, device = open_checkpoint(Path(run)), torch.device("cpu")
    experiment = evaluation_experiment(Path(run), source, [*words, "training.micro_batch_size=2"], True)
    with joined_process_group(device):
        mesh = mesh_of(experiment, device)
        scorer = Scorer(load_model(source, experiment, mesh), mesh, experiment)
        found = scorer.log_likelihoods(rows(experiment.training.seq_len, experiment.model.vocab_size))
    return {"total": found.total.tolist(), "greedy": found.greedy.tolist()}


def test_a_run_with_scores_has_the_curve_of_one_without(tmp_path: Path):
    words = ["training.steps=3", "model=qwen3_moe_debug"]
    plain, (_, curve) = train(tmp_path, *words), scored(tmp_path / "scored", *words)
    assert curve.loss == plain.loss
    assert all(curve.weights[name].equal(weight) for name, weight in plain.weights.items())
