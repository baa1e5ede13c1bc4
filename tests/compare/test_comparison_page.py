import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from tests.compare.made_runs import make_run, make_study, rows
from titan_exp.compare.compared_metrics import final_loss
from titan_exp.compare.comparison import compare
from titan_exp.compare.output.pages import downsample, to_html
from titan_exp.compare.runs import read_run, select
from titan_exp.compare.statistics import moving_average

EVIL = '</script><script>window.broken=1</script><img src=x onerror="window.broken=1">&{{7*7}}'


def page(runs: Path, tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(to_html(compare(select(["made"], runs))))
    return path


def full_study(runs: Path) -> Path:
    """Runs with seeds, layouts, a failure, and text that looks like markup."""
    folder = make_study(runs, {0.001: [3.0, 3.1, 3.2], 0.003: [2.5, 2.61, 2.69]})
    for tp in (2, 4):
        values = {"optimizer.lr": 0.003, "parallelism.tp": tp}
        make_run(runs, values, metrics=rows(2.5, speed=4000.0 * tp), world_size=tp)
    make_run(runs, {"data.subset": EVIL}, metrics=rows(3.5)[:30], state="failed", reason=EVIL)
    (folder / "study.json").write_text(json.dumps({"question": f"Is {EVIL} safe?"}))
    return folder


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_page_loads_nothing_and_escapes_text(tmp_path: Path):
    full_study(tmp_path / "runs")
    text = page(tmp_path / "runs", tmp_path).read_text()
    tags = Tags()
    tags.feed(text)
    names = [tag for tag, _ in tags.found]
    assert names.count("script") == 2
    assert not {"img", "link", "iframe", "object", "image"} & set(names)
    assert not [attributes for _, attributes in tags.found if {"src", "href", "onerror", "onclick"} & set(attributes)]
    policy = next(it for tag, it in tags.found if tag == "meta" and it.get("http-equiv") == "Content-Security-Policy")
    assert (policy["content"] or "").startswith("default-src 'none'")
    assert "http" not in re.sub(r"http://www.w3.org/2000/svg|http-equiv", "", text)
    assert "&lt;/script&gt;" in text
    assert "{{7*7}}" in text


def test_numbers_in_the_page(tmp_path: Path):
    full_study(tmp_path / "runs")
    text = page(tmp_path / "runs", tmp_path).read_text()
    numbers = json.loads(text.split('id="numbers">')[1].split("</script>")[0])
    assert len(numbers["curves"]) == 9
    assert numbers["curves"][0]["loss"][0][-1] == 50_000
    assert {point["label"] for point in numbers["scaling"][0]["points"]} == {"tp=1", "tp=2", "tp=4"}


def test_long_runs_are_downsampled_with_their_gaps(tmp_path: Path):
    many = [{"step": step, "tokens": step, "loss": float(step)} for step in range(1, 1001)]
    many[500]["loss"] = float("nan")
    tokens, steps, values, counts = downsample(read_run(make_run(tmp_path, {}, metrics=many)), "loss", 100)
    assert len(tokens) == len(steps) == len(values) == 100
    assert counts == [10] * 100
    assert values[0] == pytest.approx(5.5)
    assert [place for place, value in enumerate(values) if value is None] == [50]


@pytest.fixture
def front(tmp_path: Path) -> Path:
    """Page of runs of which three are undominated; others have the cost or the loss of one of these."""
    runs = tmp_path / "runs"
    for number, (loss, seconds) in enumerate([(3, 10), (2.5, 20), (2, 60), (3.4, 10), (2.5, 30), (2, 90), (2.9, 61)]):
        make_run(runs, {"optimizer.lr": 0.001 * (number + 1)}, metrics=rows(loss), seconds=seconds)
    return page(runs, tmp_path)


BOXES = """(selector) => [...document.querySelectorAll(selector)].map((it) => {
  const box = it.getBoundingClientRect();
  return [box.left, box.top, box.right, box.bottom];
})"""


NAMES = """[...document.querySelectorAll("#pareto text.name")]
  .map((it) => [...it.children].map((line) => line.textContent))"""


@pytest.mark.parametrize("width", [1360, 390])
def test_the_line_of_the_front_touches_undominated_points_only(front: Path, browser, width: int):
    view = browser.new_page(viewport={"width": width, "height": 900})
    view.goto(front.as_uri())
    view.wait_for_selector("#pareto path.front")
    points = [point["front"] for point in view.evaluate("data.pareto.points")]
    assert points.count(True) == 3
    circles = view.evaluate(
        """[...document.querySelectorAll("#pareto circle[r='6']")]
        .map(({ cx, cy }) => [cx.baseVal.value, cy.baseVal.value])"""
    )
    line = view.locator("#pareto path.front").get_attribute("d")
    corners = [[float(number) for number in corner.split()] for corner in line[1:].split("L")]
    assert corners == [pytest.approx(place) for place, on_front in zip(circles, points, strict=True) if on_front]
    distances = view.evaluate(
        """(places) => {
      const path = document.querySelector("#pareto path.front"), length = path.getTotalLength();
      const along = Array.from({ length: 2001 }, (_, k) => path.getPointAtLength((length * k) / 2000));
      return places.map(([x, y]) => Math.min(...along.map((it) => Math.hypot(it.x - x, it.y - y))));
    }""",
        circles,
    )
    assert [distance < 1 for distance in distances] == points


@pytest.mark.parametrize(("width", "study"), [(1360, False), (390, False), (390, True)])
def test_labels_cover_neither_dots_nor_each_other(tmp_path: Path, front: Path, browser, width: int, study: bool):
    if study:
        full_study(tmp_path / "study")
        front = page(tmp_path / "study", tmp_path)
    view = browser.new_page(viewport={"width": width, "height": 900})
    view.goto(front.as_uri())
    view.wait_for_selector("#pareto text.name")
    labels, dots = (view.evaluate(BOXES, f"#pareto {which}") for which in ("text.name", "circle[r='6']"))
    assert len(labels) >= (7 if width > 400 else 2)
    names = [" ".join(lines) for lines in view.evaluate(NAMES)]
    rows = [view.evaluate("data.rows.map((row) => row.label)")[it["row"]] for it in view.evaluate("data.pareto.points")]
    for name, (left, top, right, bottom) in zip(names, labels, strict=True):
        gaps = [math.hypot(max(left - x1, 0, x0 - right), max(top - y1, 0, y0 - bottom)) for x0, y0, x1, y1 in dots]
        assert rows[gaps.index(min(gaps))] == name, "a label is nearer to another dot"
    for place, (left, top, right, bottom) in enumerate(labels):
        for other in [*dots, *labels[:place]]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top


def test_the_end_of_a_curve_is_the_loss_of_the_table(tmp_path: Path, browser):
    """Also where rows are averaged: 2,345 rows are more than the points of a curve."""
    many = rows(2.5, steps=2345)
    for row in many:
        row["loss"] += 0.1 * math.sin(row["step"] ** 2)
    make_run(tmp_path / "runs", metrics=many)
    make_run(tmp_path / "runs", {"optimizer.lr": 0.01}, metrics=many[:700])
    view = browser.new_page()
    view.goto(page(tmp_path / "runs", tmp_path).as_uri())
    view.wait_for_selector("#curves svg path")
    numbers = view.evaluate("data")
    ends = view.evaluate("data.curves.map((it) => smoothed(it.loss[2], it.loss[3], 4).at(-1))")
    losses = [final_loss(read_run(tmp_path / "runs" / "made" / curve["run"]), math.inf) for curve in numbers["curves"]]
    assert sorted(len(curve["loss"][2]) for curve in numbers["curves"])[1] < 1001
    assert ends == pytest.approx(losses, rel=1e-5)
    # The longer run goes on after the compared tokens: its dot there is at the table's loss.
    assert view.locator("#curves circle.compared").count() == 2


@pytest.mark.parametrize("count", [20, 70, 400])
def test_scripts_smooth_like_the_metrics(tmp_path: Path, browser, count: int):
    values = [2 + 8 / (1 + place) + 0.1 * math.sin(place**2) for place in range(count)]
    values[count // 2] = values[3] = math.nan
    full_study(tmp_path / "runs")
    view = browser.new_page()
    view.goto(page(tmp_path / "runs", tmp_path).as_uri())
    given = [None if math.isnan(value) else value for value in values]
    drawn = view.evaluate("(values) => smoothed(values, values.map(() => 1), 4)", given)
    expected = [None if math.isnan(value) else value for value in moving_average(values)]
    assert [value is None for value in drawn] == [value is None for value in expected]
    assert [value or 0 for value in drawn] == pytest.approx([value or 0 for value in expected])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_that_scrolls_shows_it(tmp_path: Path, browser, scheme: str):
    full_study(tmp_path / "runs")
    view = browser.new_page(viewport={"width": 390, "height": 900}, color_scheme=scheme)
    view.goto(page(tmp_path / "runs", tmp_path).as_uri())
    table, narrow = view.locator(".scroll").first, view.locator(".scaling .scroll")

    def edges(table: Any) -> list[bool]:
        """True for a shade at the left, at the right."""
        image = matplotlib.image.imread(io.BytesIO(table.screenshot()))[..., :3]
        middle = image[5, image.shape[1] // 2]  # above the heads of short columns
        return [bool(abs(image[5, place] - middle).max() > 0.1) for place in (1, -2)]

    assert edges(table) == [False, True]
    table.evaluate("(it) => it.scrollTo(200, 0)")
    assert edges(table) == [True, True]
    table.evaluate("(it) => it.scrollTo(it.scrollWidth, 0)")
    assert edges(table) == [True, False]
    view.set_viewport_size({"width": 1360, "height": 900})
    assert edges(narrow) == [False, False]


LONG = "my_package.schedules.inverse_square_root_with_a_very_long_name_{}"


@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize("width", [1360, 390])
def test_no_name_in_a_plot_is_cut(tmp_path: Path, browser, width: int, count: int):
    for number in range(count):
        values = {"lr_schedule.decay": LONG.format(number), "data.subset": f"another {'long ' * number}name"}
        for seed in range(2):
            made = rows(2 + number / 10 + seed / 50)
            make_run(tmp_path, {**values, "experiment.seed": seed}, metrics=made, seconds=10.0 * (number + 1))
    view = browser.new_page(viewport={"width": width, "height": 900})
    view.goto(page(tmp_path, tmp_path).as_uri())
    view.wait_for_selector("#bars svg text.name")
    labels = view.evaluate("data.rows.map((row) => row.label)")
    shown = view.locator("#bars text.name").all_text_contents()
    assert ["".join(name.split()) for name in shown] == ["".join(label.split()) for label in labels]
    for plot in ("#bars", "#pareto"):
        ((left, top, right, bottom),) = view.evaluate(BOXES, f"{plot} svg")
        names = view.evaluate(BOXES, f"{plot} text.name")
        assert names
        for place, (x0, y0, x1, y1) in enumerate(names):
            assert left - 1 <= x0 < x1 <= right + 1
            assert top - 1 <= y0 < y1 <= bottom + 1
            assert not any(x0 < b[2] and b[0] < x1 and y0 + 1 < b[3] and b[1] + 1 < y1 for b in names[:place])
    assert view.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize(("width", "scheme"), [(1360, "light"), (390, "dark")])
def test_browser_draws_the_page(tmp_path: Path, browser, width: int, scheme: str):
    full_study(tmp_path / "runs")
    path = page(tmp_path / "runs", tmp_path)
    trouble: list[str] = []
    view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    view.on("console", lambda message: trouble.append(message.text))
    view.on("pageerror", lambda error: trouble.append(str(error)))
    view.on("request", lambda request: trouble.append(request.url) if not request.url.startswith("file:") else None)
    view.goto(path.as_uri())
    view.wait_for_selector("#curves svg path")
    for plot in ("#curves", "#bars", "#pareto", ".scaling"):
        assert view.locator(f"{plot} svg").count() == 1, plot
    assert view.evaluate("document.documentElement.scrollWidth") == width, "the page scrolls sideways"
    assert view.evaluate("window.broken") is None
    # Hiding a row takes its lines away; sorting reorders the rows; the theme turns round.
    lines = view.locator("#curves svg g path").count()
    view.locator("#curves .legend button").first.click()
    assert view.locator("#curves svg g path").count() < lines
    head = view.locator("table.sortable th", has_text="validation loss").first
    head.click()
    first = view.locator("table.sortable tbody tr").first.inner_text()
    head.click()
    assert view.locator("table.sortable tbody tr").first.inner_text() != first
    ground = "getComputedStyle(document.body).backgroundColor"
    before = view.evaluate(ground)
    view.locator("#theme").click()
    assert view.evaluate(ground) != before
    view.locator("#curves svg rect").last.hover()
    assert "tokens" in view.locator("#tip").inner_text()
    assert trouble == []
    view.screenshot(path=tmp_path / "page.png", full_page=True)
    assert (tmp_path / "page.png").stat().st_size > 20_000
