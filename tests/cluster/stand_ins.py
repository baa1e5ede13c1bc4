"""More fake trainers, beside tests/launch/fake_ranks.py."""

import os
import signal
import sys
import time

from titan_exp.tracking.run_folder.run_folder import RunFolder


def stop_always(path: str) -> None:
    """Save and stop at every start; only the first saves anything new."""
    (RunFolder(path).checkpoints / "step-00000001").mkdir(parents=True, exist_ok=True)
    sys.exit(85)


def killed_in_a_collective(path: str) -> None:
    """Rank 1 is killed, and the collective of the others breaks."""
    from torch import distributed

    distributed.init_process_group("gloo")
    distributed.barrier()
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()


def killed_beside_a_sleeper(path: str) -> None:
    """Rank 1 is killed, and rank 0 notices nothing."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)


def train_slowly(path: str) -> None:
    """The trainer, whose first attempt takes a second longer for every step."""
    from titan_exp.trainer.rank_main import main
    from titan_exp.trainer.trainer import Trainer

    step = Trainer._one_step

    def one_step(self: Trainer) -> bool:
        time.sleep(1)
        return step(self)

    if len(RunFolder(path).read_attempts()) == 1:
        Trainer._one_step = one_step
    main(path)


def train_at_a_pace(path: str) -> None:
    """The trainer, at most ten steps a second: a group that is away comes back before the end."""
    from titan_exp.trainer.rank_main import main
    from titan_exp.trainer.trainer import Trainer

    step = Trainer._one_step

    def one_step(self: Trainer) -> bool:
        time.sleep(0.1)
        return step(self)

    Trainer._one_step = one_step
    main(path)


def hang(path: str) -> None:
    """Hang where no Python signal handler runs."""
    open(f"{path}/hanging", "w").close()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    time.sleep(120)


def train_second_time(path: str) -> None:
    """The trainer; the first attempt with seed 1 at the lower learning rate fails."""
    from titan_exp.config.schema.typed_config import load_experiment
    from titan_exp.trainer.rank_main import main

    folder = RunFolder(path)
    experiment = load_experiment(folder.config, trust=True)
    if (experiment.experiment.seed, experiment.optimizer.lr) == (1, 1e-3) and len(folder.read_attempts()) == 1:
        raise RuntimeError("out of luck")
    main(path)
