"""Chapter 5 in a real browser: it runs, its panels follow their controls, nonsense is answered in one line."""

import re

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_its_panels_follow(open_notebook):
    notebook = open_notebook("05_gradient_checkpointing")
    notebook.run_cells("_panel(")
    assert notebook.errors() == []
    assert notebook.broken_pictures() == []

    # The chain: the picture follows the moment.
    first = notebook.html(".checkpointing-picture")
    assert "<svg" in first and "순간 15/31" in first
    notebook.press_slider(".checkpointing-moment", "ArrowRight")
    notebook.wait_until(lambda: "순간 16/31" in notebook.html(".checkpointing-picture"), "the next moment")
    notebook.press_slider(".checkpointing-moment", "End")
    notebook.wait_until(lambda: "순간 31/31" in notebook.html(".checkpointing-picture"), "the last moment")

    # Another strategy: other counts, and moments that exist.
    notebook.choose(".checkpointing-strategy", "되도록 적게 저장")
    notebook.wait_until_text(".checkpointing-status", lambda text: "최대 4개 저장, 재계산 55번" in text)
    notebook.choose(".checkpointing-strategy", "모두 저장")
    notebook.wait_until_text(".checkpointing-status", lambda text: "최대 13개 저장, 재계산 0번" in text)
    notebook.choose(".checkpointing-strategy", "예산 안에서 재계산 최소")
    notebook.wait_until_text(".checkpointing-status", lambda text: "최대 4개 안에서 재계산 최소" in text)
    assert notebook.find(".checkpointing-count input").input_value() == "4"
    notebook.choose(".checkpointing-strategy", "같은 길이의 구간")

    # No segments, too many, and back: one clear sentence and no picture.
    field = notebook.find(".checkpointing-count input")
    for value, words in (("0", "1 이상"), ("-3", "1 이상"), ("99", "1부터 12까지")):
        field.fill(value)
        field.press("Enter")
        notebook.wait_until_text(".checkpointing-status", lambda text, words=words: words in text)
        assert "<svg" not in notebook.html(".checkpointing-picture")
    field.fill("4")
    field.press("Enter")
    notebook.wait_until_text(".checkpointing-status", lambda text: "구간 4개" in text)
    notebook.press_slider(".checkpointing-nodes", "End")
    notebook.wait_until_text(".checkpointing-status", lambda text: "노드 64개" in text)
    notebook.press_slider(".checkpointing-moment", "End")  # where it ends now, not where it ended at first
    last = re.compile(r"순간 (\d{3})/\1\b")
    notebook.wait_until(lambda: last.search(notebook.html(".checkpointing-picture")), "the last moment of hundreds")
    notebook.screenshot("05_chain_panel", ".checkpointing-panel")

    # The real model: both ways side by side.
    notebook.wait_until_text(
        ".levers-status", lambda text: "없이: 메모리 부족" in text and "체크포인팅: 들어간다" in text
    )
    notebook.choose(".levers-gpu", "H200")
    notebook.wait_until_text(".levers-status", lambda text: "없이: 들어간다" in text)
    notebook.press_slider(".levers-length", "End")
    notebook.wait_until_text(".levers-status", lambda text: "최대 길이는 2048" in text)
    notebook.press_slider(".levers-length", "Home")
    notebook.wait_until_text(".levers-status", lambda text: "추가 연산 +" in text)
    notebook.screenshot("05_memory_panel", ".levers-panel")
    assert notebook.errors() == [] and notebook.console_errors == []
