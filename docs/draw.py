"""Pictures of the site, narrow enough for a phone: SVG for light and dark, and PNG for the plots of a page.

    python docs/draw.py ranks                              how the mesh numbers 16 ranks
    python docs/draw.py memory PLAN.html                   memory over a step, from a page of titan-exp plan --html
    python docs/draw.py compare COMPARE.html               plots of a page of titan-exp compare
    python docs/draw.py curves COMPARE.html 100 NAME NAME  its loss curves, with a name for each row; all but the first
                                                           begin at step 100
    python docs/draw.py experts RUN_FOLDER                 load of a run's experts

Each command replaces a picture in `docs/images`. A headless Chromium (playwright) draws the pages, as in the tests.
"""

import io
import math
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

from PIL import Image

from titan_exp.compare.output.plots import OCTAVES, heat_map, read_load
from titan_exp.config.layout.axes import AXES
from titan_exp.tracking import display

IMAGES = Path(__file__).parent / "images"
BASE = (Path(display.__file__).parent / "page" / "base.css").read_text(encoding="utf-8")
COLORS = BASE[: BASE.index(':root[data-theme="dark"]')]
"""Variables of colours in light and dark, which pages of plan and compare have too."""
STYLE = """
text { fill: var(--quiet); font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
.name { fill: var(--ink) } .bold { font-weight: 600 } .middle { text-anchor: middle } .end { text-anchor: end }
.grid { stroke: var(--grid) } .axis, .node { stroke: var(--line) } .cursor { stroke: var(--quiet) } .node { fill: none }
.limit { stroke: var(--bad); stroke-dasharray: 6 4 } .reserve { stroke: var(--ink); stroke-dasharray: 2 3 }
.zero { stroke: var(--quiet); stroke-dasharray: 4 3 } .group { fill: none; stroke-width: 2.5 }
"""
NARROW = 500
"""Width of the browser's window in pixels."""
LINE = 18
"""Height of a line of a legend in pixels."""


def save(name: str, title: str, width: float, height: float, body: str) -> None:
    """Write `docs/images/<name>.svg`."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}'
    path = IMAGES / f"{name}.svg"
    path.write_text(
        f'{head} role="img">\n<title>{escape(title)}</title>\n<style>\n{COLORS}{STYLE}</style>\n{body}\n</svg>\n'
    )
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Text whose base line is at `y`."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>\n'


def box(x: float, y: float, width: float, height: float, more: str) -> str:
    """Rectangle with further attributes."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {more}/>\n'


def legend(entries: list[tuple[str, str]], width: float, y: float) -> tuple[str, float]:
    """Squares of a colour with their names, in lines of `width`; returns them and the height below `y`."""
    found, x, line = "", 4.0, 0
    for color, name in entries:
        wide = 30 + 6.7 * len(name)
        if x + wide > width and x > 4:
            x, line = 4.0, line + 1
        found += box(x, y + line * LINE, 11, 11, f'rx="3" fill="{color}"') + text(x + 16, y + 10 + line * LINE, name)
        x += wide
    return found, (line + 1) * LINE


def ranks() -> None:
    """Draw 16 ranks with the groups of rank 5 along every axis."""
    degrees = {"pp": 2, "dp_shard": 4, "tp": 2}
    colors = {"pp": "var(--c0)", "dp_shard": "var(--c2)", "tp": "var(--c1)"}
    names = [axis.name for axis in AXES]
    # As DeviceMesh numbers them: the last axis varies fastest.
    places = [dict(zip(names, place, strict=True)) for place in product(*(range(degrees.get(it, 1)) for it in names))]
    chosen, left, cell = 5, 58, 58
    body = ""
    for rank, place in enumerate(places):
        x, y = left + place["dp_shard"] * (cell + 16), 62 + place["pp"] * 172 + place["tp"] * 54
        if place["tp"] == place["dp_shard"] == 0:
            body += box(left - 14, y - 32, 4 * (cell + 16) + 12, 140, 'rx="8" class="node"')
            body += text(left - 14, y - 38, f"node {place['pp']}: stage {place['pp']} of the pipeline", "name bold")
        if place["tp"] == 0:
            body += text(x + cell / 2, y - 14, f"dp_shard {place['dp_shard']}", "middle")
        if place["dp_shard"] == 0:
            body += text(0, y + 26, f"tp {place['tp']}")
        apart = [axis for axis in degrees if place[axis] != places[chosen][axis]]
        color = colors[apart[0]] if len(apart) == 1 else "var(--line)" if apart else "var(--ink)"
        mark = f'fill="{color}" fill-opacity="{0.3 if len(apart) < 2 else 0}" stroke="{color}" stroke-width="2"'
        body += box(x, y, cell, 42, f'rx="6" {mark}') + text(x + cell / 2, y + 26, str(rank), "name middle")
    for number, axis in enumerate(reversed(degrees)):
        others = [it for it in degrees if it != axis]
        group = [rank for rank, it in enumerate(places) if all(it[same] == places[chosen][same] for same in others)]
        words = f"{axis} group of rank {chosen}: {', '.join(map(str, group))}"
        body += legend([(colors[axis], words)], 370, 350 + number * LINE)[0]
    title = "Sixteen ranks on two nodes, pp 2, dp_shard 4, tp 2, with the groups of rank 5"
    save("ranks", title, 370, 350 + len(degrees) * LINE, body)


