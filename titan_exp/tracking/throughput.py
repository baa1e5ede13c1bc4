"""Training throughput: tokens per second, TFLOP/s and MFU, excluding warm-up, evaluation and blocking saves."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


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
