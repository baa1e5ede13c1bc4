// Sortable tables.
function sortable() {
  const valueOf = (cell) => {
    const text = cell.dataset.value ?? cell.textContent.trim();
    const number = Number(text.replace("−", "-"));
    return text !== "" && Number.isFinite(number) ? number : text === "" || text === "—" ? null : text;
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, place) => {
      if (head.classList.contains("swatch")) return;
      head.tabIndex = 0;
      const sort = () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const body = table.tBodies[0];
        const rows = [...body.rows].map((row) => [valueOf(row.cells[place]), row]);
        rows.sort(([one], [two]) => {
          if (one === null || two === null) return (one === null) - (two === null);
          const order = typeof one === "number" && typeof two === "number" ? one - two : String(one).localeCompare(String(two));
          return down ? -order : order;
        });
        body.append(...rows.map(([, row]) => row));
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    });
  }
}
