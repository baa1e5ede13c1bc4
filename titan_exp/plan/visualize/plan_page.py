"""A plan as one page that needs nothing else: no network, no other file, no library.

What it says is in the page as text; what it draws is drawn by the scripts in `page/` from numbers that the page
carries.
"""

from collections.abc import Mapping

from titan_exp.config.layout.resolved_layout import ResolvedLayout
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
)
from titan_exp.plan.visualize.page_data import page_data
from titan_exp.plan.visualize.shards import RankShards
from titan_exp.tracking.html import render_page

SCRIPTS = ("numbers.js", "layout.js", "ranks.js", "rank.js", "pipeline.js", "memory.js", "time.js", "start.js")
"""Of the folder `page`, in the order in which they stand in the page."""


def to_html(plan: Plan, shards_by_rank: Mapping[int, RankShards]) -> str:
    """The page's text.

    Args:
        plan: of the run.
        holdings: what was seen of the pipeline ranks that were looked at, by their numbers.
    """
    degrees = {axis: getattr(plan.experiment.parallelism, axis) for axis in AXES}
    words = {"axes": AXES, "kinds": KINDS, "costs": COSTS, "categories": CATEGORIES}
    return render_page(
        "titan_exp.plan.visualize",
        SCRIPTS,
        page_data(plan, shards_by_rank) | {"words": words},
        plan=plan,
        processes=ResolvedLayout.of(plan.experiment).world_size,
        device=device_noun(plan.experiment),
        degrees=degrees,
        facts=list(facts(plan)),
        sentences=list(layout_sentences(plan)),
        axes=dict(sorted(AXES.items(), key=lambda entry: degrees[entry[0]] == 1)),
        terms=TERMS,
    )
