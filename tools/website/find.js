// Search: every word that was typed has to occur in a section, anywhere in a word, so that Korean endings do not matter.
"use strict";

window.courseIndex = (sections) => {
  const MOST = 60, AROUND = 60;
  const input = document.getElementById("find-words");
  const count = document.getElementById("find-count"), results = document.getElementById("find-results");
  const texts = sections.map(([, page, heading, text]) => `${page} ${heading} ${text}`.toLowerCase());

  function find() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    history.replaceState(null, "", "?" + new URLSearchParams({ q: input.value }));
    const found = words.length === 0 ? [] : sections.map((section, index) => ({ section, text: texts[index] }))
      .filter(({ text }) => words.every((word) => text.includes(word)))
      .map((one) => ({ ...one, rank: rank(one, words) }))
      .sort((a, b) => b.rank - a.rank);
    count.textContent = words.length === 0 ? "" : found.length === 0 ? "찾은 것이 없다." :
      `${found.length}곳` + (found.length > MOST ? ` 가운데 ${MOST}곳` : "");
    results.replaceChildren(...found.slice(0, MOST).map(({ section }) => show(section, words)));
  }

  function rank({ section: [, page, heading], text }, words) {
    const inHeading = words.filter((word) => heading.toLowerCase().includes(word)).length;
    const inPage = words.filter((word) => page.toLowerCase().includes(word)).length;
    return 100 * inHeading + 10 * inPage + Math.min(9, words.reduce((sum, word) => sum + text.split(word).length - 1, 0));
  }

  function show([address, page, heading, text], words) {
    const item = document.createElement("li");
    const link = Object.assign(document.createElement("a"), { href: address, textContent: heading });
    const from = Object.assign(document.createElement("small"), { textContent: page === heading ? "" : ` ${page}` });
    const line = document.createElement("p");
    const places = words.map((word) => text.toLowerCase().indexOf(word)).filter((place) => place >= 0);
    const start = Math.max(0, Math.min(...places, text.length) - AROUND);
    const piece = text.slice(places.length ? start : 0, (places.length ? start : 0) + 3 * AROUND);
    let rest = piece;
    const pattern = new RegExp(words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|"), "gi");
    let last = 0;
    for (const match of piece.matchAll(pattern)) {
      line.append(piece.slice(last, match.index));
      line.append(Object.assign(document.createElement("mark"), { textContent: match[0] }));
      last = match.index + match[0].length;
      rest = piece.slice(last);
    }
    line.append(rest);
    item.append(link, from, line);
    return item;
  }

  input.value = new URLSearchParams(location.search).get("q") ?? "";
  input.addEventListener("input", find);
  document.getElementById("find").addEventListener("submit", (event) => event.preventDefault());
  if (input.value) find();
  input.focus();
};
