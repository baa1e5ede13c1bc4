"""Remote folders (object stores and others) through fsspec, with bounded timeouts and actionable errors.

Credentials (AWS_*, GOOGLE_APPLICATION_CREDENTIALS, ...) and the endpoint of an S3-compatible store (AWS_ENDPOINT_URL)
come from the environment, never from a configuration.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_exp.config.checkpoint_files import problem_of_url
from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.files import write_atomically

CONNECT_SECONDS = 10
READ_SECONDS = 60  # read timeout of S3 in seconds. Other protocols use their packages' timeouts.
ATTEMPTS = 3  # attempts per S3 request before the store counts as unreachable
CONCURRENT_PARTS = 4  # number of concurrent 50 MB parts of an S3 transfer; bounds its memory
_S3 = ("s3", "s3a")
_CHUNK_BYTES = 8 * 2**20


class RemoteError(Exception):
    """Failed request to a remote store, with a readable message. `permanent` is True if retrying will not help: wrong
    name, no credentials, no permission. Otherwise the network may be down."""

    def __init__(self, message: str, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class TransferCancelled(RemoteError):
    """Transfer cancelled by its `stop` callback."""


@dataclass(frozen=True)
class RemoteFile:
    """File in a remote folder; sizes are in bytes."""

    name: str
    size: int
    version: str  # ETag, generation or modification time, if the store reports one

    @property
    def version_tag(self) -> str:
        """Short hash that changes with the file."""
        return hashlib.sha256(json.dumps([self.name, self.size, self.version]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RemoteListing:
    """Direct children of a remote folder: files by name, folder names sorted."""

    files: dict[str, RemoteFile] = field(default_factory=dict)
    folders: tuple[str, ...] = ()


class RemoteFolder:
    """Remote folder at `url`, which need not exist. Names are relative and may have parts (`step-00000100/x`). Every
    method raises RemoteError if the store fails. Raises UserError if the protocol is unknown or not installed, or the
    URL may hold a credential."""

    def __init__(self, url: str) -> None:
        problem = problem_of_url(url)
        if problem is not None:
            raise UserError(f"{url.partition('://')[0]}://…: {problem[0]}\n    {problem[1]}")
        self.url = url.rstrip("/")
        """URL without a trailing slash."""
        self._opened: tuple[Any, str] | None = None

    def listing(self, name: str = "") -> RemoteListing:
        """List the folder, or a folder below it; empty if it does not exist."""
        with self._store(name) as (store, path):
            try:
                entries = store.ls(path, detail=True)
            except FileNotFoundError:
                return RemoteListing()
            files, folders = {}, []
            for entry in entries:
                full_name = str(entry["name"]).rstrip("/")
                last = full_name.rpartition("/")[2]
                if full_name == path.rstrip("/") or not last:
                    continue  # some stores list the folder itself, or the requested file
                if entry["type"] == "directory":
                    folders.append(last)
                else:
                    files[last] = _remote_file(entry)
            return RemoteListing(files, tuple(sorted(folders)))

    def stat(self, name: str = "") -> RemoteFile | None:
        """Size and version of a file (without a name, of the URL itself); None if it is not a file."""
        with self._store(name) as (store, path):
            try:
                entry = store.info(path)
            except FileNotFoundError:
                return None
            return _remote_file(entry) if entry["type"] == "file" else None

    def read(self, name: str) -> bytes | None:
        """Read a small file; None if it does not exist."""
        with self._store(name) as (store, path):
            try:
                return store.cat_file(path)
            except (FileNotFoundError, IsADirectoryError):
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file; atomic in object stores and on local disks."""
        with self._store(name) as (store, path):
            if _is_local(store):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, content.decode(errors="surrogateescape"))
            else:
                store.pipe_file(path, content)

    def upload(self, source: Path, name: str = "", *, stop: Callable[[], bool] = lambda: False) -> None:
        """Upload a file; a failure may leave a part. Raises TransferCancelled once `stop`, asked between parts."""
        if stop():
            raise TransferCancelled("the transfer was cancelled")
        with self._store(name) as (store, path):
            if _is_local(store):
                _copy(source, Path(path), stop)
            else:
                store.put_file(str(source), path, callback=_stopping(stop))

    def download(self, name: str, target: Path) -> None:
        """Download a file; `target` appears once complete. Raises OSError if the local disk is full or read-only."""
        partial = target.with_name(f"{target.name}.{os.urandom(4).hex()}.part")
        partial.touch()  # an error of the local disk must not count as one of the store
        try:
            with self._store(name) as (store, path):
                store.get_file(path, str(partial))
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    def download_verified(self, name: str, target: Path, find_damage: Callable[[], str | None]) -> str | None:
        """Download a file, and once more if it is damaged; returns the remaining damage."""
        damage = None
        for _ in range(2):
            self.download(name, target)
            if (damage := find_damage()) is None:
                break
        return damage

    def remove(self, *names: str) -> None:
        """Delete files; missing ones count as deleted."""
        for name in names:
            with self._store(name) as (store, path):
                try:
                    store.rm_file(path)
                except FileNotFoundError:
                    continue

    def remove_folder(self, name: str) -> None:
        """Delete a folder with its content."""
        with self._store(name) as (store, path):
            try:
                store.rm(path, recursive=True)
            except FileNotFoundError:
                return

    @contextmanager
    def _store(self, name: str) -> Iterator[tuple[Any, str]]:
        """File system of fsspec with an empty listing cache, and the path of `name`; errors become RemoteError."""
        try:
            if self._opened is None:
                self._opened = _open(self.url)
            store, root = self._opened
            store.invalidate_cache()
            yield store, f"{root}/{name}" if name else root
        except RemoteError:
            raise
        except Exception as error:  # stores raise different exceptions, most of them not OSErrors
            raise _to_remote_error(error, self.url) from error


