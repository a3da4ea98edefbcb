"""Chapter 12 in JupyterLab and Chromium: drive the panel, read what it shows."""

import pytest


@pytest.mark.browser
@pytest.mark.slow
def test_chapter_12s_panel_follows(open_notebook):
    notebook = open_notebook("12_two_models")
    notebook.run_cells("grpo_panel(")
    assert notebook.errors() == []
    assert notebook.broken_pictures() == []

    def shown(*words):
        return notebook.wait_until_text(".grpo-status", lambda text: all(word in text for word in words))

    shown("역전파", "RTX 4090", "들어간다")
    notebook.choose(".grpo-engine", "엔진이 늘 있음")
    notebook.press_slider(".grpo-fraction", "End")
    shown("넘친다")
    notebook.choose(".grpo-engine", "모델이 직접")
    notebook.choose(".grpo-reference", "어댑터 끄기")
    shown("어댑터가 없다")
    notebook.choose(".grpo-method", "LoRA")
    shown("롤아웃", "들어간다")
    notebook.choose(".grpo-gpu", "T4")
    shown("T4에서 쓸 수 있는")
    notebook.screenshot("12_panel", ".grpo-panel")
    assert notebook.errors() == [] and notebook.console_errors == []
