"use strict";
// Without this script the page is whole: figures, tables and texts are in it. It adds sorting, search, a theme,
// files of figures and text of tables.

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

// A figure as a file on white ground: as wide as a column of a paper (252 pt), letters of 8 pt.
const COLUMN_PT = 252, COLUMN = 380, DOTS_PER_INCH = 600;
const DRAWN = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity",
  "font-weight", "text-anchor"];

function figureFile(svg) {
  const root = document.documentElement, theme = root.dataset.theme;
  root.dataset.theme = "light"; // computed colours are those of the theme
  const copy = svg.cloneNode(true), parts = [...copy.querySelectorAll("*")];
  [...svg.querySelectorAll("*")].forEach((part, i) => {
    const style = getComputedStyle(part);
    DRAWN.forEach((name) => parts[i].setAttribute(name, style.getPropertyValue(name)));
    if (part.tagName === "text") parts[i].setAttribute("font-size", (8 * COLUMN) / COLUMN_PT);
    parts[i].removeAttribute("class");
  });
  if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
  const { width, height } = svg.viewBox.baseVal, points = (pixels) => `${((pixels * COLUMN_PT) / COLUMN).toFixed(2)}pt`;
  const ground = document.createElementNS(svg.namespaceURI, "rect");
  Object.entries({ width, height, fill: "#fff" }).forEach(([name, value]) => ground.setAttribute(name, value));
  copy.prepend(ground);
  copy.setAttribute("font-family", "Helvetica, Arial, sans-serif");
  copy.setAttribute("width", points(width));
  copy.setAttribute("height", points(height));
  return new XMLSerializer().serializeToString(copy);
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function savePicture(svg, name) {
  const picture = new Image(), canvas = document.createElement("canvas");
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(figureFile(svg))}`;
  await picture.decode();
  const { width, height } = svg.viewBox.baseVal, scale = ((COLUMN_PT / 72) * DOTS_PER_INCH) / COLUMN;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => save(blob, name), "image/png");
}

function addButton(place, text, label, action) {
  const button = document.createElement("button");
  Object.assign(button, { type: "button", textContent: text, ariaLabel: label, className: "take" });
  button.addEventListener("click", () => action(button));
  place.append(button);
}

function addFigureTools(figure) {
  const svg = figure.querySelector("svg"), caption = figure.querySelector("figcaption");
  const title = caption.querySelector("strong").textContent;
  const name = title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  const place = document.createElement("span");
  place.className = "takes";
  svg.after(place);
  addButton(place, "SVG", `Save as SVG: ${title}`, () => save(new Blob([figureFile(svg)], { type: "image/svg+xml" }), `${name}.svg`));
  addButton(place, "PNG", `Save as PNG: ${title}`, () => savePicture(svg, `${name}.png`));
}

// A table as rows of [text, columns that it spans], without what only a screen shows.
function tableRows(table) {
  const text = (cell) => cell.innerText.replace(/\s+/g, " ").trim();
  return [...table.rows].map((row) => [...row.cells].map((cell) => [text(cell), cell.colSpan]));
}

function asMarkdown(table) {
  const [head, ...rows] = tableRows(table);
  const numbers = [...table.rows[0].cells].map((cell) => cell.classList.contains("number"));
  const line = (cells) => `| ${cells.flatMap(([text, span]) => [text.replace(/\|/g, "\\|"), ...Array(span - 1).fill("")]).join(" | ")} |`;
  return [line(head), `|${numbers.map((is) => (is ? "---:|" : "---|")).join("")}`, ...rows.map(line), ""].join("\n");
}

const LATEX = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "\u00b1": "$\\pm$",
  "\u2212": "$-$", "\u2192": "$\\to$", "\u2013": "--" };

function asLatex(table) {
  const [head, ...rows] = tableRows(table);
  const escape = (text) => text.replace(/[\\&%$#_{}~^\u00b1\u2212\u2192\u2013]/g, (c) => LATEX[c] ?? `\\${c}`);
  const cell = ([text, span]) => (span > 1 ? `\\multicolumn{${span}}{l}{${escape(text)}}` : escape(text));
  const line = (cells) => `${cells.map(cell).join(" & ")} \\\\`;
  const columns = [...table.rows[0].cells].map((th) => (th.classList.contains("number") ? "r" : "l")).join("");
  return [`\\begin{tabular}{${columns}}`, "\\toprule", line(head), "\\midrule", ...rows.map(line), "\\bottomrule",
    "\\end{tabular}", ""].join("\n");
}

function addTableTools(table) {
  const place = document.createElement("span");
  table.caption.classList.remove("hidden");
  table.caption.append(" ", place);
  [["Markdown", asMarkdown], ["LaTeX", asLatex]].forEach(([text, write]) => {
    addButton(place, text, `Copy as ${text}`, async (button) => {
      try { await navigator.clipboard.writeText(write(table)); button.textContent = "copied"; }
      catch { button.textContent = "not allowed"; }
      setTimeout(() => { button.textContent = text; }, 1500);
    });
  });
}

document.querySelectorAll("section").forEach(addSampleTools);
document.querySelectorAll("figure.chart").forEach(addFigureTools);
document.querySelectorAll("table:not(.samples)").forEach(addTableTools);
addTheme(document.getElementById("theme"));
