"""Local copies of remote checkpoints: a cache that commands and ranks share, and uploads of exports.

Downloads are whole files: for a run, all files of the requested checkpoint, including optimizer state; for a Hugging
Face folder, configuration, tokenizer and the safetensors in its index; for any other folder, all files. Ranks download
different files into one cache.
"""

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from rich.filesize import decimal

from titan_exp.checkpoint.background_upload import CONFIG
from titan_exp.checkpoint.remote_folder import RemoteError, RemoteFile, RemoteFolder
from titan_exp.checkpoint.storage_writer import find_file_damage
from titan_exp.config.checkpoint_files import (
    CHECKSUMS_FILE,
    COMPLETE_NAME,
    INDEX,
    FileChecksum,
    is_url,
    joined,
    parse_checksums,
    parse_index,
    step_name,
)
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.foreign_code import SIGNATURE_FILE
from titan_exp.models.convert.hf_config import FILE
from titan_exp.parallel.mesh import from_rank_0, gather_objects, new_cpu_group
from titan_exp.tracking.logging import PROGRESS, ProgressCallback, byte_progress, get_logger

CACHE = Path("runs/.cache/remote")  # cache of commands outside runs; may be deleted while no command is running
_HUGGINGFACE_SUFFIXES = (".safetensors", ".json", ".model", ".txt", ".jinja")
_UPLOADED_LAST = ("config.json", "params.json", "model.json", ".metadata", CHECKSUMS_FILE)
"""Files that make a folder a checkpoint, in upload order."""


def local_copy(path_or_url: str, *, cache: Path = CACHE, step: int = 0) -> Path:
    """Local path of a run, a checkpoint, or weights: `path_or_url` itself if it is a path, else a cached download.
    `step` selects a run's checkpoint; 0 is the newest. Collective in a job of several ranks, which must share `cache`.
    Raises UserError if the URL is unreachable or contains no checkpoint, a file is damaged, or the disk is full."""
    if not is_url(path_or_url):
        return Path(path_or_url).expanduser()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:
        return _download_on_ranks(path_or_url, cache, step, world)
    manifest = _find_checkpoint(path_or_url, step)
    with byte_progress(f"downloading {path_or_url}") as progress:
        failure = _download(manifest, cache, list(manifest.files), progress)
    if failure is not None:
        raise UserError(failure)
    return cache / manifest.path


@contextlib.contextmanager
def staged_upload(path_or_url: str, *, cache: Path = CACHE) -> Iterator[Path]:
    """Local path to write weights to in the `with` block; if `path_or_url` is a URL, they are uploaded afterwards.
    Files that make a folder a checkpoint are uploaded last, so that a partial upload is not a checkpoint. Until then,
    the cache needs room for all weights. Raises UserError if the URL exists or is not writable."""
    if not is_url(path_or_url):
        yield Path(path_or_url).expanduser()
        return
    remote = RemoteFolder(path_or_url)
    with _as_user_error():
        listing = remote.listing()
        if listing.files or listing.folders or remote.stat() is not None:
            raise UserError(f"{path_or_url} exists. Use another URL, or remove it first.")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="outgoing-", dir=cache)
    except OSError as error:
        raise UserError(f"Cannot write {error.filename or cache} ({error.strerror or error}).") from error
    with folder as temporary:
        target = Path(temporary) / remote.url.rpartition("/")[2]
        yield target
        with _as_user_error(), byte_progress(f"uploading to {path_or_url}") as progress:
            if target.is_file():
                remote.upload(target)
                return
            files = sorted(filter(Path.is_file, target.rglob("*")), key=str)
            files.sort(key=lambda path: _UPLOADED_LAST.index(path.name) + 1 if path.name in _UPLOADED_LAST else 0)
            total, done = sum(path.stat().st_size for path in files), 0
            for path in files:
                remote.upload(path, path.relative_to(target).as_posix())
                done += path.stat().st_size
                progress(done, total)


@dataclass(frozen=True)
class _Manifest:
    url: str  # base folder of the remote names
    path: str  # cache path of the complete download
    files: dict[str, tuple[str, RemoteFile]]  # remote name, size and version by cache path
    checksums: Mapping[str, FileChecksum] = field(default_factory=dict)  # size and checksum by cache path, if known

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for _, file in self.files.values())


def _find_checkpoint(path_or_url: str, step: int) -> _Manifest:
    remote = RemoteFolder(path_or_url)
    name = remote.url.rpartition("/")[2]
    root = hashlib.sha256(remote.url.encode()).hexdigest()[:16]
    with _as_user_error():
        single = remote.stat()
        if single is not None:
            return _Manifest(remote.url, f"{root}/{name}", {f"{root}/{name}": ("", single)})
        listing = remote.listing()
        prefix = "checkpoints/" if "checkpoints" in listing.folders else ""
        folders = remote.listing("checkpoints").folders if prefix else listing.folders
        steps = [folder for folder in folders if COMPLETE_NAME.fullmatch(folder)]
        if CONFIG in listing.files and (steps or prefix):
            return _run_manifest(remote, root, prefix, steps, step)
        if step:
            raise UserError(f"step={step}: only a run has several checkpoints, and {path_or_url} is not a run.")
        if CHECKSUMS_FILE in listing.files:
            parent = RemoteFolder(remote.url.rpartition("/")[0])
            return _step_manifest(remote, "", parent, root, name)
        if COMPLETE_NAME.fullmatch(name) and listing.files:
            reason = f"it lacks {CHECKSUMS_FILE}, which we upload last"
            raise UserError(f"{path_or_url} is not a complete checkpoint: {reason}.")
        files = _files_to_download(remote, listing.files)
    if not files:
        raise UserError(f"{path_or_url} contains no checkpoint, or does not exist.")
    cached = {f"{root}/{name}/{file}": (file, entry) for file, entry in files.items()}
    return _Manifest(remote.url, f"{root}/{name}", cached)