def _open(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    protocol, options = url.partition("://")[0], dict[str, Any]()
    if protocol in _S3:
        timeouts = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS}
        options["config_kwargs"] = {**timeouts, "retries": {"total_max_attempts": ATTEMPTS}}
        options["max_concurrency"] = CONCURRENT_PARTS
    elif protocol in ("file", "local"):
        options["auto_mkdir"] = True
    store, path = url_to_fs(url, use_listings_cache=False, **options)
    if protocol in _S3:
        store.retries = 1  # botocore retries already, and each attempt waits for its timeout
    return store, path.rstrip("/")


def _remote_file(entry: dict[str, Any]) -> RemoteFile:
    keys = ("ETag", "etag", "generation", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified", "created")
    version = ";".join(f"{key}={entry[key]}" for key in keys if entry.get(key) is not None)
    return RemoteFile(str(entry["name"]).rstrip("/").rpartition("/")[2], int(entry["size"] or 0), version)


def _is_local(store: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(store, LocalFileSystem)


def _copy(source: Path, target: Path, stop: Callable[[], bool]) -> None:
    """Copy to another disk and fsync."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, target.open("wb") as written:
        while chunk := read.read(_CHUNK_BYTES):
            if stop():
                raise TransferCancelled("the transfer was cancelled")
            written.write(chunk)
        written.flush()
        os.fsync(written.fileno())


def _stopping(stop: Callable[[], bool]) -> Any:
    from fsspec.callbacks import Callback

    class Stopping(Callback):
        def relative_update(self, inc: int = 1) -> None:
            if stop():
                raise TransferCancelled("the transfer was cancelled")
            super().relative_update(inc)

    return Stopping()


_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "NoAuthTokenError", "DefaultCredentialsError"}
_UNREACHABLE = {
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ConnectionClosedError",
    "ClientConnectorError",
    "ServerDisconnectedError",
    "FSTimeoutError",
    "HTTPClientError",
    "ProxyConnectionError",
}


def _to_remote_error(error: Exception, url: str) -> RemoteError:
    # By name: the packages that define these classes are not imported unless used.
    names = {kind.__name__ for kind in type(error).__mro__}
    text = " ".join(str(error).split()) or type(error).__name__
    if names & _CREDENTIALS:
        reason = (
            "no credentials were found. Set those of the store in the environment (for S3 AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)"
        )
    elif isinstance(error, OSError) and error.errno in (errno.ENOTDIR, errno.EROFS):
        reason = f"we cannot write to it ({text})"
    elif isinstance(error, PermissionError):
        reason = f"we lack the permission ({text})"
    elif isinstance(error, FileNotFoundError):
        reason = f"there is no such bucket or folder ({text})"
    elif isinstance(error, ImportError):
        reason = f"a package is missing ({text})"
    elif isinstance(error, NotImplementedError):
        reason = "its protocol is read-only"
    elif names & _UNREACHABLE or isinstance(error, TimeoutError | ConnectionError):
        return RemoteError(f"{url}: the store does not answer ({text})")
    else:
        return RemoteError(f"{url}: {type(error).__name__}: {text}")
    return RemoteError(f"{url}: {reason}", permanent=True)
