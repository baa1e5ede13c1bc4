"""Worlds of a run: sets of ranks with process groups of their own, which train one run together.

The core launches one world. An extension by whose keys a run has several (`ClusterConfig.worlds`) launches those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Protocol

from titan_exp.config.errors.user_error import UserError, listed
from titan_exp.config.extension import loaded

if TYPE_CHECKING:
    from pathlib import Path

    from titan_exp.config.layout.resolved_layout import ResolvedLayout
    from titan_exp.launch.rank.rank_env import RankInfo
    from titan_exp.launch.state.attempt_end import AttemptResult
    from titan_exp.tracking.run_folder.run_folder import RunFolder


class Processes(Protocol):
    """All processes of one attempt on this machine, which the launcher polls; it holds the run lock."""

    job_id: str
    """Ids of their parent processes, once they are started."""

    def log(self, rank: int) -> Path:
        """Path of a rank's log, in the first world."""
        ...

    def start(self) -> None:
        """Start them. Raises OSError if the logs cannot be written."""
        ...

    def poll(self) -> bool:
        """Poll them; returns True once the attempt is over."""
        ...

    def news(self) -> Iterable[str]:
        """Lines for the console since the last call, beside those of the logs."""
        ...

    def kill(self) -> None:
        """Kill them."""
        ...

    def close(self) -> None:
        """Kill what is left."""
        ...

    def result(self) -> AttemptResult:
        """Result of the attempt; call after `poll` returned True."""
        ...


class WorldsSummary(ABC):
    """What happened to the worlds of a run; a dataclass, of which `titan-exp status --json` prints the fields."""

    @property
    @abstractmethod
    def lost(self) -> float:
        """Seconds lost to failures of worlds, over all attempts."""

    @abstractmethod
    def cells(self) -> dict[str, str]:
        """Cells of `titan-exp status` by column."""


class Worlds(ABC):
    """Launch of runs with several worlds. On SLURM each is a task of one array, with the run's token in its comment."""

    noun: ClassVar[str]
    """Name of one world in texts for users."""
    leave: ClassVar[str]
    """Module, and words before the run folder, that a batch script calls when SLURM is about to end its job: exit code
    0 ends this world alone, 1 has the run saved and stopped."""
    epilogue: ClassVar[str]
    """Module, and words before its arguments, in the place of `titan_exp.launch.slurm.epilogue`."""
    status_help: ClassVar[str]
    """Sentence about its columns for `titan-exp status --help`."""

    @abstractmethod
    def supervise(self, layout: ResolvedLayout, folder: RunFolder, attempt: int) -> Processes:
        """Processes of all worlds of an attempt on this machine."""

    @abstractmethod
    def join(self, folder: RunFolder, rank: RankInfo, number: int) -> tuple[RunFolder, RankInfo]:
        """Join the run's attempt as a rank of world `number`, in a job of its own; returns the folder as its ranks see
        it, and the rank with its attempt number. Raises UserError if it cannot."""

    @abstractmethod
    def summarize(self, folder: RunFolder) -> WorldsSummary | None:
        """Summary of a run; None of one with one world. Raises UserError if its metrics are damaged."""


@cache
def worlds_launch() -> Worlds | None:
    """Launch of runs with several worlds; None if no installed extension provides one. Raises UserError if two do."""
    kinds = list(loaded("worlds"))
    if len(kinds) > 1:
        modules = listed([kind.__module__ for kind in kinds], "and")
        raise UserError(f"A run has one launch of its worlds, and {modules} are installed. Uninstall all but one.")
    return kinds[0]() if kinds else None


def several_worlds() -> Worlds:
    """Launch of a run with several worlds."""
    launch = worlds_launch()
    assert launch is not None, "an extension's keys ask for several"
    return launch


def summarize_worlds(folder: RunFolder) -> WorldsSummary | None:
    """Summary of a run's worlds; None of one. Raises UserError if its metrics are damaged."""
    launch = worlds_launch()
    return None if launch is None else launch.summarize(folder)
