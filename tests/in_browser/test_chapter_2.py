"""Chapter 2 in JupyterLab and Chromium: drive the panel, read what it shows."""

import pytest


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

    # Silly values: one clear sentence, no picture; and back.
    for css, silly, back, said in (
        ("block", "0", "64", "block_size=0"),
        ("block", "5000", "64", "4,096"),
        ("block", "many", "64", "정수가 아니다"),
        ("block", "", "64", "정수가 아니다"),
        ("bits", "0", "4", "bits=0"),
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
