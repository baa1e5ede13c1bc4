"""A folder behind a URL, through fsspec: bounded time-outs, and errors in words that say what to do.

Credentials are the environment's (AWS_*, GOOGLE_APPLICATION_CREDENTIALS, ...), as is the address of a store that is
not Amazon's own (AWS_ENDPOINT_URL); nothing of them is in a configuration.
"""

import errno
import hashlib
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.remote_url import problem_of_url

CONNECT_SECONDS = 10
"""How long S3 may take to answer a connection."""
READ_SECONDS = 60
"""How long S3 may be silent in the middle of a transfer. Other protocols have the time-outs of their own packages."""
ATTEMPTS = 3
"""How often S3 is asked before it counts as away."""
PARTS_AT_A_TIME = 4
"""Of a large file, in parts of 50 MB: bounds the memory of a transfer."""
_S3 = ("s3", "s3a")
_CHUNK = 8 * 2**20


class RemoteError(Exception):
    """What a remote place has answered or not answered, in words.

    Attributes:
        lasting: no waiting will help: a wrong name, no credentials, no permission. Else the network may be away.
    """

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent


class TransferCancelled(RemoteError):
    """A transfer was given up because it was asked to be."""

    def __init__(self) -> None:
        super().__init__("it was given up, unfinished", permanent=False)


@dataclass(frozen=True)
class RemoteFile:
    """A file of a remote folder."""

    name: str
    """Within its folder."""
    size: int
    """Bytes."""
    version: str
    """Changes with the file, as far as the store tells: its ETag, generation or time."""


@dataclass(frozen=True)
class RemoteListing:
    """What lies directly in a remote folder."""

    files: dict[str, RemoteFile] = field(default_factory=dict)
    """By name."""
    folders: tuple[str, ...] = ()
    """Names, sorted."""


class RemoteFolder:
    """The folder at `url`; it need not exist. Names are relative to it and may have parts (`step-00000100/x`).

    Every method raises RemoteError where the store does not do what it should.

    Raises:
        UserError: the URL's protocol is not known or not installed here, or the URL may hold a credential.
    """

    def __init__(self, url: str) -> None:
        problem = problem_of_url(url)
        if problem is not None:
            raise UserError(f"{url.partition('://')[0]}://…: {problem[0]}\n    {problem[1]}")
        self.url = url.rstrip("/")
        """Where it is."""
        self._opened: tuple[Any, str] | None = None

    def entries(self, name: str = "") -> RemoteListing:
        """What lies in the folder, or in one below it; nothing where there is none."""

        def listed() -> RemoteListing:
            store, _ = self._store()
            store.invalidate_cache()
            path = self._at(name)
            try:
                found = store.ls(path, detail=True)
            except FileNotFoundError:
                return RemoteListing()
            files, folders = {}, []
            for entry in found:
                own = str(entry["name"]).rstrip("/")
                last = own.rpartition("/")[2]
                if own == path.rstrip("/") or not last:
                    continue  # some stores list the folder itself, or the file that was asked for
                if entry["type"] == "directory":
                    folders.append(last)
                else:
                    files[last] = RemoteFile(last, int(entry["size"] or 0), _version(entry))
            return RemoteListing(files, tuple(sorted(folders)))

        return self._asked(listed)

    def file(self, name: str = "") -> RemoteFile | None:
        """A file, or the URL itself where it is one; None where there is none."""

        def found() -> RemoteFile | None:
            store, _ = self._store()
            store.invalidate_cache()
            try:
                entry = store.info(self._at(name))
            except FileNotFoundError:
                return None
            if entry["type"] != "file":
                return None
            return RemoteFile(str(entry["name"]).rpartition("/")[2], int(entry["size"] or 0), _version(entry))

        return self._asked(found)

    def read(self, name: str) -> bytes | None:
        """A small file whole; None where there is none."""

        def content() -> bytes | None:
            store, _ = self._store()
            store.invalidate_cache()
            try:
                return store.cat_file(self._at(name))
            except (FileNotFoundError, IsADirectoryError):
                return None

        return self._asked(content)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file: whole or not at all in an object store and on a disk."""

        def written() -> None:
            store, _ = self._store()
            path = self._at(name)
            if _is_local(store):
                partial = Path(f"{path}.{uuid.uuid4().hex[:8]}.partial")
                partial.parent.mkdir(parents=True, exist_ok=True)
                with partial.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, path)
            else:
                store.pipe_file(path, content)

        self._asked(written)

    def put(self, source: Path, name: str = "", *, stop: Callable[[], bool] = lambda: False) -> None:
        """Upload a file. A death or an error in between may leave a part of it there.

        Raises:
            Abandoned: `stop` said so; it is asked between parts.
        """

        def uploaded() -> None:
            store, _ = self._store()
            if _is_local(store):
                _copy(source, Path(self._at(name)), stop)
            else:
                store.put_file(str(source), self._at(name), callback=_stopping(stop))

        if stop():
            raise TransferCancelled
        self._asked(uploaded)

    def get(self, name: str, target: Path) -> None:
        """Download a file; `target` appears when all of it is there. An empty name is the URL itself.

        Raises:
            OSError: the disk here is full or cannot be written to.
        """
        partial = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.part")
        with partial.open("wb"):
            pass  # what is wrong with this disk is no fault of the store
        try:
            self._asked(lambda: self._store()[0].get_file(self._at(name), str(partial)))
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    def remove(self, *names: str) -> None:
        """Delete files; those that are not there count as deleted."""

        def removed() -> None:
            store, _ = self._store()
            for name in names:
                try:
                    store.rm_file(self._at(name))
                except FileNotFoundError:
                    continue

        self._asked(removed)

    def remove_folder(self, name: str) -> None:
        """Delete a folder and all that is in it."""

        def removed() -> None:
            store, _ = self._store()
            store.invalidate_cache()
            try:
                store.rm(self._at(name), recursive=True)
            except FileNotFoundError:
                return

        self._asked(removed)

    def _at(self, name: str) -> str:
        root = self._store()[1].rstrip("/")
        return f"{root}/{name}" if name else root

    def _store(self) -> tuple[Any, str]:
        if self._opened is None:
            from fsspec.core import url_to_fs

            protocol = self.url.partition("://")[0]
            store, path = url_to_fs(self.url, use_listings_cache=False, **_options(protocol))
            if protocol in _S3:
                store.retries = 1  # botocore has tried already, and every try waits for its time-out
            self._opened = store, path
        return self._opened

    def _asked(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RemoteError:
            raise
        except Exception as error:  # every store has exceptions of its own, most of them not OSErrors
            raise _in_words(error, self.url) from error


def version_tag(file: RemoteFile) -> str:
    """A short text that changes with the file."""
    return hashlib.sha256(json.dumps([file.name, file.size, file.version]).encode()).hexdigest()[:16]


def _options(protocol: str) -> dict[str, Any]:
    if protocol in _S3:
        return {
            "config_kwargs": {
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": READ_SECONDS,
                "retries": {"total_max_attempts": ATTEMPTS},
            },
            "max_concurrency": PARTS_AT_A_TIME,
        }
    return {"auto_mkdir": True} if protocol in ("file", "local") else {}


def _is_local(store: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(store, LocalFileSystem)


def _copy(source: Path, target: Path, stop: Callable[[], bool]) -> None:
    """Copy onto another disk and wait until it has it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, target.open("wb") as written:
        while chunk := read.read(_CHUNK):
            if stop():
                raise TransferCancelled
            written.write(chunk)
        written.flush()
        os.fsync(written.fileno())


