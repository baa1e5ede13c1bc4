"""HTML page of a plan, self-contained: no network, no other file, no library.

Sentences are text; the scripts in `page/` draw the rest from embedded numbers.
"""

from pathlib import Path

from titan_exp.plan.gate.gate import MemoryCheck
from titan_exp.plan.predict import Plan
from titan_exp.plan.trace.fake_world import FakeRank
from titan_exp.plan.visualize import glossary
from titan_exp.plan.visualize.output_file import OutputFile
from titan_exp.plan.visualize.page_data import page_data
from titan_exp.plan.visualize.shards import RankShards, read_shards
from titan_exp.tracking.html import render_page

SCRIPTS = ("numbers.js", "layout.js", "ranks.js", "rank.js", "pipeline.js", "memory.js", "time.js", "start.js")
"""Files of `page/` in the order of inclusion."""


class Visualization:
    """Page of a plan made by `command`. Raises UserError if the file cannot be written."""

    def __init__(self, path: str | Path, command: str) -> None:
        self.file, self._command = OutputFile("--html", path), command
        self._shards: dict[int, RankShards] = {}

    def add_rank(self, pipeline_rank: int, rank: FakeRank) -> None:
        """Record the shards of a fake rank during a prediction."""
        self._shards[pipeline_rank] = read_shards(rank)

    def write(self, plan: Plan, memory_check: MemoryCheck) -> None:
        """Write the page of a plan with recorded ranks."""
        degrees = {axis: getattr(plan.experiment.parallelism, axis) for axis in glossary.AXES}
        page = render_page(
            "titan_exp.plan.visualize",
            SCRIPTS,
            page_data(plan, self._shards) | {"words": glossary.WORDS},
            plan=plan,
            processes=plan.layout.world_size,
            device=glossary.device_noun(plan.layout),
            degrees=degrees,
            facts=list(glossary.facts(plan, memory_check)),
            command=self._command,
            sentences=[*glossary.layout_sentences(plan), glossary.settings(plan)],
            axes=dict(sorted(glossary.AXES.items(), key=lambda entry: degrees[entry[0]] == 1)),
            terms=glossary.TERMS,
        )
        self.file.write(page)
