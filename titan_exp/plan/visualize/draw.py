"""A picture of a plan, from before the plan is made, when ranks can be looked at, until it is in its file."""

from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.plan.predict import Plan
from titan_exp.plan.trace.fake_world import FakeRank
from titan_exp.plan.visualize.plan_page import to_html
from titan_exp.plan.visualize.shards import RankShards, read_shards
from titan_exp.tracking.run_folder.atomic_write import write_atomically


class Visualization:
    """A page that will be written.

    Args:
        path: its file, whose folder is made at once: a plan may take minutes.

    Raises:
        UserError: nothing can be written there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._holdings: dict[int, RankShards] = {}
        if self.path.is_dir():
            raise UserError(f"--html {path}: this is a folder. Name a file, as in --html {self.path / 'plan.html'}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritten(error) from error

    def add_rank(self, pipeline_rank: int, rank: FakeRank) -> None:
        """See what a pretended rank holds."""
        self._holdings[pipeline_rank] = read_shards(rank)

    def write(self, plan: Plan) -> None:
        """Write the page, whole or not at all.

        Args:
            plan: whose ranks have been looked at.

        Raises:
            UserError: it cannot be written.
        """
        text = to_html(plan, self._holdings)
        try:
            if self.path.exists() and not self.path.is_file():
                self.path.write_text(text, encoding="utf-8")  # /dev/stdout, a pipe: it must not be replaced by a file
            else:
                write_atomically(self.path, text)
        except OSError as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> UserError:
        return UserError(f"--html {self.path}: cannot be written ({error.strerror or error}). Name another file.")
