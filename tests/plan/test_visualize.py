"""Page of a plan: its numbers are the executor's, and a browser draws them."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import _disable_current_modes

from tests.cli.test_plan import planned
from tests.plan.layouts import SMALL, experiment_of
from tests.ranks import run_ranks
from titan_exp.cli.hydra_command import OutputFile
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.layout.axes import AXES, DEGREES
from titan_exp.config.layout.pipeline_schedules import COST, Action, timeline
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.parallel.pipeline_runtime import build_schedule
from titan_exp.plan import draw as words_module
from titan_exp.plan.devices import DEVICES, memory_of_gpu
from titan_exp.plan.draw import (
    html_page,
    read_shards,
    schedule_of,
    schedule_text,
    sharded_dims,
    token_ranges,
    trace_json,
)
from titan_exp.plan.gate import MemoryCheck
from titan_exp.plan.predict import Plan, predict
from titan_exp.plan.trace.memory_tracker import CATEGORIES, MemoryTracker
from titan_exp.plan.trace.trace_step import fake_rank

EVIL = '</script><script>window.broken=1</script><img src=x onerror="window.broken=1">'
LAYOUT = (
    "parallelism.tp=2 parallelism.pp=2 parallelism.cp=2 parallelism.dp_shard=2 training.mixed_precision=bf16 "
    "training.micro_batch_size=1 parallelism.pp_schedule=ZBVZeroBubble"
)
"""Every axis but dp_replicate: sixteen ranks."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a layout with all pipeline ranks and with one, from a child process with a fake world."""
    folder = tmp_path_factory.mktemp("pages")
    run_ranks(1, _draw, str(folder))
    return {name: folder / "new" / f"{name}.html" for name in ("all", "some")}


def _draw(folder: str) -> None:
    experiment = experiment_of(LAYOUT)
    experiment = replace(experiment, model=replace(experiment.model, name=EVIL))
    plan = predict(experiment, DEVICES["h100"])
    for name, ranks in (("all", plan.ranks), ("some", plan.ranks[:1])):
        page = html_page(replace(plan, ranks=ranks), checked(plan), "titan-exp plan")
        OutputFile("--html", Path(folder) / "new" / f"{name}.html", "").write(page)


def checked(plan: Plan) -> MemoryCheck:
    assert plan.device is not None
    return MemoryCheck(plan.experiment, memory_of_gpu(plan.device, plan.layout, None), prediction=plan.prediction)


def numbers_in(page: str) -> dict[str, Any]:
    return json.loads(page.split('id="numbers">')[1].split("</script>", 1)[0])


def test_the_page_adds_up_and_loads_nothing(pages: dict[str, Path]):
    page = pages["all"].read_text()
    assert "http" not in re.sub(r"http://www.w3.org/2000/svg|http-equiv", "", page)
    assert page.count("<script") == 2
    assert "&lt;/script&gt;" in page
    assert "<img" not in page
    assert re.search(r"content=\"default-src 'none'", page)
    found = numbers_in(page)
    assert found["stages"] == [[[0, 0]], [[1, 1]], [[2, 2]], [[3, 3]]]
    assert set(found["ranks"]) == {"0", "1"}
    for rank in found["ranks"].values():
        memory, peak = rank["memory"], rank["peak"]
        totals = [sum(sizes) * memory["unit"] for sizes in zip(*memory["columns"].values(), strict=True)]
        # Each category is rounded to a unit.
        assert max(totals) == totals[memory["peak"]] == pytest.approx(peak["bytes"], abs=8 * memory["unit"])
        assert memory["words"][memory["where"][memory["peak"]]] == peak["where"]
        assert len({len(column) for column in memory["columns"].values()} | {len(memory["where"])}) == 1
    # One step time and one bubble: those of the plan.
    assert found["passes"]["end"] == pytest.approx(found["step"])
    assert found["passes"]["bubble"] == pytest.approx(found["bubble"])


def test_shards_are_those_of_torch():
    # In the second, three ranks share weights of 64 rows.
    uneven = "parallelism.dp_shard=3 training.global_batch_size=12 training.mixed_precision=bf16"
    found = [part for parts in run_ranks(1, _parts, [LAYOUT, uneven]) for part in parts]
    divided = 0
    for cuts, shape, degrees, places, local_shape, offset in found:
        bounds = cut(shape, cuts, degrees, places)
        assert [last - first for first, last in bounds] == list(local_shape)
        assert [first for first, _ in bounds] == list(offset)
        divided += len(cuts) == 2
    assert divided, "no weight is divided twice"
    assert any(shape[0] % local_shape[0] for _, shape, _, _, local_shape, _ in found), "every part is even"


