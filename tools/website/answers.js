// The table of answers, filtered by menus and by words; the choice stands in the address.
"use strict";

addEventListener("DOMContentLoaded", () => {
  const place = document.getElementById("answers");
  const table = place?.parentElement.querySelector("table");
  if (!table) return;
  const MENUS = { model: 0, gpu: 1, length: 2, method: 3 };
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, cells: [...row.cells].map((cell) => cell.textContent.trim()) }));
  const form = Object.assign(document.createElement("form"), { className: "live-controls" });
  const count = Object.assign(document.createElement("p"), { id: "answers-count" });
  count.setAttribute("role", "status");

  function add(name, words, input) {
    const row = document.createElement("label");
    row.append(Object.assign(document.createElement("span"), { className: "live-label", textContent: words }), input);
    input.name = name;
    input.addEventListener("input", filter);
    form.append(row);
  }
  for (const [name, column] of Object.entries(MENUS)) {
    const values = [...new Set(rows.map(({ cells }) => cells[column]))];
    const menu = document.createElement("select");
    menu.append(new Option("모두", ""), ...values.map((value) => new Option(value, value)));
    add(name, heads[column], menu);
  }
  add("q", "찾을 말", Object.assign(document.createElement("input"), { type: "search" }));
  form.addEventListener("submit", (event) => event.preventDefault());

  function filter() {
    const chosen = new FormData(form), words = chosen.get("q").toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const { row, cells } of rows) {
      const text = cells.join(" ").toLowerCase();
      row.hidden = Object.entries(MENUS).some(([name, column]) => chosen.get(name) && chosen.get(name) !== cells[column])
        || !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = shown === 0 ? "맞는 줄이 없다." : `${rows.length}줄 가운데 ${shown}줄`;
    const said = new URLSearchParams([...chosen].filter(([, value]) => value));
    history.replaceState(null, "", said.size ? `#${said}` : location.pathname + location.search);
  }

  function follow() {
    const text = location.hash.slice(1);
    if (!text.includes("=")) return filter();
    const said = new URLSearchParams(text);
    for (const input of form.elements) if (input.name) input.value = said.get(input.name) ?? "";
    for (const menu of form.querySelectorAll("select")) if (menu.selectedIndex < 0) menu.value = "";
    filter();
  }
  place.append(form, count);
  addEventListener("hashchange", follow);
  follow();
});
