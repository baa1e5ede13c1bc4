"""Plan visualization: records the shards of fake ranks during a prediction and writes the page."""

from pathlib import Path

from titan_exp.plan.gate.gate import MemoryCheck
from titan_exp.plan.predict import Plan
from titan_exp.plan.trace.fake_world import FakeRank
from titan_exp.plan.visualize.output_file import OutputFile
from titan_exp.plan.visualize.plan_page import to_html
from titan_exp.plan.visualize.shards import RankShards, read_shards


class Visualization:
    """Page of a plan made by `command`.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: str | Path, command: str) -> None:
        self.file, self._command = OutputFile("--html", path), command
        self._shards: dict[int, RankShards] = {}

    def add_rank(self, pipeline_rank: int, rank: FakeRank) -> None:
        """Record the shards of a fake rank."""
        self._shards[pipeline_rank] = read_shards(rank)

    def write(self, plan: Plan, memory_check: MemoryCheck) -> None:
        """Write the page of a plan with recorded ranks.

        Raises:
            UserError: the file cannot be written.
        """
        self.file.write(to_html(plan, self._shards, memory_check, self._command))
