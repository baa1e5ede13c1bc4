"""Stack record of a hung rank: position of its main thread, current collective, issued collectives."""

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
"""Environment variable of torch: entries of the flight recorder, read when the process group is created."""
COLLECTIVES = "torch/distributed/distributed_c10d.py"
WAITING = frozenset({"wait", "wait_tensor", "synchronize", "item"})
"""Functions of torch that wait for other ranks, or for a device that does."""


@dataclass(frozen=True)
class RankStack:
    """Position of one rank when the run hung."""

    rank: int
    host: str
    pid: int
    step: int
    """Current step; the last one during an evaluation or a save."""
    phase: str
    seconds: float
    """Seconds since its last progress report."""
    place: str
    """`file:line in function`: the innermost frame of the main thread outside torch and Python's library."""
    collective: str | None
    """Collective that the main thread waits in; None outside of one."""
    issued: dict[str, int] = field(default_factory=dict)
    """Collectives issued so far by process group, from the flight recorder."""


def rank_stack(
    position: ProgressSnapshot, *, rank: int, host: str, pid: int, recorder: dict[str, Any] | None
) -> RankStack:
    """Stack record of this process's main thread now; `recorder` is the result of `read_flight_recorder`."""
    frames = list(_outwards(sys._current_frames().get(threading.main_thread().ident or 0)))
    own = next((frame for frame in frames if _is_own_code(frame.f_code)), frames[0] if frames else None)
    place = "unknown" if own is None else f"{_short(own.f_code)}:{own.f_lineno} in {own.f_code.co_name}"
    # Only frames below that position: above it may be a collective that has called back into our code.
    called = frames[: frames.index(own)] if own is not None else frames
    return RankStack(
        rank, host, pid, position.at, position.phase, position.seconds, place, _collective(called),
        _issued(recorder),
    )  # fmt: skip


def read_flight_recorder() -> dict[str, Any] | None:
    """Torch's flight recorder of this process; None without torch or entries."""
    if "torch.distributed" not in sys.modules:
        return None
    from torch._C import _distributed_c10d as c10d

    # NCCL's recorder, if torch was built with it, knows what runs on the device; the other is of any backend.
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
    """True if a function belongs to titan_exp or the user."""
    path = code.co_filename
    library = sysconfig.get_paths()
    if path.startswith("<") or "titan_exp" in path.split("/"):
        return not path.startswith("<")
    return not any(path.startswith(library[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _short(code: CodeType) -> str:
    path = code.co_filename
    return path[path.rindex("titan_exp/") :] if "titan_exp/" in path else path


def _collective(frames: list[FrameType]) -> str | None:
    """Outermost torch collective among the frames below a code position, innermost first."""
    for frame in reversed(frames):
        if frame.f_code.co_filename.endswith(COLLECTIVES) and not frame.f_code.co_name.startswith("_"):
            return frame.f_code.co_name
    waits = [frame.f_code.co_name for frame in frames if "/torch/" in frame.f_code.co_filename]
    return next((name for name in waits if name in WAITING), None)


def _issued(recorder: dict[str, Any] | None) -> dict[str, int]:
    """Number of the last collective of every process group."""
    last: dict[str, int] = {}
    for entry in (recorder or {}).get("entries", []):
        if not entry.get("is_p2p"):
            group = str(entry["process_group"][0])
            last[group] = max(last.get(group, 0), int(entry["collective_seq_id"]))
    return last
