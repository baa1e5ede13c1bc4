"use strict";
// What drawings of every page are made of: elements, choices, tips, ticks, light and dark. No library, nothing loaded; all
// text goes in as text, never as markup. Each page's own scripts follow it.
const data = JSON.parse(document.getElementById("numbers").textContent);
const tip = document.getElementById("tip");
const finite = (value) => value !== null && value !== undefined && Number.isFinite(value);

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

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 2.5, 5, 10].map((it) => it * power).find((it) => it >= rough) || 10 * power;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
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

// ---- light and dark ---------------------------------------------------------------------------------------------------
// A canvas takes no variables: what a colour is in this theme.
function resolved(color) {
  const probe = element("span");
  probe.style.color = color;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
const themed = []; // what is painted anew in other colours
const themeButton = document.getElementById("theme");
themeButton.hidden = false;
themeButton.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  for (const paint of themed) paint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const paint of themed) paint(); });
