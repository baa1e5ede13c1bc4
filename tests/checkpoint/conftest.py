"""A job of one rank, for tests that ask for it."""

from collections.abc import Iterator

import pytest
import torch

from titan_exp.trainer.distributed import joined_process_group


@pytest.fixture
def one_rank() -> Iterator[None]:
    with joined_process_group(torch.device("cpu")):
        yield
