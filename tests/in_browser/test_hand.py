"""Pictures that a hand can act on, in a real browser without a kernel: pointer, touch, keyboard, and without a script.

The page draws the picture anew at each change, as a panel does.
"""

import pytest

from helpers.hand import answer_to_hands, draggable, pressable
from virtual_gpu.drawing import svg

pytestmark = pytest.mark.browser

PAGE = """<!doctype html><meta charset="utf-8"><body style="margin:0"><div class="course-panel">
<div class="toy-number"><input></div><div class="toy-card"><select><option>T4<option>L4</select></div>
<div id="place">PICTURE</div></div>
<script>
const place = document.getElementById("place"), still = place.innerHTML, kinds = window.kinds = [];
const panel = document.querySelector(".course-panel");
panel.addEventListener("input", () => setTimeout(() => { place.innerHTML = still; }, 5));
for (const kind of ["input", "change"]) panel.addEventListener(kind, () => kinds.push(kind));
</script>"""
FOCUSED = "() => document.activeElement.dataset.part"
NEW = "() => { window.before = document.querySelector('#place svg'); }"
DRAWN = "() => document.querySelector('#place svg') !== window.before"


def picture():
    drawing = svg.Drawing(400, 100, "a toy")
    drawing.open("g", role="group")
    for name, values in (("one", ["1", "T4"]), ("two", ["<&'\"2", "L4"])):
        drawing.open("g", **pressable(name, ("toy-number", "toy-card"), values, first=name == "one"), aria_label=name)
        drawing.rect(20 if name == "one" else 60, 10, 30, 30, svg.BLUE)
        drawing.close("g")
    drawing.close("g")
    drawing.open("g", **draggable("mark", "toy-number", 0.0, (100, 200, -10.0, 10.0, 0.5)), aria_label="mark")
    drawing.circle(200, 70, 12, svg.RED)
    drawing.close("g")
    answer_to_hands(drawing)
    return drawing.svg()


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 500, "height": 300}, has_touch=True)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_content(PAGE.replace("PICTURE", picture()))
    yield page
    assert errors == []
    context.close()


def written(page):
    return page.locator(".toy-number input").input_value(), page.locator(".toy-card select").input_value()


def middle_of(page, css):
    box = page.locator(css).bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_a_press_writes_into_every_control_and_the_part_keeps_the_focus(page):
    page.evaluate(NEW)
    page.locator('[data-part="two"]').click()
    assert written(page) == ("<&'\"2", "L4") and page.evaluate("() => window.kinds") == ["input", "change"] * 2
    page.wait_for_function(DRAWN)
    page.wait_for_timeout(50)  # each control has the picture drawn
    assert page.evaluate(FOCUSED) == "two"
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(FOCUSED) == "one" and written(page)[1] == "L4"
    page.keyboard.press("ArrowLeft")  # the row ends here
    page.keyboard.press("Enter")
    assert written(page) == ("1", "T4")
    page.mouse.click(390, 290)  # beside it
    assert written(page) == ("1", "T4")


def test_tab_comes_to_a_row_once(page):
    page.locator(".toy-card select").focus()
    stops = []
    for _ in range(2):
        page.keyboard.press("Tab")
        stops.append(page.evaluate(FOCUSED))
    assert stops == ["one", "mark"]


def test_a_drag_follows_the_pointer_over_pictures_drawn_anew_to_the_axiss_end(page):
    left, top = (page.locator("#place svg").bounding_box()[side] for side in ("x", "y"))
    page.mouse.move(*middle_of(page, '[data-part="mark"]'))
    page.mouse.down()
    for x, number in ((250, "5"), (256, "5.5"), (150, "-5"), (60, "-10"), (390, "10"), (203, "0.5"), (202, "0")):
        page.evaluate(NEW)
        page.mouse.move(left + x, top + 30)
        assert written(page)[0] == number
        page.wait_for_function(DRAWN)
    page.mouse.up()
    page.mouse.move(left + 250, top + 30)
    assert written(page)[0] == "0"
    assert page.evaluate(FOCUSED) == "mark"


def test_the_arrows_move_a_mark_by_a_step(page):
    page.locator('[data-part="mark"]').focus()
    page.keyboard.press("ArrowRight")
    assert written(page)[0] == "0.5"
    page.keyboard.press("ArrowLeft")
    assert written(page)[0] == "-0.5"  # the toy's mark stays at 0
    page.keyboard.press("Enter")
    assert written(page)[0] == "-0.5"


def test_a_finger_drags_too(page):
    touch = page.context.new_cdp_session(page)
    x, y = middle_of(page, '[data-part="mark"]')
    touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    for step in (20, 50):
        page.evaluate(NEW)
        touch.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [{"x": x + step, "y": y + 40}]})
        page.wait_for_function(DRAWN)
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert written(page)[0] == "5"


def test_without_a_script_it_is_a_picture(browser):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.set_content(PAGE.replace("PICTURE", picture()))
    page.locator('[data-part="one"]').click()
    assert page.locator("#place svg circle").is_visible() and page.locator(".toy-number input").input_value() == ""
    context.close()
