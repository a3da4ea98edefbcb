"""What a screen reader is told of a panel's controls where ipywidgets tells it nothing, or not what is seen.

A slider's handle has no name, and says the number of an option instead of the option ("2" for 256 tokens); with
ipywidgets 7, which Colab has, it is not even a slider. A button's name begins with the sign of its icon, or is nothing
else, and a button that stays pressed does not say so. A status that is drawn anew is spoken where its place is known to
speak. The page itself sets this right, after each change.

So it does with one key: End takes a slider whose range has grown to its old end only. For this key alone noUiSlider
goes by the range that it began with; that of ipywidgets 7 is another slider, which does not.
"""

from __future__ import annotations

import json
from html import escape

from virtual_gpu.language import tr

_SCRIPT = """
const panel = this.closest('.course-panel'), icons = JSON.parse(this.dataset.icons);
const say = (part, told) => Object.entries(told).forEach(([name, text]) => {
  if (part && text && part.getAttribute(name) !== text) part.setAttribute(name, text);
});
const tell = () => {
  for (const slider of panel.querySelectorAll('.widget-slider')) {
    const name = slider.querySelector('.widget-label')?.textContent, shown = slider.querySelector('.widget-readout');
    const value = shown?.textContent, off = slider.querySelector('[disabled], .ui-slider-disabled') !== null;
    const spoken = { 'aria-label': name, 'aria-valuetext': value, 'aria-disabled': String(off) };
    say(slider.querySelector('.noUi-handle'), spoken);
    say(slider.querySelector('.ui-slider-handle'), { ...spoken, 'role': 'slider', 'aria-valuenow': value });
    if (shown?.isContentEditable) say(shown, { 'role': 'textbox', 'aria-label': name });
  }
  for (const button of panel.querySelectorAll('.jupyter-button')) {
    const icon = button.querySelector('i')?.classList ?? [];
    const name = button.textContent.trim() || icons[[...icon].find((one) => one in icons)];
    const stays = button.matches('.widget-toggle-button') || [...icon].includes('fa-retweet');
    say(button, { 'aria-label': name, 'aria-pressed': stays && String(button.classList.contains('mod-active')) });
  }
  say(panel.querySelector('.course-status'), { 'aria-live': 'polite' });
};
if (panel && !panel.told) {
  panel.told = new MutationObserver(tell);
  panel.told.observe(panel, {
    childList: true, characterData: true, subtree: true, attributeFilter: ['aria-valuetext', 'class', 'disabled'],
  });
  panel.addEventListener('keydown', (event) => {
    const slider = event.key === 'End' && event.target.closest('.noUi-target:not([disabled])')?.noUiSlider;
    if (!slider) return;
    event.preventDefault();
    event.stopPropagation();
    slider.set(slider.options.range.max);
  }, true);
  tell();
}
"""


def spoken() -> str:
    """What a panel shows first: nothing to see, and the script, which nothing would run as a <script>."""
    icons = {
        "fa-play": tr(ko="재생", en="play"),
        "fa-pause": tr(ko="멈춤", en="pause"),
        "fa-stop": tr(ko="처음으로", en="back to the start"),
        "fa-retweet": tr(ko="되풀이", en="repeat"),
    }
    words = escape(json.dumps(icons, ensure_ascii=False))
    return f'<style data-icons="{words}" onload="{" ".join(_SCRIPT.split())}"></style>'
