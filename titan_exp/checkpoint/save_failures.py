"""Failed saves since the last complete checkpoint: the warning shown meanwhile, and the limit that ends the run."""

import time
from collections.abc import Callable

from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.config.errors.user_error import UserError


class SaveFailures:
    """Failed saves into a folder. After `limit_minutes` of them the run fails; None never. `clock` is in seconds."""

    def __init__(self, folder: CheckpointFolder, limit_minutes: float | None, clock: Callable[[], float]) -> None:
        self._folder, self._limit_minutes, self._clock = folder, limit_minutes, clock
        self._first = self._last = 0.0
        self._since = ""
        self._cause: str | None = None

    @property
    def warning(self) -> str | None:
        """Since when saves fail, and why; None if the last one succeeded."""
        if self._cause is None:
            return None
        return f"no checkpoint can be written to {self._folder.path} since {self._since} ({self._cause}); {self.newest}"

    @property
    def newest(self) -> str:
        """Newest complete checkpoint on the disk."""
        step = self._folder.newest_step()
        return "there is none yet" if step is None else f"the newest complete one is that of step {step}"

    @property
    def retry_due(self) -> bool:
        """True if the limit has passed: one more save decides, however long until the next regular one."""
        return self._cause is not None and self._is_over(self._clock())

    def add(self, cause: str) -> None:
        """Record a failed save."""
        self._last = self._clock()
        if self._cause is None:
            self._first, self._since = self._last, time.strftime("%Y-%m-%d %H:%M:%S")
        self._cause = cause

    def clear(self) -> None:
        """Record a successful save."""
        self._cause = None

    def require_within_limit(self) -> None:
        """Raise UserError if a save has failed after the limit."""
        if self._cause is not None and self._is_over(self._last):
            raise UserError(
                f"No checkpoint could be written to {self._folder.path} since {self._since}, longer than "
                f"checkpoint.fail_after_minutes={self._limit_minutes:g}: {self._cause}\n"
                f"Of the complete checkpoints, {self.newest}. Free disk space, or make the folder writable. Then "
                f"continue the run: titan-exp retry {self._folder.path.parent}"
            )

    def _is_over(self, now: float) -> bool:
        return self._limit_minutes is not None and now - self._first >= 60 * self._limit_minutes
