// Loss curves.
// Moving average over `share` percent of the rows, as `stats/moving_average.py` computes it. Each value is of `rows` rows.
function smoothed(values, rows, share) {
  if (!share) return values;
  const many = Math.max(1, Math.floor((rows.reduce((a, b) => a + b, 0) * share) / 200));
  let half = 0;
  for (let found = 0; half < rows.length && found < many; half++) found += rows[rows.length - 1 - half];
  const sums = [0], counts = [0];
  values.forEach((value, k) => {
    sums.push(sums.at(-1) + (finite(value) ? value * rows[k] : 0));
    counts.push(counts.at(-1) + (finite(value) ? rows[k] : 0));
  });
  return values.map((value, k) => {
    if (!finite(value)) return null;
    const last = Math.min(values.length, k + half + 1), first = Math.max(0, k - half + (k + half >= values.length ? 1 : 0));
    const fitted = k < Math.min(half, values.length - half) ? fittedLine(values, rows, k, last) : null;
    return fitted ?? (sums[last] - sums[first]) / (counts[last] - counts[first]);
  });
}
// Value at `place` of a line fitted to the values before `last`; null for fewer than two.
function fittedLine(values, rows, place, last) {
  const known = [];
  for (let k = 0; k < last; k++) if (finite(values[k])) known.push([k - place, values[k], rows[k]]);
  if (known.length < 2) return null;
  const of = (term) => known.reduce((found, [x, y, weight]) => found + weight * term(x, y), 0);
  const [n, x, y, xx, xy] = [of(() => 1), of((a) => a), of((_, b) => b), of((a) => a * a), of((a, b) => a * b)];
  return (y * xx - x * xy) / (n * xx - x * x);
}
function at(xs, ys, place) {
  let low = 0, high = xs.length - 1;
  if (high < 0 || place < xs[0] || place > xs[high]) return null;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= place) low = middle; else high = middle; }
  if (low === high) return ys[low];
  if (!finite(ys[low]) || !finite(ys[high])) return null;
  return ys[low] + ((ys[high] - ys[low]) * (place - xs[low])) / (xs[high] - xs[low] || 1);
}
function path(xs, ys, x, y) {
  let text = "", open = false;
  for (let k = 0; k < xs.length; k++) {
    if (!finite(ys[k])) { open = false; continue; }
    text += `${open ? "L" : "M"}${x(xs[k]).toFixed(1)} ${y(ys[k]).toFixed(1)}`;
    open = true;
  }
  return text;
}
function crowd() {
  // With many rows only the best twelve and the baseline are shown at first; the legend has the others.
  const metric = data.metrics[0];
  if (data.rows.length <= 16 || !metric) return new Set();
  const order = data.rows.map((row, place) => [row.baseline ? -Infinity : metric.values[place] ? metric.values[place][0] * (metric.better === "max" ? -1 : 1) : Infinity, place]);
  return new Set(order.sort((a, b) => a[0] - b[0]).slice(13).map(([, place]) => place));
}
function lossCurves() {
  const section = document.getElementById("curves");
  const has = (key) => data.curves.some((it) => it[key][2].some(finite));
  if (!has("loss") && !has("validation_loss")) return;
  const state = { key: has("loss") ? "loss" : "validation_loss", by: 0, smooth: 4, logX: false, logY: false, range: null, off: crowd(), near: null };
  let lines = [], again = null;

  function prepare() {
    lines = data.curves.filter((it) => !state.off.has(it.row)).map((it) => {
      const xs = it[state.key][state.by];
      return { ...it, xs, ys: smoothed(it[state.key][2], it[state.key][3], state.key === "loss" ? state.smooth : 0) };
    }).filter((it) => it.xs.length);
  }
  function paint(box) {
    prepare();
    const f = frame(box, { height: Math.max(300, Math.min(460, box.clientWidth * 0.5)), left: 58 });
    const inside = (it) => (!state.range || (it >= state.range[0] && it <= state.range[1])) && (!state.logX || it > 0);
    const allX = lines.flatMap((it) => it.xs.filter(inside));
    const allY = lines.flatMap((it) => it.ys.filter((value, k) => finite(value) && inside(it.xs[k]) && (!state.logY || value > 0)));
    if (!allX.length || !allY.length) {
      draw(f.svg, "text", { x: f.width / 2, y: f.height / 2, "text-anchor": "middle" }, "nothing chosen");
      return;
    }
    const lowX = state.range ? state.range[0] : state.logX ? allX.reduce((a, b) => Math.min(a, b)) : 0;
    const highX = state.range ? state.range[1] : allX.reduce((a, b) => Math.max(a, b));
    let [lowY, highY] = [allY.reduce((a, b) => Math.min(a, b)), allY.reduce((a, b) => Math.max(a, b))];
    const more = (highY - lowY) * 0.05 || 0.05;
    [lowY, highY] = [state.logY ? lowY * 0.985 : lowY - more, state.logY ? highY * 1.015 : highY + more];
    const x = scale(lowX, highX, f.x0, f.x1, state.logX), y = scale(lowY, highY, f.y0, f.y1, state.logY);
    const yt = state.logY ? logTicks(lowY, highY, 6) : ticks(lowY, highY, 6);
    const xt = state.logX ? logTicks(lowX, highX, 6) : ticks(lowX, highX, Math.max(4, f.width / 130));
    axes(f, x, y, xt, yt, formatCount, (it) => String(Number(it.toPrecision(5))), state.by ? "steps" : "tokens", "loss (nats per token)");
    const clip = `clip${Math.random().toString(36).slice(2)}`;
    draw(draw(f.svg, "clipPath", { id: clip }), "rect", { x: f.x0, y: f.y1, width: f.x1 - f.x0, height: f.y0 - f.y1 });
    const isCut = state.by === 0 && finite(data.point) && data.point > lowX && data.point < highX * 0.999;
    if (isCut) {
      draw(f.svg, "line", { class: "zero", x1: x(data.point), x2: x(data.point), y1: f.y0, y2: f.y1 });
      draw(f.svg, "text", { x: x(data.point) - 5, y: f.y1 + 12, "text-anchor": "end" }, "compared here");
    }
    const compared = isCut ? data.metrics.find((metric) => metric.name === state.key) : null;
    const group = draw(f.svg, "g", { "clip-path": `url(#${clip})`, fill: "none", "stroke-linejoin": "round" });
    const seeds = new Map();
    for (const it of lines) seeds.set(it.row, (seeds.get(it.row) || 0) + 1);
    for (const it of lines) {
      const few = it.xs.length < 40;
      const fade = state.near !== null && state.near !== it.row;
      const line = draw(group, "path", {
        d: path(it.xs, it.ys, x, y), "stroke-width": seeds.get(it.row) > 1 ? 1.5 : 2, "stroke-dasharray": dash(it.row) || null,
        opacity: fade ? 0.15 : seeds.get(it.row) > 1 ? 0.8 : 1,
      });
      line.style.stroke = color(it.row);
      if (few && !fade) it.xs.forEach((value, k) => {
        if (!finite(it.ys[k])) return;
        const dot = draw(group, "circle", { cx: x(value), cy: y(it.ys[k]), r: 2.6 });
        dot.style.fill = color(it.row);
      });
    }
    // What the table says of runs that go on after the compared tokens.
    for (const row of compared ? seeds.keys() : []) {
      const value = compared.values[row];
      if (!value || (state.near !== null && state.near !== row)) continue;
      draw(f.svg, "circle", { class: "compared", cx: x(data.point), cy: y(value[0]), r: 3.5, fill: color(row), stroke: "var(--card)" });
    }
    follow(f, x);
  }
  function follow(f, x) {
    const cursor = draw(f.svg, "line", { class: "cursor", y1: f.y0, y2: f.y1, visibility: "hidden" });
    const brush = draw(f.svg, "rect", { class: "brush", y: f.y1, height: f.y0 - f.y1, visibility: "hidden" });
    const field = draw(f.svg, "rect", { x: f.x0, y: f.y1, width: f.x1 - f.x0, height: f.y0 - f.y1, fill: "transparent" });
    let from = null;
    const place = (event) => {
      const bounds = f.svg.getBoundingClientRect();
      const raw = ((event.clientX - bounds.left) * f.width) / bounds.width;
      return Math.max(f.x0, Math.min(f.x1, raw));
    };
    field.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") { from = place(event); field.setPointerCapture(event.pointerId); } });
    field.addEventListener("pointermove", (event) => {
      const here = place(event), value = x.invert(here);
      cursor.setAttribute("x1", here); cursor.setAttribute("x2", here); cursor.setAttribute("visibility", "visible");
      if (from !== null) {
        brush.setAttribute("x", Math.min(from, here)); brush.setAttribute("width", Math.abs(here - from)); brush.setAttribute("visibility", "visible");
      }
      const rows = new Map();
      for (const it of lines) {
        const found = at(it.xs, it.ys, value);
        if (finite(found)) rows.set(it.row, [...(rows.get(it.row) || []), found]);
      }
      const listed = [...rows].map(([row, values]) => [row, values.reduce((a, b) => a + b) / values.length]).sort((a, b) => a[1] - b[1]);
      const shown = listed.slice(0, 12).map(([row, mean]) => [row, data.rows[row].label, mean.toFixed(4)]);
      if (shown.length) tipOfRows(event, `${formatCount(value)} ${state.by ? "steps" : "tokens"}`, shown); else hideTip();
    });
    field.addEventListener("pointerup", (event) => {
      const here = place(event);
      if (from !== null && Math.abs(here - from) > 8) { state.range = [x.invert(Math.min(from, here)), x.invert(Math.max(from, here))]; from = null; hideTip(); again(); }
      from = null;
    });
    field.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); hideTip(); });
    field.addEventListener("dblclick", () => { state.range = null; again(); });
  }
  const controls = section.querySelector(".controls");
  if (has("loss") && has("validation_loss")) controls.append(choice([["loss", "training"], ["validation_loss", "validation"]], state.key, (it) => { state.key = it; again(); }));
  controls.append(choice([[0, "tokens"], [1, "steps"]], 0, (it) => { state.by = it; state.range = null; again(); }));
  controls.append(element("label", {}, "smoothing", element("input", { type: "range", min: 0, max: 20, value: state.smooth, oninput: (event) => { state.smooth = Number(event.target.value); again(); } })));
  controls.append(element("label", {}, element("input", { type: "checkbox", onchange: (event) => { state.logX = event.target.checked; again(); } }), "log x"));
  controls.append(element("label", {}, element("input", { type: "checkbox", onchange: (event) => { state.logY = event.target.checked; again(); } }), "log y"));
  controls.append(element("span", { class: "hint" }, "drag to zoom, double-click to zoom out"));
  const legend = section.querySelector(".legend");
  const buttons = data.rows.map((row, place) => {
    const mark = element("i");
    mark.style.background = color(place);
    return element("button", {
      type: "button", "aria-pressed": "true", title: "click hides it; double-click shows it alone",
      onclick: () => { if (!state.off.delete(place)) state.off.add(place); update(); },
      ondblclick: () => { state.off = new Set(data.rows.map((_, other) => other).filter((other) => other !== place)); update(); },
      onpointerenter: () => { state.near = place; again(); }, onpointerleave: () => { state.near = null; again(); },
    }, mark, row.label);
  });
  const everything = element("button", { type: "button", onclick: () => { state.off = new Set(); update(); } }, "all");
  legend.append(...buttons, ...(data.rows.length > 2 ? [everything] : []));
  if (state.off.size) section.querySelector("h2").append(" · the best twelve and the baseline");
  function update() { buttons.forEach((it, place) => it.setAttribute("aria-pressed", String(!state.off.has(place)))); again(); }
  again = shown(section, paint);
  update();
}
