// ---- the mesh: ranks and their coordinates -----------------------------------------------------------------------------
const WORLD = Object.values(data.mesh.axes).reduce((one, other) => one * other, 1);
// Degree and stride of every axis: of the mesh, and of the experts' over the same ranks.
const AXES = Object.assign({}, ...[data.mesh.experts, data.mesh.axes].map(placed));
function placed(axes) {
  let stride = 1;
  return Object.fromEntries(Object.entries(axes).reverse().map(([axis, degree]) => {
    const place = { degree, stride };
    stride *= degree;
    return [axis, place];
  }));
}
const NODE = Math.min(data.mesh.node, WORLD);
const NODES = Math.ceil(WORLD / NODE);
// Axes as people configure them, of those of the mesh.
const SHOWN_AXES = {
  ...(data.mesh.experts.ep ? { etp: ["etp"], ep: ["ep"] } : {}),
  tp: ["tp"], cp: ["cp_across", "cp_within"], dp_shard: ["dp_shard"], dp_replicate: ["dp_replicate"], pp: ["pp"],
};

const coordinate = (rank, axis) => Math.floor(rank / AXES[axis].stride) % AXES[axis].degree;
const degree = (axes) => axes.reduce((one, axis) => one * AXES[axis].degree, 1);
// A rank's place along axes that are folded into one, the first being the slowest.
const placeAlong = (rank, axes) => axes.reduce((place, axis) => place * AXES[axis].degree + coordinate(rank, axis), 0);
// The ranks that differ from this one along these axes alone, itself among them.
function group(rank, axes) {
  let found = [rank];
  for (const axis of axes) {
    const { degree, stride } = AXES[axis];
    found = found.flatMap((it) => Array.from({ length: degree }, (_, k) => it + (k - coordinate(it, axis)) * stride));
  }
  return found.sort((one, other) => one - other);
}
// The axes of the mesh behind a name that messages are booked on, which may be "dp_shard=fsdp".
function axesOf(name) {
  for (const part of name.split("=")) {
    if (part in AXES) return [part];
    if (part in data.mesh.sharding) return data.mesh.sharding[part];
  }
  return [];
}
const nodeOf = (rank) => Math.floor(rank / NODE);
const pipelineRank = (rank) => coordinate(rank, "pp");
const stagesOf = (pipeline) => data.passes.placement.flatMap((rank, stage) => (rank === pipeline ? [stage] : []));
const layersOf = (stages) => runsOf(stages.flatMap((stage) => data.stages[stage].flatMap(([first, last]) => Array.from({ length: last - first + 1 }, (_, k) => first + k))));
const layerWords = (ranges) => (ranges.length ? `layer${ranges.length > 1 || ranges[0][0] !== ranges[0][1] ? "s" : ""} ${runs(ranges)}` : "no layers");
// Which share of the batch a rank computes, and which part of every sequence.
const dataShare = (rank) => placeAlong(rank, ["dp_replicate", "dp_shard"]);
const sequencePart = (rank) => placeAlong(rank, ["cp_across", "cp_within"]);
// Predicted pipeline ranks, and the one whose blocks stand in for those of the others.
const LOOKED = Object.keys(data.ranks).map(Number);
const nearest = (pipeline) => LOOKED.reduce((one, other) => (Math.abs(other - pipeline) < Math.abs(one - pipeline) ? other : one));

// ---- selection and its listeners -------------------------------------------------------------------------------
const chosen = { rank: 0, listeners: [] };
function choose(rank) {
  chosen.rank = Math.max(0, Math.min(WORLD - 1, rank));
  for (const listen of chosen.listeners) listen();
}
// The pipeline rank whose memory and messages are shown: the chosen rank's where it was predicted.
const shownPipelineRank = () => (LOOKED.includes(pipelineRank(chosen.rank)) ? pipelineRank(chosen.rank) : nearest(pipelineRank(chosen.rank)));
