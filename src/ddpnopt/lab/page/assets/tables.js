// Tables sort by a column, show the rows of one data set; the summary shows the claims of one verdict.
(() => {
  const number = (text) => {
    const found = text.replace("−", "-").match(/[-+]?\d*\.?\d+(?:e[-+]?\d+)?/i);
    return found && /^[\s≥≤<>~±]*[-+−]?[\d.]/.test(text) ? Number(found[0]) : NaN;
  };
  const compare = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
    return a.localeCompare(b, "en", { numeric: true });
  };
  const empty = (text) => ["", "–", "-", "—", "nan"].includes(text.trim().toLowerCase());

  for (const table of document.querySelectorAll("table.data")) {
    const heads = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const way = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", way);
        const text = (row) => row.cells[column].textContent;
        const sign = way === "ascending" ? 1 : -1;
        const rows = [...body.rows].sort((a, b) =>
          empty(text(a)) - empty(text(b)) || sign * compare(text(a), text(b)));  // gaps stay at the end
        body.append(...rows);
      });
    });
  }

  for (const select of document.querySelectorAll("select[data-rows]")) {
    select.closest(".choose").hidden = false;
    const column = Number(select.dataset.column);
    select.addEventListener("change", () => {
      for (const row of document.querySelectorAll(`#${select.dataset.rows} tbody tr`))
        row.hidden = select.value !== "" && row.cells[column].textContent !== select.value;
    });
  }

  for (const select of document.querySelectorAll("select[data-parts]")) {
    select.closest(".choose").hidden = false;
    select.addEventListener("change", () => {
      for (const part of document.querySelectorAll(`[data-part-of="${select.dataset.parts}"]`))
        part.hidden = select.value !== "" && part.dataset.part !== select.value;
    });
  }

  const tiles = [...document.querySelectorAll("button.tile")];
  for (const tile of tiles) {
    tile.addEventListener("click", () => {
      const on = tile.getAttribute("aria-pressed") !== "true";
      for (const other of tiles) other.setAttribute("aria-pressed", String(on && other === tile));
      let shown = 0;
      const rows = [...document.querySelectorAll("#claims tr[data-verdict]")];
      for (const row of rows) {
        row.hidden = on && row.dataset.verdict !== tile.dataset.verdict;
        shown += !row.hidden;
      }
      for (const group of document.querySelectorAll("#claims tbody"))
        group.hidden = ![...group.querySelectorAll("tr[data-verdict]")].some((row) => !row.hidden);
      const hint = document.getElementById("tally-hint");
      hint.hidden = !on;
      hint.textContent = on ? `${shown} of ${rows.length} claims shown; press again for all.` : "";
    });
  }
})();
