"""Chapter 4 in JupyterLab and Chromium: every control of its panel is moved, nonsense is answered."""

import pytest


@pytest.mark.browser
@pytest.mark.slow
def test_chapter_4s_panel_follows(open_notebook):
    notebook = open_notebook("04_gradient_accumulation")
    notebook.run_cells("accumulation_panel(")
    assert notebook.errors() == []
    assert notebook.broken_pictures() == []

    def shown(*words):
        return notebook.wait_until_text(".accumulation-status", lambda text: all(word in text for word in words))

    # Batch 16 as 4 × 4; then micro-batches of 8 and of 16.
    shown("4 × 4", "12.42 GiB", "순전파와 역전파 256번", "옵티마이저 스텝 64번")
    assert "<svg" in notebook.html(".accumulation-picture")
    notebook.press_slider(".accumulation-micro", "ArrowRight")
    shown("8 × 2", "13.84 GiB")
    notebook.press_slider(".accumulation-micro", "End")
    shown("16 × 1", "메모리 부족", "15.25 GiB")
    notebook.press_slider(".accumulation-micro", "Home")
    shown("1 × 16", "1,024번")

    # Another optimizer, another batch: the micro-batch stays where it can.
    notebook.choose(".accumulation-optimizer", "adamw_fused")
    shown("1 × 16", "들어간다")
    notebook.press_slider(".accumulation-micro", "End")
    notebook.press_slider(".accumulation-batch", "Home")
    shown("1 × 1", "옵티마이저 스텝 1,024번")
    notebook.press_slider(".accumulation-batch", "ArrowRight", times=3)
    notebook.wait_until(lambda: "배치 크기 8, 누적 1" in notebook.html(".accumulation-picture"), "the splits of 8")

    # A length that the model does not have: one sentence, no picture; and back. Another GPU, another model.
    notebook.press_slider(".accumulation-length", "End")
    shown("8192")
    assert "<svg" not in notebook.html(".accumulation-picture")
    notebook.press_slider(".accumulation-length", "Home")
    shown("들어간다")
    notebook.choose(".accumulation-gpu", "H200")
    notebook.wait_until(lambda: "H200" in notebook.html(".accumulation-picture"), "the picture names the GPU")
    notebook.choose(".accumulation-model", "openai-community/gpt2-large")
    notebook.wait_until(lambda: "gpt2-large" in notebook.html(".accumulation-picture"), "the picture names the model")
    notebook.screenshot("04_panel", ".accumulation-panel")
    assert notebook.errors() == [] and notebook.console_errors == []
