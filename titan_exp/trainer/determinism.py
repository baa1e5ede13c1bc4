"""Randomness and bitwise repeatability.

Random draws in a step (dropout in a model of yours) come from a generator seeded by (seed, step, data rank), so there
is no generator state to save, and a resumed step draws what the undisturbed one drew.
"""

import hashlib
import os

import torch


def seed_step(seed: int, step: int, dp_rank: int, device: torch.device) -> None:
    """Seed the generators that a step on this device draws from."""
    digest = hashlib.sha256(f"{seed}/step/{step}/{dp_rank}".encode()).digest()
    number = int.from_bytes(digest[:7], "little")
    # torch.manual_seed would look for every kind of device there is, each step.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def set_deterministic(deterministic: bool) -> None:
    """Allow only kernels that repeat their bits, or (False) leave the choice to torch."""
    if not deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory with NaN costs time and breaks buffers that are written later.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
