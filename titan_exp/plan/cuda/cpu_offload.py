"""CPU offload: a fake GPU beside the host, and copies between them.

FSDP2's own `CPUOffloadPolicy` code decides by the device of fake tensors what it copies. The fake GPU is named as a
second CPU, because torch without CUDA cannot run backward on CUDA tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fully_shard

from titan_exp.plan.trace.torch_patches import replaced_attributes

GPU = torch.device("cpu", 1)
"""Device of the fake GPU."""
AXIS = "host"
"""Axis name of copies between host and GPU."""
TO_GPU, WAITED_FOR, TO_HOST = "to the GPU", "to the GPU, waited for", "to the host"
"""Kinds of copies. FSDP2 copies parameters and gradients on its own streams; on a single rank, which gathers nothing,
parameters are copied on the compute stream (`WAITED_FOR`)."""
PINNED = ("parameters", "gradients")
"""Categories in pinned host memory: the trainer uses `CPUOffloadPolicy(pin_memory=True)` on CUDA. FSDP2 pins parameters
before the first step (`FSDPParam.reset_sharded_param`); torch pins the target of non-blocking copies of gradients
(`foreach_reduce`, ATen's `_to_copy`). Optimizer state is created like its parameter, but not pinned."""


@contextmanager
def gpu_beside_host() -> Iterator[None]:
    """Let FSDP2 use the fake GPU as its device in the `with` block, so that its copies are traced."""

    def device_of(plain: Callable[[Any], torch.device], mesh: Any) -> torch.device:
        return GPU if mesh.device_type == GPU.type else plain(mesh)

    replacement = partial(device_of, _fully_shard._get_device_from_mesh)
    with replaced_attributes((_fully_shard, "_get_device_from_mesh", replacement)):
        yield


def power_of_two(size: int) -> int:
    """Smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()
