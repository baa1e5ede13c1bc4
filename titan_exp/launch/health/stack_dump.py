"""Stack record of a hung rank: main-thread position, current collective, issued collectives."""

import json
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from titan_exp.tracking.progress_tracker import ProgressSnapshot

RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE"
"""torch environment variable: flight recorder entries, read when the process group is created."""
COLLECTIVES = "torch/distributed/distributed_c10d.py"
PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages, of this environment and of others."""
WAITING = frozenset({"wait", "wait_tensor", "synchronize", "item"})
"""torch functions that block on other ranks or on the device."""


@dataclass(frozen=True)
class RankStack:
    """Position of one rank at a hang."""

    rank: int
    host: str
    pid: int
    step: int
    """Current step; the last finished one during evaluation or saving."""
    phase: str
    seconds: float
    """Seconds since the last progress report."""
    place: str
    """`file:line in function` of the innermost main-thread frame outside site-packages and the standard library."""
    collective: str | None
    """Collective that blocks the main thread; None outside a collective."""
    issued: dict[str, int] = field(default_factory=dict)
    """Collectives issued so far per process group, from the flight recorder."""


def rank_stack(
    position: ProgressSnapshot, *, rank: int, host: str, pid: int, recorder: dict[str, Any] | None
) -> RankStack:
    """Stack record of this process; `recorder` is the result of `read_flight_recorder`."""
    frames = list(_outwards(sys._current_frames().get(threading.main_thread().ident or 0)))
    own = next((frame for frame in frames if _is_own_code(frame.f_code)), frames[0] if frames else None)
    place = "unknown" if own is None else f"{_short(own.f_code)}:{own.f_lineno} in {own.f_code.co_name}"
    # Only frames called from that position: an outer frame may be a collective that called back into our code.
    called = frames[: frames.index(own)] if own is not None else frames
    return RankStack(
        rank, host, pid, position.at, position.phase, position.seconds, place, _collective(called),
        _issued(recorder),
    )  # fmt: skip


def read_flight_recorder() -> dict[str, Any] | None:
    """Torch's flight recorder of this process; None without torch or without entries."""
    if "torch.distributed" not in sys.modules:
        return None
    from torch._C import _distributed_c10d as c10d

    # NCCL's recorder tracks execution on the device, but needs a build with NCCL; the other covers any backend.
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        try:
            found = json.loads(dump())
        except Exception:  # a diagnosis must not raise
            continue
        if found.get("entries"):
            return found
    return None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_own_code(code: CodeType) -> bool:
    """True for code of titan_exp or the user."""
    path = code.co_filename
    folders = set(path.split("/"))
    if path.startswith("<") or "titan_exp" in folders:
        return not path.startswith("<")
    # By name: a container's torch lies outside the environment that runs titan_exp.
    if folders & PACKAGES:
        return False
    library = sysconfig.get_paths()
    return not any(path.startswith(library[name]) for name in ("stdlib", "platstdlib"))


def _short(code: CodeType) -> str:
    path = code.co_filename
    return path[path.rindex("titan_exp/") :] if "titan_exp/" in path else path


def _collective(frames: list[FrameType]) -> str | None:
    """Outermost torch collective; `frames` are ordered innermost first."""
    for frame in reversed(frames):
        if frame.f_code.co_filename.endswith(COLLECTIVES) and not frame.f_code.co_name.startswith("_"):
            return frame.f_code.co_name
    waits = [frame.f_code.co_name for frame in frames if "/torch/" in frame.f_code.co_filename]
    return next((name for name in waits if name in WAITING), None)


def _issued(recorder: dict[str, Any] | None) -> dict[str, int]:
    """Sequence number of the last collective per process group."""
    last: dict[str, int] = {}
    for entry in (recorder or {}).get("entries", []):
        if not entry.get("is_p2p"):
            group = str(entry["process_group"][0])
            last[group] = max(last.get(group, 0), int(entry["collective_seq_id"]))
    return last