def _run_manifest(remote: RemoteFolder, root: str, prefix: str, steps: list[str], step: int) -> _Manifest:
    for name in [step_name(step)] if step else reversed(steps):
        if name in steps and remote.read(f"{prefix}{name}/{CHECKSUMS_FILE}") is not None:
            return _step_manifest(remote, f"{prefix}{name}/", remote, f"{root}/{name}", name, whole_run=True)
    if step:
        there = ", ".join(steps) or "none"
        raise UserError(f"step={step}: {remote.url} has no complete checkpoint of this step. It has {there}.")
    raise UserError(f"{remote.url} contains no complete checkpoint.")


def _step_manifest(
    remote: RemoteFolder, prefix: str, run: RemoteFolder, root: str, name: str, *, whole_run: bool = False
) -> _Manifest:
    listed = remote.listing(prefix.rstrip("/")).files
    try:
        checksums = parse_checksums(remote.read(f"{prefix}{CHECKSUMS_FILE}") or b"")
    except UserError as error:
        raise UserError(f"{joined(remote.url, prefix)}{CHECKSUMS_FILE} is damaged, so we cannot read it.") from error
    if bad := [file for file in checksums if Path(file).name != file or file not in listed]:
        raise UserError(f"{joined(remote.url, prefix)}: the checkpoint is damaged: {bad[0]} is missing.")
    folder = f"{root}/checkpoints/{name}"
    # A converted checkpoint contains its model description, and may contain a tokenizer.
    names = dict.fromkeys((*checksums, CHECKSUMS_FILE, *(listed if FILE in listed else ())))
    files = {f"{folder}/{file}": (f"{prefix}{file}", listed[file]) for file in names}
    if run is not remote:
        # Names are relative to the run's folder, which has the configuration.
        files = {path: (f"{name}/{file}", entry) for path, (file, entry) in files.items()}
    for file in (CONFIG, SIGNATURE_FILE):
        if (entry := run.stat(file)) is not None:
            files[f"{root}/{file}"] = (file, entry)
    expected = {f"{folder}/{file}": checksum for file, checksum in checksums.items()}
    return _Manifest(run.url, root if whole_run else folder, files, expected)


def _files_to_download(remote: RemoteFolder, files: dict[str, RemoteFile]) -> dict[str, RemoteFile]:
    """Files to download: all, or those that `transformers` would read from a Hugging Face folder."""
    if "config.json" not in files or not any(name.endswith(".safetensors") for name in files):
        return files
    indexed = None
    if INDEX in files:
        indexed = set(parse_index(remote.read(INDEX) or b"", joined(remote.url, INDEX)).values())
    return {
        name: file
        for name, file in files.items()
        if name.endswith(_HUGGINGFACE_SUFFIXES)
        and (indexed is None or not name.endswith(".safetensors") or name in indexed)
    }


def _download_on_ranks(path_or_url: str, cache: Path, step: int, world: int) -> Path:
    group, rank = new_cpu_group(), dist.get_rank()
    manifest: _Manifest | str | None = None
    if rank == 0:
        try:
            manifest = _find_checkpoint(path_or_url, step)
        except UserError as error:
            manifest = str(error)
    manifest = from_rank_0(manifest, group)
    if not isinstance(manifest, _Manifest):
        raise UserError(str(manifest))
    get_logger().info("downloading %s from %s, unless cached", decimal(manifest.bytes), path_or_url)
    failures = gather_objects(_download(manifest, cache, sorted(manifest.files)[rank::world]), group)
    dist.destroy_process_group(group)
    if any(failures):
        raise UserError(next(failure for failure in failures if failure is not None))
    return cache / manifest.path


def _download(
    manifest: _Manifest, cache: Path, paths: list[str], progress: ProgressCallback | None = None
) -> str | None:
    """Download the given files unless cached; returns the error message of the first failure."""
    remote, done = RemoteFolder(manifest.url), 0
    try:
        for path in paths:
            name, file = manifest.files[path]
            damage = _download_file(remote, name, file, cache / path, manifest.checksums.get(path))
            if damage is not None:
                return f"{joined(manifest.url, name) if name else manifest.url} is damaged: {damage}."
            done += file.size
            PROGRESS.keep_alive()
            if progress is not None:
                progress(done, manifest.bytes)
    except RemoteError as error:
        return str(error)
    except OSError as error:
        return f"Cannot write the download to {error.filename or cache} ({error.strerror or error})."
    return None


def _download_file(
    remote: RemoteFolder, name: str, file: RemoteFile, target: Path, expected: FileChecksum | None
) -> str | None:
    version_file = target.with_name(f".{target.name}.version")
    target.parent.mkdir(parents=True, exist_ok=True)

    def find_damage() -> str | None:
        if expected is not None:
            return find_file_damage(target, expected)
        if not target.is_file():
            return f"{target.name} is missing"
        size = target.stat().st_size
        return None if size == file.size else f"it has {size:,} bytes instead of {file.size:,}"

    current = version_file.is_file() and version_file.read_text(encoding="utf-8") == file.version_tag
    if current and find_damage() is None:
        return None
    version_file.unlink(missing_ok=True)
    damage = remote.download_verified(name, target, find_damage)
    if damage is None:
        version_file.write_text(file.version_tag, encoding="utf-8")
    return damage


@contextlib.contextmanager
def _as_user_error() -> Iterator[None]:
    try:
        yield
    except RemoteError as error:
        raise UserError(str(error)) from error
