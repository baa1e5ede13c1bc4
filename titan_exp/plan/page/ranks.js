// ---- which rank holds what: nodes and their devices ------------------------------------------------------------------------
function drawRanks() {
  const section = document.getElementById("ranks");
  const plot = section.querySelector(".plot");
  const USED = Object.entries(SHOWN_AXES).filter(([, axes]) => degree(axes) > 1);
  const state = { near: null, lit: null, open: new Set(), color: data.stages.length > 1 ? "stage" : "data" };
  const FEW = 8;
  let cells = new Map(), marks = null;

  // Consecutive nodes that hold the same stages, and differ in nothing but which part and which data.
  const groups = [];
  for (let node = 0; node < NODES; node++) {
    const held = [...new Set(ranksOf(node).flatMap((rank) => stagesOf(pipelineRank(rank))))];
    const key = held.join(",");
    if (groups.length && groups.at(-1).key === key) groups.at(-1).nodes.push(node);
    else groups.push({ key, stages: held, nodes: [node] });
  }
  function ranksOf(node) {
    return Array.from({ length: Math.min(NODE, WORLD - node * NODE) }, (_, k) => node * NODE + k);
  }
  const folds = (it) => it.nodes.length > FEW && NODES > 128 && !state.open.has(it.key);
  const hue = (place, many) => `oklch(var(--stage-l) var(--stage-c) ${(255 + (place / many) * 330) % 360})`;
  function colors(rank) {
    if (state.color === "stage") return stagesOf(pipelineRank(rank)).map((stage) => stageColor(stage));
    const axes = state.color === "data" ? ["dp_replicate", "dp_shard"] : SHOWN_AXES[state.color];
    return [hue(placeAlong(rank, axes), Math.max(2, degree(axes)))];
  }
  function stageWords(stages) {
    if (data.stages.length === 1) return `all ${data.layers} layers`;
    const named = `stage${stages.length > 1 ? "s" : ""} ${runs(runsOf(stages))}`;
    return `${named} · ${layerWords(layersOf(stages))}`;
  }

  function paint(box, width) {
    cells = new Map();
    const most = Math.max(...groups.map((it) => (folds(it) ? 5 : it.nodes.length)));
    const gap = 10, between = 2, pad = 4;
    // As large as fits a group of nodes in one line, but legible.
    const smallest = 11, across = Math.min(NODE, Math.max(1, Math.floor((width - 2 * pad) / (smallest + between)))), rows = Math.ceil(NODE / across);
    const wide = (size) => across * (size + between) - between + 2 * pad;
    const inLine = Math.max(1, Math.min(most, Math.floor((width + gap) / (wide(smallest) + gap))));
    const size = Math.max(smallest, Math.min(WORLD <= 16 ? 56 : 34, Math.floor(((width + gap) / inLine - gap - 2 * pad + between) / across) - between));
    const nodeWidth = wide(size), nodeHeight = rows * (size + between) - between + 2 * pad;
    const [spots, height] = arranged(Math.max(inLine, Math.floor((width + gap) / (nodeWidth + gap))), nodeWidth + gap, nodeHeight + gap);
    const svg = picture(box, width, height + 2, `${counted(WORLD, "rank")} in ${counted(NODES, "node")}`);
    for (const spot of spots) {
      if (spot.text) { draw(svg, "text", { class: "name", x: spot.x, y: spot.y + 14 }, spot.text); continue; }
      if (spot.node === null) { fold(svg, spot, nodeWidth, nodeHeight); continue; }
      draw(svg, "rect", { class: "node", x: spot.x + 0.5, y: spot.y + 0.5, width: nodeWidth - 1, height: nodeHeight - 1, rx: 5 });
      ranksOf(spot.node).forEach((rank, k) => cell(svg, rank, spot.x + pad + (k % across) * (size + between), spot.y + pad + Math.floor(k / across) * (size + between), size));
    }
    marks = draw(svg, "g");
    svg.addEventListener("pointermove", (event) => point(event, rankAt(event)));
    svg.addEventListener("pointerleave", () => { state.near = null; hideTip(); light(); });
    svg.addEventListener("click", (event) => { const rank = rankAt(event); if (rank !== null) choose(rank); });
    light();
  }
  // Where titles and nodes stand; groups of few nodes share a line.
  function arranged(inLine, wide, high) {
    const title = 20, spots = [];
    let column = 0, y = 0;
    for (const it of groups) {
      const shown = folds(it) ? [...it.nodes.slice(0, 3), null, it.nodes.at(-1)] : it.nodes;
      const columns = Math.max(shown.length, Math.ceil((stageWords(it.stages).length * 6.6) / wide));
      if (column && column + columns > inLine) { y += title + high; column = 0; }
      spots.push({ text: stageWords(it.stages), x: column * wide, y });
      shown.forEach((node, k) => spots.push({ node, group: it, x: (column + (k % inLine)) * wide, y: y + title + Math.floor(k / inLine) * high }));
      column += columns;
      if (column >= inLine) { y += title + Math.ceil(shown.length / inLine) * high; column = 0; }
    }
    return [spots, y + (column ? title + high : 0)];
  }
  function cell(svg, rank, x, y, size) {
    const g = draw(svg, "g", { class: "cell", "data-rank": rank });
    const parts = colors(rank), width = size / parts.length;
    parts.forEach((color, k) => draw(g, "rect", { x: x + k * width, y, width: width + (k < parts.length - 1 ? 0.3 : 0), height: size, rx: parts.length > 1 ? 0 : 2.5, fill: color }));
    // Numbers that fit, of a legible size; a tip has all of them.
    const font = Math.min(13, (size - 3) / (0.62 * String(rank).length));
    const number = font >= 8 ? draw(g, "text", { x: x + size / 2, y: y + size / 2 + 0.36 * font, style: `font-size: ${font}px` }, String(rank)) : null;
    cells.set(rank, { g, x, y, size, parts, number });
  }
  function fold(svg, spot, width, height) {
    const hidden = spot.group.nodes.length - 4;
    const g = draw(svg, "g", { class: "fold" });
    const rect = draw(g, "rect", { x: spot.x + 0.5, y: spot.y + 0.5, width: width - 1, height: height - 1, rx: 5 });
    draw(g, "text", { x: spot.x + width / 2, y: spot.y + height / 2 + 4 }, width > 100 ? `+ ${whole(hidden)} like these` : `+ ${whole(hidden)}`);
    rect.addEventListener("click", () => { state.open.add(spot.group.key); again(); });
  }
  function rankAt(event) {
    const found = event.target.closest?.(".cell");
    return found ? Number(found.dataset.rank) : null;
  }
  function point(event, rank) {
    if (rank === null) { if (state.near !== null) { state.near = null; light(); } hideTip(); return; }
    if (state.near !== rank) { state.near = rank; light(); }
    showTip(event, `rank ${whole(rank)}`, [
      [null, `node ${whole(nodeOf(rank))}, ${data.mesh.device} ${rank % NODE}`, ""],
      [colors(rank)[0], stageWords(stagesOf(pipelineRank(rank))), ""],
      ...USED.map(([name, axes]) => [AXIS_COLORS[name], `${name}, with ${listed(group(rank, axes).filter((it) => it !== rank))}`, `${placeAlong(rank, axes)} of 0–${degree(axes) - 1}`]),
    ]);
  }
  // Its groups are outlined, each axis in its colour; all others step back.
  function light() {
    if (!marks) return;
    marks.replaceChildren();
    const rank = state.near ?? chosen.rank;
    const bright = new Set([rank]);
    for (const [name, axes] of USED) {
      if (state.lit !== null && state.lit !== name) continue;
      for (const other of group(rank, axes)) {
        bright.add(other);
        const at = cells.get(other);
        if (!at || other === rank) continue;
        // On a ring of the ground, so that it is seen on a stage of the same colour.
        for (const [color, width] of [["var(--card)", 5.5], [AXIS_COLORS[name], 3]]) {
          draw(marks, "rect", { class: "mark", x: at.x - 1, y: at.y - 1, width: at.size + 2, height: at.size + 2, rx: 4, stroke: color, "stroke-width": width });
        }
      }
    }
    for (const [it, at] of cells) {
      const strength = bright.has(it) || !USED.length ? 1 : state.near === null ? 0.55 : 0.2;
      for (const part of at.g.querySelectorAll("rect")) part.style.opacity = strength;
      if (at.number) at.number.style.fill = inkOn(at.parts, strength);
    }
    const self = cells.get(rank);
    if (self) draw(marks, "rect", { class: "self", x: self.x - 1.5, y: self.y - 1.5, width: self.size + 3, height: self.size + 3, rx: 4.5 });
  }
  const again = drawn(plot, paint);
  themed.push(light);

  const controls = section.querySelector(".controls");
  const field = element("input", { type: "number", min: 0, max: WORLD - 1, value: 0, "aria-label": "rank", onchange: (event) => choose(Number(event.target.value) || 0) });
  controls.append(element("label", {}, "rank", field));
  if (USED.length > 1) controls.append(element("label", {}, "show groups along", choice([["", "all axes"], ...USED.map(([name]) => [name, name])], "", (value) => { state.lit = value || null; light(); })));
  const colorings = [...(data.stages.length > 1 ? [["stage", "stage"]] : []), ["data", "share of the batch"], ...USED.filter(([name]) => ["tp", "cp"].includes(name)).map(([name]) => [name, `${name} part`])];
  if (colorings.length > 1) controls.append(element("label", {}, "colour by", choice(colorings, state.color, (value) => { state.color = value; again(); })));
  for (const entry of section.querySelectorAll(".axes div")) entry.querySelector("i").style.borderColor = AXIS_COLORS[entry.dataset.axis];
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: NODE, ArrowUp: -NODE }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(chosen.rank + step);
  });
  chosen.listeners.push(() => {
    field.value = chosen.rank;
    const its = groups.find((it) => it.nodes.includes(nodeOf(chosen.rank)));
    if (folds(its) && cells.size && !cells.has(chosen.rank)) { state.open.add(its.key); again(); }
    light();
  });
}
