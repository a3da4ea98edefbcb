// The panels of a page: what was computed at each setting, shown when it is chosen. The setting stands in the address.
"use strict";

(() => {
  const panels = new Map();

  // What image/live says of a panel arrives as a call of this, so that a page opened as a file works as well.
  window.coursePanel = (name, data) => {
    for (const place of document.querySelectorAll(`.live[data-panel="${name}"]`)) {
      const panel = new LivePanel(place, data);
      panels.set(place.id, panel);
      panel.follow(address());
      place.classList.add("live-ready");
    }
  };

  function address() {
    const text = location.hash.slice(1);
    return new URLSearchParams(text.includes("=") ? text : "");
  }

  class LivePanel {
    constructor(place, data) {
      Object.assign(this, { place, data });
      this.status = place.querySelector(".live-status");
      this.picture = place.querySelector(".live-picture");
      this.count = data.controls.length;
      this.current = data.settings[data.start];
      this.inputs = data.controls.map((control, index) => this.build(control, index));
      const form = document.createElement("form");
      form.className = "live-controls";
      form.addEventListener("submit", (event) => event.preventDefault());
      form.append(...this.inputs.map((input) => input.row));
      place.prepend(form);
      this.refresh();
    }

    // A control that knows the places of the values that can be chosen (`set`) and tells which one was (`choose`).
    build(control, index) {
      const row = document.createElement("label");
      const label = Object.assign(document.createElement("span"), { className: "live-label", textContent: control.label });
      row.append(label);
      const input = document.createElement(control.kind === "menu" ? "select" : "input");
      input.name = control.name;
      input.setAttribute("aria-label", control.label);  // without the value beside it, which the slider says itself
      row.append(input);
      if (control.kind === "menu") {
        input.addEventListener("change", () => this.choose(index, Number(input.value)));
        return { row, input, set: (places, chosen) => {
          input.replaceChildren(...places.map((place) => new Option(control.words[place], place)));
          input.value = chosen;
          input.disabled = places.length < 2;
        } };
      }
      if (control.kind === "check") {
        input.type = "checkbox";
        const place = (on) => control.values.indexOf(on);
        input.addEventListener("change", () => this.choose(index, place(input.checked)));
        return { row, input, set: (places, chosen) => {
          input.checked = chosen === place(true);
          input.disabled = places.length < 2;
        } };
      }
      input.type = "range";
      input.min = 0;
      input.step = 1;
      const output = document.createElement("output");
      output.setAttribute("aria-hidden", "true");
      row.append(output);
      if (control.name === "moment") row.append(this.player(input));
      let possible = [];
      input.addEventListener("input", () => this.choose(index, possible[Number(input.value)]));
      return { row, input, set: (places, chosen) => {
        possible = places;
        input.max = Math.max(places.length - 1, 0);
        input.value = places.indexOf(chosen);
        input.disabled = places.length < 2;
        output.textContent = control.words[chosen];
        input.setAttribute("aria-valuetext", control.words[chosen]);
      } };
    }

    // A button that moves a slider on by itself to its end, or from there once more, until it is pressed again.
    player(input) {
      const button = Object.assign(document.createElement("button"), { type: "button" });
      let timer = 0;
      const set = (running) => {
        clearInterval(timer);
        timer = running ? setInterval(step, 400) : 0;
        button.textContent = running ? "⏸" : "▶";
        button.setAttribute("aria-label", running ? "멈춤" : "재생");
      };
      const turn = (value) => {
        input.value = value;
        input.dispatchEvent(new Event("input"));
      };
      const step = () => (Number(input.value) < Number(input.max) ? turn(Number(input.value) + 1) : set(false));
      button.addEventListener("click", () => {
        if (!timer && input.value === input.max) turn(0);
        set(!timer);
      });
      set(false);
      return button;
    }

    choose(index, place) {
      this.current = this.nearest(index, place);
      this.refresh();
      this.write();
    }

    // The computed setting with this value that is nearest to the present one, the first controls before the others.
    nearest(index, place) {
      const distances = (row) => row.slice(0, this.count).map((value, i) => Math.abs(value - this.current[i]));
      const possible = this.data.settings.filter((row) => row[index] === place);
      return possible.reduce((best, row) => {
        const [a, b] = [distances(row), distances(best)];
        const first = a.findIndex((distance, i) => distance !== b[i]);
        return first >= 0 && a[first] < b[first] ? row : best;
      });
    }

    // What can be chosen of a control: its values in settings that agree in the controls before it.
    refresh() {
      this.inputs.forEach((input, index) => {
        const before = this.current.slice(0, index).join();
        const places = new Set(this.data.settings.filter((row) => row.slice(0, index).join() === before)
          .map((row) => row[index]));
        input.set([...places].sort((a, b) => a - b), this.current[index]);
      });
      const [status, picture] = this.current.slice(this.count);
      this.status.innerHTML = this.data.statuses[status];
      this.picture.innerHTML = this.data.pictures[picture].map((piece) => this.data.pieces[piece]).join("");
    }

    write() {
      const setting = address();
      this.data.controls.forEach((control, index) => setting.set(control.name, control.values[this.current[index]]));
      history.replaceState(null, "", "#" + setting.toString());
    }

    follow(setting) {
      let named = false;
      this.data.controls.forEach((control, index) => {
        const place = control.values.findIndex((value) => String(value) === setting.get(control.name));
        if (setting.has(control.name)) named = true;
        if (place >= 0) this.current = this.nearest(index, place);
      });
      this.refresh();
      if (named) this.place.scrollIntoView({ block: "start" });
    }
  }

  function load(place) {
    const script = document.createElement("script");
    script.src = place.dataset.source;
    document.head.append(script);
  }

  addEventListener("hashchange", () => panels.forEach((panel) => panel.follow(address())));
  addEventListener("DOMContentLoaded", () => {
    const waiting = new IntersectionObserver((entries) => entries.forEach((entry) => {
      if (entry.isIntersecting) {
        waiting.unobserve(entry.target);
        load(entry.target);
      }
    }), { rootMargin: "1200px" });
    const named = [...address().keys()].length > 0;
    document.querySelectorAll(".live").forEach((place) => (named ? load(place) : waiting.observe(place)));
  });
})();
