"""A page to look at that needs nothing else: no network, no other file, no library.

All text is escaped, numbers travel as JSON that no text in it can end, and a page's own policy lets nothing be loaded.
"""

import json
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

FOLDER = "page"
"""Of a room: template, style and scripts. Beside this file: what all pages have of them."""


def render_page(room: str, scripts: Sequence[str], numbers: Any, **words: Any) -> str:
    """A page's text, from `page.html` and `page.css` of a room.

    Args:
        room: the package that has them in its folder `page`.
        scripts: files there, in the order in which they stand in the page.
        numbers: what they draw, as JSON values; finite.
        words: what the template says; it is escaped.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    ours = __package__ or ""
    # Markup is what is ours, or was made safe.
    return environment.from_string(_part(room, "page.html")).render(
        drawn_at=time.strftime("%Y-%m-%d %H:%M"),
        style=Markup(_part(ours, "base.css") + _part(room, "page.css")),
        script=Markup("\n".join([_part(ours, "elements.js"), *(_part(room, name) for name in scripts)])),
        numbers=Markup(_script_safe(numbers)),
        **words,
    )


def _part(package: str, name: str) -> str:
    return files(package).joinpath(FOLDER, name).read_text(encoding="utf-8")


def _script_safe(value: Any) -> str:
    """JSON that may stand in a <script>: no character in it can end the element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
