"""On-disk cache of a user's compiled code beside the runs, shared by attempts and by the runs of a sweep.

torch's default is the temporary folder of the machine, which is empty in a new container or on a new node.
"""

import contextlib
import os
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.folder_owner import own_folder
from titan_exp.tracking.run_folder.run_folder import RunFolder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable of the cache of inductor, its Triton kernels, and AOTAutograd."""


def set_compile_cache(folder: RunFolder, run_name: str) -> None:
    """Set the compile cache of this process, unless the user has set one. Call it before anything compiles.

    Entries are keyed by a hash of the graph, torch's version and its settings, so runs and ranks share them safely.
    torch unpickles and executes them, so users do not share them, and never deletes them.
    """
    if VARIABLE not in os.environ:
        with contextlib.suppress(UserError, OSError):  # another user's: torch's own default then
            # Not in `.cache`, whose owner could replace it.
            os.environ[VARIABLE] = str(own_folder(_runs_of(folder, run_name) / f".compile-{os.geteuid()}"))


def cache_of(folder: RunFolder, run_name: str) -> Path:
    """Cache folder shared by runs: `.cache` under `paths.runs`, or in a run folder that was moved elsewhere."""
    return _runs_of(folder, run_name) / ".cache"


def _runs_of(folder: RunFolder, run_name: str) -> Path:
    path = folder.path.resolve()
    return path.parents[1] if path.parent.name == run_name else path
