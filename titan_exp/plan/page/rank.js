// ---- one rank: its layers, its part of weights and batch, whom it talks to -----------------------------------------------------
// Where a weight's part begins and ends in each dim, cut along some axes: pieces are of a size that is rounded up.
function partOf(rank, weight, axes = null) {
  const bounds = weight.shape.map((size) => [0, size]);
  for (const [axis, dim] of weight.cuts) {
    if (axes && !axes.includes(axis)) continue;
    const along = data.mesh.sharding[axis];
    const [first, last] = bounds[dim], piece = Math.ceil((last - first) / degree(along)), place = placeAlong(rank, along);
    bounds[dim] = [Math.min(last, first + place * piece), Math.min(last, first + (place + 1) * piece)];
  }
  return bounds;
}
// Parts of a name, between which a line may end.
const words = (name) => name.split(/(?<=[._])/).flatMap((part) => [part, element("wbr")]);
const numel = (bounds) => bounds.reduce((one, [first, last]) => one * (last - first), 1);

function drawRank() {
  const section = document.getElementById("rank");
  section.hidden = false;
  const part = (name) => section.querySelector(`.${name}`);

  function head() {
    const rank = chosen.rank;
    section.querySelector("h2").textContent = `Rank ${whole(rank)}`;
    const chips = [[`node ${whole(nodeOf(rank))}, ${data.mesh.device}`, rank % NODE]];
    for (const [name, axes] of Object.entries(SHOWN_AXES).reverse()) if (degree(axes) > 1) chips.push([name, `${placeAlong(rank, axes)} of 0–${degree(axes) - 1}`]);
    part("where").replaceChildren(...chips.map(([name, value]) => element("span", {}, `${name} `, element("b", {}, String(value)))));
  }

  function layers(box, width) {
    const mine = new Set(stagesOf(pipelineRank(chosen.rank)));
    const stageOf = [];
    data.stages.forEach((ranges, stage) => ranges.forEach(([first, last]) => { for (let k = first; k <= last; k++) stageOf[k] = stage; }));
    const end = 30, height = 48, each = (width - 2 * end - 8) / data.layers;
    const svg = picture(box, width, height, "which layers this rank holds");
    const block = (x, wide, stage, name) => {
      const has = mine.has(stage);
      const rect = draw(svg, "rect", { x, y: has ? 2 : 8, width: Math.max(0.6, wide), height: has ? 30 : 18, rx: Math.min(3, wide / 3), fill: has ? stageColor(stage) : stageColor(stage, 0.25) });
      draw(rect, "title", {}, `${name}, stage ${stage}`);
    };
    block(0, end, 0, "embedding");
    for (let k = 0; k < data.layers; k++) block(end + 4 + k * each, each - (each > 4 ? 1.5 : each > 2 ? 0.5 : 0), stageOf[k], `layer ${k}`);
    block(width - end, end, data.stages.length - 1, "head and loss");
    draw(svg, "text", { x: 0, y: height - 4 }, "embedding");
    draw(svg, "text", { x: width, y: height - 4, "text-anchor": "end" }, "head, loss");
    const held = [...mine];
    const ends = [...(mine.has(0) ? ["the embedding"] : []), ...(mine.has(data.stages.length - 1) ? ["the head and the loss"] : [])];
    const sentence = `${layerWords(layersOf(held))} of ${data.layers}${ends.length ? `, and ${ends.join(" and ")}` : ""}`;
    part("layers").querySelector("p").textContent = data.stages.length > 1
      ? `Pipeline rank ${pipelineRank(chosen.rank)} holds stage${held.length > 1 ? "s" : ""} ${runs(runsOf(held))} of ${data.stages.length}: ${sentence}.`
      : `There is no pipeline: every rank computes all ${data.layers} layers, the embedding and the head.`;
  }

  function batch(box, width) {
    const { sequences, tokens, shares, pieces, micro, microbatches, divided } = data.batch;
    const share = dataShare(chosen.rank), mine = pieces[sequencePart(chosen.rank)];
    const rows = Math.min(sequences, 32), high = Math.max(4, Math.min(14, 150 / rows));
    const left = 42, height = rows * high + 20;
    const svg = picture(box, width, height, "which sequences and tokens of a batch this rank computes");
    const x = (token) => left + (token / tokens) * (width - left);
    for (let row = 0; row < rows; row++) {
      draw(svg, "rect", { x: left, y: row * high, width: width - left, height: high - 1, rx: 1.5, fill: "var(--chip)" });
      if (row % shares !== share) continue;
      for (const [first, last] of mine) draw(svg, "rect", { x: x(first), y: row * high, width: x(last + 1) - x(first), height: high - 1, rx: 1.5, fill: "var(--accent)" });
    }
    draw(svg, "text", { x: 0, y: 11 }, "seq 0");
    if (rows < sequences) draw(svg, "text", { x: 0, y: rows * high + 14 }, `and ${whole(sequences - rows)} more like these`);
    else if (rows * high > 24) draw(svg, "text", { x: 0, y: rows * high - 2 }, `${whole(sequences - 1)}`);
    draw(svg, "text", { x: width, y: rows * high + 14, "text-anchor": "end" }, `${whole(tokens)} tokens →`);
    const own = Array.from({ length: Math.ceil((sequences - share) / shares) }, (_, k) => share + k * shares);
    const which = shares > 1 ? `Sequences ${listed(own)} of each batch (one in ${shares}, so ${own.length} of ${whole(sequences)})` : `All ${counted(sequences, "sequence")} of each batch`;
    const where = pieces.length > 1 ? `, of which it computes tokens ${runs(mine)}${mine.length > 1 ? `: one piece from the front and one from the back${mine.length > 2 ? " of each segment" : ""}, so that attention is equal work on every rank` : ""}` : "";
    const others = shares * pieces.length > 1 && shares * pieces.length < WORLD ? " Ranks that differ only in tp or pp read the same." : "";
    const tp = divided ? " Between matrix multiplications, the tp ranks divide these tokens (sequence parallelism)." : "";
    part("batch").querySelector("p").textContent = `${which}, in ${counted(microbatches, "micro-batch")} of ${micro}${where}.${others}${tp}`;
  }

  function weights() {
    const pipeline = pipelineRank(chosen.rank), looked = LOOKED.includes(pipeline), source = looked ? pipeline : nearest(pipeline);
    // Blocks are homogeneous; weights outside blocks are known for predicted stages.
    const listedWeights = data.ranks[source].weights.filter((it) => looked || it.layers.length);
    let kept = 0, all = 0;
    const stages = stagesOf(pipeline);
    const rows = (looked ? listedWeights : listedWeights.filter((it) => it.stage === listedWeights[0]?.stage)).map((weight) => {
      const bounds = partOf(chosen.rank, weight), used = partOf(chosen.rank, weight, ["tp", "ep", "etp"]);
      const count = looked ? Math.max(1, sum(weight.layers.map(([first, last]) => last - first + 1))) : 1;
      const size = numel(bounds) * weight.itemsize;
      kept += size * count;
      all += numel(weight.shape.map((it) => [0, it])) * weight.itemsize * count;
      const color = stageColor(looked ? weight.stage : stages[0]);
      const where = !looked ? "in each of its layers" : weight.layers.length ? `in ${layerWords(weight.layers)}` : weight.stage === 0 || weight.stage === data.stages.length - 1 ? "once" : "";
      return element("tr", {}, element("td", {}, icon(weight, bounds, used, color)), element("td", { class: "key" }, ...words(weight.name.replace(/\.weight$/, "")), element("small", {}, where)),
        element("td", { class: "key" }, weight.shape.join(" × ")), element("td", {}, partWords(weight.shape, bounds)), element("td", { class: "number" }, bytes(size), ...(count > 1 ? [element("small", {}, `× ${count}`)] : [])));
    });
    part("weights").querySelector("tbody").replaceChildren(...rows);
    const cut = new Set(listedWeights.flatMap((it) => it.cuts.map(([axis]) => axis)));
    const colored = cut.has("fsdp") ? " Full colour: what this rank keeps. Pale: what it gathers from other ranks while the layer computes." : cut.size ? " In colour: what this rank keeps and computes with." : " Nothing is sharded: this rank keeps every weight of its layers.";
    part("weights").querySelector("p").textContent = looked
      ? `${bytes(kept)} of weights${all > kept ? `, ${percent(kept / all)} of those of its layers` : ""}.${colored}`
      : `This plan leaves out pipeline rank ${pipeline} (--ranks). Its layers have the weights of those on pipeline rank ${source}.${colored}`;
  }
  function icon(weight, bounds, used, color) {
    const [rows, columns] = weight.shape.length > 1 ? weight.shape : [weight.shape[0], 1];
    const tall = weight.shape.length > 1 ? Math.max(0.28, Math.min(3.2, rows / columns)) : 8;
    const height = tall >= 1 ? 34 : 34 * tall, width = tall >= 1 ? Math.max(6, 34 / tall) : 34;
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [key, value] of [["width", 38], ["height", 38], ["aria-hidden", "true"]]) svg.setAttribute(key, value);
    const box = (at, fill) => {
      const [[top, bottom], [left, right]] = [at[0], at[1] || [0, 1]];
      draw(svg, "rect", { x: 2 + (38 - 4 - width) / 2 + (left / columns) * width, y: 2 + (34 - height) / 2 + (top / rows) * height, width: Math.max(1.2, ((right - left) / columns) * width), height: Math.max(1.2, ((bottom - top) / rows) * height), fill });
    };
    box(weight.shape.map((it) => [0, it]), "var(--line)");
    box(used, color.replace("/ 1)", "/ 0.45)"));
    if (numel(bounds)) box(bounds, color);
    return svg;
  }
  function partWords(shape, bounds) {
    if (!numel(bounds)) return "nothing, since there are more ranks than rows";
    const names = shape.length > 2 ? ["experts", "rows", "columns"] : shape.length > 1 ? ["rows", "columns"] : ["numbers"];
    const parts = bounds.flatMap(([first, last], dim) => (last - first < shape[dim] ? [`${names[dim] || `dim ${dim}`} ${runs([[first, last - 1]])}`] : []));
    return parts.length ? parts.join(", ") : "all of it";
  }

  function messages() {
    const pipeline = pipelineRank(chosen.rank), looked = LOOKED.includes(pipeline);
    const rows = (looked ? data.ranks[pipeline].messages : []).map((it) => {
      const others = partners(it.axis, it.kind);
      const near = others.filter((rank) => nodeOf(rank) === nodeOf(chosen.rank)).length;
      const where = near === others.length ? "in its node" : near ? "in its and other nodes" : "in other nodes";
      const who = others.length ? [listed(others), element("small", {}, where)] : ["—"];
      return element("tr", {}, element("td", { class: "key" }, it.axis), element("td", {}, it.kind), element("td", {}, ...who), element("td", { class: "number" }, whole(it.calls)), element("td", { class: "number" }, bytes(it.bytes)));
    });
    part("messages").querySelector("tbody").replaceChildren(...rows);
    part("messages").querySelector("table").hidden = !rows.length;
    part("messages").querySelector("p").textContent = !looked
      ? `This plan leaves out pipeline rank ${pipeline} (--ranks), so its messages are unknown.`
      : rows.length ? "Bytes count the larger side of a message: the gathered tensor, the tensor to scatter, the sent tensor." : "This rank sends nothing.";
  }

  // Tensors pass between neighbours of the pipeline; every other message is one of a whole group.
  function partners(axis, kind) {
    const rank = chosen.rank, others = group(rank, axesOf(axis)).filter((it) => it !== rank);
    if (axis !== "pp" || !["send", "receive"].includes(kind)) return others;
    const { placement } = data.passes;
    const beside = stagesOf(pipelineRank(rank)).flatMap((stage) => [placement[stage - 1], placement[stage + 1]]);
    return others.filter((it) => beside.includes(pipelineRank(it)));
  }

  const repaint = [drawn(part("layers").querySelector(".plot"), layers), drawn(part("batch").querySelector(".plot"), batch)];
  const all = () => { head(); for (const paint of repaint) paint(); weights(); messages(); };
  chosen.listeners.push(all);
}
