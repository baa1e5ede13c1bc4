"""Self-contained HTML pages without external resources.

Text is escaped, data is embedded as script-safe JSON, and a content security policy blocks all loading.
"""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from titan_exp.tracking.number_format import format_time

FOLDER = "page"
"""Folder of a package with its template, style and scripts; `tracking/page` is shared by all pages."""


def render_page(package: str, scripts: Sequence[str], numbers: Any, **words: Any) -> str:
    """Render `page.html` (extends `base.html`) and `page.css` from the folder `page` of a package.

    `scripts` are files in that folder, `numbers` their data (finite JSON values), `words` the template variables, which
    are escaped.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    common = __package__ or ""
    loader = FunctionLoader(lambda name: _asset(common, name))
    options = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(autoescape=True, loader=loader, **options)
    # Markup is not escaped: files of the package, and script-safe data.
    return environment.from_string(_asset(package, "page.html")).render(
        drawn_at=format_time(),
        style=Markup(_asset(common, "base.css") + _asset(package, "page.css")),
        script=Markup("\n".join([_asset(common, "elements.js"), *(_asset(package, name) for name in scripts)])),
        numbers=Markup(_script_safe(numbers)),
        **words,
    )


def _asset(package: str, name: str) -> str:
    return files(package).joinpath(FOLDER, name).read_text(encoding="utf-8")


def _script_safe(value: Any) -> str:
    """JSON that cannot end a <script> element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
