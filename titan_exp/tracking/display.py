"""Display for people: bytes, seconds and counts with a unit, times of day, and self-contained HTML pages.

Text is escaped, data is embedded as script-safe JSON, and a content security policy blocks all loading.
"""

import json
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

GIB, MIB = 2**30, 2**20
_COUNT_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_BYTE_UNITS = ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (1024, "KiB"))


def format_bytes(size: float) -> str:
    """Format bytes in binary units: 38.2 GiB, 1,234 TiB."""
    for scale, unit in _BYTE_UNITS:
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 999.5 * scale else f"{size / scale:,.0f} {unit}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format a short time: 1.25 s, 340 ms, 12 µs."""
    scale, unit = (1, "s") if seconds >= 0.9995 else (1e3, "ms") if seconds >= 0.9995e-3 else (1e6, "µs")
    return f"{seconds * scale:.3g} {unit}"


def format_duration(seconds: float) -> str:
    """Format a long time in its two largest units: 2h 05m, 3m 20s, 12.5s."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {whole % 60:02d}s" if minutes else f"{seconds:.3g}s"


def format_time(seconds: float | None = None) -> str:
    """Format a time, by default now, in the zone of this machine: 2026-11-30 19:05:12 UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


def format_count(number: float) -> str:
    """Format a count in at most six characters: 950, 30.72k, 1.25M, 2.5B."""
    for scale, unit in _COUNT_UNITS:
        if abs(number) >= scale * 0.99995:
            return f"{number / scale:.4g}{unit}"
    return f"{number:.4g}"


def format_si(number: float, unit: str) -> str:
    """Format a number with a decimal prefix: 8.77 MFLOP, 1.2 GB."""
    for power, prefix in ((5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if number >= 1000**power:
            return f"{number / 1000**power:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def format_items(number: int, noun: str) -> str:
    """Format a number of items: 1 run, 3 runs, 12 micro-batches."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


FOLDER = "page"  # folder of a package with its template, style and scripts; `tracking/page` is shared by all pages


def render_page(package: str, scripts: Sequence[str], numbers: Any, **words: Any) -> str:
    """Render `page.html` (extends `base.html`) and `page.css` from the folder `page` of a package. `scripts` are files
    in that folder, `numbers` their data (finite JSON values), `words` the template variables, which are escaped."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    common = __package__ or ""
    loader = FunctionLoader(lambda name: _asset(common, name))
    options = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(autoescape=True, loader=loader, **options)
    # JSON that cannot end a <script> element or begin a comment.
    data = json.dumps(numbers, separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    # Markup is not escaped: files of the package, and script-safe data.
    return environment.from_string(_asset(package, "page.html")).render(
        drawn_at=format_time(),
        style=Markup(_asset(common, "base.css") + _asset(package, "page.css")),
        script=Markup("\n".join([_asset(common, "elements.js"), *(_asset(package, name) for name in scripts)])),
        numbers=Markup(data),
        **words,
    )


def _asset(package: str, name: str) -> str:
    return files(package).joinpath(FOLDER, name).read_text(encoding="utf-8")
