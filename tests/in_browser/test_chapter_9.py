"""Chapter 9 in JupyterLab and Chromium: drive the panel, read what it shows."""

import pytest

SEARCH_TIMEOUT_S = 300  # half a minute alone; other tests share the machine


@pytest.mark.browser
@pytest.mark.slow
def test_chapter_9s_panel_follows(open_notebook):
    notebook = open_notebook("09_fit_your_gpu")
    notebook.run_cells("planner_panel(")
    assert notebook.errors() == []
    assert notebook.broken_pictures() == []

    def shown(where, *words):
        return notebook.wait_until_text(
            f".planner-{where}", lambda text: all(word in text for word in words), SEARCH_TIMEOUT_S
        )

    def faded(where):
        return notebook.find(f".planner-{where}").evaluate("one => getComputedStyle(one).opacity") == "0.35"

    def write(name, text):
        field = notebook.find(f".planner-{name} input")
        field.fill(text)
        field.press("Enter")

    # It begins with the chapter's plans.
    shown("status", "polyglot-ko-5.8b", "4가지가 들어간다")
    shown("table", "LoRA", "QLoRA", "12.98 GiB", "체크포인팅")
    assert "<svg" in notebook.html(".planner-picture")
    assert "torch" in notebook.html(".planner-files")

    # A cell of the heat map chooses its model and its GPU, by pointer and by keyboard.
    notebook.click(".planner-map summary")
    notebook.find('[data-part="meta-llama/Llama-3.1-8B RTX 3090"]').click()
    shown("status", "바뀌었다")
    model, gpu = notebook.find(".planner-model input"), notebook.find(".planner-gpu select")
    assert (model.input_value(), gpu.input_value()) == ("meta-llama/Llama-3.1-8B", "RTX 3090")
    cell = notebook.find('[data-part="Qwen/Qwen3-0.6B T4"]')
    cell.focus()
    notebook.page.keyboard.press("Enter")
    assert (model.input_value(), gpu.input_value()) == ("Qwen/Qwen3-0.6B", "T4")
    notebook.wait_until(lambda: faded("table") and faded("picture"), "what was found before is faded")
    assert not faded("map")
    notebook.screenshot("09_heat_map", ".planner-map")

    # Another request is searched when asked for, twice clicked or not.
    write("model", "gpt2")
    notebook.choose(".planner-gpu", "L4")
    write("batch", "4")
    shown("status", "바뀌었다")
    notebook.click("button.planner-search")
    notebook.click("button.planner-search")
    shown("status", "gpt2 · L4 · 길이 512 · 배치 4", "들어간다")
    notebook.wait_until(lambda: not faded("table"), "what was found now is not")

    # Silly values: one clear sentence, no table.
    positive = "1 이상의 정수"
    for name, silly, words in (("batch", "-3", positive), ("batch", "넷", positive), ("model", "gpt9", "gpt9")):
        write(name, silly)
        shown("status", "바뀌었다")  # it has arrived, and nothing on the page moves under the pointer any more
        notebook.click("button.planner-search")
        shown("status", words)
        assert "<table" not in notebook.html(".planner-table")
        write("batch", "4")
        write("model", "gpt2")

    # Pairs, ranked by what is left, on a machine whose RAM counts; the files are another trainer's.
    notebook.choose(".planner-objective", "DPO(선호 학습, 배치는 쌍의 수)")
    notebook.choose(".planner-prefer", "메모리가 많이 남는 것")
    notebook.choose(".planner-host", "Colab")
    notebook.click("button.planner-search")
    shown("status", "gpt2 · DPO · L4 · 길이 512 · 배치 4쌍", "들어간다")
    shown("table", "QLoRA", "기준 로그 확률은 미리 계산")
    assert "DPOTrainer" in notebook.html(".planner-files")
    notebook.screenshot("09_dpo", ".planner-panel")
    notebook.choose(".planner-objective", "SFT(지도 미세 조정)")
    notebook.choose(".planner-prefer", "학습을 덜 바꾸는 것")
    notebook.choose(".planner-host", "따지지 않는다")

    # What is seldom changed is folded: what a model has not is told, what it has comes into the files.
    notebook.click(".planner-more [class*=Collapse-header]")
    write("modules", "head")
    shown("status", "바뀌었다")
    notebook.click("button.planner-search")
    shown("status", "통째로 학습할 층", "lm_head", "wte")
    write("modules", "wte")
    write("rank", "64")
    notebook.choose(".planner-split", "파이프라인 병렬 2")
    shown("status", "바뀌었다")
    notebook.click("button.planner-search")
    shown("status", "파이프라인 병렬 2: GPU 1개")
    notebook.choose(".planner-split", "플래너가 고른다")
    notebook.click("button.planner-search")
    shown("table", "LoRA")
    notebook.choose(".planner-choice", "5. LoRA · mixed_bf16 · adamw_fused · 4 × 1")
    shown("files", "lora_config.json")
    notebook.wait_until(lambda: "wte" in notebook.html(".planner-files"), "the module is in the files")
    notebook.screenshot("09_more", ".planner-panel")
    write("modules", "")
    write("rank", "8")

    # Full fine-tuning alone, and with its state in the RAM.
    for method in ("lora", "qlora"):
        notebook.click(f".planner-{method} input")
    notebook.click(".planner-cpu_offload input")
    notebook.click("button.planner-search")
    shown("table", "전체 미세 조정 · CPU 오프로드", "CPU로 보내는 양")
    notebook.screenshot("09_cpu_offload", ".planner-panel")
    notebook.click(".planner-cpu_offload input")

    # Nothing fits: what is missing, and what would fit.
    write("model", "Llama-3.1-8B")
    notebook.choose(".planner-gpu", "RTX 4090")
    notebook.click("button.planner-search")
    shown("status", "들어가는 것이 없다", "모자란다")
    shown("table", "하나만 바꾼다면", "방법을 더 허용한다", "학습 상태를 CPU에 둔다")
    notebook.screenshot("09_panel", ".planner-panel")
    assert notebook.errors() == [] and notebook.console_errors == []
