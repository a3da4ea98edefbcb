"""What a report calls things, in the reader's language. JSON has the English names, whatever the language is."""

from __future__ import annotations

from ..drawing.labels import category_label, phase_label
from ..language import tr


def phase(name: str) -> str:
    """A phase of the program."""
    return {
        "loading": tr(ko="불러오기", en="loading"),
        "evaluation": tr(ko="평가와 생성", en="evaluation"),
        "saving": tr(ko="저장", en="saving"),
        "between": tr(ko="그 사이", en="between"),
    }.get(name) or phase_label(name)


def category(name: str) -> str:
    """What memory is for."""
    return {
        "saved for backward": tr(ko="역전파를 위해 저장한 텐서", en="saved for backward"),
        "temporaries": tr(ko="임시 텐서", en="temporaries"),
        "workspaces": tr(ko="작업 공간", en="workspaces"),
        "inputs": tr(ko="입력", en="inputs"),
        "buffers": tr(ko="버퍼", en="buffers"),
        "loading": tr(ko="파일에서 읽은 텐서", en="read from files"),
        "copies": tr(ko="GPU에서 온 복사본", en="copies from the GPU"),
        "pinned": tr(ko="고정 메모리(pinned)", en="pinned"),
        "workers": tr(ko="DataLoader가 미리 만든 배치", en="batches that loaders have ready"),
        "other": tr(ko="기타", en="other"),
        "engine": tr(ko="vLLM 엔진", en="vLLM engine"),
    }.get(name) or category_label(name)


def module(name: str) -> str:
    """A module, or "(phase)" for what was allocated outside of all."""
    if not name.startswith("("):
        return name
    where = phase(name[1:-1])
    return tr(ko=f"(모듈 밖, {where})", en=f"(outside modules, {where})")


def question(name: str) -> str:
    """How a program asked for a value."""
    return {
        "item": "item",
        "copy to the CPU": tr(ko="CPU로 복사", en="copy to the CPU"),
        "index": tr(ko="마스크 인덱싱", en="indexing by a mask"),
        "print": tr(ko="출력", en="print"),
    }.get(name, name)
