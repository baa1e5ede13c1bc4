"""Self-contained HTML pages: no network, no other file, no library.

All text is escaped, numbers are JSON that cannot end its script element, and the content security policy forbids loads.
"""

import json
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

FOLDER = "page"
"""Folder of a room's template, style and scripts; the one beside this file holds those that all pages share."""


def render_page(room: str, scripts: Sequence[str], numbers: Any, **words: Any) -> str:
    """Render `page.html` and `page.css` of a room; the template extends `base.html`.

    Args:
        room: package with a folder `page`.
        scripts: script files in the order of inclusion.
        numbers: finite JSON values for the scripts.
        words: variables of the template, which are escaped.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    ours = __package__ or ""
    loader = FunctionLoader(lambda name: _part(ours, name))
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=loader
    )
    # Markup is not escaped: our own files, and JSON that was made safe.
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
    """JSON for a <script>: no character in it can end the element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
