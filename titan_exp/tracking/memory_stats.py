"""Peak memory of a rank: CUDA allocator, or resident set."""

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from titan_exp.tracking.number_format import GIB

if TYPE_CHECKING:
    import torch


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
