"""A plan as one page that needs nothing else: no network, no other file, no library.

What it says is in the page as text; what it draws is drawn by the scripts in `page/` from numbers that the page
carries. All text is escaped, and the page's own policy lets nothing be loaded.
"""

import json
import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from titan_exp.config.layout import world_size
from titan_exp.plan.picture.holding import Holding
from titan_exp.plan.picture.numbers import drawn_numbers
from titan_exp.plan.picture.words import AXES, CATEGORIES, COSTS, KINDS, TERMS, device_word, facts, layout_in_words
from titan_exp.plan.predict import Plan

FOLDER = "page"
"""Template, style and scripts, beside this file."""
SCRIPTS = ("elements.js", "layout.js", "ranks.js", "rank.js", "pipeline.js", "memory.js", "time.js", "start.js")
"""In the order in which they stand in the page."""


def to_html(plan: Plan, holdings: Mapping[int, Holding]) -> str:
    """The page's text.

    Args:
        plan: of the run.
        holdings: what was seen of the pipeline ranks that were looked at, by their numbers.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    degrees = {axis: getattr(plan.experiment.parallelism, axis) for axis in AXES}
    words = {"axes": AXES, "kinds": KINDS, "costs": COSTS, "categories": CATEGORIES}
    return environment.from_string(_part("page.html")).render(
        plan=plan,
        processes=world_size(plan.experiment),
        device=device_word(plan.experiment),
        degrees=degrees,
        facts=list(facts(plan)),
        sentences=list(layout_in_words(plan)),
        axes=dict(sorted(AXES.items(), key=lambda entry: degrees[entry[0]] == 1)),
        terms=TERMS,
        drawn_at=time.strftime("%Y-%m-%d %H:%M"),
        style=Markup(_part("page.css")),  # ours
        script=Markup("\n".join(map(_part, SCRIPTS))),  # ours
        numbers=Markup(_script_safe(drawn_numbers(plan, holdings) | {"words": words})),  # made safe
    )


def _part(name: str) -> str:
    return files("titan_exp.plan.picture").joinpath(FOLDER, name).read_text(encoding="utf-8")


def _script_safe(value: Any) -> str:
    """JSON that may stand in a <script>: no character in it can end the element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
