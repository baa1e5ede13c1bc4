"""HTML page of a plan, self-contained: no network, no other file, no library.

Sentences are text; the scripts in `page/` draw the rest from embedded numbers.
"""

from collections.abc import Mapping

from titan_exp.plan.gate.gate import MemoryCheck
from titan_exp.plan.predict import Plan
from titan_exp.plan.visualize.glossary import (
    AXES,
    CATEGORIES,
    COSTS,
    KINDS,
    TERMS,
    device_noun,
    facts,
    layout_sentences,
    settings,
)
from titan_exp.plan.visualize.page_data import page_data
from titan_exp.plan.visualize.shards import RankShards
from titan_exp.tracking.html import render_page

SCRIPTS = ("numbers.js", "layout.js", "ranks.js", "rank.js", "pipeline.js", "memory.js", "time.js", "start.js")
"""Files of `page/` in the order of inclusion."""


def to_html(plan: Plan, shards_by_rank: Mapping[int, RankShards], memory_check: MemoryCheck, command: str) -> str:
    """Render a plan, made by `command`, and the shards of its pipeline ranks as HTML."""
    degrees = {axis: getattr(plan.experiment.parallelism, axis) for axis in AXES}
    words = {"axes": AXES, "kinds": KINDS, "costs": COSTS, "categories": CATEGORIES}
    return render_page(
        "titan_exp.plan.visualize",
        SCRIPTS,
        page_data(plan, shards_by_rank) | {"words": words},
        plan=plan,
        processes=plan.layout.world_size,
        device=device_noun(plan.layout),
        degrees=degrees,
        facts=list(facts(plan, memory_check)),
        command=command,
        sentences=[*layout_sentences(plan), settings(plan)],
        axes=dict(sorted(AXES.items(), key=lambda entry: degrees[entry[0]] == 1)),
        terms=TERMS,
    )
