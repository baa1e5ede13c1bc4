"""Plan visualization: records the shards of fake ranks during a prediction and writes the page."""

from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.plan.predict import Plan
from titan_exp.plan.trace.fake_world import FakeRank
from titan_exp.plan.visualize.plan_page import to_html
from titan_exp.plan.visualize.shards import RankShards, read_shards
from titan_exp.tracking.run_folder.atomic_write import write_atomically


class Visualization:
    """Page of a plan. Its folder is created first, since a prediction may take minutes.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._shards: dict[int, RankShards] = {}
        if self.path.is_dir():
            raise UserError(f"--html {path} is a folder. Name a file, as in --html {self.path / 'plan.html'}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._write_error(error) from error

    def add_rank(self, pipeline_rank: int, rank: FakeRank) -> None:
        """Record the shards of a fake rank."""
        self._shards[pipeline_rank] = read_shards(rank)

    def write(self, plan: Plan) -> None:
        """Write the page of a plan with recorded ranks, atomically.

        Raises:
            UserError: the file cannot be written.
        """
        text = to_html(plan, self._shards)
        try:
            if self.path.exists() and not self.path.is_file():
                self.path.write_text(text, encoding="utf-8")  # do not replace a device or pipe by a file
            else:
                write_atomically(self.path, text)
        except OSError as error:
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> UserError:
        return UserError(f"--html {self.path}: cannot be written ({error.strerror or error}). Name another file.")
