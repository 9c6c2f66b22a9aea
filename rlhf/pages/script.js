"use strict";
// Without this script the page is whole: figures, tables and texts are in it. It adds tooltips, sorting, search, a theme.

const number = (element, name) => Number(element.dataset[name]);

// The tooltip of a figure reads its numbers from the figure's own table.
function addTooltip(figure) {
  const plot = figure.querySelector(".plot");
  const svg = plot.querySelector("svg");
  const names = [...figure.querySelectorAll("thead th")].map((head) => head.textContent);
  const rows = [...figure.querySelectorAll("tbody tr")].map((row) => ({
    x: number(row, "x"),
    cells: [...row.children].map((cell) => cell.textContent),
  }));
  if (rows.length === 0) return;
  const [x0, x1, left, right] = ["x0", "x1", "left", "right"].map((name) => number(figure, name));
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
  cursor.setAttribute("class", "cursor");
  const tip = Object.assign(document.createElement("output"), { className: "tip", hidden: true });
  plot.append(tip);
  let current = -1;

  function show(index) {
    current = index;
    const row = rows[index];
    const x = left + ((row.x - x0) / (x1 - x0)) * (right - left);
    cursor.setAttribute("d", `M${x} ${figure.dataset.top}V${figure.dataset.bottom}`);
    svg.append(cursor);
    const lines = row.cells.map((cell, i) => (cell === "" ? "" : `${names[i]} ${cell}`.trim()));
    tip.textContent = lines.filter((line) => line !== "").join("\n").replaceAll("\n± 95 % ", " ± ").replaceAll("\n95 % ", " ");
    tip.hidden = false;
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    const beside = x * scale + 12;
    tip.style.left = `${beside + tip.offsetWidth > plot.clientWidth ? Math.max(0, x * scale - tip.offsetWidth - 12) : beside}px`;
  }
  function hide() {
    cursor.remove();
    tip.hidden = true;
    current = -1;
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const pixel = ((event.clientX - box.left) * svg.viewBox.baseVal.width) / box.width;
    const x = x0 + ((pixel - left) / (right - left)) * (x1 - x0);
    let nearest = 0;
    rows.forEach((row, i) => { if (Math.abs(row.x - x) < Math.abs(rows[nearest].x - x)) nearest = i; });
    show(nearest);
  });
  svg.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: rows.length - 1 };
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(Math.min(rows.length - 1, Math.max(0, moves[event.key])));
  });
}

// Samples: search, sort by a column of numbers, and more rows on demand.
function addSampleTools(section) {
  const table = section.querySelector("table.samples");
  if (!table) return;
  const tools = section.querySelector(".tools");
  const search = tools.querySelector("input");
  const count = tools.querySelector("output");
  const more = section.querySelector("button.more");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const STEP = Number(table.dataset.shown);
  let limit = STEP;

  function update() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matching = new Set(rows.filter((_, i) => words.every((word) => texts[i].includes(word))));
    let shown = 0;
    for (const row of body.rows) {
      row.hidden = !matching.has(row) || shown >= limit;
      if (!row.hidden) shown += 1;
    }
    count.textContent = `${shown} of ${matching.size} shown`;
    more.hidden = shown >= matching.size;
  }
  table.querySelectorAll("thead th[data-column]").forEach((head) => {
    head.querySelector("button").addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") !== "descending";
      table.querySelectorAll("thead th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const value = (row) => Number(row.cells[head.cellIndex].dataset.value ?? NaN);
      const sign = descending ? -1 : 1;
      const last = (x) => (Number.isNaN(x) ? Infinity : sign * x);
      body.append(...rows.toSorted((a, b) => last(value(a)) - last(value(b)) || rows.indexOf(a) - rows.indexOf(b)));
      update();
    });
  });
  search.addEventListener("input", () => { limit = STEP; update(); });
  more.addEventListener("click", () => { limit += STEP; update(); });
  tools.hidden = false;
  update();
}

// Light and dark follow the system until the button chooses; the choice is for all pages where storage works.
function addTheme(button) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  try {
    const stored = localStorage.getItem("rlhf-theme");
    if (stored) document.documentElement.dataset.theme = stored;
  } catch { /* no storage: the choice is for this page */ }
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try { localStorage.setItem("rlhf-theme", theme); } catch { /* as above */ }
    label();
  });
  system.addEventListener("change", label);
  button.hidden = false;
  label();
}

document.querySelectorAll("figure.chart").forEach(addTooltip);
document.querySelectorAll("section").forEach(addSampleTools);
addTheme(document.getElementById("theme"));
