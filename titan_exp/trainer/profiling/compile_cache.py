"""On-disk cache of compiled code beside the runs, shared by attempts and by the runs of a sweep.

torch's default is the temporary folder of the machine, which is empty in a new container or on a new node.
"""

import os
from pathlib import Path

from titan_exp.tracking.run_folder.run_folder import RunFolder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable of the cache of inductor, its Triton kernels, and AOTAutograd."""


def set_compile_cache(folder: RunFolder, run_name: str) -> None:
    """Set the compile cache of this process, unless the user has set one. Call it before anything compiles.

    Entries are keyed by a hash of the graph, torch's version and its settings, so runs and ranks share them safely.
    torch never deletes them.
    """
    os.environ.setdefault(VARIABLE, str(cache_of(folder, run_name) / "compile"))


def cache_of(folder: RunFolder, run_name: str) -> Path:
    """Cache folder shared by runs: `.cache` under `paths.runs`, or in a run folder that was moved elsewhere."""
    path = folder.path.resolve()
    home = path.parents[1] if path.parent.name == run_name else path
    return home / ".cache"
