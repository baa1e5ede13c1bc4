"""Weights behind a URL, brought here: fetched once into a cache that later commands and runs find, or written there.

Fetched are: of a run, the one checkpoint that is asked for, all of its files, the optimizer's state included; of a
Hugging Face folder, the safetensors that its index names, configuration and tokenizer; of any other folder, all of its
files. Ranks fetch different files of it into the one cache. Nothing is fetched by parts of a file.
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from rich.filesize import decimal

from titan_exp.checkpoint.dcp.checksums import CHECKSUMS_FILE, FileChecksum, find_file_damage, parse_checksums
from titan_exp.checkpoint.remote.remote_folder import RemoteError, RemoteFile, RemoteFolder, RemoteListing, version_tag
from titan_exp.checkpoint.remote.remote_run import CONFIG, step_name
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.checkpoint_paths import COMPLETE_NAME
from titan_exp.config.paths.remote_url import is_url, joined
from titan_exp.models.convert.model_json import FILE
from titan_exp.parallel.mesh import new_cpu_group
from titan_exp.tracking.byte_progress import ProgressCallback, byte_progress
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.progress_tracker import PROGRESS

CACHE = Path("runs/.cache/remote")
"""Where commands that know no run keep what they have fetched; deleting it is safe while none of them runs."""
_HUGGINGFACE = (".safetensors", ".json", ".model", ".txt", ".jinja")
"""Ends of the names of what is fetched of a Hugging Face folder."""
_INDEX = "model.safetensors.index.json"
_LAST = ("config.json", "params.json", "model.json", ".metadata", CHECKSUMS_FILE)
"""Files without which a folder is no checkpoint: uploaded last, in this order."""


def local_copy(place: str, *, cache: Path = CACHE, step: int = 0) -> Path:
    """The path of what a place holds: a path as it is, what is behind a URL after it has been fetched.

    In a job of several ranks all of them call it together.

    Args:
        place: path or URL of a run, of a checkpoint, or of weights in another format.
        cache: folder to fetch into, seen by all ranks.
        step: the checkpoint of a run; 0 is the newest.

    Raises:
        UserError: the place cannot be reached or holds no checkpoint, a file of it is damaged, or there is no room.
    """
    if not is_url(place):
        return Path(place).expanduser()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        wanted = _found(place, step)
        with byte_progress(f"fetching {place}") as progress:
            failure = _fetch(wanted, cache, list(wanted.files), progress)
        if failure is not None:
            raise UserError(failure)
        return cache / wanted.path
    return _fetched_by_ranks(place, cache, step, world)


@contextlib.contextmanager
def staged_upload(place: str, *, cache: Path = CACHE) -> Iterator[Path]:
    """A path to write weights to in the block; where the place is a URL, they are uploaded after it.

    What makes a folder a checkpoint goes last, so that a half uploaded one is none. The path lies in the cache, which
    needs room for all of the weights, until they are uploaded.

    Raises:
        UserError: something is there already, or the place does not take it.
    """
    if not is_url(place):
        yield Path(place).expanduser()
        return
    remote = RemoteFolder(place)
    with _for_users():
        entries = remote.entries()
        if entries.files or entries.folders or remote.file() is not None:
            raise UserError(f"{place} exists. Name another place, or remove it first.")
    with _room(cache):
        cache.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="outgoing-", dir=cache)
    with folder as temporary:
        target = Path(temporary) / remote.url.rpartition("/")[2]
        yield target
        with _for_users(), byte_progress(f"uploading to {place}") as progress:
            if target.is_file():
                remote.put(target)
                return
            files = sorted((path for path in target.rglob("*") if path.is_file()), key=_order)
            total, done = sum(path.stat().st_size for path in files), 0
            for path in files:
                remote.put(path, path.relative_to(target).as_posix())
                done += path.stat().st_size
                progress(done, total)


def _silent(done: int, total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class _Wanted:
    """What is to be fetched."""

    url: str
    """What the names are relative to."""
    path: str
    """What it is in the cache, when all of it is there."""
    files: dict[str, tuple[str, RemoteFile]]
    """Path in the cache → name below `url`, and what the store says of it."""
    sums: dict[str, FileChecksum] = field(default_factory=dict)
    """Path in the cache → size and checksum, where they are known."""

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.size for _, file in self.files.values())


def _found(place: str, step: int) -> _Wanted:
    remote = RemoteFolder(place)
    name = remote.url.rpartition("/")[2]
    root = f"{hashlib.sha256(remote.url.encode()).hexdigest()[:16]}"
    with _for_users():
        alone = remote.file()
        if alone is not None:
            return _Wanted(remote.url, f"{root}/{name}", {f"{root}/{name}": ("", alone)})
        entries = remote.entries()
        within = "checkpoints/" if "checkpoints" in entries.folders else ""
        steps = [one for one in entries.folders if COMPLETE_NAME.fullmatch(one)]
        if within:
            steps = [one for one in remote.entries("checkpoints").folders if COMPLETE_NAME.fullmatch(one)]
        if CONFIG in entries.files and (steps or within):
            return _of_run(remote, root, within, steps, step)
        if step:
            raise UserError(f"step={step}: only a run has several checkpoints, and {place} is none.")
        if CHECKSUMS_FILE in entries.files:
            above = RemoteFolder(remote.url.rpartition("/")[0])
            return _of_step(remote, "", above, root, name)
        if COMPLETE_NAME.fullmatch(name) and entries.files:
            raise UserError(
                f"{place} is no complete checkpoint: {CHECKSUMS_FILE}, which is uploaded last, is not there."
            )
        files = _of_folder(remote, entries)
    if not files:
        raise UserError(f"{place} holds no checkpoint, or does not exist.")
    return _Wanted(remote.url, f"{root}/{name}", {f"{root}/{name}/{one}": (one, files[one]) for one in files})


def _of_run(remote: RemoteFolder, root: str, within: str, steps: list[str], step: int) -> _Wanted:
    asked = [step_name(step)] if step else list(reversed(steps))
    for name in asked:
        if name in steps and remote.read(f"{within}{name}/{CHECKSUMS_FILE}") is not None:
            return _of_step(remote, f"{within}{name}/", remote, f"{root}/{name}", name, whole_run=True)
    if step:
        raise UserError(
            f"step={step}: {remote.url} has no complete checkpoint of it, but {', '.join(steps) or 'none'}."
        )
    raise UserError(f"{remote.url} holds no complete checkpoint.")


def _of_step(
    remote: RemoteFolder, within: str, run: RemoteFolder, root: str, name: str, *, whole_run: bool = False
) -> _Wanted:
    """A checkpoint as it lies in a run, with the run's configuration where that is known."""
    there = remote.entries(within.rstrip("/")).files
    try:
        sums = parse_checksums((remote.read(f"{within}{CHECKSUMS_FILE}") or b"").decode())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{joined(remote.url, within)}{CHECKSUMS_FILE} cannot be read; the checkpoint is damaged."
        ) from error
    if bad := [one for one in sums if Path(one).name != one or one not in there]:
        raise UserError(f"{joined(remote.url, within)}: the checkpoint is damaged: {bad[0]} is missing.")
    folder = f"{root}/checkpoints/{name}"
    # A converted one says itself of which model it is, and may have a tokenizer beside it.
    names = dict.fromkeys((*sums, CHECKSUMS_FILE, *(there if FILE in there else ())))
    files = {f"{folder}/{one}": (f"{within}{one}", there[one]) for one in names}
    # Of the run above a single checkpoint, what is named is relative to that run.
    url = remote.url
    if run is not remote:
        url, files = run.url, {path: (f"{name}/{one}", file) for path, (one, file) in files.items()}
    config = run.file(CONFIG)
    if config is not None:
        files[f"{root}/{CONFIG}"] = (CONFIG, config)
    expected = {f"{folder}/{one}": sums[one] for one in sums}
    return _Wanted(url, root if whole_run else folder, files, expected)


