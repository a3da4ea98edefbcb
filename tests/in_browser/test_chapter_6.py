"""Chapter 6's panel in JupyterLab and Chromium: every control is moved, what it shows follows."""

import pytest


@pytest.mark.browser
@pytest.mark.slow
def test_the_zero_panel_follows(open_notebook):
    notebook = open_notebook("06_distributed_zero")
    notebook.run_cells("zero_panel(")
    assert notebook.errors() == []
    assert notebook.broken_pictures() == []

    # Fewer GPUs, then the picture says so; one GPU does not hold it.
    first = notebook.html(".zero-picture")
    assert "<svg" in first and "H100 × 64" in first
    notebook.press_slider(".zero-ranks", "ArrowLeft")
    notebook.wait_until(lambda: "H100 × 32" in notebook.html(".zero-picture"), "the picture follows the slider")
    notebook.press_slider(".zero-ranks", "Home")
    notebook.wait_until_text(".zero-status", lambda text: "메모리 부족" in text)

    # More tensor parallelism than GPUs: one clear sentence, no picture; and back.
    notebook.press_slider(".zero-tensor-parallel", "ArrowRight")
    notebook.wait_until_text(".zero-status", lambda text: "GPU 1개를 텐서 병렬 2개씩" in text)
    assert "<svg" not in notebook.html(".zero-picture")
    notebook.press_slider(".zero-ranks", "End")
    notebook.wait_until_text(".zero-status", lambda text: "들어간다" in text)
    assert "텐서 병렬 2" in notebook.html(".zero-picture")
    notebook.press_slider(".zero-tensor-parallel", "End")
    notebook.wait_until_text(".zero-status", lambda text: "똑같이 나눌 수 없다" in text)

    def back_to_one() -> bool:  # pressed again: the kernel's echo of the value before may still be on its way
        notebook.press_slider(".zero-tensor-parallel", "Home")
        return "들어간다" in notebook.text(".zero-status")

    notebook.wait_until(back_to_one, "one GPU a group fits again")

    # The stage, another model, another GPU.
    notebook.choose(".zero-stage", "0 · DDP")
    notebook.wait_until_text(".zero-status", lambda text: "메모리 부족" in text)
    notebook.choose(".zero-stage", "3 · FSDP2")
    notebook.choose(".zero-model", "meta-llama/Llama-3.2-1B")
    notebook.choose(".zero-gpu", "T4")
    notebook.wait_until(lambda: "T4 × 16,384" in notebook.html(".zero-picture"), "the picture shows the T4")

    # Without checkpointing and with the longest batch it does not fit.
    notebook.press_slider(".zero-batch", "End")
    notebook.wait_until_text(".zero-status", lambda text: "메모리 부족" in text)
    notebook.screenshot("06_zero_panel", ".zero-panel")
    assert notebook.errors() == [] and notebook.console_errors == []
