// Tables sort by a click on a heading and show the rows that contain a text; folds print open.
for (const table of document.querySelectorAll("table.sortable")) {
  const rows = () => [...table.tBodies[0].rows];
  const value = (row, column) => {
    const cell = row.cells[column], number = Number(cell.dataset.value ?? cell.textContent);
    return Number.isNaN(number) ? cell.textContent : number;
  };
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => heading.querySelector("button")?.addEventListener("click", () => {
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of headings) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = (a, b) => { const x = value(a, column), y = value(b, column); return x < y ? -1 : x > y ? 1 : 0; };
    table.tBodies[0].append(...rows().sort((a, b) => (down ? -1 : 1) * order(a, b)));
  }));
  table.parentElement.querySelector("input[type=search]")?.addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    for (const row of rows()) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((fold) => { fold.open = true; }));
