"use strict";
// Without this script the page is whole: figures, tables and texts are in it. It adds sorting, search, a theme.

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

document.querySelectorAll("section").forEach(addSampleTools);
addTheme(document.getElementById("theme"));
