"""Throughput and memory of training."""

import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from titan_exp.tracking.number_format import GIB

if TYPE_CHECKING:
    import torch


@dataclass
class TimeBreakdown:
    """Time of one attempt by activity in seconds, and tokens trained after warm-up."""

    warmup: float = 0.0
    """First steps: compilation, allocation, autotuning."""
    training: float = 0.0
    """Steps after warm-up, up to the last reading."""
    tokens: int = 0
    """Tokens of the whole job trained in `training` seconds."""
    steps: int = 0
    """Optimizer steps in `training` seconds."""
    paused: dict[str, float] = field(default_factory=dict)
    """Pauses by reason (`evaluation`, `checkpoint`), including those during warm-up."""


class Throughput:
    """Throughput between two readings, one per logged row.

    `devices` is the number of processes, `flops_per_token` the model's forward and backward FLOPs per token (6 × active
    parameters in matmuls + attention), `peak_tflops` the dense bf16 peak of one device; None makes the dependent
    metrics unknown. `synchronize` waits for the device; it is called at the ends of pauses and of warm-up, so that
    queued kernels are attributed correctly.
    """

    def __init__(
        self,
        *,
        devices: int,
        flops_per_token: float | None = None,
        peak_tflops: float | None = None,
        warmup_steps: int = 3,
        synchronize: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.spent = TimeBreakdown()
        self.devices, self._flops_per_token, self._peak_tflops = devices, flops_per_token, peak_tflops
        self._warmup_steps, self._synchronize, self._clock = warmup_steps, synchronize, clock
        self._window_start = clock()
        self._window_tokens = self._window_steps = 0
        self._window_paused = 0.0

    def step(self, tokens: int) -> None:
        """Count an optimizer step of the whole job on `tokens` tokens."""
        if self._warmup_steps > 0:
            self._warmup_steps -= 1
            if self._warmup_steps == 0:
                self._synchronize()
                self.spent.warmup += self._restart()
        else:
            self._window_tokens += tokens
            self._window_steps += 1

    @contextmanager
    def pause(self, reason: str) -> Iterator[None]:
        """Exclude the block from throughput and count its time under `reason`. Not reentrant."""
        self._synchronize()
        begin = self._clock()
        try:
            yield
        finally:
            self._synchronize()
            seconds = self._clock() - begin
            self._window_paused += seconds
            self.spent.paused[reason] = self.spent.paused.get(reason, 0.0) + seconds

    def read(self) -> dict[str, float | None]:
        """Throughput since the last reading, under the keys of a row; None if unmeasured or unknown.

        `tflops` is per device, `mfu` is `tflops` over the peak. Synchronize with the device before the call.
        """
        per_second = tflops = mfu = None
        if self._window_tokens > 0:
            tokens, steps = self._window_tokens, self._window_steps
            seconds = self._restart()
            self.spent.training += seconds
            self.spent.tokens += tokens
            self.spent.steps += steps
            per_second = tokens / seconds if seconds > 0 else None
        per_device = None if per_second is None else per_second / self.devices
        if per_device is not None and self._flops_per_token is not None:
            tflops = per_device * self._flops_per_token / 1e12
            mfu = None if self._peak_tflops is None else tflops / self._peak_tflops
        return {
            "tokens_per_second": per_second,
            "tokens_per_second_per_device": per_device,
            "tflops": tflops,
            "mfu": mfu,
        }

    def _restart(self) -> float:
        """Start a new window; returns the seconds of the old one, without pauses."""
        now = self._clock()
        seconds = now - self._window_start - self._window_paused
        self._window_start, self._window_tokens, self._window_steps, self._window_paused = now, 0, 0, 0.0
        return seconds


class PeakMemory:
    """Peak memory of this rank since construction or `reset`, in GiB.

    CUDA: allocated and reserved bytes of the caching allocator. CPU: peak resident set of the process, which cannot be
    reset outside Linux.
    """

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Reset the peak to the current usage."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_peak_resident()

    def read(self) -> dict[str, float | None]:
        """Peaks under the keys of a row: `memory` and `memory_reserved` (None on a CPU)."""
        if self._device.type == "cuda":
            import torch

            allocated = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.max_memory_reserved(self._device)
            return {"memory": allocated / GIB, "memory_reserved": reserved / GIB}
        return {"memory": _peak_resident() / GIB, "memory_reserved": None}


def _reset_peak_resident() -> None:
    # Outside Linux, or in a sandbox, the peak covers the process lifetime.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)


def _peak_resident() -> int:
    """Peak resident set in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    if found := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
