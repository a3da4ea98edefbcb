"""Chapter 1 in JupyterLab and Chromium: drive the panel."""

import pytest

FOCUSED = "() => document.activeElement.dataset.part"


@pytest.mark.browser
def test_chapter_1s_panel_follows(open_notebook):
    notebook = open_notebook("01_data_types")
    notebook.run_cells("number_panel(")
    assert notebook.errors() == [] and notebook.broken_pictures() == []
    assert "0.1" in notebook.text(".number-status")

    notebook.click(".number-preset-4")  # 65520: fp16 gives up
    notebook.wait_until_text(".number-status", lambda text: "65520" in text)
    assert "범위를 벗어났다" in notebook.html(".number-picture")
    notebook.click(".number-preset-3")  # 65504: the largest that fp16 holds
    notebook.wait_until_text(".number-status", lambda text: "65504" in text)

    field = notebook.page.locator(".number-text input")
    for text, expected in (("2049", "2049.0"), ("1/3", "0.333"), ("-0.0", "-0.0"), ("nan", "nan")):
        field.fill(text)
        field.press("Enter")
        notebook.wait_until_text(".number-status", lambda shown, expected=expected: expected in shown)
        assert "<svg" in notebook.html(".number-picture")
    below = notebook.page.locator(".number-picture").bounding_box()["height"]
    for text in ("abc", "1/0", ""):
        field.fill(text)
        field.press("Enter")
        notebook.wait_until_text(".number-status", lambda shown: "숫자로 읽을 수 없다" in shown)
        assert "<svg" not in notebook.html(".number-picture")
        assert notebook.page.locator(".number-picture").bounding_box()["height"] == below
    notebook.press_slider(".number-slider", "ArrowRight", times=3)
    # The third press's own answer: one still on its way would undo what is typed next.
    notebook.wait_until_text(".number-status", lambda text: "125893" in text)
    notebook.wait_until(lambda: "<svg" in notebook.html(".number-picture"), "the slider sets a number")

    # A bit is pressed, with the pointer and with the keyboard, and keeps the focus.
    field.fill("1")
    notebook.wait_until_text(".number-status", lambda text: "1.0" in text)
    notebook.page.locator('[data-part="fp16-0"]').click()
    notebook.wait_until_text(".number-status", lambda text: "-1.0" in text)
    assert field.input_value() == "-1.0"
    notebook.wait_until(lambda: notebook.page.evaluate(FOCUSED) == "fp16-0", "the bit has the focus")
    notebook.page.keyboard.press("ArrowRight")
    notebook.page.keyboard.press("Enter")  # the exponent's first bit: 01111 becomes 11111
    notebook.wait_until_text(".number-status", lambda text: "-inf" in text)
    notebook.wait_until(lambda: notebook.page.evaluate(FOCUSED) == "fp16-1", "the next bit has the focus")
    notebook.page.keyboard.press(" ")
    notebook.wait_until_text(".number-status", lambda text: "-1.0" in text)
    notebook.page.keyboard.press("Tab")
    assert notebook.page.evaluate(FOCUSED) == "bf16-0"
    notebook.screenshot("01_panel", ".number-panel")
    assert notebook.errors() == [] and notebook.console_errors == []
