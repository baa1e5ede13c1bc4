// Number formatting, scales, and a frame with axes.
const COLORS = 10;
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const color = (row) => `var(--c${row % COLORS})`;
const dash = (row) => DASHES[Math.floor(row / COLORS) % DASHES.length];
// Tooltip with a line per row, marked with its colour.
const tipOfRows = (event, title, lines) => showTip(event, title, lines.map(([row, ...rest]) => [row === null ? null : color(row), ...rest]));

function formatCount(number) {
  for (const [scale, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(number) >= scale) return `${Number((number / scale).toPrecision(4))}${letter}`;
  }
  if (number !== 0 && Math.abs(number) < 1e-3) return number.toExponential(1);
  return String(Number(number.toPrecision(4)));
}
const signed = (number) => (number < 0 ? "−" : "+") + formatCount(Math.abs(number));
function formatMetric(metric, number) {
  if (!finite(number)) return "—";
  if (metric.name === "mfu") return `${(100 * number).toFixed(1)} %`;
  if (metric.unit === "nats") return number.toFixed(4);
  if (metric.name === "time") return number < 1 / 60 ? `${formatCount(3600 * number)} s` : number < 1 ? `${formatCount(60 * number)} min` : `${formatCount(number)} h`;
  return formatCount(number);
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
  // A least axis range, so that rounding noise is not magnified.
  const more = Math.max((high - low) * part, Math.abs(high) * 0.002) || 1;
  return [low - more, high + more];
}

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

// Lines of a name that fit a width, broken at spaces, or between letters where a word alone is wider.
const ruler = document.createElement("canvas").getContext("2d");
function linesOf(name, width) {
  ruler.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const fits = (text) => ruler.measureText(text).width <= width;
  const lines = [""];
  for (let word of name.split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (fits(longer)) { lines[lines.length - 1] = longer; continue; }
    if (lines.at(-1)) lines.push("");
    while (word.length > 1 && !fits(word)) {
      let count = word.length - 1;
      while (count > 1 && !fits(word.slice(0, count))) count--;
      const sign = word.slice(0, count).search(/[._/=-][^._/=-]*$/);
      if (sign > count / 2) count = sign + 1;
      lines[lines.length - 1] = word.slice(0, count);
      lines.push("");
      word = word.slice(count);
    }
    lines[lines.length - 1] = word;
  }
  return lines;
}
const LINE = 15;
// Text of several lines, whose first base line is at `y`.
function drawLines(svg, attributes, lines) {
  const text = draw(svg, "text", attributes);
  lines.forEach((line, k) => draw(text, "tspan", { x: attributes.x ?? 0, dy: k ? LINE : 0 }, line));
  return text;
}

function shown(section, paint) {
  section.hidden = false;
  return drawn(section.querySelector(".plot"), paint);
}
