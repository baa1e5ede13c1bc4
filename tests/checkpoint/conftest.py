"""Fixtures: a job of one rank, and an S3 server."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from titan_exp.trainer.distributed import joined_process_group


@pytest.fixture
def one_rank() -> Iterator[None]:
    with joined_process_group(torch.device("cpu")):
        yield


@pytest.fixture(scope="session")
def served() -> Iterator[Any]:
    from tests.checkpoint.s3_server import S3Server

    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(served: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An S3Server with an empty bucket that this process reaches; whatever the test does to the server is undone."""
    from tests.checkpoint.s3_server import forget_stores

    served.reset()
    for key, value in served.environment.items():
        monkeypatch.setenv(key, value)
    forget_stores()
    yield served
    served.reset()
    forget_stores()