@contextmanager
def opened(page: str, width: int = NARROW) -> Iterator[Any]:
    """A page in a window of a headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = chromium.new_page(viewport={"width": width, "height": 900})
        view.goto(Path(page).resolve().as_uri())
        view.wait_for_selector(".plot svg")
        yield view
        chromium.close()


def drawing(page: str, prepare: str, selector: str) -> tuple[str, float, float]:
    """Content, width and height of a drawing of a page, after a script has prepared the page."""
    with opened(page) as view:
        view.evaluate(prepare)
        content, width, height = view.evaluate(
            """(selector) => {
              const svg = document.querySelector(selector);
              const hidden = svg.querySelectorAll("[fill=transparent], [style*=transparent], [visibility=hidden]");
              for (const it of hidden) it.remove();
              const { width, height } = svg.viewBox.baseVal;
              return [new XMLSerializer().serializeToString(svg), width, height];
            }""",
            selector,
        )
    return re.sub(r"^<svg[^>]*>|</svg>$", "", content), width, height


def compare(page: str) -> None:
    """Photograph the plots of a comparison's page."""
    with opened(page, 1000) as view:
        found = view.locator(".pair").screenshot()
    # A palette takes a third of the bytes. The octree keeps rare colours, such as the red of a worse row.
    Image.open(io.BytesIO(found)).convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE).save(
        IMAGES / "compare.png", optimize=True
    )


def memory(page: str) -> None:
    """Draw memory over a step from the page of a plan."""
    selector = "#memory .over-time svg"
    body, width, height = drawing(page, "() => {}", selector)
    # Tenths of a pixel would be a third of the file.
    body = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\d)\.\d", r"\1", path[0]), body)
    names = re.findall(r"var\(--c\d\)", body)
    script = (Path(display.__file__).parents[1] / "plan" / "page" / "numbers.js").read_text(encoding="utf-8")
    block = script[script.index("CATEGORY_COLORS = {") : script.index("AXIS_COLORS")]
    kinds = [(color, name.strip('"')) for name, color in re.findall(r'("[a-z ]+"|[a-z]+): "(var\(--c\d\))"', block)]
    words, more = legend([entry for entry in kinds if entry[0] in names], width, height + 6)
    save("memory", "Memory over a training step, by what it holds", width, height + 6 + more, body + words)


def curves(page: str, begin: str, *names: str) -> None:
    """Draw loss curves from the page of a comparison: the first as a broad band, on which the others lie."""
    prepare = """() => {
      const input = document.querySelector("#curves input[type=range]");
      input.value = 0;
      input.dispatchEvent(new Event("input"));
      [...document.querySelectorAll("#curves .choice button")].find((it) => it.textContent === "steps").click();
      document.querySelectorAll("#curves .plot svg circle").forEach((it) => it.remove());
      const [first, ...others] = document.querySelectorAll("#curves .plot svg path");
      first.setAttribute("stroke-width", 8);
      first.setAttribute("opacity", 0.5);
      others.forEach((it, row) => {
        const points = it.getAttribute("d").slice(1).split("L");
        it.setAttribute("d", "M" + points.filter((_, k) => data.curves[row + 1].loss[1][k] >= BEGIN).join("L"));
        it.setAttribute("stroke-width", 2);
      });
    }""".replace("BEGIN", begin)
    body, width, height = drawing(page, prepare, "#curves .plot svg")
    words, more = legend([(f"var(--c{row})", name) for row, name in enumerate(names)], width, height + 6)
    save("curves", f"Loss curves: {'; '.join(names)}", width + 8, height + 6 + more, body + words)


def experts(run_folder: str) -> None:
    """Draw the load of experts over a run, as titan-exp show --plot does."""
    history = read_load(Path(run_folder))
    assert history is not None, "the run has recorded no load of experts"
    loads, ends = heat_map(history)
    left, width, high = 62, 440, 9
    wide = (width - left) / loads.shape[1]
    body, begins = "", [0, *ends[:-1]]
    for row, values in enumerate(loads):
        y = row * high + 8 * sum(row >= end for end in ends)
        for column, load in enumerate(values):
            share = 0 if load == 0 else max(-1.0, min(1.0, math.log2(load) / OCTAVES))
            color = "var(--ink)" if load == 0 else f"var(--{'c4' if share > 0 else 'c0'})"
            shade = 1 if load == 0 else round(abs(share), 2)
            body += box(
                round(left + column * wide, 1), y, round(wide, 1), high, f'fill="{color}" fill-opacity="{shade}"'
            )
    for number, (begin, end, layer) in enumerate(zip(begins, ends, history.counts, strict=True)):
        y = begin * high + 8 * number
        body += box(left, y, width - left, (end - begin) * high, 'class="node"')
        body += text(0, y + (end - begin) * high / 2 + 4, layer.replace("_", " "))
    bottom = len(loads) * high + 8 * len(ends)
    body += text(left, bottom + 12, f"step {history.steps[0]:g}") + text(
        width, bottom + 12, f"step {history.steps[-1]:g}", "end"
    )
    words, more = legend(
        [("var(--c4)", "more tokens than the mean"), ("var(--c0)", "fewer"), ("var(--ink)", "none")], width, bottom + 26
    )
    save(
        "experts",
        "Load of every expert over a run, the busiest of each layer on top",
        width,
        bottom + 26 + more,
        body + words,
    )


if __name__ == "__main__":
    PICTURES = {"ranks": ranks, "memory": memory, "compare": compare, "curves": curves, "experts": experts}
    if len(sys.argv) < 2 or sys.argv[1] not in PICTURES:
        sys.exit(__doc__)
    PICTURES[sys.argv[1]](*sys.argv[2:])
