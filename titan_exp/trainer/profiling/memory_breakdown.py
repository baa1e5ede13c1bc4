"""Memory breakdown of a rank: weights, gradients, optimizer states by name, and the rest."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn

from titan_exp.ops.local_tensor import local_tensor

GIB = 1024**3
LARGEST = 5
"""Tensors, or places of allocation, listed of each consumer."""


@dataclass(frozen=True)
class Consumer:
    """A use of memory."""

    name: str
    """What for: `weights`, `gradients`, `optimizer state`, `everything else`."""
    size: int
    """Bytes on this rank."""
    largest: tuple[tuple[str, int], ...] = ()
    """The largest parts of it, with their bytes."""


@dataclass(frozen=True)
class MemoryAccount:
    """Memory in use on one rank now."""

    device: str
    """`cuda`: the allocator's memory; `cpu`: the resident set of the process."""
    used: int
    """Bytes in use."""
    reserved: int
    """Bytes that the allocator has of the device; on a CPU the same as `used`."""
    capacity: int
    """Bytes of the device, or of the machine."""
    consumers: tuple[Consumer, ...]
    """The largest first."""

    def text(self) -> str:
        """For reading."""
        what = "allocated on the device" if self.device == "cuda" else "resident in this process"
        reserved = f", {gib(self.reserved)} reserved" if self.device == "cuda" else ""
        lines = [f"{gib(self.used)} {what}{reserved}, of {gib(self.capacity)}", ""]
        for consumer in self.consumers:
            lines.append(f"{gib(consumer.size):>12}  {consumer.name}")
            lines += [f"{'':14}{gib(size):>12}  {name}" for name, size in consumer.largest]
        return "\n".join(lines) + "\n"


def memory_account(
    device: torch.device, parts: Sequence[nn.Module] = (), optimizer: torch.optim.Optimizer | None = None
) -> MemoryAccount:
    """Count this rank's memory.

    Args:
        device: what trains.
        parts: the model, or its parts on this rank; none where it is only being built.
        optimizer: over its parameters.
    """
    named = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    states: dict[str, Tensor] = {}
    if optimizer is not None:
        names = {id(parameter): name for name, parameter in named.items()}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    states[f"{names.get(id(parameter), 'a parameter')}: {key}"] = value
    buffers = {name: buffer for part in parts for name, buffer in part.named_buffers()}
    known = [
        _consumer("weights", {**named, **buffers}, device),
        _consumer("gradients", {name: each.grad for name, each in named.items() if each.grad is not None}, device),
        _consumer("optimizer state", states, device),
    ]
    used, reserved, capacity = _in_use(device)
    rest = max(0, used - sum(consumer.size for consumer in known))
    what = "activations, gathered weights, buffers of kernels and collectives"
    if device.type == "cpu":
        what = "activations, data, Python, torch's own code and what the allocator keeps"
    known.append(Consumer(f"everything else: {what}", rest, _blocks(device)))
    return MemoryAccount(
        device.type, used, reserved, capacity, tuple(sorted(known, key=lambda consumer: -consumer.size))
    )


def gib(size: float) -> str:
    """Bytes for reading."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"


def _consumer(name: str, tensors: dict[str, Tensor], device: torch.device) -> Consumer:
    sizes = {key: _bytes(tensor) for key, tensor in tensors.items() if local_tensor(tensor).device.type == device.type}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:LARGEST]
    return Consumer(name, sum(sizes.values()), tuple(largest))


def _in_use(device: torch.device) -> tuple[int, int, int]:
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total
    resident = psutil.Process().memory_info().rss
    return resident, resident, psutil.virtual_memory().total


def _blocks(device: torch.device) -> tuple[tuple[str, int], ...]:
    """The largest blocks of the device, weights included, by where they were allocated as far as that was recorded."""
    if device.type != "cuda":
        return ()
    found: dict[str, list[int]] = {}
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found.setdefault(_place(block.get("frames", ())), []).append(block["size"])
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))[:LARGEST]
    return tuple((f"{len(sizes)} blocks {place}", sum(sizes)) for place, sizes in ordered)


def _place(frames: Iterable[dict[str, object]]) -> str:
    ours = [frame for frame in frames if "titan_exp" in str(frame.get("filename"))]
    shown = [f"{str(it['filename']).rpartition('/')[2]}:{it['line']} in {it['name']}" for it in ours[:2]]
    return f"allocated at {', from '.join(shown)}" if shown else "of which nothing was recorded (profiling.memory_step)"


def _bytes(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    # Low-precision moments are tensor subclasses around several plain ones.
    if hasattr(local, "__tensor_flatten__"):
        names, _ = local.__tensor_flatten__()  # type: ignore[operator]  # the subclass's own
        return sum(_bytes(getattr(local, name)) for name in names)
    return local.untyped_storage().nbytes() if local.device.type != "meta" else 0
