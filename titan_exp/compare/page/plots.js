"use strict";
// Draws the plots of compare.html as SVG from the numbers in the page. No library, nothing loaded; all text goes in as
// text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("numbers").textContent);
  const tip = document.getElementById("tip");
  const COLORS = 10;
  const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
  const color = (row) => `var(--c${row % COLORS})`;
  const dash = (row) => DASHES[Math.floor(row / COLORS) % DASHES.length];
  const finite = (value) => value !== null && value !== undefined && Number.isFinite(value);

  // ---- elements -------------------------------------------------------------------------------------------------
  function element(name, attributes = {}, ...children) {
    const found = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) found.addEventListener(key.slice(2), value);
      else if (value !== null && value !== false) found.setAttribute(key, value === true ? "" : value);
    }
    found.append(...children);
    return found;
  }
  function draw(parent, name, attributes = {}, text = null) {
    const found = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) found.setAttribute(key, value);
    if (text !== null) found.textContent = text;
    parent.append(found);
    return found;
  }
  function choice(options, chosen, changed) {
    const box = element("span", { class: "choice", role: "group" });
    for (const [value, words] of options) {
      box.append(element("button", {
        type: "button", "aria-pressed": String(value === chosen),
        onclick: (event) => {
          for (const other of box.children) other.setAttribute("aria-pressed", String(other === event.currentTarget));
          changed(value);
        },
      }, words));
    }
    return box;
  }
  function showTip(event, title, lines) {
    tip.replaceChildren(element("strong", {}, title));
    for (const [row, name, value] of lines) {
      const mark = element("i");
      if (row !== null) mark.style.background = color(row);
      tip.append(element("div", {}, mark, element("span", {}, name), element("b", {}, value)));
    }
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 16 + box.width > innerWidth;
    tip.style.left = `${Math.max(4, right ? event.clientX - box.width - 16 : event.clientX + 16)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 6))}px`;
  }
  const hideTip = () => { tip.hidden = true; };

  // ---- numbers --------------------------------------------------------------------------------------------------
  function short(number) {
    for (const [scale, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(number) >= scale) return `${Number((number / scale).toPrecision(4))}${letter}`;
    }
    if (number !== 0 && Math.abs(number) < 1e-3) return number.toExponential(1);
    return String(Number(number.toPrecision(4)));
  }
  const signed = (number) => (number < 0 ? "−" : "+") + short(Math.abs(number));
  function said(metric, number) {
    if (!finite(number)) return "—";
    if (metric.name === "mfu") return `${(100 * number).toFixed(1)} %`;
    if (metric.unit === "nats") return number.toFixed(4);
    if (metric.name === "time") return number < 1 / 60 ? `${short(3600 * number)} s` : number < 1 ? `${short(60 * number)} min` : `${short(number)} h`;
    return short(number);
  }
  function ticks(low, high, count) {
    const rough = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough || 1));
    const step = [1, 2, 2.5, 5, 10].map((it) => it * power).find((it) => it >= rough) || 10 * power;
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
    return found;
  }
  function logTicks(low, high, count) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    for (const marks of [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1, 3], [1]]) {
      const found = [];
      for (let power = first; power <= last; power++) for (const mark of marks) found.push(mark * 10 ** power);
      const inside = found.filter((it) => it >= low * 0.9999 && it <= high * 1.0001);
      if (inside.length <= count + 2 && inside.length > 1) return inside;
    }
    return ticks(low, high, count);
  }
  function scale(low, high, from, to, log = false) {
    const move = log ? Math.log : (it) => it;
    const [first, last] = [move(low), move(high)];
    const width = last - first || 1;
    const found = (value) => from + ((move(value) - first) / width) * (to - from);
    found.invert = (place) => {
      const value = first + ((place - from) / (to - from)) * width;
      return log ? Math.exp(value) : value;
    };
    return found;
  }
  function padded(values, part = 0.06) {
    const low = Math.min(...values), high = Math.max(...values);
    // Differences that are rounding do not fill a plot.
    const more = Math.max((high - low) * part, Math.abs(high) * 0.002) || 1;
    return [low - more, high + more];
  }

  // ---- a frame with axes ----------------------------------------------------------------------------------------
  function frame(box, { height, left = 54, right = 14, bottom = 40, top = 10 }) {
    const width = Math.max(260, box.clientWidth);
    box.replaceChildren();
    const svg = draw(box, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
    return { svg, width, height, x0: left, x1: width - right, y0: height - bottom, y1: top };
  }
  function axes(f, x, y, xt, yt, xWords, yWords, xLabel, yLabel) {
    for (const value of yt) {
      draw(f.svg, "line", { class: "grid", x1: f.x0, x2: f.x1, y1: y(value), y2: y(value) });
      draw(f.svg, "text", { x: f.x0 - 8, y: y(value) + 4, "text-anchor": "end" }, yWords(value));
    }
    draw(f.svg, "line", { class: "axis", x1: f.x0, x2: f.x1, y1: f.y0, y2: f.y0 });
    for (const value of xt) {
      draw(f.svg, "line", { class: "axis", x1: x(value), x2: x(value), y1: f.y0, y2: f.y0 + 4 });
      draw(f.svg, "text", { x: x(value), y: f.y0 + 17, "text-anchor": "middle" }, xWords(value));
    }
    draw(f.svg, "text", { x: (f.x0 + f.x1) / 2, y: f.height - 5, "text-anchor": "middle" }, xLabel);
    if (yLabel) draw(f.svg, "text", { x: 13, y: (f.y0 + f.y1) / 2, "text-anchor": "middle", transform: `rotate(-90 13 ${(f.y0 + f.y1) / 2})` }, yLabel);
  }

  function drawn(section, paint) {
    section.hidden = false;
    const box = section.querySelector(".plot");
    let width = 0;
    const again = () => paint(box);
    new ResizeObserver(() => { if (box.clientWidth !== width) { width = box.clientWidth; again(); } }).observe(box);
    return again;
  }

  // ---- loss curves ----------------------------------------------------------------------------------------------
  function smoothed(values, half) {
    if (half < 1) return values;
    const sums = [0], counts = [0];
    for (const value of values) {
      sums.push(sums.at(-1) + (finite(value) ? value : 0));
      counts.push(counts.at(-1) + (finite(value) ? 1 : 0));
    }
    return values.map((value, k) => {
      const reach = Math.min(half, k, values.length - 1 - k);
      const [first, last] = [k - reach, k + reach + 1];
      return finite(value) ? (sums[last] - sums[first]) / (counts[last] - counts[first]) : null;
    });
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
    // Of very many rows the twelve best and the baseline are shown at first; the legend has the others.
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
        const half = state.key === "loss" ? Math.round((xs.length * state.smooth) / 200) : 0;
        return { ...it, xs, ys: smoothed(it[state.key][2], half) };
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
      axes(f, x, y, xt, yt, short, (it) => String(Number(it.toPrecision(5))), state.by ? "steps" : "tokens", "loss (nats per token)");
      const clip = `clip${Math.random().toString(36).slice(2)}`;
      draw(draw(f.svg, "clipPath", { id: clip }), "rect", { x: f.x0, y: f.y1, width: f.x1 - f.x0, height: f.y0 - f.y1 });
      if (state.by === 0 && finite(data.point) && data.point > lowX && data.point < highX * 0.999) {
        draw(f.svg, "line", { class: "zero", x1: x(data.point), x2: x(data.point), y1: f.y0, y2: f.y1 });
        draw(f.svg, "text", { x: x(data.point) - 5, y: f.y1 + 12, "text-anchor": "end" }, "compared here");
      }
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
        if (shown.length) showTip(event, `${short(value)} ${state.by ? "steps" : "tokens"}`, shown); else hideTip();
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
    controls.append(element("span", { class: "hint" }, "drag to zoom, double-click for all"));
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
    again = drawn(section, paint);
    update();
  }

  // ---- differences, and values with intervals --------------------------------------------------------------------
  function bars() {
    const section = document.getElementById("bars");
    const usable = data.metrics.filter((metric) => metric.values.some((it) => it));
    if (!usable.length) return;
    const differs = (metric) => metric.deltas.some((it) => it);
    const state = { metric: usable[0], mode: differs(usable[0]) ? "difference" : "value" };
    let again = null;
    const INK = { better: "var(--good)", worse: "var(--bad)", different: "var(--warn)" };

    function paint(box) {
      const metric = state.metric, isDifference = state.mode === "difference" && differs(metric);
      const listed = data.rows.map((row, place) => ({ row, place, value: metric.values[place], delta: metric.deltas[place] })).filter((it) => it.value);
      const narrow = box.clientWidth < 520;
      const rowHeight = narrow ? 44 : 32;
      const longest = Math.max(...listed.map((it) => it.row.label.length));
      const left = narrow ? 12 : Math.min(box.clientWidth * 0.42, 16 + longest * 6.9);
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
        draw(f.svg, "text", { x: x(value), y: f.y0 + 17, "text-anchor": "middle" }, isDifference ? (Math.abs(value) < 1e-12 ? "0" : signed(value)) : said(metric, value).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, ""));
      }
      const direction = { min: "lower is better", max: "higher is better" }[metric.better] || "";
      draw(f.svg, "text", { x: (f.x0 + f.x1) / 2, y: f.height - 5, "text-anchor": "middle" }, `${metric.title}${isDifference ? ", difference" : ""}${direction ? ` · ${direction}` : ""}`);
      const zero = isDifference ? 0 : base ? base.value[0] : null;
      if (zero !== null) draw(f.svg, "line", { class: "zero", x1: x(zero), x2: x(zero), y1: f.y1, y2: f.y0 });
      listed.forEach((it, k) => {
        const middle = f.y1 + rowHeight * k + rowHeight / 2 + (narrow ? 8 : 0);
        const ink = isDifference ? (it.delta ? INK[it.delta[3]] || "var(--quiet)" : "var(--ink)") : color(it.place);
        const letters = narrow ? Math.floor(f.width / 7.2) : Math.max(8, Math.floor((left - 16) / 6.9));
        const name = it.row.label.length > letters ? `${it.row.label.slice(0, letters - 1)}…` : it.row.label;
        draw(f.svg, "text", narrow ? { class: "name", x: f.x0, y: middle - 14 } : { class: "name", x: f.x0 - 10, y: middle + 4, "text-anchor": "end" }, name);
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
        const field = draw(f.svg, "rect", { x: 0, y: middle - rowHeight / 2, width: f.width, height: rowHeight, fill: "transparent" });
        field.addEventListener("pointermove", (event) => {
          const lines = [[it.place, metric.title, said(metric, it.value[0])]];
          if (finite(it.value[1])) lines.push([null, "95 % interval", `${said(metric, it.value[1])} to ${said(metric, it.value[2])}`]);
          if (it.delta) lines.push([null, "against the baseline", signed(it.delta[0])]);
          if (it.delta && finite(it.delta[1])) lines.push([null, "95 % interval", `${signed(it.delta[1])} to ${signed(it.delta[2])}`]);
          if (it.delta) lines.push([null, it.delta[3], ""]);
          if (it.row.baseline) lines.push([null, "the baseline", ""]);
          showTip(event, it.row.label, lines);
        });
        field.addEventListener("pointerleave", hideTip);
      });
    }
    const controls = section.querySelector(".controls");
    const pick = element("select", { "aria-label": "metric", onchange: (event) => { state.metric = usable[event.target.selectedIndex]; again(); } });
    for (const metric of usable) pick.append(element("option", {}, metric.title));
    controls.append(pick);
    if (differs(usable[0])) controls.append(choice([["difference", "difference"], ["value", "value"]], state.mode, (it) => { state.mode = it; again(); }));
    again = drawn(section, paint);
  }

  // ---- dots with names that do not cover each other ----------------------------------------------------------------
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
      field.addEventListener("pointermove", (event) => showTip(event, data.rows[it.row].label, lines(it)));
      field.addEventListener("pointerleave", hideTip);
      entries.push({ x: x(it.x), y: y(it.y), text: it.label || data.rows[it.row].label });
    }
    names(f, entries);
  }
  function pareto() {
    const points = data.pareto.points;
    if (points.length < 2) return;
    drawn(document.getElementById("pareto"), (box) => {
      const f = frame(box, { height: 340, left: 62 });
      const costs = points.map((it) => it.x);
      const log = Math.max(...costs) / Math.min(...costs) > 5 && Math.min(...costs) > 0;
      const [lowX, highX] = log ? [Math.min(...costs) / 1.3, Math.max(...costs) * 1.3] : padded(costs, 0.12);
      const [lowY, highY] = padded(points.map((it) => it.y), 0.12);
      const x = scale(lowX, highX, f.x0, f.x1, log), y = scale(lowY, highY, f.y0, f.y1);
      axes(f, x, y, log ? logTicks(lowX, highX, 5) : ticks(lowX, highX, 5), ticks(lowY, highY, 5), short, short, `${data.pareto.cost}${log ? " (log)" : ""}`, data.pareto.loss);
      const front = points.filter((it) => it.front);
      let text = "";
      front.forEach((it, k) => { text += k ? `H${x(it.x)}V${y(it.y)}` : `M${x(it.x)} ${f.y1}V${y(it.y)}`; });
      const line = draw(f.svg, "path", { d: `${text}H${f.x1}`, fill: "none", "stroke-width": 1.5, "stroke-dasharray": "5 4" });
      line.style.stroke = "var(--accent)";
      dots(f, x, y, points, (it) => [[it.row, data.pareto.loss, it.y.toFixed(4)], [null, data.pareto.cost, short(it.x)], [null, it.front ? "on the front" : "beaten by another", ""]]);
    });
  }
  function scaling() {
    for (const section of document.querySelectorAll(".scaling")) {
      const series = data.scaling[Number(section.dataset.series)];
      drawn(section, (box) => {
        const f = frame(box, { height: 300, left: 62 });
        const sizes = [...new Set(series.points.map((it) => it.x))];
        const [low, high] = [Math.min(...sizes), Math.max(...sizes)];
        const ideal = high / low, speeds = series.points.map((it) => it.y);
        const bottom = Math.min(1, ...speeds) / 1.35, top = Math.max(ideal, ...speeds) * 1.25;
        const x = scale(low / 1.25, high * 1.25, f.x0, f.x1, true), y = scale(bottom, top, f.y0, f.y1, true);
        axes(f, x, y, sizes, logTicks(bottom, top, 6), String, (it) => `${short(it)}×`, "processes (log)", "speedup (log)");
        draw(f.svg, "line", { class: "zero", x1: x(low), x2: x(high), y1: y(1), y2: y(ideal) });
        draw(f.svg, "text", { x: x(high) - 4, y: y(ideal) - 7, "text-anchor": "end" }, "ideal");
        dots(f, x, y, series.points, (it) => [[it.row, "speedup", `${it.y.toFixed(2)}×`], [null, "efficiency", `${(100 * it.e).toFixed(0)} %`], [null, "processes", String(it.x)]]);
      });
    }
  }

  // ---- tables, colours, theme ------------------------------------------------------------------------------------
  function sortable() {
    const valueOf = (cell) => {
      const text = cell.dataset.value ?? cell.textContent.trim();
      const number = Number(text.replace("−", "-"));
      return text !== "" && Number.isFinite(number) ? number : text === "" || text === "—" ? null : text;
    };
    for (const table of document.querySelectorAll("table.sortable")) {
      const heads = [...table.tHead.rows[0].cells];
      heads.forEach((head, place) => {
        if (head.classList.contains("swatch")) return;
        head.tabIndex = 0;
        const sort = () => {
          const down = head.getAttribute("aria-sort") === "ascending";
          for (const other of heads) other.removeAttribute("aria-sort");
          head.setAttribute("aria-sort", down ? "descending" : "ascending");
          const body = table.tBodies[0];
          const rows = [...body.rows].map((row) => [valueOf(row.cells[place]), row]);
          rows.sort(([one], [two]) => {
            if (one === null || two === null) return (one === null) - (two === null);
            const order = typeof one === "number" && typeof two === "number" ? one - two : String(one).localeCompare(String(two));
            return down ? -order : order;
          });
          body.append(...rows.map(([, row]) => row));
        };
        head.addEventListener("click", sort);
        head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
      });
    }
  }
  for (const mark of document.querySelectorAll("i[data-color]")) mark.style.background = color(Number(mark.dataset.color));
  const theme = document.getElementById("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  sortable();
  lossCurves();
  bars();
  pareto();
  scaling();
})();
