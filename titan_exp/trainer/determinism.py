"""Randomness and bitwise repeatability.

Random draws in a step (dropout in a model of yours) come from a generator seeded by (seed, step, data rank), so there
is no generator state to save, and a resumed step draws what the undisturbed one drew.
"""

import hashlib
import os

import torch


def seed_step(seed: int, step: int, data_rank: int) -> None:
    """Seed torch's generators for one step."""
    digest = hashlib.sha256(f"{seed}/step/{step}/{data_rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))


def set_deterministic(deterministic: bool) -> None:
    """Allow only kernels that repeat their bits, or (False) leave the choice to torch."""
    if not deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory with NaN costs time and breaks buffers that are written later.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