def _of_folder(remote: RemoteFolder, entries: RemoteListing) -> dict[str, RemoteFile]:
    files = entries.files
    if "config.json" not in files or not any(name.endswith(".safetensors") for name in files):
        return files
    named = None
    if _INDEX in files:
        try:
            named = set(json.loads(remote.read(_INDEX) or b"")["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{joined(remote.url, _INDEX)} cannot be read: {error}") from error
    return {
        name: file
        for name, file in files.items()
        if name.endswith(_HUGGINGFACE) and (named is None or not name.endswith(".safetensors") or name in named)
    }


def _fetched_by_ranks(place: str, cache: Path, step: int, world: int) -> Path:
    group, rank = new_cpu_group(), dist.get_rank()
    found: list[_Wanted | str | None] = [None]
    if rank == 0:
        try:
            found[0] = _found(place, step)
        except UserError as error:
            found[0] = str(error)
    dist.broadcast_object_list(found, src=0, group=group)
    wanted = found[0]
    if not isinstance(wanted, _Wanted):
        raise UserError(str(wanted))
    get_logger().info("fetching %s from %s, unless it is here already", decimal(wanted.bytes), place)
    failure = _fetch(wanted, cache, sorted(wanted.files)[rank::world])
    failures: list[str | None] = [None] * world
    dist.all_gather_object(failures, failure, group=group)
    dist.destroy_process_group(group)
    if any(failures):
        raise UserError(next(one for one in failures if one is not None))
    return cache / wanted.path


def _fetch(wanted: _Wanted, cache: Path, paths: list[str], progress: ProgressCallback = _silent) -> str | None:
    """Fetch some of the files that are not here yet; returns what went wrong, in words."""
    remote, done = RemoteFolder(wanted.url), 0
    try:
        for path in paths:
            name, file = wanted.files[path]
            problem = _fetch_one(remote, name, file, cache / path, wanted.sums.get(path))
            if problem is not None:
                return f"{joined(wanted.url, name) if name else wanted.url} is damaged: {problem}."
            done += file.size
            PROGRESS.keep_alive()
            progress(done, wanted.bytes)
    except RemoteError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or cache}: what is fetched cannot be written ({error.strerror or error})."
    return None


def _fetch_one(
    remote: RemoteFolder, name: str, file: RemoteFile, target: Path, expected: FileChecksum | None
) -> str | None:
    note, version = target.with_name(f".{target.name}.version"), version_tag(file)
    target.parent.mkdir(parents=True, exist_ok=True)

    def problem() -> str | None:
        if not target.is_file():
            return f"{target.name} is missing"
        if expected is not None:
            return find_file_damage(target, expected)
        size = target.stat().st_size
        return None if size == file.size else f"it has {size:,} bytes instead of {file.size:,}"

    known = note.is_file() and note.read_text(encoding="utf-8") == version
    if known and problem() is None:
        return None
    # Bits may have flipped on the way: what arrives wrong twice is wrong there.
    found: str | None = None
    for _ in range(2):
        note.unlink(missing_ok=True)
        remote.get(name, target)
        if (found := problem()) is None:
            note.write_text(version, encoding="utf-8")
            return None
    return found


def _order(path: Path) -> tuple[int, str]:
    return (_LAST.index(path.name) + 1 if path.name in _LAST else 0, str(path))


@contextlib.contextmanager
def _for_users() -> Iterator[None]:
    try:
        yield
    except RemoteError as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def _room(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or cache}: cannot be written ({error.strerror or error}).") from error
