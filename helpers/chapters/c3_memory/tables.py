"""Numbers under heads: what chapter 3's cells show where a row of bare numbers would not say what they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from virtual_gpu.drawing.labels import category_label
from virtual_gpu.language import tr
from virtual_gpu.report import MemoryReport
from virtual_gpu.trace.timeline import CATEGORIES
from virtual_gpu.units import human_bytes

from ...rows import LeftRows


def table(names: str, rows: Iterable[Sequence[object]]) -> LeftRows:
    """LeftRows under the heads that the words of `names` stand for; floats with one decimal."""
    words = _heads()
    cells = [[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    return LeftRows([words[name] for name in names.split()], cells)


def _heads() -> dict[str, str]:
    return {
        "after_forward": tr(ko="첫 순전파 뒤의 순전파 상태", en="activations after the first forward"),
        "allocated": tr(ko="텐서의 최대", en="tensors, peak"),
        "batch": tr(ko="배치", en="batch"),
        "call": tr(ko="부르는 방법", en="call"),
        "dtype": tr(ko="자료형", en="dtype"),
        "eager": "eager",
        "expandable": tr(ko="설정을 켰을 때의 예약", en="reserved, expandable"),
        "gradients": category_label("gradients"),
        "formula": tr(ko="식", en="formula"),
        "gpu": "GPU",
        "kept": tr(ko="역전파까지 남는 것", en="kept for backward"),
        "kernel": tr(ko="커널", en="kernel"),
        "length": tr(ko="길이", en="length"),
        "meaning": tr(ko="뜻과 할 일", en="meaning"),
        "module": tr(ko="모듈", en="module"),
        "name": "",
        "optimizer": category_label("optimizer"),
        "parameters": category_label("parameters"),
        "peak": tr(ko="최대", en="peak"),
        "per_sbh": tr(ko="바이트 ÷ sbh", en="bytes ÷ sbh"),
        "reserved": tr(ko="예약", en="reserved"),
        "sdpa": "sdpa",
        "shape": tr(ko="모양", en="shape"),
        "size": tr(ko="크기", en="size"),
        "together": tr(ko="합", en="together"),
        "words": tr(ko="메시지의 말", en="the message says"),
    }


def largest_at_peak(report: MemoryReport, most: int = 4, category: str = "activations") -> LeftRows:
    """The blocks of one category that lie in memory at the report's peak, those of a size together, the largest first.

    The report must come from a virtual GPU (`predict_memory` always does): it has the trace.
    """
    trace = report.timeline.trace
    moment = int(np.where(trace.allocates, trace.nbytes, -trace.nbytes).cumsum().argmax()) + 1
    born = trace.born[:moment]
    alive = np.setdiff1d(born, born[~trace.allocates[:moment]])
    sizes = Counter(trace.nbytes[alive[trace.category[alive] == CATEGORIES.index(category)]].tolist())
    heads = (tr(ko="한 개", en="each"), tr(ko="개수", en="how many"), tr(ko="합", en="together"))
    heads = (f"{category_label(category)}, {heads[0]}", *heads[1:])
    rows = [[human_bytes(size), str(count), human_bytes(size * count)] for size, count in sizes.items()]
    largest = sorted(zip(sizes, rows, strict=True), reverse=True)[:most]
    return LeftRows(heads, [row for _, row in largest])
