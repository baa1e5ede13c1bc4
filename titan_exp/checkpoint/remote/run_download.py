"""Checkpoints of a run that come back from its remote place: every rank fetches its share and checks what arrived.

What has arrived whole survives a death: the next start goes on with the files that are still missing.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_exp.checkpoint.dcp.checksums import CHECKSUMS_FILE, FileChecksum, find_file_damage
from titan_exp.checkpoint.remote.remote_folder import RemoteError
from titan_exp.checkpoint.remote.remote_run import RemoteRun, step_name
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.progress_tracker import PROGRESS

DOWNLOADING = ".fetching"
"""Ends the name of a folder into which a checkpoint is fetched; unlike a partial one it is kept for the next start."""


def download_newer(
    run: RemoteRun, folder: CheckpointFolder, than: int | None, group: dist.ProcessGroup | None
) -> int | None:
    """Fetch the newest good checkpoint that is newer than what is here; all ranks of the group together.

    A damaged one is named in the log, no longer counts there, and the one before it is taken. Where the store does not
    answer, the run continues from what is here, and the log says so.

    Args:
        run: where they are.
        folder: where to; the run's own checkpoints.
        than: step of the newest intact checkpoint here; None where there is none.
        group: the ranks, which all see the folder.

    Returns:
        The step that is now here; None where nothing newer is there.

    Raises:
        UserError: the store cannot be asked, and here is no checkpoint: the run would begin anew without need. Or
            the disk is full.
    """
    leader = dist.get_rank(group) == 0
    known = _agreed(lambda: [step for step in run.complete_steps() if than is None or step > than], leader, group)
    if isinstance(known, RemoteError):
        _go_on_without(known, than)
        return None
    for step in reversed(known):
        sums = _agreed(lambda step=step: run.checksums(step), leader, group)
        if isinstance(sums, RemoteError):
            _go_on_without(sums, than)
            return None
        if sums is None:
            continue
        get_logger().info("fetching the checkpoint of step %d from %s", step, run.url)
        target = folder.path_of(step).with_name(step_name(step) + DOWNLOADING)
        damage = _fetch(run, step, sums, target, group)
        if damage is None:
            _publish(run, folder, step, target, group)
            return step
        if isinstance(damage, RemoteError):
            _go_on_without(damage, than)
            return None
        get_logger().error(
            "the checkpoint of step %d in %s is damaged: %s; an older one is used instead, and it no longer counts",
            step,
            run.url,
            damage,
        )
        if leader:
            run.quarantine(step)
            shutil.rmtree(target, ignore_errors=True)
    return None


def _fetch(
    run: RemoteRun, step: int, sums: dict[str, FileChecksum], target: Path, group: dist.ProcessGroup | None
) -> str | RemoteError | None:
    """What is wrong with a checkpoint, in words, or what the store did not do; None when all of it is here.

    Raises:
        UserError: it cannot be written here.
    """
    world = dist.get_world_size(group)
    names = sorted(sums)[dist.get_rank(group) :: world]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, _fetch_share(run, step, {name: sums[name] for name in names}, target), group=group)
    kinds: dict[str, str] = dict(reversed([one for one in found if one is not None]))
    if "disk" in kinds:
        raise UserError(
            f"The checkpoint of step {step} from {run.url} cannot be written here: {kinds['disk']}. Make room, and "
            "start again: what has arrived is kept."
        )
    if "store" in kinds:
        return RemoteError(kinds["store"], permanent=False)
    return kinds.get("damage")


def _fetch_share(run: RemoteRun, step: int, sums: dict[str, FileChecksum], target: Path) -> tuple[str, str] | None:
    name = ""
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, expected in sums.items():
            PROGRESS.keep_alive()
            problem = find_file_damage(target / name, expected)
            # Bits may have flipped on the way: what arrives wrong twice is wrong there.
            for _ in range(2):
                if problem is not None:
                    run.folder.get(f"{step_name(step)}/{name}", target / name)
                    problem = find_file_damage(target / name, expected)
            if problem is not None:
                (target / name).unlink(missing_ok=True)
                return "damage", problem
            _sync(target / name)
    except RemoteError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        return ("damage", f"{name} is missing") if missing else ("store", str(error))
    except OSError as error:
        return "disk", f"{error.filename or target}: {error.strerror or error}"
    return None


def _publish(
    run: RemoteRun, folder: CheckpointFolder, step: int, target: Path, group: dist.ProcessGroup | None
) -> None:
    def published() -> None:
        text = run.folder.read(f"{step_name(step)}/{CHECKSUMS_FILE}")
        (target / CHECKSUMS_FILE).write_bytes(text or b"")
        _sync(target / CHECKSUMS_FILE)
        shutil.rmtree(folder.partial_path(step), ignore_errors=True)
        os.rename(target, folder.partial_path(step))
        folder.publish(step)
        for other in folder.path.glob(f"*{DOWNLOADING}"):
            shutil.rmtree(other, ignore_errors=True)

    failure = _agreed(published, dist.get_rank(group) == 0, group)
    if isinstance(failure, RemoteError):
        raise UserError(f"The checkpoint of step {step} could not be fetched: {failure}")


def _go_on_without(error: RemoteError, than: int | None) -> None:
    if than is None or error.permanent:
        raise UserError(
            f"checkpoint.remote: {error}\nWhether a newer checkpoint is there cannot be told. Try again when the store "
            "can be reached, or train without it: checkpoint.remote=null"
        )
    get_logger().error("continuing from step %d, which is here: %s", than, error)


def _agreed(question: Callable[[], Any], leader: bool, group: dist.ProcessGroup | None) -> Any:
    """What rank 0 finds out, on every rank; a RemoteError is an answer.

    Raises:
        UserError: on every rank where rank 0 cannot write here.
    """
    answer: list[Any] = [None]
    if leader:
        try:
            answer[0] = question()
        except RemoteError as error:
            # As text: the causes of errors do not travel.
            answer[0] = _Said(str(error), error.permanent)
        except OSError as error:
            answer[0] = UserError(f"{error.filename or 'the run folder'}: {error.strerror or error}")
    dist.broadcast_object_list(answer, src=0, group=group)
    if isinstance(answer[0], _Said):
        return RemoteError(answer[0].text, permanent=answer[0].permanent)
    if isinstance(answer[0], UserError):
        raise answer[0]
    return answer[0]


class _Said:
    """A RemoteError on its way to other ranks."""

    def __init__(self, text: str, permanent: bool) -> None:
        self.text, self.permanent = text, permanent


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
