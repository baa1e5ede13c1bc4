"""What was asked of a sweep beside overrides, on its way around Hydra to the sweeper: Hydra would compose it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep is to be carried out, and of what."""

    study: Path | None = None
    """The file of a study, whose points are swept over instead of what is listed with commas."""
    size: str | None = None
    """One of the study's sizes; None takes the first."""
    typed: tuple[str, ...] = ()
    """Overrides that were typed after a study's name. They may need groups that only its points choose."""
    dry_run: bool = False
    """Print the plan and start nothing."""
    skip: bool = False
    """Leave out points that cannot run; studies always do."""
    jobs: int = 1
    """Runs at a time on this machine."""
    prune: bool = False
    """Of a study: cancel runs that it no longer holds."""
    yes: bool = False
    """Ask nothing."""


_now: ContextVar[SweepOptions] = ContextVar("options", default=SweepOptions())  # noqa: B039  # it is frozen


@contextmanager
def use_sweep_options(options: SweepOptions) -> Iterator[None]:
    """Inside the block, the sweeper finds this."""
    token = _now.set(options)
    try:
        yield
    finally:
        _now.reset(token)


def current_sweep_options() -> SweepOptions:
    """What the block around asks; a sweep of all that is listed with commas, without one."""
    return _now.get()
