"""Determinism: random seeds of steps, and deterministic kernels.

Each step seeds the generators by (seed, step, data rank), so that no RNG state needs saving, and a resumed step draws
the same numbers.
"""

import hashlib
import os

import torch


def seed_step(seed: int, step: int, dp_rank: int, device: torch.device) -> None:
    """Seed the default generators of CPU and device for a step."""
    digest = hashlib.sha256(f"{seed}/step/{step}/{dp_rank}".encode()).digest()
    number = int.from_bytes(digest[:7], "little")
    # torch.manual_seed would probe every device type in each step.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def set_deterministic(deterministic: bool) -> None:
    """Allow deterministic kernels only, if `deterministic`."""
    if not deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory with NaN costs time and breaks buffers that are computed later.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
