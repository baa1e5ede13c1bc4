// ---- memory: the peak of every pipeline rank, and one rank's step ---------------------------------------------------------------
function drawMemory() {
  const section = document.getElementById("memory");
  section.hidden = false;
  const state = { full: false };
  const taken = (rank) => rank.reserved ?? rank.peak.bytes; // of the device
  const largest = Math.max(...Object.values(data.ranks).map(taken));
  const reserving = Object.values(data.ranks).some((it) => finite(it.reserved));
  const used = data.categories.filter((name) => Object.values(data.ranks).some((it) => name in it.memory.columns));
  const high = () => (state.full && data.room ? Math.max(data.room, largest) : largest) * 1.06;

  function peaks(box, width) {
    const left = 46, right = 74, tall = Math.max(18, Math.min(34, 360 / LOOKED.length)), height = LOOKED.length * tall + 26;
    const svg = picture(box, width, height, "peak memory of every pipeline rank");
    const most = high(), x = (value) => left + (value / most) * (width - left - right);
    for (const value of byteTicks(most, Math.max(1, (width - left - right) / 110))) {
      draw(svg, "line", { class: "grid", x1: x(value), x2: x(value), y1: 0, y2: height - 22 });
      draw(svg, "text", { x: x(value), y: height - 6, "text-anchor": "middle" }, value ? bytes(value) : "0");
    }
    LOOKED.forEach((pipeline, place) => {
      const { peak, reserved } = data.ranks[pipeline], y = place * tall;
      let at = 0;
      for (const name of used) {
        const size = peak.of[name];
        if (size) draw(svg, "rect", { x: x(at), y: y + 3, width: Math.max(0.5, x(at + size) - x(at)), height: tall - 6, fill: CATEGORY_COLORS[name] });
        at += size;
      }
      if (reserved > at) {
        draw(svg, "rect", { class: "reserved", x: x(at), y: y + 3, width: x(reserved) - x(at), height: tall - 6 });
        at = reserved;
      }
      const here = pipeline === shownPipelineRank();
      const label = draw(svg, "text", { x: 0, y: y + tall / 2 + 4, class: here ? "name" : "" }, `pp ${pipeline}`);
      if (here) label.style.fontWeight = "bold";
      draw(svg, "text", { x: x(at) + 6, y: y + tall / 2 + 4 }, bytes(at));
      const field = draw(svg, "rect", { x: 0, y, width, height: tall, fill: "transparent" });
      field.style.cursor = "pointer";
      field.addEventListener("pointermove", (event) => showTip(event, `pipeline rank ${pipeline}`, [...beyond(data.ranks[pipeline]), ...parts(peak.of), [null, `at: ${peak.where}`, ""]]));
      field.addEventListener("pointerleave", hideTip);
      field.addEventListener("click", () => choose(chosen.rank + (pipeline - pipelineRank(chosen.rank)) * AXES.pp.stride));
    });
    limit(svg, { x1: x(data.room), x2: x(data.room), y1: 0, y2: height - 22 });
  }
  function limit(svg, where) {
    if (data.room && data.room <= high()) draw(svg, "line", { class: "limit", ...where });
  }
  const parts = (of) => [...used].reverse().filter((name) => of[name]).map((name) => [CATEGORY_COLORS[name], name, bytes(of[name])]);

  const beyond = ({ peak, reserved }) => (finite(reserved) ? [[null, "reserved", bytes(reserved)], [null, "in tensors", bytes(peak.bytes)]] : []);

  const PHASES = [["forward", "var(--c0)"], ["backward", "var(--c1)"], ["optimizer", "var(--c3)"]];
  const phase = (words) => PHASES.findIndex(([name]) => words.startsWith(name));
  function overTime(box, width) {
    const { memory, peak, reserved } = data.ranks[shownPipelineRank()], many = memory.where.length;
    const left = 62, right = 10, top = 26, strip = 10, height = 340, bottom = 46;
    const svg = picture(box, width, height, "memory over a step, by what it is for");
    const most = high(), y = (value) => height - bottom - (value / most) * (height - bottom - top);
    const x = (place) => left + (place / Math.max(1, many - 1)) * (width - left - right);
    for (const value of byteTicks(most, 5)) {
      draw(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) });
      draw(svg, "text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, value ? bytes(value) : "0");
    }
    let below = new Array(many).fill(0);
    for (const name of used) {
      const column = memory.columns[name];
      if (!column) continue;
      const above = below.map((it, k) => it + column[k] * memory.unit);
      const there = above.map((it, k) => `${x(k).toFixed(1)} ${y(it).toFixed(1)}`), back = below.map((it, k) => `${x(k).toFixed(1)} ${y(it).toFixed(1)}`).reverse();
      draw(svg, "path", { d: `M${there.join("L")}L${back.join("L")}Z`, fill: CATEGORY_COLORS[name] });
      below = above;
    }
    // What was being computed: a strip below.
    for (let k = 0, start = 0; k < many; k++) {
      const now = phase(memory.words[memory.where[k]]);
      if (k < many - 1 && phase(memory.words[memory.where[k + 1]]) === now) continue;
      if (now >= 0) draw(svg, "rect", { x: x(start - (start ? 0.5 : 0)), y: height - bottom + 4, width: Math.max(now === 2 ? 2 : 0.8, x(Math.min(k + 0.5, many - 1)) - x(start - (start ? 0.5 : 0))), height: strip, fill: PHASES[now][1] });
      start = k + 1;
    }
    let at = left;
    for (const [name, color] of PHASES) {
      draw(svg, "rect", { x: at, y: height - 22, width: 11, height: 11, rx: 3, fill: color });
      draw(svg, "text", { x: at + 16, y: height - 12 }, name);
      at += 30 + name.length * 6.6;
    }
    if (width > 480) draw(svg, "text", { x: width - right, y: height - 12, "text-anchor": "end" }, "allocations and frees in their order →");
    limit(svg, { x1: left, x2: width - right, y1: y(data.room), y2: y(data.room) });
    if (data.room && data.room <= high()) draw(svg, "text", { x: width - right, y: y(data.room) - 5, "text-anchor": "end" }, `device memory: ${bytes(data.room)}`);
    if (reserved > peak.bytes) {
      draw(svg, "line", { class: "reserve", x1: left, x2: width - right, y1: y(reserved), y2: y(reserved) });
      draw(svg, "text", { x: left + 6, y: y(reserved) - 5 }, `reserved: ${bytes(reserved)}`);
    }
    const px = x(memory.peak), py = y(peak.bytes), words = `peak ${bytes(peak.bytes)} · ${peak.where}`, long = words.length * 6.5;
    draw(svg, "line", { class: "cursor", x1: px, x2: px, y1: py, y2: height - bottom });
    draw(svg, "circle", { cx: px, cy: py, r: 4.5, fill: "var(--card)", stroke: "var(--ink)", "stroke-width": 2 });
    const label = draw(svg, "text", { class: "name", textLength: long, lengthAdjust: "spacingAndGlyphs", x: Math.max(4, px > width * 0.55 || px + long > width ? px - 9 - long : px + 9), y: Math.max(13, py - 10) }, words);
    label.style.cssText = "paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round";
    const cursor = draw(svg, "line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
    const field = draw(svg, "rect", { x: left, y: 0, width: width - left - right, height: height - bottom, fill: "transparent" });
    field.addEventListener("pointermove", (event) => {
      const k = Math.max(0, Math.min(many - 1, Math.round(((event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right)) * (many - 1))));
      cursor.setAttribute("x1", x(k));
      cursor.setAttribute("x2", x(k));
      cursor.setAttribute("visibility", "visible");
      const of = Object.fromEntries(Object.entries(memory.columns).map(([name, column]) => [name, column[k] * memory.unit]));
      showTip(event, memory.words[memory.where[k]], [[null, "total", bytes(sum(Object.values(of)))], ...parts(of)]);
    });
    field.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); hideTip(); });
  }
  function say() {
    const pipeline = shownPipelineRank();
    section.querySelector(".over-time h3").textContent = data.mesh.axes.pp > 1 ? `Pipeline rank ${pipeline}` : "Every rank";
    const missing = data.mesh.axes.pp - LOOKED.length;
    const room = data.room ? ` The largest ${reserving ? "reserve" : "peak"} is ${percent(largest / data.room)} of the device's ${bytes(data.room)}. The rest must hold ${reserving ? "" : "the allocator's gaps, "}the driver's context and communication buffers.` : "";
    const kept = reserving ? ` Dotted line${LOOKED.length > 1 ? ", and grey in the bars" : ""}: memory that torch's allocator reserves, including gaps too small to reuse.` : "";
    const some = missing ? ` This plan leaves out ${counted(missing, "pipeline rank")} (--ranks).` : "";
    const alike = data.mesh.axes.pp > 1 ? " All ranks with the same pp are alike." : WORLD > 1 ? " All ranks are alike." : "";
    section.querySelector(".summary").textContent = `Live tensors of a training step, by what they hold.${alike} The plot keeps the highest moment of each interval, so it shows the true peak.${kept}${room}${some}`;
  }
  fillTerms(section.querySelector("dl"), used.map((name) => [CATEGORY_COLORS[name], name, data.words.categories[name]]));
  section.querySelector(".peaks").hidden = LOOKED.length < 2;
  if (LOOKED.length < 2) section.querySelector(".pair").style.gridTemplateColumns = "minmax(0, 1fr)";
  const repaint = [drawn(section.querySelector(".peaks .plot"), peaks), drawn(section.querySelector(".over-time .plot"), overTime)];
  if (data.room && data.room > largest * 1.06) {
    section.querySelector(".controls").append(element("label", {}, "scale", choice([["", "to the largest peak"], ["full", "to the device's memory"]], "", (value) => { state.full = value === "full"; for (const paint of repaint) paint(); })));
  }
  chosen.listeners.push(() => { say(); for (const paint of repaint) paint(); });
}
