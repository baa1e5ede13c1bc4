// Colours of stages, categories and axes, and numbers as people read them.
const sum = (numbers) => numbers.reduce((one, other) => one + other, 0);

// ---- colours ------------------------------------------------------------------------------------------------------
// Stages go round the colours in order, so that neighbours in the pipeline are neighbours in colour.
function stageColor(stage, strength = 1) {
  const hue = 255 - (stage / Math.max(1, data.stages.length - 1)) * (data.stages.length > 3 ? 285 : 90 * (data.stages.length - 1));
  return `oklch(var(--stage-l) var(--stage-c) ${((hue % 360) + 360) % 360} / ${strength})`;
}
// Colours as drawn: their bytes in this theme.
const pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
const bytesOf = new Map(), darkness = matchMedia("(prefers-color-scheme: dark)");
function rgb(color) {
  const key = `${document.documentElement.dataset.theme} ${darkness.matches} ${color}`;
  if (!bytesOf.has(key)) {
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = resolved(color);
    pixel.fillRect(0, 0, 1, 1);
    bytesOf.set(key, [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3));
  }
  return bytesOf.get(key);
}
// Relative luminance of WCAG 2.
const luminance = (bytes) => sum(bytes.map((it) => it / 255).map((it) => (it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4)).map((it, k) => it * [0.2126, 0.7152, 0.0722][k]));
// Black or white, whichever stands out more from each of these colours at this opacity over a ground: at least 4.5 to 1.
function inkOn(colors, opacity = 1, ground = "var(--card)") {
  const below = rgb(ground);
  const seen = colors.map((it) => luminance(rgb(it).map((byte, k) => opacity * byte + (1 - opacity) * below[k])));
  return Math.min(...seen.map((it) => (it + 0.05) / 0.05)) >= Math.min(...seen.map((it) => 1.05 / (it + 0.05))) ? "#000000" : "#ffffff";
}
const CATEGORY_COLORS = {
  parameters: "var(--c0)", gradients: "var(--c1)", optimizer: "var(--c3)", activations: "var(--c2)", "gathered parameters": "var(--c5)",
  communication: "var(--c6)", loss: "var(--c4)", workspaces: "var(--c9)", other: "var(--c7)",
};
const AXIS_COLORS = { etp: "var(--c6)", ep: "var(--c4)", tp: "var(--c1)", cp: "var(--c3)", dp_shard: "var(--c2)", dp_replicate: "var(--c8)", pp: "var(--c0)" };
// ---- numbers ------------------------------------------------------------------------------------------------------
function bytes(number) {
  for (const [scale, word] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [1024, "KiB"]]) {
    if (number >= scale) return `${(number / scale).toLocaleString("en", { maximumSignificantDigits: 3 })} ${word}`;
  }
  return `${Math.round(number)} B`;
}
function seconds(number) {
  if (number === 0) return "0 s";
  const [scale, word] = number >= 0.9995 ? [1, "s"] : number >= 0.9995e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${(number * scale).toLocaleString("en", { maximumSignificantDigits: 3 })} ${word}`;
}
const percent = (share) => (share > 0 && share < 0.0005 ? "less than 0.1%" : `${(100 * share).toFixed(1)}%`);
const whole = (number) => number.toLocaleString("en");
const counted = (number, word) => `${whole(number)} ${word}${number === 1 ? "" : word.endsWith("s") || word.endsWith("ch") ? "es" : "s"}`;
// Runs of numbers, first and last: "3–5, 8".
const runs = (ranges) => ranges.map(([first, last]) => (first === last ? whole(first) : `${whole(first)}–${whole(last)}`)).join(", ");
function runsOf(numbers) {
  const found = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    if (found.length && found.at(-1)[1] === number - 1) found.at(-1)[1] = number;
    else found.push([number, number]);
  }
  return found;
}
// Numbers in a line: runs, or where they come at equal distances "1, 5, … 61".
function listed(numbers) {
  const ranges = runsOf(numbers);
  if (ranges.length <= 4) return runs(ranges);
  const sorted = [...numbers].sort((a, b) => a - b);
  return ranges.every(([a, b]) => a === b) ? `${sorted.slice(0, 3).map(whole).join(", ")} … ${whole(sorted.at(-1))}` : `${runs(ranges.slice(0, 2))} … ${runs(ranges.slice(-1))}`;
}
// Bytes at round places of their own unit.
function byteTicks(high, count) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log2(high || 1) / 10));
  return ticks(0, high / unit, count).map((it) => it * unit);
}
function fillTerms(list, entries) {
  list.replaceChildren(...entries.map(([color, term, sentence]) => {
    const mark = element("i");
    if (color) mark.style.background = color;
    return element("div", {}, element("dt", {}, ...(color ? [mark] : []), term), element("dd", {}, sentence));
  }));
}
