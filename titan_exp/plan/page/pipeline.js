// ---- the pipeline's timeline: what every pipeline rank computes when ------------------------------------------------------------
const KIND_WORDS = { F: "forward", B: "backward", I: "backward, gradient of the input", W: "backward, gradient of the weights" };
const KIND_COLORS = { F: "var(--c0)", B: "var(--c1)", I: "var(--c1)", W: "var(--c2)" };

function drawPipeline() {
  const section = document.getElementById("pipeline");
  section.hidden = false;
  const plot = section.querySelector(".plot");
  const canvas = element("canvas", { role: "img" });
  plot.append(canvas);
  const schedule = data.passes, state = { range: null, near: null };
  // Actions as [stage, kind, micro-batch, start, end], and idle times with kind "~".
  const all = schedule.rows.map((words) => {
    let now = 0;
    const found = words.split(" ").map((word) => {
      const start = now;
      if (word[0] === "~") return [null, "~", null, start, (now += Number(word.slice(1)))];
      const [, stage, kind, micro] = /(\d+)([FBIW])(\d+)/.exec(word);
      return [Number(stage), kind, Number(micro), start, (now += schedule.cost[kind] * schedule.costs[Number(stage)])];
    });
    if (now < schedule.end * (1 - 1e-9)) found.push([null, "~", null, now, schedule.end]);
    return found;
  });
  const stagesHere = data.mesh.axes.pp > 1;
  const clock = (time) => (schedule.estimated ? seconds(time) : String(Number(time.toPrecision(4))));
  const idle = (row) => sum(row.filter((it) => it[1] === "~").map((it) => it[4] - it[3]));
  let geometry = null;

  function paint(_, width) {
    const left = stagesHere ? 58 : 12, right = stagesHere && width > 520 ? 62 : 8;
    const high = Math.max(16, Math.min(30, 420 / all.length)), height = all.length * high + 40;
    canvas.setAttribute("aria-label", section.querySelector(".summary").textContent);
    const sharp = Math.max(1, devicePixelRatio || 1);
    canvas.width = width * sharp;
    canvas.height = height * sharp;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(sharp, sharp);
    const [from, to] = state.range || [0, schedule.end];
    const x = (time) => left + ((time - from) / (to - from)) * (width - left - right);
    geometry = { left, right, high, width, from, to };
    const ink = Object.fromEntries(Object.entries(KIND_COLORS).map(([kind, color]) => [kind, resolved(color)]));
    const [quiet, line, chip, name] = ["--quiet", "--line", "--chip", "--ink"].map((it) => resolved(`var(${it})`));
    const font = getComputedStyle(document.body).fontFamily;
    pen.textBaseline = "middle";
    all.forEach((row, place) => {
      const y = place * high + 1, tall = high - 2;
      pen.save();
      pen.beginPath();
      pen.rect(left, y, width - left - right, tall);
      pen.clip();
      pen.fillStyle = chip;
      pen.fillRect(left, y, width - left - right, tall);
      for (const [stage, kind, micro, start, end] of row) {
        if (end < from || start > to) continue;
        const a = x(start), b = x(end), wide = b - a;
        if (kind === "~") { hatch(pen, Math.max(a, left), y, Math.min(b, width - right), tall, quiet); continue; }
        const here = stagesOf(data.passes.placement[stage]).indexOf(stage);
        const alpha = (state.near !== null && state.near !== micro ? 0.2 : 1) * (here ? Math.max(0.45, 1 - 0.3 * here) : 1);
        pen.globalAlpha = alpha;
        pen.fillStyle = ink[kind];
        pen.fillRect(a, y, Math.max(wide - (wide > 3 ? 1 : 0), 0.6), tall);
        pen.globalAlpha = 1;
        if (wide > 9 + 6 * String(micro).length && tall > 11) {
          pen.fillStyle = inkOn([ink[kind]], alpha, chip);
          pen.font = `${Math.min(12, tall - 4)}px ${font}`;
          pen.textAlign = "center";
          pen.fillText(String(micro), (a + b) / 2, y + tall / 2 + 0.5);
        }
      }
      pen.restore();
      if (!stagesHere) return;
      pen.fillStyle = place === pipelineRank(chosen.rank) ? name : quiet;
      pen.font = `${place === pipelineRank(chosen.rank) ? "bold " : ""}12px ${font}`;
      pen.textAlign = "left";
      pen.fillText(`pp ${place}`, 16, y + tall / 2);
      stagesOf(place).forEach((stage, k, its) => {
        pen.fillStyle = resolved(stageColor(stage));
        pen.fillRect(1 + (k * 11) / its.length, y + tall / 2 - 5.5, 11 / its.length, 11);
      });
      if (right > 40) {
        pen.fillStyle = quiet;
        pen.font = `12px ${font}`;
        pen.fillText(percent(idle(row) / schedule.end), width - right + 8, y + tall / 2);
      }
    });
    const base = all.length * high + 2;
    pen.font = `12px ${font}`;
    pen.textAlign = "center";
    for (const time of ticks(from, to, Math.max(2, width / 130))) {
      pen.fillStyle = line;
      pen.fillRect(x(time), base, 1, 5);
      pen.fillStyle = quiet;
      pen.fillText(clock(time), Math.min(x(time), width - 24), base + 14);
    }
    pen.fillText(schedule.estimated ? "time" : "time, in forward passes of a stage", (left + width - right) / 2, base + 30);
    if (right > 40) { pen.textAlign = "left"; pen.fillText("idle", width - right + 8, base + 14); }
  }
  function hatch(pen, a, y, b, tall, color) {
    if (b - a < 2) return;
    pen.save();
    pen.beginPath();
    pen.rect(a, y, b - a, tall);
    pen.clip();
    pen.strokeStyle = color;
    pen.lineWidth = 1;
    pen.globalAlpha = 0.4;
    pen.beginPath();
    for (let k = a - tall; k < b; k += 6) { pen.moveTo(k, y + tall); pen.lineTo(k + tall, y); }
    pen.stroke();
    pen.restore();
  }
  function pointing() {
    let from = null;
    const time = (place) => geometry.from + ((place - geometry.left) / (geometry.width - geometry.left - geometry.right)) * (geometry.to - geometry.from);
    const at = (event) => {
      const place = Math.floor(event.offsetY / geometry.high), moment = time(event.offsetX);
      const row = all[place];
      if (!row || event.offsetX < geometry.left) return [row ? place : null, null];
      return [place, row.find((it) => it[3] <= moment && moment < it[4]) || null];
    };
    canvas.addEventListener("pointerdown", (event) => { from = event.offsetX; });
    canvas.addEventListener("pointermove", (event) => {
      const [place, found] = at(event);
      const near = found && found[1] !== "~" ? found[2] : null;
      if (near !== state.near) { state.near = near; again(); }
      if (!found) { hideTip(); return; }
      if (found[1] === "~") { showTip(event, "bubble", [[null, stagesHere ? `pipeline rank ${place} waits` : "waits", clock(found[4] - found[3])]]); return; }
      const [stage, kind, micro, start, end] = found;
      showTip(event, `${KIND_WORDS[kind]} of micro-batch ${micro}`, [
        [stageColor(stage), stagesHere ? `stage ${stage}, ${layerWords(data.stages[stage])}` : layerWords(data.stages[0]), ""],
        [null, "takes", clock(end - start)],
        [null, "begins at", clock(start)],
      ]);
    });
    canvas.addEventListener("pointerup", (event) => {
      const dragged = from !== null && Math.abs(event.offsetX - from) > 8 && time(Math.max(from, event.offsetX)) > 0;
      if (dragged) {
        state.range = [Math.max(0, time(Math.min(from, event.offsetX))), Math.min(schedule.end, time(Math.max(from, event.offsetX)))];
        again();
      } else if (stagesHere) {
        const [place] = at(event);
        if (place !== null) choose(chosen.rank + (place - pipelineRank(chosen.rank)) * AXES.pp.stride);
      }
      from = null;
    });
    canvas.addEventListener("pointerleave", () => { from = null; hideTip(); if (state.near !== null) { state.near = null; again(); } });
    canvas.addEventListener("dblclick", () => { state.range = null; again(); });
  }

  function say() {
    const { passes, microbatches, rows } = schedule;
    const many = passes > 1 ? ` A step has ${passes} such passes, one after the other.` : "";
    const numbers = schedule.estimated
      ? "Durations add up to the plan's step time: every stage takes as long as the slowest, and a backward pass twice as long as a forward pass"
      : "The plan knows no rates of this device. So durations are in units: 1 for a forward pass of any stage, 2 for a backward pass";
    const split = rows.some((row) => row.includes("I")) ? " (1 for each of its halves)" : "";
    const begin = stagesHere
      ? `${counted(microbatches, "micro-batch")} pass through ${counted(data.stages.length, "stage")} on ${counted(rows.length, "pipeline rank")}, in the trainer's order. Hatched: the bubble, in which a rank waits. It takes ${percent(data.bubble)} of the ranks' time, on average ${clock(data.bubble * schedule.end)} per rank.`
      : `There is no pipeline, so no bubble: every rank runs ${counted(microbatches, "micro-batch")} forward and backward, one after the other.`;
    section.querySelector(".summary").textContent = `${begin} ${numbers}${split}.${many}`;
    const kinds = [...new Set(rows.join(" ").match(/[FBIW]/g))];
    const keys = kinds.map((kind) => {
      const mark = element("i");
      mark.style.background = KIND_COLORS[kind];
      return element("span", {}, mark, KIND_WORDS[kind]);
    });
    const wait = element("i");
    wait.style.background = "repeating-linear-gradient(135deg, var(--chip) 0 4px, color-mix(in srgb, var(--quiet) 40%, transparent) 4px 5px)";
    if (stagesHere) keys.push(element("span", {}, wait, "bubble"));
    const pale = data.stages.length > rows.length ? " A rank's later stages are paler." : "";
    section.querySelector(".keys").replaceChildren(...keys, element("span", {}, `Numbers are micro-batches: point at one to follow it.${pale} Drag to zoom, double-click to zoom out.`));
  }
  say();
  pointing();
  const again = drawn(plot, paint);
  chosen.listeners.push(again);
  themed.push(again);
}
