"""Chapter 2 in JupyterLab and Chromium: drive the panel, read what it shows."""

import pytest

FOCUSED = "() => document.activeElement.dataset.part"


def fill(notebook, css, text):
    field = notebook.find(f"{css} input")
    field.fill(text)
    field.press("Enter")


@pytest.mark.browser
@pytest.mark.slow
def test_chapter_2s_panel_follows(open_notebook):
    notebook = open_notebook("02_quantization")
    notebook.run_cells("quantization_panel(")
    assert notebook.errors() == []
    assert notebook.broken_pictures() == []

    def status(*parts):
        notebook.wait_until_text(".quantization-status", lambda text: all(part in text for part in parts))

    status("절댓값 최대 · 8비트 · 텐서 전체", "낭비된 코드 44/256")
    assert "<svg" in notebook.html(".quantization-picture")

    # Another method, other bits.
    notebook.choose(".quantization-method", "분위수")
    fill(notebook, ".quantization-bits", "4")
    status("분위수 · 4비트", "낭비된 코드 0/16")
    assert "분위수" in notebook.html(".quantization-picture")

    # Outliers, and blocks of 64 and of 16.
    notebook.choose(".quantization-method", "절댓값 최대")
    notebook.choose(".quantization-distribution", "이상치 네 개")
    status("낭비된 코드 9/16", "4.01비트")
    notebook.choose(".quantization-grouping", "블록")
    status("블록 64", "4.50비트")
    notebook.screenshot("02_panel", ".quantization-panel")
    fill(notebook, ".quantization-block", "16")
    status("블록 16", "6.00비트")

    # An outlier is dragged, to where the pointer is; the arrows move it on, and it keeps the focus.
    notebook.choose(".quantization-grouping", "텐서 전체")
    notebook.choose(".quantization-distribution", "이상치 하나(끌어 보기)")
    status("텐서 전체", "낭비된 코드 12/16")
    page, field = notebook.page, notebook.find(".quantization-outlier input")
    mark = notebook.find('[data-part="outlier"] circle')
    mark.scroll_into_view_if_needed()
    box, picture = mark.bounding_box(), notebook.find(".quantization-picture svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    for share in (0.8, 0.7, 24 / 760 + 712 / 760 * 36 / 64):  # the last one is 4 on an axis of -32 to 32
        page.mouse.move(picture["x"] + share * picture["width"], picture["y"] + 60, steps=4)
    status("낭비된 코드 2/16")
    page.mouse.up()
    assert field.input_value() == "4"
    page.mouse.move(picture["x"], picture["y"])  # nobody holds it any more
    notebook.wait_until(lambda: page.evaluate(FOCUSED) == "outlier", "the mark has the focus")
    page.keyboard.press("ArrowLeft")
    notebook.wait_until(lambda: "이상치 3.5" in notebook.html(".quantization-picture"), "half a step to the left")
    assert field.input_value() == "3.5" and page.evaluate(FOCUSED) == "outlier"
    notebook.screenshot("02_outlier", ".quantization-panel")
    fill(notebook, ".quantization-outlier", "1e39")
    status("'1e39'", "fp32")
    notebook.choose(".quantization-distribution", "이상치 네 개")
    notebook.choose(".quantization-grouping", "블록")
    status("4비트 · 블록 16")
    assert field.is_disabled()

    # Silly values: one clear sentence, no picture; and back.
    for css, silly, back, said in (
        ("block", "0", "64", "블록 크기 0:"),
        ("block", "5000", "64", "4,096"),
        ("block", "many", "64", "정수가 아니다"),
        ("block", "", "64", "정수가 아니다"),
        ("bits", "0", "4", "비트 0:"),
        ("bits", "1", "4", "2부터 8"),
        ("bits", "9", "4", "2부터 8"),
        ("bits", "4.5", "4", "정수가 아니다"),
    ):
        fill(notebook, f".quantization-{css}", silly)
        status(said)
        assert "<svg" not in notebook.html(".quantization-picture")
        fill(notebook, f".quantization-{css}", back)
        status("4비트 · 블록 64")

    # NF4 has 4 bits whatever the field says; a layer's weights; channels.
    notebook.choose(".quantization-method", "NF4")
    status("NF4 · 4비트 · 블록 64")
    assert notebook.find(".quantization-bits input").is_disabled()
    # NVFP4 prescribes its blocks too.
    notebook.choose(".quantization-method", "NVFP4")
    status("NVFP4 · 4비트 · 블록 16", "4.5")
    assert notebook.find(".quantization-block input").is_disabled()
    notebook.choose(".quantization-method", "NF4")
    notebook.choose(".quantization-distribution", "실제 층의 가중치")
    notebook.choose(".quantization-grouping", "채널(행)마다")
    status("NF4", "채널")
    notebook.choose(".quantization-method", "자료형의 범위")
    status("낭비된 코드 15/16")
    notebook.screenshot("02_panel_type_range", ".quantization-panel")
    assert notebook.errors() == [] and notebook.console_errors == []
