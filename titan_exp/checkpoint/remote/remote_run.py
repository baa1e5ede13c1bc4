"""The checkpoints of a run behind a URL: `step-00000100/` counts when its `checksums.json`, written last, is there.

An object store renames nothing, so the one file that says what the others are says that they are all there.
"""

import re
from collections.abc import Callable
from pathlib import Path

from titan_exp.checkpoint.dcp.checksums import CHECKSUMS_FILE, FileChecksum, parse_checksums
from titan_exp.checkpoint.remote.remote_folder import RemoteError, RemoteFolder
from titan_exp.config.paths.checkpoint_paths import COMPLETE_NAME, METADATA_FILE
from titan_exp.config.paths.remote_url import joined
from titan_exp.tracking.logging import get_logger

CONFIG = "config.yaml"
"""The run's configuration, beside its checkpoints."""
DAMAGED = "checksums.damaged.json"
"""What `checksums.json` is called in a checkpoint that was found damaged, so that it no longer counts."""
_OF_A_RANK = re.compile(r"__(\d+)_\d+\.distcp")


def step_name(step: int) -> str:
    """Name of the folder of a step."""
    return f"step-{step:08d}"


class RemoteRun:
    """The remote folder of one run.

    Args:
        remote: URL of all runs, `checkpoint.remote`.
        name: of the experiment.
        run_id: of the run.

    Raises:
        UserError: the URL cannot be used on this machine.
    """

    def __init__(self, remote: str, name: str, run_id: str) -> None:
        self.folder = RemoteFolder(joined(remote, name, run_id))
        """Where everything of the run is."""
        self.url = self.folder.url
        self._kept: set[int] = set()

    def write_config(self, config: Path) -> None:
        """Write the run's configuration there, which also shows that the place can be written to."""
        text = config.read_bytes() if config.is_file() else b""
        if self.folder.read(CONFIG) != text:
            self.folder.write(CONFIG, text)

    def listed_steps(self) -> list[int]:
        """Steps of which anything is there, ascending, complete or not."""
        found = (COMPLETE_NAME.fullmatch(name) for name in self.folder.entries().folders)
        return sorted(int(match[1]) for match in found if match)

    def checksums(self, step: int) -> dict[str, FileChecksum] | None:
        """What a complete checkpoint consists of; None where it is not complete."""
        return _parsed(self.folder.read(f"{step_name(step)}/{CHECKSUMS_FILE}"))

    def complete_steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending; asks the store once for each that was begun."""
        return [step for step in self.listed_steps() if self.checksums(step) is not None]

    def has_same(self, step: int, path: Path) -> bool:
        """Whether the checkpoint at `path` is there, complete, and the same one."""
        return self.folder.read(f"{step_name(step)}/{CHECKSUMS_FILE}") == (path / CHECKSUMS_FILE).read_bytes()

    def upload_shard(self, step: int, path: Path, share: int, shares: int, stop: Callable[[], bool]) -> None:
        """Upload one rank's share of a checkpoint's files: those that it wrote itself, where the layout is the same.

        The checkpoint no longer counts as complete from the first file on, should it have been.

        Raises:
            RemoteError: the store did not take all of it.
            OSError: the checkpoint at `path` cannot be read.
        """
        there = self.folder.entries(step_name(step)).files
        if CHECKSUMS_FILE in there and self.has_same(step, path):
            return
        self.folder.remove(*(f"{step_name(step)}/{name}" for name in (CHECKSUMS_FILE, DAMAGED) if name in there))
        for name in parse_checksums((path / CHECKSUMS_FILE).read_text(encoding="utf-8")):
            if share_of(name, shares) == share:
                self.folder.put(path / name, f"{step_name(step)}/{name}", stop=stop)

    def publish(self, step: int, path: Path) -> None:
        """Write the file that makes a checkpoint count; all shares are there.

        Raises:
            RemoteError: a file is not there, or not as long as it should be, or the store did not take this one.
        """
        text = (path / CHECKSUMS_FILE).read_text(encoding="utf-8")
        there = self.folder.entries(step_name(step)).files
        if CHECKSUMS_FILE in there:
            return  # it was complete and the same: no rank has sent anything
        for name, one in parse_checksums(text).items():
            if name not in there or there[name].size != one.size:
                size = f"{there[name].size:,} bytes" if name in there else "nothing"
                raise RemoteError(
                    f"{joined(self.url, step_name(step), name)}: {size} arrived of {one.size:,} bytes", permanent=False
                )
        self.folder.write(f"{step_name(step)}/{CHECKSUMS_FILE}", text.encode())

    def apply_retention(self, newest: int, every: int | None, published: int) -> None:
        """Delete complete checkpoints, the oldest first, and what interrupted uploads left of older steps.

        Args:
            newest: how many of the newest stay.
            every: those whose step is a multiple of it stay as well; None keeps none of them.
            published: the step that has just been made complete; what is newer is let be.
        """
        begun = [step for step in self.listed_steps() if step <= published]
        complete = [step for step in begun if step in self._kept or self.checksums(step) is not None]
        self._kept = set()
        for step in begun:
            if step not in complete:
                if DAMAGED not in self.folder.entries(step_name(step)).files:
                    self.folder.remove_folder(step_name(step))
            elif step not in complete[-newest:] and (every is None or step % every):
                # First it stops to count: half of a checkpoint must not look like one.
                self.folder.remove(f"{step_name(step)}/{CHECKSUMS_FILE}")
                self.folder.remove_folder(step_name(step))
            else:
                self._kept.add(step)

    def quarantine(self, step: int) -> None:
        """Make a damaged checkpoint no longer count; its files stay."""
        text = self.folder.read(f"{step_name(step)}/{CHECKSUMS_FILE}")
        try:
            self.folder.write(f"{step_name(step)}/{DAMAGED}", text or b"")
            self.folder.remove(f"{step_name(step)}/{CHECKSUMS_FILE}")
        except RemoteError as error:
            get_logger().error("the damaged checkpoint of step %d still counts there: %s", step, error)


def share_of(name: str, shares: int) -> int:
    """Which of so many ranks uploads a file: the one that wrote it, if there are as many as then; rank 0 the rest."""
    match = _OF_A_RANK.fullmatch(name)
    return int(match[1]) % shares if match else 0


def _parsed(text: bytes | None) -> dict[str, FileChecksum] | None:
    """A torn or foreign file is none: it says of no checkpoint that it is complete."""
    if text is None:
        return None
    try:
        sums = parse_checksums(text.decode())
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    # A name with a path in it could be written anywhere by who fetches.
    return sums if METADATA_FILE in sums and all(Path(name).name == name for name in sums) else None
