// ---- step time and communication ------------------------------------------------------------------------------------
const COST_COLORS = { matmuls: "var(--c0)", elementwise: "var(--c5)", exposed: "var(--c1)", behind: "var(--c2)", bubble: "var(--line)" };
const COST_NAMES = { matmuls: "matmuls", elementwise: "elementwise", exposed: "exposed communication", behind: "overlapped communication", bubble: "idle" };

function drawTime() {
  const section = document.getElementById("time");
  const known = LOOKED.filter((pipeline) => data.ranks[pipeline].time);
  if (!known.length || data.step === null) return;
  section.hidden = false;

  function paint(box, width) {
    const left = 46, right = 60, tall = Math.max(24, Math.min(40, 420 / known.length)), height = known.length * tall + 26;
    const svg = picture(box, width, height, "a step's time by what it goes to");
    const x = (value) => left + (value / data.step) * (width - left - right);
    for (const value of ticks(0, data.step, Math.max(2, width / 120))) {
      draw(svg, "line", { class: "grid", x1: x(value), x2: x(value), y1: 0, y2: height - 22 });
      draw(svg, "text", { x: x(value), y: height - 6, "text-anchor": "middle" }, seconds(value));
    }
    known.forEach((pipeline, place) => {
      const time = data.ranks[pipeline].time, y = place * tall;
      const waited = time.matmuls + time.elementwise + time.exposed;
      let at = 0;
      for (const [name, value] of [["matmuls", time.matmuls], ["elementwise", time.elementwise], ["exposed", time.exposed], ["bubble", data.step - Math.max(waited, time.behind)]]) {
        // Messages that compute could not hide stand behind it.
        if (name === "bubble") at = Math.max(waited, time.behind);
        if (value > 0) draw(svg, "rect", { x: x(at), y: y + 4, width: Math.max(0.5, x(at + value) - x(at)), height: tall - 15, fill: COST_COLORS[name] });
        at += value;
      }
      draw(svg, "rect", { x: left, y: y + tall - 10, width: Math.max(0.5, x(time.behind) - left), height: 5, fill: COST_COLORS.behind });
      const here = pipeline === shownPipelineRank();
      const label = draw(svg, "text", { x: 0, y: y + tall / 2 + 2, class: here ? "name" : "" }, data.mesh.axes.pp > 1 ? `pp ${pipeline}` : "rank");
      if (here) label.style.fontWeight = "bold";
      const field = draw(svg, "rect", { x: 0, y, width, height: tall, fill: "transparent" });
      field.addEventListener("pointermove", (event) => showTip(event, data.mesh.axes.pp > 1 ? `pipeline rank ${pipeline}` : "any rank", [
        ...Object.keys(COST_NAMES).filter((name) => name in time).map((name) => [COST_COLORS[name], COST_NAMES[name], seconds(time[name])]),
        ...(data.mesh.axes.pp > 1 ? [[COST_COLORS.bubble, COST_NAMES.bubble, seconds(Math.max(0, data.step - Math.max(waited, time.behind)))]] : []),
        [null, "the step", seconds(data.step)],
      ]));
      field.addEventListener("pointerleave", hideTip);
    });
  }
  const hidden = known.every((pipeline) => { const it = data.ranks[pipeline].time; return it.behind <= it.matmuls + it.elementwise + it.exposed; });
  section.querySelector(".summary").textContent = `${seconds(data.step)} per step, estimated from the rates that training reaches on this device. Thin line: communication that overlaps with compute. ${hidden ? "It is never longer than compute." : "Where it is longer than compute, the step waits for it."}`;
  const shown = Object.keys(COST_NAMES).filter((name) => (name === "bubble" ? data.mesh.axes.pp > 1 : known.some((pipeline) => data.ranks[pipeline].time[name] > 0)));
  fillTerms(section.querySelector("dl"), shown.map((name) => [COST_COLORS[name], COST_NAMES[name], data.words.costs[name]]));
  chosen.listeners.push(drawn(section.querySelector(".plot"), paint));
}

function drawSent() {
  const section = document.getElementById("sent");
  section.hidden = false;
  const most = Math.max(1, ...Object.values(data.ranks).flatMap((rank) => rank.messages.map((it) => it.bytes)));
  const color = (axis) => AXIS_COLORS[axis.split("=")[0]] || (axis.startsWith("cp") ? AXIS_COLORS.cp : AXIS_COLORS.dp_shard);
  chosen.listeners.push(() => {
    const pipeline = shownPipelineRank(), { messages } = data.ranks[pipeline];
    const named = messages.flatMap((it) => it.axis.split("="));
    const folded = [
      ...(named.includes("fsdp") ? ["fsdp is dp_shard and cp as one axis, along which weights are sharded."] : []),
      ...(named.includes("cp_across") ? ["cp_across are the cp ranks that exchange keys and values."] : []),
      ...(named.includes("cp_within") ? ["cp_within are the cp ranks that exchange heads."] : []),
    ].join(" ");
    section.querySelector(".summary").textContent = messages.length
      ? `Messages of one rank${data.mesh.axes.pp > 1 ? ` of pipeline rank ${pipeline}` : ""} in a step, by mesh axis: ${bytes(sum(messages.map((it) => it.bytes)))} in total. Bytes count the larger side of a message. ${folded}`
      : "One rank alone sends nothing.";
    section.querySelector("table").hidden = !messages.length;
    section.querySelector("tbody").replaceChildren(...messages.map((it) => {
      const bar = element("i");
      bar.style.width = `${(100 * it.bytes) / most}%`;
      bar.style.background = color(it.axis);
      return element("tr", {}, element("td", { class: "key" }, it.axis), element("td", {}, it.kind), element("td", { class: "number" }, whole(it.calls)), element("td", { class: "number" }, bytes(it.bytes)), element("td", { class: "share" }, bar));
    }));
    const kinds = [...new Set(messages.map((it) => it.kind))].filter((kind) => kind in data.words.kinds);
    fillTerms(section.querySelector("dl"), kinds.map((kind) => [null, kind, data.words.kinds[kind]]));
  });
}
