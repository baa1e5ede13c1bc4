"""Roofline of a finished run: achieved FLOP/s over the device's peak, with the source of each number."""

import json
import os
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from titan_exp.ops.autograd import local_tensor
from titan_exp.optim.optimizer import ScalesGradients
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.files import write_atomically
from titan_exp.tracking.throughput import PeakRate, device_name, matmul_rate, read_rates
from titan_exp.trainer.part import Part, Phase, Run, Step


@dataclass(frozen=True)
class Roofline:
    """Figures of one attempt, per device. None means unknown."""

    device: str
    seconds: float  # measured seconds of steps after warm-up, without evaluation, checkpoints and exports
    step_seconds: float  # mean of those seconds per step
    flops_per_token: float  # FLOPs of a training step per token, computed from the model's shapes
    tflops: float  # `flops_per_token` times measured tokens per second and device
    peak_tflops: float | None
    peak_source: str | None
    optimizer_bytes: int  # minimum bytes that one update with clipping moves, computed from rank 0's tensors
    copy_rate: float | None  # GB/s read and written in a copy, measured by `titan-exp doctor`

    @property
    def short(self) -> str:
        """Share of the peak, for the last line of a run; empty if the peak is unknown."""
        if self.peak_tflops is None:
            return ""
        return f"{100 * self.tflops / self.peak_tflops:.1f} % of {_flops(self.peak_tflops)} ({self.peak_source})"

    def text(self) -> str:
        """The note as logged."""
        unknown = ". We do not know the peak of this device, and titan-exp doctor measures it"
        share = f", {self.short}" if self.short else unknown
        flops = (
            f"roofline: {_flops(self.tflops)} per device (the model's FLOPs, computed from its shapes, over "
            f"{self.seconds:.1f} s of steps, measured){share}"
        )
        traffic = f"optimizer and clipping: at least {self.optimizer_bytes / 1e9:.3g} GB a step (computed)"
        if self.copy_rate:
            seconds = self.optimizer_bytes / 1e9 / self.copy_rate
            traffic += (
                f", which take {1e3 * seconds:.3g} ms at the measured {self.copy_rate:.3g} GB/s of a copy: "
                f"{100 * seconds / self.step_seconds:.1f} % of a step of {self.step_seconds:.3g} s (measured)"
            )
        return f"{flops}; {traffic}"


class RooflineNote(Part):
    """Logs the roofline of a finished attempt on rank 0 and writes it to the run folder, if any step was timed."""

    name = "roofline"
    phase = Phase.REPORT
    isolated = False  # it runs nothing of a model's

    def begin(self, run: Run) -> None:
        self._run = run

    def finish(self, step: Step) -> None:
        training, report, optimizer = self._run.experiment.training, self._run.report, self._run.state.optimizer
        spent = report.throughput.spent
        if not report.leader or not (spent.tokens and spent.training):
            return
        device, file = report.mesh.device, report.folder.roofline
        measured = read_rates(report.cache, device_name(device))
        dtype = "bf16" if training.mixed_precision == "bf16" else "fp32"
        peak = report.peak or matmul_rate(device, dtype, report.cache)
        if peak is not None and report.peak is None and device.type == "cpu":  # this rank has a share of the cores
            cores, threads = os.cpu_count() or 1, torch.get_num_threads()
            source = peak.source if threads >= cores else f"{threads} of {cores} cores of the {peak.source}"
            peak = PeakRate(peak.tflops * min(1.0, threads / cores), source)
        rate = spent.tokens / spent.training / report.mesh.world.size()
        clipped = training.max_grad_norm is not None and not isinstance(optimizer, ScalesGradients)
        note = Roofline(
            device=device_name(device),
            seconds=spent.training,
            step_seconds=spent.training / spent.steps,
            flops_per_token=report.flops_per_token,
            tflops=rate * report.flops_per_token / 1e12,
            peak_tflops=None if peak is None else peak.tflops,
            peak_source=None if peak is None else peak.source,
            optimizer_bytes=optimizer_traffic(optimizer, clipped=clipped),
            copy_rate=None if measured is None else measured.copy,
        )
        get_logger().info("%s", note.text())
        try:
            write_atomically(file, json.dumps({**asdict(note), "short": note.short}) + "\n", durable=False)
        except OSError as error:
            get_logger().error("cannot write %s (%s)", file, error.strerror or error)


def optimizer_traffic(optimizer: torch.optim.Optimizer, *, clipped: bool) -> int:
    """Minimum bytes that an update moves on this rank. Weights and states are read and written; gradients are read for
    the norm and for the update, and a separate clipping pass reads and writes them once more."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = _bytes(parameter)  # same dtype
            tensors = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
            total += 2 * (_bytes(parameter) + sum(map(_bytes, tensors))) + gradient * (4 if clipped else 2)
    return total


def _flops(tflops: float) -> str:
    return f"{tflops:.3g} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:.3g} GFLOP/s"


def _bytes(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.element_size()
