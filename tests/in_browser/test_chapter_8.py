"""Chapter 8 in JupyterLab and Chromium: drive the panel, read what it shows."""

import pytest


@pytest.mark.browser
@pytest.mark.slow
def test_chapter_8s_panel_follows(open_notebook):
    notebook = open_notebook("08_lora")
    notebook.run_cells("lora_panel(")
    assert notebook.errors() == []
    assert notebook.broken_pictures() == []

    def shown(*words):
        return notebook.wait_until_text(".lora-status", lambda text: all(word in text for word in words))

    def write_rank(text):
        field = notebook.find(".lora-rank input")
        field.fill(text)
        field.press("Enter")

    # It begins with LoRA at batch 16; QLoRA needs more, and less with checkpointing.
    shown("1,572,864 / 1,333,383,168 (0.118%)", "최대 8.89 GiB")
    notebook.choose(".lora-method", "QLoRA")
    shown("0.118%", "최대 11.52 GiB")
    notebook.click(".lora-checkpointing input")
    shown("최대 3.23 GiB")
    assert "<svg" in notebook.html(".lora-picture") and "qlora" in notebook.html(".lora-picture")

    # Rank and target layers change what is trained.
    notebook.choose(".lora-targets", "모든 선형층")
    shown("6,291,456 / 1,338,101,760 (0.470%)")
    write_rank("64")
    shown("50,331,648", "(3.642%)")

    # Silly ranks: one clear sentence, no picture; and back.
    for silly, words in (("0", "rank 0:"), ("-8", "rank -8:"), ("팔", "1 이상의 정수"), ("9999", "2048을")):
        write_rank(silly)
        shown(words)
        assert "<svg" not in notebook.html(".lora-picture")
    write_rank("8")
    shown("6,291,456")

    # Full fine-tuning has no rank; another GPU holds it.
    notebook.choose(".lora-method", "전체 미세 조정")
    shown("1,331,810,304 / 1,331,810,304 (100.000%)")
    assert notebook.find(".lora-rank input").is_disabled()
    assert notebook.find(".lora-method select").input_value() == "전체 미세 조정"
    notebook.press_slider(".lora-batch", "End")
    notebook.wait_until(lambda: "배치 64" in notebook.html(".lora-picture"), "the picture follows the slider")
    notebook.choose(".lora-gpu", "H200")
    shown("들어간다")
    notebook.screenshot("08_panel", ".lora-panel")
    assert notebook.errors() == [] and notebook.console_errors == []
