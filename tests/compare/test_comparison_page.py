import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.compare.made_runs import make_run, make_study, rows
from titan_exp.compare.comparison import compare
from titan_exp.compare.output.comparison_page import to_html
from titan_exp.compare.output.downsample import downsample
from titan_exp.compare.run_record import read_run
from titan_exp.compare.select_runs import select

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
    tokens, steps, values = downsample(read_run(make_run(tmp_path, {}, metrics=many)), "loss", 100)
    assert len(tokens) == len(steps) == len(values) == 100
    assert values[0] == pytest.approx(5.5)
    assert [place for place, value in enumerate(values) if value is None] == [50]


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
