"""Names of things in the reader's language, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ..language import tr


def category_label(category: str) -> str:
    """The category in the reader's language."""
    return {
        "parameters": tr(ko="파라미터", en="parameters"),
        "gradients": tr(ko="그레이디언트", en="gradients"),
        "optimizer": tr(ko="옵티마이저 상태", en="optimizer state"),
        "activations": tr(ko="순전파 상태와 임시 텐서", en="activations and temporaries"),
        "other": tr(ko="버퍼·배치·작업 공간", en="buffers, batch, workspaces"),
    }[category]


def phase_label(phase: str | None) -> str:
    """The phase in the reader's language."""
    return {
        "forward": tr(ko="순전파", en="forward"),
        "backward": tr(ko="역전파", en="backward"),
        "step": tr(ko="스텝", en="step"),
        "generation": tr(ko="롤아웃", en="generation"),
        "scoring": tr(ko="로그 확률 계산", en="scoring"),
        None: "-",
    }[phase]


def setting_label(name: str) -> str:
    """The name of an experiment's setting in the reader's language."""
    return {
        "model_id": tr(ko="모델", en="model"),
        "batch_size": tr(ko="배치 크기", en="batch size"),
        "gradient_accumulation_steps": tr(ko="누적", en="accumulation"),
        "gradient_checkpointing": tr(ko="체크포인팅", en="checkpointing"),
        "sequence_length": tr(ko="길이", en="length"),
        "precision": tr(ko="정밀도", en="precision"),
        "optimizer": tr(ko="옵티마이저", en="optimizer"),
        "attention": tr(ko="어텐션", en="attention"),
        "peft": "peft",
        "lora_rank": "rank",
        "lora_targets": tr(ko="대상 층", en="target layers"),
        "gpu": "GPU",
    }.get(name, name)


def setting_value(value: Any) -> str:
    """A setting's value in the reader's language: a switch is on or off, and None is none."""
    if value is None:
        return tr(ko="없음", en="none")
    return tr(ko="켬" if value else "끔", en="on" if value else "off") if isinstance(value, bool) else str(value)


def varies(name: str, reports: Sequence[Any]) -> bool:
    """Whether a setting tells these reports apart, or there is but one report."""
    return len({str(report.setting[name]) for report in reports if name in report.setting}) > 1 or len(reports) == 1


def html_table(heads: list[str], rows: list[list[str]]) -> str:
    """A plain HTML table; every cell is escaped."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def kind_label(kind: str) -> str:
    """A kind of memory in the reader's language."""
    return {
        "parameters": tr(ko="파라미터", en="parameters"),
        "gathered": tr(ko="모아 둔 파라미터", en="gathered parameters"),
        "buckets": tr(ko="DDP 버킷", en="DDP buckets"),
        "gradients": tr(ko="그레이디언트", en="gradients"),
        "master": tr(ko="fp32 가중치", en="fp32 weights"),
        "momentum": "momentum",
        "variance": "variance",
        "optimizer": tr(ko="옵티마이저 상태", en="optimizer state"),
        "activations": tr(ko="순전파 상태와 임시 텐서", en="activations and temporaries"),
        "communication": tr(ko="통신 버퍼", en="communication buffers"),
    }[kind]
