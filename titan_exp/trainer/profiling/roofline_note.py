"""Roofline of a finished run: achieved FLOP/s against the device's peak, with the source of each number."""

import json
import os
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from titan_exp.config.groups.experiment import Experiment
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.optim.grad_clip import ScalesGradients
from titan_exp.tracking.device_rates import PeakRate, device_name, matmul_rate, read_rates
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.atomic_write import write_atomically
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.metrics import Report
from titan_exp.trainer.profiling.compile_cache import cache_of


@dataclass(frozen=True)
class Roofline:
    """Figures of one attempt, per device. None is unknown."""

    device: str
    """Name of rank 0's device."""
    seconds: float
    """Measured: of steps after warm-up, without evaluation, checkpoints and exports."""
    step_seconds: float
    """Measured: mean seconds of a step among those."""
    flops_per_token: float
    """Computed from the model's shapes: operations of a training step per token."""
    tflops: float
    """`flops_per_token` times measured tokens per second and device."""
    peak_tflops: float | None
    """What it is held against."""
    peak_source: str | None
    """Where that is from."""
    optimizer_bytes: int
    """Computed from rank 0's tensors: bytes that one update and clipping read and write at least."""
    copy_rate: float | None
    """Measured by `titan-exp doctor`: GB/s read and written in a copy."""

    @property
    def short(self) -> str:
        """A few words, for the line at the end of a run; empty where there is nothing to hold it against."""
        if self.peak_tflops is None:
            return ""
        return f"{100 * self.tflops / self.peak_tflops:.1f} % of {_flops(self.peak_tflops)} ({self.peak_source})"

    def text(self) -> str:
        """The whole note."""
        against = (
            f", {self.short}" if self.short else "; what the device can do is unknown: titan-exp doctor measures it"
        )
        lines = [
            f"roofline: {_flops(self.tflops)} per device (the model's operations, computed from its shapes, over "
            f"{self.seconds:.1f} s of steps, measured){against}",
        ]
        traffic = f"optimizer and clipping: at least {self.optimizer_bytes / 1e9:.3g} GB a step (computed)"
        if self.copy_rate:
            needed = self.optimizer_bytes / 1e9 / self.copy_rate
            share = f"{100 * needed / self.step_seconds:.1f} % of a step of {self.step_seconds:.3g} s (measured)"
            traffic += (
                f", which take {1e3 * needed:.3g} ms at the measured {self.copy_rate:.3g} GB/s of a copy: {share}"
            )
        return "; ".join([*lines, traffic])


def note_roofline(
    experiment: Experiment,
    folder: RunFolder,
    report: Report,
    flops_per_token: float,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write and log the note of an attempt that comes to its end; nothing where no step was timed.

    Args:
        experiment: the run.
        folder: its folder.
        report: of this rank; only the leader's says anything.
        flops_per_token: operations of a training step per token.
        optimizer: after its steps.
    """
    spent = report.throughput.spent
    if not report.leader or not (spent.tokens and spent.training):
        return
    cache, device = cache_of(folder, experiment), report.mesh.device
    measured = read_rates(cache, device_name(device))
    dtype = "bf16" if experiment.training.mixed_precision == "bf16" else "fp32"
    peak = report.peak or _share_of_cores(matmul_rate(device, dtype, cache), device)
    rate = spent.tokens / spent.training / report.mesh.world.size()
    steps = spent.tokens / (experiment.training.global_batch_size * experiment.training.seq_len)
    note = Roofline(
        device=device_name(device),
        seconds=spent.training,
        step_seconds=spent.training / steps,
        flops_per_token=flops_per_token,
        tflops=rate * flops_per_token / 1e12,
        peak_tflops=None if peak is None else peak.tflops,
        peak_source=None if peak is None else peak.source,
        optimizer_bytes=optimizer_traffic(
            optimizer,
            clipped=experiment.training.max_grad_norm is not None and not isinstance(optimizer, ScalesGradients),
        ),
        copy_rate=None if measured is None else measured.copy,
    )
    get_logger().info("%s", note.text())
    try:
        write_atomically(folder.roofline, json.dumps({**asdict(note), "short": note.short}) + "\n", durable=False)
    except OSError as error:
        get_logger().error("%s cannot be written (%s)", folder.roofline, error.strerror or error)


def optimizer_traffic(optimizer: torch.optim.Optimizer, *, clipped: bool) -> int:
    """Bytes on this rank that an update must move: weights and states read and written, gradients read, once for the
    norm and once for the update, and, where they are clipped in a pass of its own, read and written in between."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = _bytes(parameter)  # of the parameter's type
            states = sum(_bytes(it) for it in optimizer.state.get(parameter, {}).values() if isinstance(it, Tensor))
            total += 2 * (_bytes(parameter) + states) + gradient * (4 if clipped else 2)
    return total


def _share_of_cores(peak: PeakRate | None, device: torch.device) -> PeakRate | None:
    """A rank has only some threads of a CPU."""
    if peak is None or device.type != "cpu":
        return peak
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    source = peak.source if threads >= cores else f"{threads} of {cores} cores of the {peak.source}"
    return PeakRate(peak.tflops * min(1.0, threads / cores), source)


def _flops(tflops: float) -> str:
    return f"{tflops:.3g} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:.3g} GFLOP/s"


def _bytes(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.element_size()
