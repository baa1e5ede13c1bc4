"use strict";
// What all drawings are made of: elements, colours, numbers as people read them. No library, nothing loaded; all text goes
// in as text, never as markup.
const data = JSON.parse(document.getElementById("numbers").textContent);
const tip = document.getElementById("tip");
const finite = (value) => value !== null && value !== undefined && Number.isFinite(value);
const sum = (numbers) => numbers.reduce((one, other) => one + other, 0);

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
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null) continue;
    // Colours are of the theme, which attributes do not know.
    if (key === "fill" || key === "stroke") found.style[key] = value;
    else found.setAttribute(key, value);
  }
  if (text !== null) found.textContent = text;
  parent.append(found);
  return found;
}
function choice(options, chosen, changed) {
  const box = element("span", { class: "choice", role: "group" });
  for (const [value, words] of options) {
    box.append(element("button", {
      type: "button", "aria-pressed": String(value === chosen), "data-value": value,
      onclick: () => { box.choose(value); changed(value); },
    }, words));
  }
  box.choose = (value) => { for (const it of box.children) it.setAttribute("aria-pressed", String(it.dataset.value === String(value))); };
  return box;
}
function showTip(event, title, lines) {
  tip.replaceChildren(element("strong", {}, title));
  for (const [color, name, value] of lines) {
    const mark = element("i");
    if (color) mark.style.background = color;
    tip.append(element("div", {}, mark, element("span", {}, name), element("b", {}, value)));
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const right = event.clientX + 16 + box.width > innerWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX - box.width - 16 : event.clientX + 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 6))}px`;
}
const hideTip = () => { tip.hidden = true; };

// ---- colours ------------------------------------------------------------------------------------------------------
// Stages go round the colours in order, so that neighbours in the pipeline are neighbours in colour.
function stageColor(stage, strength = 1) {
  const hue = 255 - (stage / Math.max(1, data.stages.length - 1)) * (data.stages.length > 3 ? 285 : 90 * (data.stages.length - 1));
  return `oklch(var(--stage-l) var(--stage-c) ${((hue % 360) + 360) % 360} / ${strength})`;
}
const CATEGORY_COLORS = {
  parameters: "var(--c0)", gradients: "var(--c1)", optimizer: "var(--c3)", activations: "var(--c2)", "gathered parameters": "var(--c5)",
  communication: "var(--c6)", loss: "var(--c4)", other: "var(--c7)",
};
const AXIS_COLORS = { tp: "var(--c1)", cp: "var(--c3)", dp_shard: "var(--c2)", dp_replicate: "var(--c8)", pp: "var(--c0)" };
// A canvas takes no variables: what a colour is in this theme.
function resolved(color) {
  const probe = element("span");
  probe.style.color = color;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

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
const percent = (share) => (share > 0 && share < 0.0005 ? "less than 0.1 %" : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`);
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
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 2.5, 5, 10].map((it) => it * power).find((it) => it >= rough) || 10 * power;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}
// Bytes at round places of their own unit.
function byteTicks(high, count) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log2(high || 1) / 10));
  return ticks(0, high / unit, count).map((it) => it * unit);
}

// ---- drawing again where the width changes ----------------------------------------------------------------------------
function drawn(box, paint) {
  let width = 0;
  const again = () => { if (box.clientWidth) paint(box, Math.max(240, box.clientWidth)); };
  new ResizeObserver(() => { if (box.clientWidth !== width) { width = box.clientWidth; again(); } }).observe(box);
  return again;
}
function picture(box, width, height, label) {
  box.replaceChildren();
  return draw(box, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
}
function fillTerms(list, entries) {
  list.replaceChildren(...entries.map(([color, term, sentence]) => {
    const mark = element("i");
    if (color) mark.style.background = color;
    return element("div", {}, element("dt", {}, ...(color ? [mark] : []), term), element("dd", {}, sentence));
  }));
}
