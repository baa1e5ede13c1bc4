// Scatter plots whose labels do not overlap: the Pareto front, and scaling.
function names(f, entries) {
  const taken = entries.map((it) => ({ x0: it.x - 7, x1: it.x + 7, y0: it.y - 7, y1: it.y + 7 }));
  for (const it of [...entries].sort((a, b) => a.y - b.y)) {
    const width = it.text.length * 6.7;
    const spots = [[it.x + 10, it.y + 4], [it.x - 10 - width, it.y + 4], [it.x - width / 2, it.y - 11], [it.x - width / 2, it.y + 20],
      [it.x + 10, it.y - 10], [it.x + 10, it.y + 18], [it.x - 10 - width, it.y - 10], [it.x - 10 - width, it.y + 18]];
    for (const [left, base] of spots) {
      const box = { x0: left - 2, x1: left + width + 2, y0: base - 11, y1: base + 4 };
      const free = box.x0 > 2 && box.x1 < f.width - 2 && box.y0 > 0 && box.y1 < f.y0
        && !taken.some((other) => box.x0 < other.x1 && box.x1 > other.x0 && box.y0 < other.y1 && box.y1 > other.y0);
      if (!free) continue;
      taken.push(box);
      draw(f.svg, "text", { class: "name", x: left, y: base }, it.text);
      break;
    }
  }
}
function dots(f, x, y, points, lines) {
  const entries = [];
  for (const it of points) {
    const dot = draw(f.svg, "circle", { cx: x(it.x), cy: y(it.y), r: 6, "stroke-width": 2.5, opacity: it.front === false ? 0.6 : 1 });
    dot.style.stroke = color(it.row);
    dot.style.fill = it.front === false ? "var(--card)" : color(it.row);
    const field = draw(f.svg, "circle", { cx: x(it.x), cy: y(it.y), r: 14, fill: "transparent" });
    field.addEventListener("pointermove", (event) => tipOfRows(event, data.rows[it.row].label, lines(it)));
    field.addEventListener("pointerleave", hideTip);
    entries.push({ x: x(it.x), y: y(it.y), text: it.label || data.rows[it.row].label });
  }
  names(f, entries);
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
    const front = points.filter((it) => it.front);
    let text = "";
    front.forEach((it, k) => { text += k ? `H${x(it.x)}V${y(it.y)}` : `M${x(it.x)} ${f.y1}V${y(it.y)}`; });
    const line = draw(f.svg, "path", { d: `${text}H${f.x1}`, fill: "none", "stroke-width": 1.5, "stroke-dasharray": "5 4" });
    line.style.stroke = "var(--accent)";
    dots(f, x, y, points, (it) => [[it.row, data.pareto.loss, it.y.toFixed(4)], [null, data.pareto.cost, formatCount(it.x)], [null, it.front ? "on the front" : "beaten by another", ""]]);
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
      draw(f.svg, "text", { x: x(high) - 4, y: y(ideal) - 7, "text-anchor": "end" }, "ideal");
      dots(f, x, y, series.points, (it) => [[it.row, "speedup", `${it.y.toFixed(2)}×`], [null, "efficiency", `${(100 * it.e).toFixed(0)} %`], [null, "processes", String(it.x)]]);
    });
  }
}
