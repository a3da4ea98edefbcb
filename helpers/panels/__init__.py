"""The interactive panels, one module each, and what they share.

No `Output` widget, no print, no thread: what a panel shows is the value of an `HTML` widget, which works the same in
JupyterLab and in Colab. A panel has a fixed `repr`, so that notebooks can be compared.
"""

from __future__ import annotations

from html import escape
from typing import Any

WIDE = {"width": "340px"}
STYLE = {"description_width": "110px"}


def status_line(text: str) -> str:
    """A line of a panel's status, as HTML."""
    return f'<p role="status" style="margin:4px 0"><b>{escape(text)}</b></p>'


def error_line(error: BaseException) -> str:
    """An error in place of a result, as HTML."""
    return f'<p role="alert" style="margin:4px 0;color:#d55e00"><b>{escape(str(error))}</b></p>'


def memory_panel() -> Any:
    """Chapter 3: model, GPU, batch, length, precision, optimizer, checkpointing → memory, predicted or run."""
    from .memory import MemoryPanel

    return MemoryPanel()


def quantization_panel(weights: Any = None) -> Any:
    """Chapter 2: distribution, method, bits, grouping → histogram with the codes on it. `weights`: a layer's."""
    from .quantization import QuantizationPanel

    return QuantizationPanel(weights)


def lora_panel() -> Any:
    """Chapter 7: model, GPU, method, rank, target layers, batch, length → what is trained, and the memory by kind."""
    from .lora import LoraPanel

    return LoraPanel()


def number_panel() -> Any:
    """Chapter 1: a number, typed, dragged or a preset → its bits in every format, what is stored, the error."""
    from .number_formats import NumberPanel

    return NumberPanel()


def accumulation_panel() -> Any:
    """Chapter 4: model, GPU, optimizer, length, batch, micro-batch → memory of every split, passes and steps."""
    from .accumulation import AccumulationPanel

    return AccumulationPanel()


def checkpointing_panel() -> Any:
    """Chapter 5: a chain's depth, strategy, segments, moment → who is alive, memory curve, recomputations."""
    from .checkpointing import CheckpointingPanel

    return CheckpointingPanel()


def checkpointing_memory_panel() -> Any:
    """Chapter 5: model, GPU, batch, length → memory without and with checkpointing, and the extra FLOPs."""
    from .checkpointing import CheckpointingMemoryPanel

    return CheckpointingMemoryPanel()


def zero_panel() -> Any:
    """Chapter 6: model, GPUs, ZeRO stage, tensor parallelism, batch, length → one GPU's bytes and messages."""
    from .zero import ZeroPanel

    return ZeroPanel()


def planner_panel() -> Any:
    """Chapter 8: model, GPUs, length, batch, methods → ranked plans, why each loser loses, the files of a plan."""
    from .planner import PlannerPanel

    return PlannerPanel()
