"""Stack record of a hung rank: position of its main thread, current collective, issued collectives."""

import json
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from types import CodeType, FrameType
from typing import Any

from titan_exp.tracking.progress_tracker import ProgressSnapshot

RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE"
"""Environment variable of torch: collectives that the flight recorder remembers; read when a rank joins its peers."""
COLLECTIVES = "torch/distributed/distributed_c10d.py"
"""File of torch's collectives."""
WAITING = frozenset({"wait", "wait_tensor", "synchronize", "item"})
"""Names of functions in torch that wait for others, or for a device that does."""


@dataclass(frozen=True)
class RankStack:
    """Position of one rank when the run hung."""

    rank: int
    """Number in the job."""
    host: str
    """Name of its machine."""
    pid: int
    """Process number there."""
    step: int
    """The step that it trains, or after which it does something else."""
    phase: str
    """Phase of training."""
    seconds: float
    """For how long it has reported nothing."""
    place: str
    """`file:line in function`: the innermost frame of its main thread that is neither torch's nor Python's own."""
    collective: str | None
    """The collective that its main thread waits in, by torch's name; None outside of one."""
    issued: dict[str, int] = field(default_factory=dict)
    """Collectives issued so far by process group, where the flight recorder knows."""


def rank_stack(
    position: ProgressSnapshot, *, rank: int, host: str, pid: int, recorder: dict[str, Any] | None
) -> RankStack:
    """Stack of this process's main thread now.

    Args:
        position: what it last reported.
        rank: number in the job.
        host: name of this machine.
        pid: number of this process.
        recorder: what `read_flight_recorder` returned.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = list(_outwards(frame))
    here = next((each for each in frames if _is_telling(each.f_code)), frames[0] if frames else None)
    place = "unknown" if here is None else f"{_short(here.f_code)}:{here.f_lineno} in {here.f_code.co_name}"
    # Those frames only that this place called: above it may be a collective that has called something else.
    called = frames[: frames.index(here)] if here is not None else frames
    return RankStack(
        rank, host, pid, position.at, position.phase, position.seconds, place, _collective(called),
        _issued(recorder),
    )  # fmt: skip


def read_flight_recorder() -> dict[str, Any] | None:
    """Torch's flight recorder of this process; None without torch or without entries."""
    if "torch.distributed" not in sys.modules:
        return None
    from torch._C import _distributed_c10d as c10d

    # The first is NCCL's, where torch was built with it, and knows what runs on the device; the other is of any kind.
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        try:
            found = json.loads(dump())
        except Exception:  # a diagnosis must not fail the diagnosed in another way
            continue
        if found.get("entries"):
            return found
    return None


def to_json(each: RankStack) -> str:
    """For the file that other ranks read."""
    return json.dumps(asdict(each), indent=2) + "\n"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_telling(code: CodeType) -> bool:
    """True if a function belongs to titan_exp or to the user."""
    path = code.co_filename
    library = sysconfig.get_paths()
    if path.startswith("<") or "titan_exp" in path.split("/"):
        return not path.startswith("<")
    return not any(path.startswith(library[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _short(code: CodeType) -> str:
    path = code.co_filename
    return path[path.rindex("titan_exp/") :] if "titan_exp/" in path else path


def _collective(frames: list[FrameType]) -> str | None:
    """The outermost call into torch's collectives among the frames that a place called, innermost first."""
    for frame in reversed(frames):
        if frame.f_code.co_filename.endswith(COLLECTIVES) and not frame.f_code.co_name.startswith("_"):
            return frame.f_code.co_name
    waits = [each.f_code.co_name for each in frames if "/torch/" in each.f_code.co_filename]
    return next((name for name in waits if name in WAITING), None)


def _issued(recorder: dict[str, Any] | None) -> dict[str, int]:
    """The number of the last collective of every process group that has issued one."""
    last: dict[str, int] = {}
    for entry in (recorder or {}).get("entries", []):
        if not entry.get("is_p2p"):
            group = str(entry["process_group"][0])
            last[group] = max(last.get(group, 0), int(entry["collective_seq_id"]))
    return last
