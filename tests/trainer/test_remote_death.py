"""Killed while it uploads or deletes behind a URL, and moved to a machine that has nothing but that URL."""

import os
import zlib
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from tests.checkpoint.s3_server import S3Server
from tests.parity.runs import SMALL
from tests.ranks import Ranks
from tests.trainer.committed import committed, numbers
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.storage_reader import load_into, tensor_shapes
from titan_exp.config.checkpoint_files import parse_checksums
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.rank_main import main

STEPS = 12
KINDS = ("model.", "optimizer.")
REMOTE = "bucket/runs/first"


def run_folder(path: Path, *overrides: str) -> RunFolder:
    settings = ["training.steps=12", "evaluation.every=0", "checkpoint.mode=async", "checkpoint.every=3"]
    return committed(path, [*SMALL, *settings, "data.prefetch=2", *overrides])


def start(folder: RunFolder, world: int) -> Ranks:
    folder.add_attempt(world_size=world, hosts=["localhost"])
    return Ranks(world, main, str(folder.path))


def reaching(environment: dict[str, str], path: str) -> None:
    os.environ.update(environment)
    main(path)


def start_with(server: S3Server, folder: RunFolder, world: int) -> Ranks:
    folder.add_attempt(world_size=world, hosts=["localhost"])
    return Ranks(world, reaching, server.environment, str(folder.path))


def killed_at(server: S3Server, folder: RunFolder, world: int, asking: tuple[str, str, int]) -> None:
    """Run until the store is asked something for the n-th time, and kill every rank before it has its answer."""
    method, part, count = asking
    reached, asked = Event(), 0

    def seen(its_method: str, path: str) -> None:
        nonlocal asked
        if its_method == method and part in path:
            asked += 1
            if asked == count:
                reached.set()
            if asked >= count:
                # Nobody will hear: what was asked is not done.
                raise ConnectionAbortedError("killed")

    server.seen = seen
    ranks = start_with(server, folder, world)
    try:
        assert reached.wait(60)
        assert ranks.alive()
    finally:
        ranks.kill()
        server.seen = lambda method, path: None


def state(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Weights and optimizer state after the last step."""
    path = CheckpointFolder(folder.checkpoints).path_of(STEPS)
    tensors = {key: torch.empty(shape) for key, shape in tensor_shapes(path).items() if key.startswith(KINDS)}
    load_into(path, tensors)
    return tensors


def complete(server: S3Server, run: str) -> list[int]:
    """Steps that count there; every file of each is as its checksums say."""
    store, steps = server.store(), []
    for marker in sorted(store.glob(f"{REMOTE}/{run}/step-*/checksums.json")):
        folder = marker.rpartition("/")[0]
        for name, expected in parse_checksums(store.cat_file(marker).decode()).items():
            content = store.cat_file(f"{folder}/{name}")
            assert (len(content), zlib.crc32(content)) == (expected.size, expected.crc32), f"{folder}/{name} is torn"
        steps.append(int(folder.rpartition("step-")[2]))
    return steps


@pytest.fixture(scope="module")
def server() -> Any:
    one = S3Server()
    yield one
    one.close()


@pytest.mark.night
def test_killed_in_the_middle_of_uploads_and_deletions_and_moved(tmp_path: Path, server):
    world, name = 2, "abc"
    layout = ["parallelism.dp_shard=2"]
    undisturbed = run_folder(tmp_path / "undisturbed" / name, *layout)
    ranks = start(undisturbed, world)
    try:
        ranks.results(120)
    finally:
        ranks.kill()

    layout = [*layout, "checkpoint.remote=s3://bucket/runs", "checkpoint.keep=1", "experiment.name=first"]
    here = run_folder(tmp_path / "here" / name, *layout)
    # Between the files of the first upload; then before a marker; then in both halves of a deletion.
    killed_at(server, here, world, ("PUT", "step-00000003/", 2))
    assert complete(server, name) == []
    killed_at(server, here, world, ("PUT", "/checksums.json", 2))
    assert len(complete(server, name)) == 1
    killed_at(server, here, world, ("POST", "?delete", 1))
    assert len(complete(server, name)) >= 1
    killed_at(server, here, world, ("DELETE", "/checksums.json", 1))
    left = complete(server, name)
    assert left

    there = run_folder(tmp_path / "there" / name, *layout)
    killed_at(server, there, world, ("PUT", "/checksums.json", 1))
    assert complete(server, name)
    ranks = start_with(server, there, world)
    try:
        ranks.results(120)
    finally:
        ranks.kill()
    begin = left[-1]
    assert [row["step"] for row in numbers(there)] == list(range(begin + 1, STEPS + 1))
    assert numbers(there) == numbers(undisturbed)[begin:]
    expected, found = state(undisturbed), state(there)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert complete(server, name) == [STEPS]
    store = server.store()
    kept = [path.rpartition("/")[2] for path in store.ls(f"{REMOTE}/{name}")]
    assert kept == ["config.sig", "config.yaml", f"step-{STEPS:08d}"]
