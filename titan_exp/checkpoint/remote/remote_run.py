"""Remote checkpoints of a run. The marker file `checksums.json`, written last, completes `step-00000100/`.

Object stores have no atomic rename; instead, the file that lists all others marks the checkpoint as complete.
"""

import re
from collections.abc import Callable
from pathlib import Path

from titan_exp.checkpoint.remote.remote_folder import RemoteError, RemoteFolder
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.checkpoint_files import CHECKSUMS_FILE, FileChecksum, parse_checksums
from titan_exp.config.paths.checkpoint_paths import COMPLETE_NAME, METADATA_FILE, step_name
from titan_exp.config.paths.remote_url import joined
from titan_exp.config.schema.run_signature import SIGNATURE_FILE
from titan_exp.tracking.logging import get_logger

CONFIG = "config.yaml"
"""Configuration file of the run, next to its checkpoints."""
DAMAGED = "checksums.damaged.json"
"""Name of `checksums.json` in a quarantined checkpoint."""
_RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp")


class RemoteRun:
    """Remote folder of a run below `remote` (`checkpoint.remote`). Raises UserError if the URL is not usable."""

    def __init__(self, remote: str, name: str, run_id: str) -> None:
        self.folder = RemoteFolder(joined(remote, name, run_id))
        """Folder with the configuration and the checkpoints."""
        self.url = self.folder.url
        self._kept: set[int] = set()

    @classmethod
    def of(cls, remote: str | None, name: str, run_id: str) -> "RemoteRun | None":
        """Remote folder of a run; None if its checkpoints stay here."""
        return None if remote is None else cls(remote, name, run_id)

    def write_config(self, config: Path) -> None:
        """Upload the run's configuration and its signature; this also verifies that the store is writable."""
        for path in (config.with_name(SIGNATURE_FILE), config):
            text = path.read_bytes() if path.is_file() else b""
            if self.folder.read(path.name) != text:
                self.folder.write(path.name, text)

    def listed_steps(self) -> list[int]:
        """Steps with any file, ascending, complete or not."""
        matches = (COMPLETE_NAME.fullmatch(name) for name in self.folder.listing().folders)
        return sorted(int(match[1]) for match in matches if match)

    def checksums(self, step: int) -> dict[str, FileChecksum] | None:
        """Checksums of a complete checkpoint by file name; None if it is incomplete."""
        text = self._marker(step)
        try:
            checksums = parse_checksums(text or b"")
        except UserError:
            return None  # a partial or foreign file does not complete a checkpoint
        # Names with path components could be written outside the checkpoint.
        safe = METADATA_FILE in checksums and all(Path(name).name == name for name in checksums)
        return checksums if safe else None

    def complete_steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending; sends one request per listed step."""
        return [step for step in self.listed_steps() if self.checksums(step) is not None]

    def has_same(self, step: int, path: Path) -> bool:
        """True if the checkpoint at `path` is already uploaded, complete and identical."""
        return self._marker(step) == (path / CHECKSUMS_FILE).read_bytes()

    def upload_shard(self, step: int, path: Path, rank: int, world: int, stop: Callable[[], bool]) -> None:
        """Upload one rank's share of a checkpoint's files: its own files, if the layout is unchanged.

        The first file invalidates an existing checkpoint of the step. Raises RemoteError if an upload fails, OSError if
        the checkpoint at `path` cannot be read.
        """
        listed = self.folder.listing(step_name(step)).files
        if CHECKSUMS_FILE in listed and self.has_same(step, path):
            return
        self.folder.remove(*(f"{step_name(step)}/{name}" for name in (CHECKSUMS_FILE, DAMAGED) if name in listed))
        for name in parse_checksums((path / CHECKSUMS_FILE).read_text(encoding="utf-8")):
            if uploading_rank(name, world) == rank:
                self.folder.upload(path / name, f"{step_name(step)}/{name}", stop=stop)

    def publish(self, step: int, path: Path) -> None:
        """Write the marker file once all shards are uploaded. Raises RemoteError if a file is missing or has the wrong
        size."""
        text = (path / CHECKSUMS_FILE).read_text(encoding="utf-8")
        listed = self.folder.listing(step_name(step)).files
        if CHECKSUMS_FILE in listed:
            return  # complete and identical: no rank has uploaded anything
        for name, checksum in parse_checksums(text).items():
            if name not in listed or listed[name].size != checksum.size:
                size = f"{listed[name].size:,} bytes" if name in listed else "nothing"
                raise RemoteError(
                    f"{joined(self.url, step_name(step), name)}: {size} arrived of {checksum.size:,} bytes"
                )
        self.folder.write(f"{step_name(step)}/{CHECKSUMS_FILE}", text.encode())

    def apply_retention(self, newest: int, every: int | None, published: int) -> None:
        """Delete old complete checkpoints and files of interrupted uploads, up to the step just published.

        The `newest` checkpoints and multiples of `every` are kept.
        """
        listed = [step for step in self.listed_steps() if step <= published]
        complete = [step for step in listed if step in self._kept or self.checksums(step) is not None]
        self._kept = set()
        for step in listed:
            if step not in complete:
                if DAMAGED not in self.folder.listing(step_name(step)).files:
                    self.folder.remove_folder(step_name(step))
            elif step not in complete[-newest:] and (every is None or step % every):
                # Delete the marker first: a partially deleted checkpoint must not look complete.
                self.folder.remove(f"{step_name(step)}/{CHECKSUMS_FILE}")
                self.folder.remove_folder(step_name(step))
            else:
                self._kept.add(step)

    def quarantine(self, step: int) -> None:
        """Rename the marker file of a damaged checkpoint; its other files are kept."""
        try:
            self.folder.write(f"{step_name(step)}/{DAMAGED}", self._marker(step) or b"")
            self.folder.remove(f"{step_name(step)}/{CHECKSUMS_FILE}")
        except RemoteError as error:
            get_logger().error("the damaged checkpoint of step %d could not be quarantined: %s", step, error)

    def _marker(self, step: int) -> bytes | None:
        return self.folder.read(f"{step_name(step)}/{CHECKSUMS_FILE}")


def uploading_rank(name: str, world: int) -> int:
    """Rank that uploads a file: its writer, modulo the world size; rank 0 for files without a rank."""
    match = _RANK_FILE.fullmatch(name)
    return int(match[1]) % world if match else 0
