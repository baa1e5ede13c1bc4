"""Memory at a chosen step: a text breakdown and, on CUDA, a snapshot for torch's viewer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from titan_exp.config.groups.run import ProfilingConfig
from titan_exp.ops.autograd import local_tensor
from titan_exp.tracking.display import format_bytes
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.files import write_atomically
from titan_exp.trainer.part import Part, Run, Step
from titan_exp.trainer.train_state import TrainState

UNKNOWN_SITE = "without recorded stack (profiling.memory_step)"
LARGEST = 5  # number of tensors, or allocation sites, listed per category


@dataclass(frozen=True)
class MemoryCategory:
    """Memory of one category."""

    name: str  # `weights`, `gradients`, `optimizer state` or `everything else: ...`
    size: int
    largest: tuple[tuple[str, int], ...] = ()  # its largest tensors or allocation sites, with their bytes


@dataclass(frozen=True)
class MemoryBreakdown:
    """Memory currently in use on one rank, in bytes."""

    device: str  # `cuda`: memory of the caching allocator; `cpu`: resident memory of the process
    used: int
    reserved: int  # memory reserved by the caching allocator; equal to `used` on a CPU
    capacity: int
    categories: tuple[MemoryCategory, ...]

    def text(self) -> str:
        """A table of categories."""
        kind = "allocated on the device" if self.device == "cuda" else "resident in this process"
        reserved = f", {format_bytes(self.reserved)} reserved" if self.device == "cuda" else ""
        lines = [f"{format_bytes(self.used)} {kind}{reserved}, of {format_bytes(self.capacity)}", ""]
        for category in self.categories:
            lines.append(f"{format_bytes(category.size):>12}  {category.name}")
            lines += [f"{'':14}{format_bytes(size):>12}  {name}" for name, size in category.largest]
        return "\n".join(lines) + "\n"


def memory_breakdown(
    device: torch.device,
    parts: Sequence[nn.Module] = (),
    optimizer: torch.optim.Optimizer | None = None,
    compute_weights: Mapping[nn.Parameter, Tensor] | None = None,
) -> MemoryBreakdown:
    """Break down this rank's memory. Without `parts`, before the model is built, weights count as the rest."""
    named = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    states: dict[str, Tensor] = {}
    copies = {f"{name}: compute weight": (compute_weights or {}).get(weight) for name, weight in named.items()}
    if optimizer is not None:
        names = {id(parameter): name for name, parameter in named.items()}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    states[f"{names.get(id(parameter), 'unnamed parameter')}: {key}"] = value
    buffers = {name: buffer for part in parts for name, buffer in part.named_buffers()}
    known = [
        _category("weights", {**named, **_present(copies), **buffers}, device),
        _category("gradients", _present({name: weight.grad for name, weight in named.items()}), device),
        _category("optimizer state", states, device),
    ]
    if device.type == "cuda":
        used, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        capacity = torch.cuda.get_device_properties(device).total_memory
    else:
        used = reserved = psutil.Process().memory_info().rss
        capacity = psutil.virtual_memory().total
    rest = max(0, used - sum(category.size for category in known))
    others = "activations, gathered weights, buffers of kernels and collectives"
    if device.type == "cpu":
        others = "activations, data, Python, torch's code and cached blocks of the allocator"
    known.append(MemoryCategory(f"everything else: {others}", rest, _blocks(device)))
    largest = tuple(sorted(known, key=lambda category: -category.size))
    return MemoryBreakdown(device.type, used, reserved, capacity, largest)


def _present(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _category(name: str, tensors: dict[str, Tensor], device: torch.device) -> MemoryCategory:
    sizes = {key: _bytes(tensor) for key, tensor in tensors.items() if local_tensor(tensor).device.type == device.type}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:LARGEST]
    return MemoryCategory(name, sum(sizes.values()), tuple(largest))


def _blocks(device: torch.device) -> tuple[tuple[str, int], ...]:
    """Allocation sites with the largest active blocks of the caching allocator, weights included."""
    if device.type != "cuda":
        return ()
    found: dict[str, list[int]] = {}
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                frames = [frame for frame in block.get("frames", ()) if "titan_exp" in str(frame.get("filename"))][:2]
                places = [f"{Path(frame['filename']).name}:{frame['line']} in {frame['name']}" for frame in frames]
                site = f"allocated at {', from '.join(places)}" if places else UNKNOWN_SITE
                found.setdefault(site, []).append(block["size"])
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))[:LARGEST]
    return tuple((f"{len(sizes)} blocks {site}", sum(sizes)) for site, sizes in ordered)


def _bytes(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    # Low-precision moments are tensor subclasses of several inner tensors.
    if hasattr(local, "__tensor_flatten__"):
        names, _ = local.__tensor_flatten__()  # type: ignore[operator]  # a method of the subclass
        return sum(_bytes(getattr(local, name)) for name in names)
    return local.untyped_storage().nbytes() if local.device.type != "meta" else 0


MAX_EVENTS = 500_000  # allocation events that a snapshot keeps; torch's viewer is slow with more


def record_live_allocations(config: ProfilingConfig, device: torch.device) -> None:
    """Record the stacks of live allocations, starting before the model is built."""
    if config.memory_step is not None and device.type == "cuda":
        torch.cuda.memory._record_memory_history("state", stacks="python")


class MemorySnapshot(Part):
    """Writes the memory breakdown of this rank after step `step` into the run's `traces` folder."""

    name = "memory_snapshot"
    isolated = False  # it runs nothing of a model's

    def __init__(self, step: int, folder: Path, state: TrainState) -> None:
        self._step, self._folder, self._rank, self._state = step, folder, torch.distributed.get_rank(), state
        self._device = state.mesh.device

    def begin(self, run: Run) -> None:
        self._memory = run.report.memory

    def before(self, step: int) -> None:
        if step == self._step and self._device.type == "cuda":
            torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=MAX_EVENTS)

    def after(self, step: Step) -> None:
        if step.step != self._step:
            return
        model = self._state.model
        memory = memory_breakdown(self._device, model.parts, self._state.optimizer, model.weights.copies)
        peaks = [f"{name} {value:.2f} GiB" for name, value in self._memory.read().items() if value is not None]
        peak = f"\npeak since the previous row: {', '.join(peaks)}\n"
        try:
            written = write_breakdown(memory, self._folder, f"step-{step.step:08d}", self._rank, peak)
            get_logger().info("memory after step %d: %s", step.step, written)
        except OSError as error:
            get_logger().error("%s: cannot write the memory breakdown (%s)", self._folder, error.strerror or error)
        if self._device.type == "cuda":
            torch.cuda.memory._record_memory_history(None)


def write_breakdown(memory: MemoryBreakdown, folder: Path, when: str, rank: int, more: str = "") -> Path:
    """Write `memory-WHEN-rank-*.txt` and, on CUDA, a `.pickle` for the viewer at https://docs.pytorch.org/memory_viz.
    Raises OSError if the disk is full or read-only."""
    folder.mkdir(exist_ok=True)
    path = folder / f"memory-{when}-rank-{rank:05d}.txt"
    write_atomically(path, memory.text() + more, durable=False)
    if memory.device == "cuda":
        temporary = path.with_suffix(".pickle.tmp")
        torch.cuda.memory._dump_snapshot(str(temporary))
        temporary.replace(path.with_suffix(".pickle"))
    return path
