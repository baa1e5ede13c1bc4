// Scatter plots whose labels do not overlap: the Pareto front, and scaling.
// Labels beside their dots, none on a dot, a label or the line through `corners`; one without such a place is left out.
function names(f, entries, corners) {
  const around = (x, y, reach) => ({ x0: x - reach, x1: x + reach, y0: y - reach, y1: y + reach });
  const taken = entries.map((it) => around(it.x, it.y, 9));
  corners.slice(1).forEach(([x, y], k) => {
    const [x0, y0] = corners[k], steps = Math.ceil(Math.hypot(x - x0, y - y0) / 4);
    for (let step = 0; step <= steps; step++) taken.push(around(x0 + ((x - x0) * step) / (steps || 1), y0 + ((y - y0) * step) / (steps || 1), 2));
  });
  for (const it of [...entries].sort((a, b) => a.y - b.y)) {
    const lines = linesOf(it.text, Math.min(190, f.width / 2)), high = LINE * (lines.length - 1);
    const text = drawLines(f.svg, { class: it.class || "name" }, lines), width = text.getBBox().width;
    const [right, left, middle] = [it.x + 13, it.x - 13 - width, it.x - width / 2];
    const spots = [[right, it.y + 4], [left, it.y + 4], [middle, it.y - 16], [middle, it.y + 25], [right, it.y - 12], [right, it.y + 20], [left, it.y - 12], [left, it.y + 20],
      [middle, it.y - 32], [middle, it.y + 41], [right, it.y - 28], [right, it.y + 36], [left, it.y - 28], [left, it.y + 36]];
    // Names above a dot end, and names beside it are centred, at their spot.
    const first = (base) => base - (base < it.y ? high : base === it.y + 4 ? high / 2 : 0);
    const boxOf = ([x, base]) => ({ x0: x - 3, x1: x + width + 3, y0: first(base) - 13, y1: first(base) + high + 6 });
    const gap = (box, dot) => Math.hypot(Math.max(box.x0 - dot.x, 0, dot.x - box.x1), Math.max(box.y0 - dot.y, 0, dot.y - box.y1));
    const spot = spots.find((place) => {
      const box = boxOf(place);
      // Nearer to its own dot than to any other, so that it is not taken for another's.
      if (entries.some((other) => other !== it && gap(box, other) < gap(box, it) + 4)) return false;
      return box.x0 > f.x0 && box.x1 < f.width && box.y0 > 0 && box.y1 < f.y0
        && !taken.some((other) => box.x0 < other.x1 && box.x1 > other.x0 && box.y0 < other.y1 && box.y1 > other.y0);
    });
    if (!spot) { text.remove(); continue; }
    taken.push(boxOf(spot));
    for (const line of text.children) line.setAttribute("x", spot[0]);
    text.setAttribute("y", first(spot[1]));
  }
}
function dots(f, x, y, points, lines, corners, more = []) {
  const entries = [...more];
  for (const it of points) {
    const dot = draw(f.svg, "circle", { cx: x(it.x), cy: y(it.y), r: 6, "stroke-width": 2.5, opacity: it.front === false ? 0.6 : 1 });
    dot.style.stroke = color(it.row);
    dot.style.fill = it.front === false ? "var(--card)" : color(it.row);
    const field = draw(f.svg, "circle", { cx: x(it.x), cy: y(it.y), r: 14, fill: "transparent" });
    field.addEventListener("pointermove", (event) => tipOfRows(event, data.rows[it.row].label, lines(it)));
    field.addEventListener("pointerleave", hideTip);
    entries.push({ x: x(it.x), y: y(it.y), text: it.label || data.rows[it.row].label });
  }
  names(f, entries, corners);
}
function pareto() {
  const points = data.pareto.points;
  if (points.length < 2) return;
  shown(document.getElementById("pareto"), (box) => {
    const f = frame(box, { height: 340, left: 62 });
    const costs = points.map((it) => it.x);
    const log = Math.max(...costs) / Math.min(...costs) > 5 && Math.min(...costs) > 0;
    const [lowX, highX] = log ? [Math.min(...costs) / 1.3, Math.max(...costs) * 1.3] : padded(costs, 0.12);
    const [lowY, highY] = padded(points.map((it) => it.y), 0.12);
    const x = scale(lowX, highX, f.x0, f.x1, log), y = scale(lowY, highY, f.y0, f.y1);
    axes(f, x, y, log ? logTicks(lowX, highX, 5) : ticks(lowX, highX, 5), ticks(lowY, highY, 5), formatCount, formatCount, `${data.pareto.cost}${log ? " (log)" : ""}`, data.pareto.loss);
    // Between two points of the front a straight line touches no other: what lies on it is beaten by neither.
    const corners = points.filter((it) => it.front).map((it) => [x(it.x), y(it.y)]);
    draw(f.svg, "path", { class: "front", d: `M${corners.map((it) => it.join(" ")).join("L")}`, fill: "none", stroke: "var(--accent)", "stroke-width": 1.5, "stroke-dasharray": "5 4" });
    dots(f, x, y, points, (it) => [[it.row, data.pareto.loss, it.y.toFixed(4)], [null, data.pareto.cost, formatCount(it.x)], [null, it.front ? "on the front" : "beaten by another", ""]], corners);
  });
}
function scaling() {
  for (const section of document.querySelectorAll(".scaling")) {
    const series = data.scaling[Number(section.dataset.series)];
    shown(section, (box) => {
      const f = frame(box, { height: 300, left: 62 });
      const sizes = [...new Set(series.points.map((it) => it.x))];
      const [low, high] = [Math.min(...sizes), Math.max(...sizes)];
      const ideal = high / low, speeds = series.points.map((it) => it.y);
      const bottom = Math.min(1, ...speeds) / 1.35, top = Math.max(ideal, ...speeds) * 1.25;
      const x = scale(low / 1.25, high * 1.25, f.x0, f.x1, true), y = scale(bottom, top, f.y0, f.y1, true);
      axes(f, x, y, sizes, logTicks(bottom, top, 6), String, (it) => `${formatCount(it)}×`, "processes (log)", "speedup (log)");
      draw(f.svg, "line", { class: "zero", x1: x(low), x2: x(high), y1: y(1), y2: y(ideal) });
      const ends = [[x(low), y(1)], [x(high), y(ideal)]];
      dots(f, x, y, series.points, (it) => [[it.row, "speedup", `${it.y.toFixed(2)}×`], [null, "efficiency", `${(100 * it.e).toFixed(0)} %`], [null, "processes", String(it.x)]], ends, [{ x: x(high), y: y(ideal), text: "ideal", class: "quiet" }]);
    });
  }
}
