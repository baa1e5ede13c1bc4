"""Promise 3: killed at any moment and started again, a run's numbers and weights are those of an undisturbed one."""

import random
import time
from pathlib import Path

import pytest
import torch

from tests.parity.runs import SMALL
from tests.ranks import Ranks
from titan_exp.checkpoint.folder import CheckpointFolder
from titan_exp.checkpoint.reader import read_into, tensor_shapes
from titan_exp.config.compose import compose
from titan_exp.config.convert import to_experiment, to_yaml
from titan_exp.config.layout import resolve_layout
from titan_exp.tracking.metrics_file import read_metrics
from titan_exp.tracking.run_folder import RunFolder
from titan_exp.trainer.rank import main

STEPS = 24
KEYS = ("step", "tokens", "loss", "grad_norm", "lr", "validation_loss")


def run_folder(path: Path, *overrides: str) -> RunFolder:
    settings = [
        *SMALL,
        f"training.steps={STEPS}",
        "training.evaluate_every=10",
        "checkpoint.mode=async",
        "checkpoint.every=3",
        "data.prefetch=2",
        *overrides,
    ]
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.config.write_text(to_yaml(resolve_layout(to_experiment(compose(settings)), 1)))
    return folder


def start(folder: RunFolder, world: int) -> Ranks:
    folder.add_attempt(world_size=world, hosts=["localhost"])
    return Ranks(world, main, str(folder.path))


def numbers(folder: RunFolder) -> list[dict]:
    return [{key: row.get(key) for key in KEYS} for row in read_metrics(folder.metrics)]


def final_state(folder: RunFolder) -> dict[str, torch.Tensor]:
    path = CheckpointFolder(folder.checkpoints).at(STEPS)
    state = {
        key: torch.empty(shape)
        for key, shape in tensor_shapes(path).items()
        if key.startswith(("model.", "optimizer."))
    }
    read_into(path, state)
    return state


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, []), (2, ["parallelism.dp_shard=2"]), (1, ["checkpoint.mode=async_process"])],
)
def test_killed_at_random_moments(tmp_path, world, layout):
    undisturbed = run_folder(tmp_path / "undisturbed", *layout)
    ranks = start(undisturbed, world)
    try:
        ranks.results(120)
    finally:
        ranks.kill()

    seed = random.randrange(10**6)
    print(f"seed of the kills: {seed}")
    chance = random.Random(seed)
    disturbed = run_folder(tmp_path / "disturbed", *layout)
    kills = 0
    # Half the kills wait for a save that has begun; the others come a random while after the next row.
    for kill in range(6):
        ranks = start(disturbed, world)
        try:
            rows = len(read_metrics(disturbed.metrics))
            deadline = time.monotonic() + 60
            saving = kill % 2 == 0
            while time.monotonic() < deadline and ranks.alive():
                if saving and list(disturbed.checkpoints.glob("*.partial")):
                    break
                if not saving and disturbed.metrics.exists() and len(read_metrics(disturbed.metrics)) > rows:
                    time.sleep(chance.uniform(0, 0.3))
                    break
                time.sleep(0.002)
            kills += ranks.alive()
        finally:
            ranks.kill()
    assert kills >= 3, "the run was over before it could be killed"
    ranks = start(disturbed, world)
    try:
        ranks.results(120)
    finally:
        ranks.kill()

    assert [row["step"] for row in numbers(disturbed)] == list(range(1, STEPS + 1))
    assert numbers(disturbed) == numbers(undisturbed)
    expected, found = final_state(undisturbed), final_state(disturbed)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