def _stopping(stop: Callable[[], bool]) -> Any:
    """A callback that ends a transfer between two of its parts."""
    from fsspec.callbacks import Callback

    class Stopping(Callback):
        def relative_update(self, inc: int = 1) -> None:
            if stop():
                raise TransferCancelled
            super().relative_update(inc)

    return Stopping()


def _version(entry: dict[str, Any]) -> str:
    keys = ("ETag", "etag", "generation", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified", "created")
    return ";".join(f"{key}={entry[key]}" for key in keys if entry.get(key) is not None)


_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "NoAuthTokenError", "DefaultCredentialsError")
_AWAY = (
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ConnectionClosedError",
    "ClientConnectorError",
    "ServerDisconnectedError",
    "FSTimeoutError",
    "HTTPClientError",
    "ProxyConnectionError",
)


def _in_words(error: Exception, url: str) -> RemoteError:
    names = {kind.__name__ for kind in type(error).__mro__}
    said = " ".join(str(error).split()) or type(error).__name__
    if names & set(_CREDENTIALS):
        reason = (
            "no credentials were found. Set those of the store in the environment (for S3 AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)"
        )
    elif isinstance(error, OSError) and error.errno in (errno.ENOTDIR, errno.EROFS):
        reason = f"it cannot be written to ({said})"
    elif isinstance(error, PermissionError):
        reason = f"permission was denied ({said})"
    elif isinstance(error, FileNotFoundError):
        reason = f"there is no such bucket or folder ({said})"
    elif isinstance(error, ImportError):
        reason = f"a package is missing ({said})"
    elif isinstance(error, NotImplementedError):
        reason = "its protocol can only be read"
    elif names & set(_AWAY) or isinstance(error, TimeoutError | ConnectionError):
        return RemoteError(f"{url}: the store does not answer ({said})", permanent=False)
    else:
        return RemoteError(f"{url}: {type(error).__name__}: {said}", permanent=False)
    return RemoteError(f"{url}: {reason}", permanent=True)
