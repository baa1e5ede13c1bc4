"""Entry point and RankInfo of a rank started by submitit's local controller.

`python -m titan_exp.launch.local.submitit_rank RUN_FOLDER` runs it. The rank is given a path: nothing is unpickled,
least of all from the run folder, where other users may write.
"""

import os
import sys

from titan_exp.launch.rank.main import run_rank
from titan_exp.launch.rank.rank_env import ATTEMPT, LAUNCHER, VISIBLE_GPUS, RankInfo, extend_import_path
from titan_exp.tracking.run_folder.attempts import World
from titan_exp.tracking.run_folder.run import Run
from titan_exp.tracking.run_folder.run_folder import RunFolder


def submitit_rank() -> RankInfo:
    """Rank from submitit's environment. Restores the launcher's CUDA_VISIBLE_DEVICES and sys.path."""
    extend_import_path()
    gpus = os.environ.get(VISIBLE_GPUS)
    if gpus is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    return RankInfo(
        rank=int(os.environ["SUBMITIT_LOCAL_GLOBALID"]),
        world_size=int(os.environ["SUBMITIT_LOCAL_NTASKS"]),
        local_rank=int(os.environ["SUBMITIT_LOCAL_LOCALID"]),
        attempt=int(os.environ[ATTEMPT]),
        launcher=int(os.environ[LAUNCHER]),
        controller=int(os.environ["SUBMITIT_LOCAL_JOB_ID"]),
    )


def run_submitit_rank(path: str) -> None:
    """Run one rank of the run folder at `path`; calls `sys.exit` with a nonzero exit code."""
    world = World.from_environment()
    folder = RunFolder(path, world_logs=None if world is None else world.logs)
    code = run_rank(Run(folder), submitit_rank())
    if code:
        sys.exit(code)


if __name__ == "__main__":
    run_submitit_rank(sys.argv[1])