def cut(
    shape: list[int], cuts: list[tuple[str, int]], degrees: dict[str, int], places: dict[str, int]
) -> list[list[int]]:
    """Apply `sharded_dims`."""
    bounds = [[0, size] for size in shape]
    for axis, dim in cuts:
        first, last = bounds[dim]
        piece = -(-(last - first) // degrees[axis])
        bounds[dim] = [min(last, first + places[axis] * piece), min(last, first + (places[axis] + 1) * piece)]
    return bounds


def _parts(layouts: list[str]) -> list[Any]:
    found: list[Any] = []
    ranks = [
        (experiment, rank)
        for experiment in map(experiment_of, layouts)
        for rank in {0, ResolvedLayout.of(experiment).world_size // 2 + 1, ResolvedLayout.of(experiment).world_size - 1}
    ]
    for experiment, rank in ranks:
        with fake_rank(experiment, rank) as fake:
            for module in fake.state.model.parts:
                for weight in module.parameters():
                    assert isinstance(weight, DTensor)
                    mesh = weight.device_mesh
                    names, sizes = mesh.mesh_dim_names or (), mesh.shape
                    degrees = dict(zip(names, sizes, strict=True))
                    places = dict(zip(names, mesh.get_coordinate() or (), strict=True))
                    with _disable_current_modes():
                        truth = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
                    found.append((sharded_dims(weight), list(weight.shape), degrees, places, *truth))
            pieces = [weight["layers"] for weight in read_shards(fake)[1]]
            assert sum(max(1, sum(last - first + 1 for first, last in blocks)) for blocks in pieces) == len(
                [1 for module in fake.state.model.parts for _ in module.parameters()]
            )
    return found


@pytest.mark.parametrize("overrides", ["", "parallelism.cp=4", "parallelism.cp=4 parallelism.cp_ulysses=2"])
def test_every_token_is_computed_once(overrides: str):
    experiment = experiment_of(f"{overrides} training.seq_len=64")
    parts = token_ranges(experiment)
    assert len(parts) == experiment.parallelism.cp
    tokens = [token for pieces in parts for first, last in pieces for token in range(first, last + 1)]
    assert sorted(tokens) == list(range(64))


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_the_drawn_schedule_is_the_executor_s(name: str):
    experiment = experiment_of(f"parallelism.pp=2 parallelism.pp_schedule={name} training.micro_batch_size=2")
    schedule = schedule_of(ResolvedLayout.of(experiment))
    stages = len(schedule.placement)
    assert schedule.orders == build_schedule(name, 2, stages, 4)
    costs = [1.0 + stage for stage in range(stages)]
    line = timeline(schedule.orders, costs)
    busy = idle = 0.0
    for order in schedule.orders:
        words, now, actions = schedule_text(order, line.end, costs).split(" "), 0.0, []
        for word in words:
            if word[0] == "~":
                now += float(word[1:])
                continue
            stage, kind, number = re.fullmatch(r"(\d+)([FBIW])(\d+)", word).groups()  # type: ignore[union-attr]
            actions.append(Action(int(stage), kind, int(number)))
            now += COST[kind] * costs[int(stage)]
            busy += COST[kind] * costs[int(stage)]
            assert now == pytest.approx(line.end[actions[-1]], rel=1e-4)
        assert actions == order
        idle += max(line.end.values()) - now
    assert 1 - busy / (2 * max(line.end.values())) == pytest.approx(line.bubble)


def test_a_downsampled_timeline_keeps_its_peak():
    ledger = MemoryTracker()
    kept = [torch.empty(100, dtype=torch.uint8)]
    ledger.track(kept[0], "parameters")
    ledger.begin_step()
    for number in range(1000):
        ledger.where = f"turn {number}"
        tensor = torch.empty(5000 if number == 777 else 10, dtype=torch.uint8)
        ledger.track(tensor, "activations")
        del tensor
    drawn = ledger.timeline(20)
    assert len(drawn) == 20
    assert (drawn[0].bytes, drawn[0].by_category["parameters"]) == (100, 100)
    assert max(drawn, key=lambda moment: moment.bytes) == ledger.peak()
    assert ledger.peak().where == "turn 777"
    # The full timeline has every change: up and down.
    every = [moment.bytes for moment in ledger.timeline(10_000)]
    assert len(every) == 2001
    assert {after - before for before, after in pairwise(every)} == {10, -10, 5000, -5000}
    assert all(moment.bytes == sum(moment.by_category[name] for name in CATEGORIES) for moment in drawn)


def test_a_page_that_cannot_be_written_is_refused_before_the_plan(tmp_path: Path):
    with pytest.raises(UserError, match=r"is a folder.*plan\.html"):
        OutputFile("--html", tmp_path, "plan.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        OutputFile("--html", tmp_path / "file" / "plan.html", "plan.html")


@pytest.mark.night
def test_the_verb_writes_a_page_beside_what_it_prints(tmp_path: Path):
    path = tmp_path / "plan.html"
    found = json.loads(planned(*SMALL, "--json", "--html", str(path), "--trace", str(tmp_path / "plan.json")))
    assert f"titan-exp plan {SMALL[0]}" in path.read_text()
    drawn = numbers_in(path.read_text())["ranks"]["0"]
    assert drawn["peak"]["bytes"] == found["ranks"][0]["peak_allocated_bytes"]
    assert drawn["messages"] == []
    assert {row.name for row in tmp_path.iterdir()} == {"plan.html", "plan.json"}


EXPERTS = "model=qwen3_moe_debug parallelism.dp_shard=4 parallelism.ep=2 parallelism.tp=2 parallelism.etp=1"


@pytest.fixture(scope="module")
def plan_of_experts() -> Plan:
    return predict(experiment_of(EXPERTS), DEVICES["h100"])


def test_the_page_says_first_whether_the_run_fits(plan_of_experts: Plan):
    check = checked(plan_of_experts)
    page = html_page(plan_of_experts, check, "titan-exp plan model=x")
    first = page.split('<div class="facts">')[1].strip()
    assert first.startswith("<div><span>fits</span>")
    assert (
        "It computes in fp32, without a low-precision recipe, recomputes nothing, and runs without a compiler." in page
    )
    assert "Experts are distributed over 2 ranks (ep)." in page
    assert "titan-exp plan model=x" in page
    assert check.device_memory is not None
    small = replace(check, device_memory=replace(check.device_memory, capacity=(check.needed or 0) - 1))
    first = html_page(plan_of_experts, small, "").split('<div class="facts">')[1].strip()
    assert first.startswith('<div class="bad"><span>does not fit</span>')


def test_some_ranks_and_an_upper_bound_leave_open_whether_a_run_fits(monkeypatch: pytest.MonkeyPatch):
    plan = predict(experiment_of("parallelism.pp=2"), DEVICES["h100"], [0])
    assert (plan.verdict(fits=True), plan.verdict(fits=False)) == ("the planned ranks fit", "does not fit")
    monkeypatch.setattr(Plan, "at_most", True)
    assert plan.verdict(fits=False) == "may not fit"


def test_a_browser_draws_the_shards_of_experts(plan_of_experts: Plan, browser: Any, tmp_path: Path):
    path = tmp_path / "experts.html"
    path.write_text(html_page(plan_of_experts, checked(plan_of_experts), ""))
    view, trouble = browser.new_page(), list[str]()
    view.on("pageerror", lambda error: trouble.append(str(error)))
    view.goto(path.as_uri())
    view.locator("#ranks .cell[data-rank='5'] rect").first.click()
    # Rank 5 is dp_shard 2, tp 1 of the dense mesh, and efsdp 2, ep 1 of the experts'.
    assert view.evaluate("group(5, ['ep'])") == [4, 5]
    assert view.evaluate("group(5, ['efsdp'])") == [1, 3, 5, 7]
    assert "experts " in view.locator("#rank .weights").inner_text()
    assert trouble == []


def test_the_trace_is_the_schedule(tmp_path: Path):
    experiment = experiment_of("parallelism.pp=2 parallelism.pp_schedule=1F1B training.global_batch_size=8")
    plan = predict(experiment, DEVICES["h100"])
    events = json.loads(trace_json(plan))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "pipeline rank 0", 1: "pipeline rank 1"}
    actions = [event for event in events if event["ph"] == "X"]
    schedule = schedule_of(plan.layout)
    for rank, order in enumerate(schedule.orders):
        own = [event for event in actions if event["pid"] == rank]
        assert [event["args"]["micro-batch"] for event in own] == schedule.passes * [one.microbatch for one in order]
        assert all(one["ts"] + one["dur"] <= two["ts"] + 0.01 for one, two in pairwise(own))
    assert plan.step_seconds is not None
    assert max(event["ts"] + event["dur"] for event in actions) == pytest.approx(plan.step_seconds * 1e6, rel=1e-3)


def test_every_degree_is_explained_from_the_table_of_axes():
    assert list(words_module.MEANINGS) == [*reversed(DEGREES), "ep", "etp"]
    for axis in AXES:
        assert words_module.MEANINGS[axis.key].startswith(axis.meaning)
        assert axis.collectives in words_module.MEANINGS[axis.key]


def test_every_memory_category_has_a_sentence_and_a_colour():
    script = Path(words_module.__file__).parent / "page" / "numbers.js"
    colours = re.search(r"const CATEGORY_COLORS = \{(.*?)\};", script.read_text(), re.DOTALL)
    assert colours is not None
    coloured = {name.strip('"') for name in re.findall(r'("[a-z ]+"|[a-z]+): "var', colours[1])}
    assert set(words_module.WORDS["categories"]) == coloured == set(CATEGORIES)


@pytest.mark.parametrize(("width", "scheme"), [(1360, "light"), (390, "dark")])
def test_a_browser_draws_it(pages: dict[str, Path], browser: Any, width: int, scheme: str):
    page = pages["some"].read_text()
    trouble: list[str] = []
    view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    view.on("console", lambda message: trouble.append(message.text))
    view.on("pageerror", lambda error: trouble.append(str(error)))
    view.on("request", lambda request: trouble.append(request.url) if not request.url.startswith("file:") else None)
    view.goto(pages["some"].as_uri())
    view.wait_for_selector("#memory .over-time svg path")
    assert view.locator("#ranks .cell").count() == 16
    assert view.evaluate("document.documentElement.scrollWidth") == width, "the page scrolls sideways"
    assert view.evaluate("window.broken") is None
    # A click says what a rank holds; rank 13 is pp 1, dp_shard 1, cp 0, tp 1.
    view.locator("#ranks .cell[data-rank='13'] rect").first.click()
    assert view.locator("#rank h2").inner_text() == "Rank 13"
    said = view.locator("#rank").inner_text()
    assert "tokens 0–15, 48–63" in said
    assert "Sequences 1, 3, 5, 7 of each batch" in said
    assert "leaves out pipeline rank 1" in said
    assert [view.evaluate(f"group(13, {axes})") for axes in (["tp"], ["dp_shard", "cp_across", "cp_within"])] == [
        [12, 13],
        [9, 11, 13, 15],
    ]
    # What the script cuts is what was cut above.
    weights = numbers_in(page)["ranks"]["0"]["weights"]
    uneven = {"shape": [11, 5], "cuts": [["tp", 0], ["fsdp", 0], ["fsdp", 1]]}
    for weight in [*weights, uneven]:
        drawn = view.evaluate("(weight) => partOf(7, weight)", weight)
        cuts = [(axis, dim) for axis, dim in weight["cuts"]]
        assert drawn == cut(weight["shape"], cuts, {"fsdp": 4, "tp": 2}, {"fsdp": 3, "tp": 1})
    view.locator("#ranks .plot").press("ArrowLeft")
    assert view.locator("#rank h2").inner_text() == "Rank 12"
    view.locator("#pipeline canvas").hover(position={"x": 75, "y": 12})
    assert "micro-batch" in view.locator("#tip").inner_text()
    # Dragging zooms in, a double click out again.
    canvas = view.locator("#pipeline canvas")
    view.mouse.move(0, 0)
    all_of_it = canvas.evaluate("(it) => it.toDataURL()")
    place = canvas.bounding_box()
    view.mouse.move(place["x"] + 100, place["y"] + 12)
    view.mouse.down()
    view.mouse.move(place["x"] + 150, place["y"] + 12)
    view.mouse.move(place["x"] + 200, place["y"] + 12)
    view.mouse.up()
    view.mouse.move(0, 0)
    assert canvas.evaluate("(it) => it.toDataURL()") != all_of_it
    canvas.dblclick(position={"x": 2, "y": 40})  # its own row
    view.mouse.move(0, 0)
    assert canvas.evaluate("(it) => it.toDataURL()") == all_of_it
    view.locator("#memory .over-time svg rect").last.hover()
    assert "total" in view.locator("#tip").inner_text()
    ground = "getComputedStyle(document.body).backgroundColor"
    before = view.evaluate(ground)
    view.locator("#theme").click()
    assert view.evaluate(ground) != before
    assert trouble == []


CELLS = """() => [...document.querySelectorAll("#ranks .cell")].map((cell) => {
  const text = cell.querySelector("text"), pen = document.createElement("canvas").getContext("2d");
  const bytes = (colour) => {
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const card = bytes(getComputedStyle(document.querySelector("section")).backgroundColor);
  return text && [bytes(getComputedStyle(text).fill), card, [...cell.querySelectorAll("rect")].map((part) => {
    const style = getComputedStyle(part);
    return [bytes(style.fill), Number(style.opacity)];
  })];
})"""
"""Colours of each rank's number, of the ground, and of its square's parts with their opacity."""


def luminance(colour: Any) -> float:
    """Relative luminance of WCAG 2."""
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def assert_readable(cells: list[Any]) -> None:
    for number, card, parts in cells:
        for colour, opacity in parts:
            seen = [opacity * over + (1 - opacity) * under for over, under in zip(colour, card, strict=True)]
            low, high = sorted((luminance(number), luminance(seen)))
            assert (high + 0.05) / (low + 0.05) >= 4.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_rank_numbers_are_readable_on_every_square(pages: dict[str, Path], browser: Any, scheme: str):
    view = browser.new_page(viewport={"width": 1360, "height": 900}, color_scheme=scheme)
    view.goto(pages["all"].as_uri())
    view.wait_for_selector("#ranks .cell text")
    for again in (False, True):
        for colouring in ("stage", "data", "tp"):
            view.locator(f"#ranks .choice [data-value='{colouring}']").last.click()
            view.mouse.move(0, 0)
            cells = view.evaluate(CELLS)
            assert len(cells) == 16
            assert_readable(cells)
            # Others step back from the rank that is pointed at.
            view.locator("#ranks .cell[data-rank='13'] rect").first.hover()
            pointed = view.evaluate(CELLS)
            assert len({opacity for _, _, parts in pointed for _, opacity in parts}) == 2
            assert_readable(pointed)
        if not again:
            view.locator("#theme").click()


def test_the_page_has_one_step_time_and_one_bubble(pages: dict[str, Path], browser: Any):
    view = browser.new_page()
    view.goto(pages["all"].as_uri())
    view.wait_for_selector("#pipeline canvas")
    facts = dict(re.findall(r"<span>(\w+)</span><b>([^<]*)</b>", pages["all"].read_text()))
    assert f"It takes {facts['bubble']} of the ranks' time" in view.locator("#pipeline .summary").inner_text()
    assert f"{facts['step']} per step" in view.locator("#time .summary").inner_text()
    assert view.locator("#pipeline button").count() == 0


def test_thousands_of_ranks_are_folded(pages: dict[str, Path], browser: Any, tmp_path: Path):
    path = tmp_path / "large.html"
    path.write_text(pages["all"].read_text().replace('"dp_shard":2,', '"dp_shard":1024,', 1))
    view = browser.new_page()
    view.goto(path.as_uri())
    view.wait_for_selector("#ranks .fold")
    # Of 256 nodes of 16 ranks that hold the same stages, three and the last are drawn.
    assert view.locator("#ranks .cell").count() == 2 * 4 * 16
    assert "252 like these" in view.locator("#ranks .fold").first.text_content()
    view.locator("#ranks .fold rect").first.click()
    assert view.locator("#ranks .cell").count() == (256 + 4) * 16
    # A rank that is asked for is shown.
    view.locator("#ranks input").fill("5000")
    view.locator("#ranks input").press("Enter")
    assert view.locator("#ranks .cell[data-rank='5000']").count() == 1
    assert view.locator("#rank h2").inner_text() == "Rank 5,000"
