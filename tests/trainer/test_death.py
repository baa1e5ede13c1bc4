"""Promise 3: killed at any moment and started again, a run's numbers and weights are those of an undisturbed one."""

import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.parity.runs import EVALUATE, PARAGRAPHS, SMALL
from tests.ranks import Ranks
from tests.trainer.committed import committed, numbers
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.storage_reader import load_into, tensor_shapes
from titan_exp.checkpoint.storage_writer import find_damage
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.rank_main import main

STEPS = 30
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
MODELS = {
    "dense": "model=llama_debug",
    # Biases and the load of the step before are state of the balance.
    "experts": "model=qwen3_moe_debug model.moe.router_bias=true model.moe.balance.bias_rate=1e-2",
    "ramp": "model=llama_debug training.batch_ramp=[[9,2],[11,4]]",
}
BY_NIGHT = [
    ("ramp", "async_process", 2),
    *(("dense", "sync", world) for world in (1, 2)),
    *(("dense", "async_process", world) for world in (1, 2)),
    ("dense", "async", 1),
    *(("experts", *case) for case in (("sync", 1), ("async", 2), ("async_process", 2))),
]
KILLED = [
    ("dense", "async", 2),  # tests/checkpoint/test_async_process.py kills the processes that save
    *(pytest.param(*case, marks=pytest.mark.night) for case in BY_NIGHT),
    *(pytest.param("dense", "async_pinned", world, marks=[NEEDS_CUDA, pytest.mark.cuda]) for world in (1, 2)),
]


def run_folder(path: Path, model: str, world: int, mode: str) -> RunFolder:
    words = [*MODELS[model].split(), *([f"parallelism.ep={world}"] if model == "experts" else [])]
    return committed_run(path, [*words, *PARAGRAPHS, *EVALUATE.split()], world, mode)


def committed_run(path: Path, words: Sequence[str], world: int, mode: str) -> RunFolder:
    """A run that saves often."""
    settings = [
        *SMALL,
        *words,
        f"training.steps={STEPS}",
        f"parallelism.dp_shard={world}",
        f"checkpoint.mode={mode}",
        "checkpoint.every=2",
        "checkpoint.keep=2",
        "data.prefetch=2",
        *(["cluster.device=cuda"] if mode == "async_pinned" else []),
    ]
    return committed(path, settings)


def start(folder: RunFolder, world: int) -> Ranks:
    folder.add_attempt(world_size=world, hosts=["localhost"])
    return Ranks(world, deletes_slowly, str(folder.path))


def deletes_slowly(path: str) -> None:
    """A rank on a disk that takes its time to delete, as those of clusters do: there is a moment to be killed in."""
    import shutil
    from pathlib import Path

    delete = shutil.rmtree

    def slowly(folder: Path, *arguments: object, **options: object) -> None:
        if str(folder).endswith(".deleted") and Path(folder).exists():
            for file in sorted(Path(folder).iterdir()):
                time.sleep(0.02)
                file.unlink()
        delete(folder, *arguments, **options)  # type: ignore[arg-type]  # passed on as they are

    shutil.rmtree = slowly  # type: ignore[assignment]  # on purpose
    main(path)


def finished(folder: RunFolder, world: int) -> RunFolder:
    ranks = start(folder, world)
    try:
        ranks.results(120)
    finally:
        ranks.kill()
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, bool], RunFolder]:
    """A run that nobody kills: how it is saved changes no number of it."""

    @cache
    def run(model: str, world: int, cuda: bool) -> RunFolder:
        mode = "async_pinned" if cuda else "sync"
        return finished(run_folder(tmp_path_factory.mktemp("undisturbed") / "run", model, world, mode), world)

    return run


def final_state(folder: RunFolder) -> dict[str, torch.Tensor]:
    path = CheckpointFolder(folder.checkpoints).path_of(STEPS)
    state = {
        key: torch.empty(shape)
        for key, shape in tensor_shapes(path).items()
        if key.startswith(("model.", "optimizer."))
    }
    load_into(path, state)
    return state


def await_moment(moment: str, folder: RunFolder, ranks: Ranks, chance: random.Random) -> None:
    """Return while a checkpoint is written or deleted, or a random while after a row; or when the run is over."""
    rows, deadline = len(read_metrics(folder.metrics)), time.monotonic() + 60
    steps = chance.randrange(1, 4)
    while time.monotonic() < deadline and ranks.alive():
        if moment == "any":
            if len(read_metrics(folder.metrics)) >= rows + steps:
                time.sleep(chance.uniform(0, 0.05))
                return
        elif any(folder.checkpoints.glob({"saving": "*.partial/*", "retention": "*.deleted"}[moment])):
            time.sleep(chance.uniform(0, 0.01 if moment == "saving" else 0.06))
            return
        time.sleep(0.001)


@pytest.mark.parametrize(("model", "mode", "world"), KILLED)
def test_killed_at_random_moments(tmp_path, undisturbed, model, mode, world):
    if mode == "async_pinned" and torch.cuda.device_count() < world:
        pytest.skip("a GPU for each rank")
    seed = random.randrange(10**6)
    print(f"seed of the kills: {seed}")
    disturbed = run_folder(tmp_path / "disturbed", model, world, mode)
    kill_thrice(disturbed, world, random.Random(seed))
    found = assert_same_run(disturbed, undisturbed(model, world, mode == "async_pinned"))
    if model == "experts":
        assert {"bias", "previous_load"} <= {key.rpartition(".router.")[2] for key in found}


def kill_thrice(disturbed: RunFolder, world: int, chance: random.Random) -> None:
    """Kill a run while it saves, while it deletes and at any moment, and let it finish."""
    kills = 0
    for moment in ("saving", "any", "retention"):
        ranks = start(disturbed, world)
        try:
            await_moment(moment, disturbed, ranks, chance)
            kills += ranks.alive()
        finally:
            ranks.kill()
        folder = CheckpointFolder(disturbed.checkpoints)
        # Asked once: a writing process may outlive its rank by the moment in which it publishes what it has written.
        for step in folder.complete_steps():
            assert find_damage(folder.path_of(step)) is None
    assert kills == 3, "the run was over before it could be killed"
    finished(disturbed, world)


def assert_same_run(disturbed: RunFolder, expected: RunFolder) -> dict[str, torch.Tensor]:
    """Rows and weights are those of another run; returns the final state."""
    assert [row["step"] for row in numbers(disturbed)] == list(range(1, STEPS + 1))
    assert numbers(disturbed) == numbers(expected)
    weights, found = final_state(expected), final_state(disturbed)
    assert found.keys() == weights.keys()
    for key, value in weights.items():
        assert torch.equal(found[key], value), key
    left = sorted(entry.name for entry in disturbed.checkpoints.iterdir())
    assert left == [f"step-{step:08d}" for step in (STEPS - 2, STEPS)]
    return found
