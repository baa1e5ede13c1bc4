// Differences, and values with intervals.
function bars() {
  const section = document.getElementById("bars");
  const usable = data.metrics.filter((metric) => metric.values.some((it) => it));
  if (!usable.length || data.rows.length < 2) return;
  const differs = (metric) => metric.deltas.some((it) => it);
  const state = { metric: usable[0], mode: differs(usable[0]) ? "difference" : "value" };
  let again = null;
  const INK = { better: "var(--good)", worse: "var(--bad)", different: "var(--warn)" };

  function paint(box) {
    const metric = state.metric, isDifference = state.mode === "difference" && differs(metric);
    const listed = data.rows.map((row, place) => ({ row, place, value: metric.values[place], delta: metric.deltas[place] })).filter((it) => it.value);
    const narrow = box.clientWidth < 520;
    const space = Math.max(260, box.clientWidth) * (narrow ? 1 : 0.42) - 24;
    for (const it of listed) it.lines = linesOf(it.row.label, space);
    const most = Math.max(...listed.map((it) => it.lines.length)), above = narrow ? LINE * most : 0;
    const rowHeight = narrow ? 29 + above : Math.max(32, 10 + LINE * most);
    const left = narrow ? 12 : 22 + Math.max(...listed.flatMap((it) => it.lines.map((line) => ruler.measureText(line).width)));
    const f = frame(box, { height: listed.length * rowHeight + 54, left, right: 20 });
    const base = listed.find((it) => it.row.baseline);
    const seedsOf = (it) => (isDifference ? [] : metric.seeds[it.place].filter(finite));
    const numbers = listed.flatMap((it) => (isDifference ? (it.delta || [0]).slice(0, 3) : [...it.value, ...seedsOf(it)])).filter(finite);
    if (isDifference) numbers.push(0);
    const [low, high] = padded(numbers, 0.08);
    const x = scale(low, high, f.x0, f.x1);
    const xt = ticks(low, high, Math.max(2, (f.x1 - f.x0) / 90));
    for (const value of xt) {
      draw(f.svg, "line", { class: "grid", x1: x(value), x2: x(value), y1: f.y1, y2: f.y0 });
      draw(f.svg, "text", { x: x(value), y: f.y0 + 17, "text-anchor": "middle" }, isDifference ? (Math.abs(value) < 1e-12 ? "0" : signed(value)) : formatMetric(metric, value).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, ""));
    }
    const direction = { min: "lower is better", max: "higher is better" }[metric.better] || "";
    draw(f.svg, "text", { x: (f.x0 + f.x1) / 2, y: f.height - 5, "text-anchor": "middle" }, `${metric.title}${isDifference ? ", difference" : ""}${direction ? ` · ${direction}` : ""}`);
    const zero = isDifference ? 0 : base ? base.value[0] : null;
    if (zero !== null) draw(f.svg, "line", { class: "zero", x1: x(zero), x2: x(zero), y1: f.y1, y2: f.y0 });
    listed.forEach((it, k) => {
      const middle = f.y1 + rowHeight * k + rowHeight / 2 + above / 2;
      const ink = isDifference ? (it.delta ? INK[it.delta[3]] || "var(--quiet)" : "var(--ink)") : color(it.place);
      const high = LINE * (it.lines.length - 1);
      drawLines(f.svg, narrow ? { class: "name", x: f.x0, y: middle - 14 - high } : { class: "name", x: f.x0 - 10, y: middle + 4 - high / 2, "text-anchor": "end" }, it.lines);
      const [mean, from, to] = isDifference ? it.delta ? it.delta : [0, null, null] : it.value;
      if (finite(from) && finite(to)) {
        const line = draw(f.svg, "line", { x1: x(from), x2: x(to), y1: middle, y2: middle, "stroke-width": 3, "stroke-linecap": "round", opacity: 0.55 });
        line.style.stroke = ink;
      }
      for (const seed of seedsOf(it)) {
        const dot = draw(f.svg, "circle", { cx: x(seed), cy: middle, r: 2.6, opacity: 0.8 });
        dot.style.fill = ink;
      }
      const ring = draw(f.svg, "circle", { cx: x(mean), cy: middle, r: 5, "stroke-width": 2.5 });
      ring.style.stroke = ink;
      ring.style.fill = "var(--card)";
      const field = draw(f.svg, "rect", { x: 0, y: middle - rowHeight / 2 - above / 2, width: f.width, height: rowHeight, fill: "transparent" });
      field.addEventListener("pointermove", (event) => {
        const lines = [[it.place, metric.title, formatMetric(metric, it.value[0])]];
        if (finite(it.value[1])) lines.push([null, "95 % interval", `${formatMetric(metric, it.value[1])} to ${formatMetric(metric, it.value[2])}`]);
        if (it.delta) lines.push([null, "against the baseline", signed(it.delta[0])]);
        if (it.delta && finite(it.delta[1])) lines.push([null, "95 % interval", `${signed(it.delta[1])} to ${signed(it.delta[2])}`]);
        if (it.delta) lines.push([null, it.delta[3], ""]);
        if (it.row.baseline) lines.push([null, "the baseline", ""]);
        tipOfRows(event, it.row.label, lines);
      });
      field.addEventListener("pointerleave", hideTip);
    });
  }
  const controls = section.querySelector(".controls");
  const pick = element("select", { "aria-label": "metric", onchange: (event) => { state.metric = usable[event.target.selectedIndex]; again(); } });
  for (const metric of usable) pick.append(element("option", {}, metric.title));
  controls.append(pick);
  if (differs(usable[0])) controls.append(choice([["difference", "difference"], ["value", "value"]], state.mode, (it) => { state.mode = it; again(); }));
  again = shown(section, paint);
}
