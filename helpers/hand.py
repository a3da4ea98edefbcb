"""Pictures that a hand can act on: a click, a key or a drag on a part of a picture writes into the panel's controls.

The parts say what is written where; the kernel answers as to any other move. The script stands in the picture's own
attributes, since nothing runs a <script> that an HTML widget shows. Without it the picture says what it says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from virtual_gpu.drawing import svg

# `place` stays while the picture in it is drawn anew: it holds the pointer, and gives the part that had the focus the
# focus again, where nothing else has it by then.
_SCRIPT = """
const part = event.target.closest('[data-part]'), place = this.parentElement, drawn = this.viewBox.baseVal;
if (!part) return;
const { axis, to, value } = part.dataset;
const keep = (one) => {
  place.kept = one.dataset.part;
  if (place.keeper) return;
  place.keeper = new MutationObserver(() => {
    if (document.activeElement !== document.body) return;
    const parts = [...place.querySelectorAll('[data-part]')];
    parts.find((one) => one.dataset.part === place.kept)?.focus({ preventScroll: true });
  });
  place.keeper.observe(place, { childList: true });
};
const write = (values) => to.split(' ').forEach((name, i) => {
  const field = place.closest('.course-panel').querySelector(`.${name} :is(input, select)`);
  field.value = values[i];
  for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, { bubbles: true }));
});
const turn = (number) => {
  const [, , low, high, step] = JSON.parse(axis);
  const turned = Math.round(Math.min(Math.max(number, low), high) / step) * step;
  write([String(Number(turned.toFixed(6)))]);
};
keep(part);
if (event.type === 'keydown') {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (axis && step) turn(Number(value) + step * JSON.parse(axis)[4]);
  else if (step) {
    const row = [...part.parentElement.querySelectorAll('[data-part]')], next = row[row.indexOf(part) + step];
    if (next) {
      keep(next);
      next.focus();
    }
  } else if (!axis && (event.key === 'Enter' || event.key === ' ')) write(JSON.parse(value));
  else return;
  event.preventDefault();
} else if (event.type === 'touchstart' && axis) event.preventDefault();
else if (event.type === 'pointerdown' && axis) {
  const move = (moved) => {
    const [left, width, low, high] = JSON.parse(axis), box = place.querySelector('svg')?.getBoundingClientRect();
    if (box) turn(low + ((moved.clientX - box.left) * drawn.width / box.width - left) / width * (high - low));
  };
  place.setPointerCapture(event.pointerId);
  place.addEventListener('pointermove', move);
  for (const end of ['pointerup', 'pointercancel'])
    place.addEventListener(end, () => place.removeEventListener('pointermove', move), { once: true });
} else if (event.type === 'click' && !axis) write(JSON.parse(value));
"""


def answer_to_hands(drawing: svg.Drawing) -> None:
    """Give the picture the script, and let its parts be reached."""
    drawing.role = "group"
    again = "this.onclick(event)"
    drawing.attributes |= {
        "onclick": " ".join(_SCRIPT.split()),
        "onkeydown": again,
        "onpointerdown": again,
        "ontouchstart": again,  # a finger on a mark drags it, and does not scroll the page
        "data-lm-suppress-shortcuts": "true",  # JupyterLab would take the arrows for its cells
    }


def pressable(name: str, to: Sequence[str], values: Sequence[str], first: bool = True) -> dict[str, object]:
    """Attributes of a part that writes `values` into the controls of the classes `to` when it is pressed.

    Parts in one element are a row: Tab comes to the one that is `first`, arrows go on from there.
    """
    return {
        "data_part": name,
        "data_to": " ".join(to),
        "data_value": json.dumps(list(values), ensure_ascii=False),
        "role": "button",
        "tabindex": 0 if first else -1,
        "style": "cursor:pointer",
    }


def draggable(name: str, to: str, value: float, axis: tuple[float, float, float, float, float]) -> dict[str, object]:
    """Attributes of a part that a drag or the arrows move along an axis, writing the number into the control `to`.

    axis: its left end and its width in the picture's pixels, the numbers at its ends, and the step.
    """
    _, _, low, high, _ = axis
    return {
        "data_part": name,
        "data_to": to,
        "data_value": f"{value:g}",
        "data_axis": json.dumps(axis),
        "role": "slider",
        "aria_valuemin": f"{low:g}",
        "aria_valuemax": f"{high:g}",
        "aria_valuenow": f"{value:g}",
        "tabindex": 0,
        "style": "cursor:ew-resize",
    }
