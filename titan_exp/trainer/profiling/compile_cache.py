"""Compiled code kept on disk beside the runs, for the next attempt and the next run of a sweep.

torch keeps it in the machine's temporary folder by default, which a new container or node begins without.
"""

import os
from pathlib import Path

from titan_exp.config.groups.experiment import Experiment
from titan_exp.tracking.run_folder.run_folder import RunFolder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable by which inductor, Triton's compiler in it, and AOTAutograd find their cache."""


def keep_compiled_code(folder: RunFolder, experiment: Experiment) -> None:
    """Name the cache of this process, before anything is compiled; where the user has named one, that stays.

    Entries are found by a hash of the graph, torch's version and its settings, so runs and ranks share them safely.
    torch removes none.
    """
    os.environ.setdefault(VARIABLE, str(cache_folder(folder, experiment)))


def cache_folder(folder: RunFolder, experiment: Experiment) -> Path:
    """`.cache/compile` under `paths.runs`; in the run folder itself where that was moved elsewhere."""
    return cache_of(folder, experiment) / "compile"


def cache_of(folder: RunFolder, experiment: Experiment) -> Path:
    """`.cache` under `paths.runs`, what runs share; in the run folder itself where that was moved elsewhere."""
    path = folder.path.resolve()
    home = path.parents[1] if path.parent.name == experiment.experiment.name else path
    return home / ".cache"
