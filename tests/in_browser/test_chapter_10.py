"""Chapter 10 in JupyterLab and Chromium: paste an error into the panel, read the diagnosis."""

import pytest

PASTED = (
    'Traceback (most recent call last):\n  File "/home/me/<img src=x>.py", line 7, in main\n    optimizer.step()\n'
    '  File "/env/lib/python3.11/site-packages/torch/optim/adamw.py", line 9, in _init_group\n    x\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 144.00 MiB. GPU 0 has a total capacity of 23.69 GiB "
    "of which 77.06 MiB is free. Including non-PyTorch memory, this process has 23.61 GiB memory in use. Of the "
    "allocated memory 23.01 GiB is allocated by PyTorch, and 38.50 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.browser
@pytest.mark.slow
def test_chapter_10s_panel_reads_a_pasted_error(open_notebook):
    notebook = open_notebook("10_oom_clinic")
    notebook.run_cells("doctor_panel(")
    assert notebook.errors() == []

    def shown(where, *words):
        return notebook.wait_until_text(f".doctor-{where}", lambda text: all(word in text for word in words))

    notebook.click("button.doctor-ask")
    shown("status", "비어 있다")
    field = notebook.find(".doctor-text textarea")
    field.fill(PASTED)
    field.press("Tab")
    notebook.click("button.doctor-ask")
    shown("picture", "첫 스텝에서 옵티마이저 상태를", "확실", "144.00 MiB", "adamw_bnb_8bit", "virtual-gpu run")
    shown("picture", "<img src=x>.py:7")  # as text
    assert "<img" not in notebook.html(".doctor-picture")
    notebook.screenshot("10_panel", ".doctor-panel")

    field.fill("hello")
    field.press("Tab")
    shown("status", "진단")
    notebook.click("button.doctor-ask")
    shown("picture", "찾지 못했다")
    notebook.choose(".doctor-example", "프로그램 10")
    shown("picture", "스스로 건 한도")
    assert notebook.errors() == [] and notebook.console_errors == []
