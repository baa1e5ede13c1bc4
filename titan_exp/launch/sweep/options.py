"""Sweep options (--dry-run, --jobs, ...) that Hydra must not see, passed to the sweeper through a ContextVar."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep."""

    study: Path | None = None
    """Study file; its points replace the comma-separated values."""
    size: str | None = None
    """Study size; None is the first."""
    typed: tuple[str, ...] = ()
    """Typed overrides, which may refer to keys that only the points' groups have."""
    dry_run: bool = False
    """Print the plan and start nothing."""
    skip: bool = False
    """Skip points that cannot run; studies always do."""
    jobs: int = 1
    prune: bool = False
    """Cancel runs that the study no longer contains."""
    yes: bool = False
    """Do not ask for confirmation."""


_now: ContextVar[SweepOptions] = ContextVar("options", default=SweepOptions())  # noqa: B039  # it is frozen


@contextmanager
def use_sweep_options(options: SweepOptions) -> Iterator[None]:
    """Set the sweeper's options for the block."""
    token = _now.set(options)
    try:
        yield
    finally:
        _now.reset(token)


def current_sweep_options() -> SweepOptions:
    """Options of the surrounding block, else the defaults."""
    return _now.get()
