"""Pictures of how a training is split: data, pipeline and tensor parallelism, matrices, a block, who works when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr

from .pipeline import PipelineRun, Work, bubble, timetable


def draw_model_splits(layers: int = 8, gpus: int = 4) -> svg.Drawing:
    """One model over four GPUs: cut across its layers (pipeline) and along them (tensor)."""
    title = tr(ko=f"층 {layers}개짜리 모델을 GPU {gpus}개에", en=f"{layers} layers over {gpus} GPUs")
    drawing = svg.Drawing(760, 110 + layers * 30, title)
    drawing.text(20, 30, title, size=16, bold=True)
    stages = [int(part[0]) for part in torch.arange(layers).tensor_split(gpus)]
    for left, name in (
        (20, tr(ko="파이프라인 병렬: 층을 나누어 맡는다", en="pipeline: each has whole layers")),
        (400, tr(ko="텐서 병렬: 층마다 나누어 맡는다", en="tensor: each has a slice of every layer")),
    ):
        drawing.text(left, 60, name, size=13, bold=True)
        for layer in range(layers):
            y = 74 + layer * 30
            for gpu in range(gpus):
                owner = sum(layer >= first for first in stages) - 1 if left == 20 else gpu
                drawing.rect(left + 42 + gpu * 72, y, 72, 24, svg.RANKS[owner])
            drawing.text(left + 36, y + 17, f"{layer + 1}", size=12, anchor="end", fill=svg.MUTED)
            if left == 400:
                continue
            if layer in stages[1:]:
                drawing.line(left + 42, y - 3, left + 42 + 72 * gpus, y - 3, svg.INK, stroke_dasharray="4 3")
    y = 74 + layers * 30 + 14
    for gpu in range(gpus):
        label = f"GPU {gpu}"
        drawing.rect(62 + gpu * 100, y, 11, 11, svg.RANKS[gpu])
        drawing.text(79 + gpu * 100, y + 10, label, size=12)
    note = tr(ko="점선에서 순전파 상태를 넘긴다", en="activations are handed on at the dashed lines")
    drawing.text(740, y + 10, note, size=12, anchor="end", fill=svg.MUTED)
    return drawing


# -- matrices ------------------------------------------------------------------------------------------------------

X = torch.tensor([[1, 2], [3, 4]])
A = torch.tensor([[1, 0, 2, 1], [0, 1, 1, 3]])


def draw_matrix_splits() -> svg.Drawing:
    """X·A (a) whole, (b) A split by columns and the results put side by side, (c) by rows and the results added."""
    title = tr(ko="행렬곱을 GPU 두 개로 나누기", en="A matrix product on two GPUs")
    drawing = svg.Drawing(760, 430, f"{title}: {(X @ A).tolist()}")
    drawing.text(20, 30, title, size=16, bold=True)
    one, two, both = svg.BLUE, svg.ORANGE, svg.INK

    def row(y: float, name: str, parts: Sequence[object]) -> None:
        drawing.text(20, y - 12, name, size=13, bold=True)
        x = 36.0
        for part in parts:
            if isinstance(part, str):
                drawing.text(x + 11, y + 32, part, size=17, anchor="middle")
                x += 26
            else:
                x = _matrix(drawing, x, y, *part) + 4

    columns, rows = A.chunk(2, dim=1), A.chunk(2, dim=0)
    slices = X.chunk(2, dim=1)
    whole = tr(ko="(a) GPU 하나에서: X·A", en="(a) on one GPU: X·A")
    row(78, whole, [(X, [both] * 2), "·", (A, [both] * 4), "=", (X @ A, [both] * 4)])
    by_columns = tr(
        ko="(b) A를 열로 나눈다: 결과를 나란히 놓는다(concatenate)", en="(b) A by columns: results side by side"
    )
    side = torch.cat([X @ part for part in columns], 1)
    row(
        196,
        by_columns,
        [(X, [both] * 2), "·", (A, [one, one, two, two]), "=", (side, [one, one, two, two])],
    )
    by_rows = tr(
        ko="(c) A를 행으로, X를 열로 나눈다: 결과를 더한다(all-reduce)", en="(c) A by rows, X by columns: results added"
    )
    first, second = (part @ rows[i] for i, part in enumerate(slices))
    parts = [(slices[0], [one]), "·", (rows[0], [one] * 4), "+", (slices[1], [two]), "·", (rows[1], [two] * 4)]
    row(314, by_rows, parts)
    x, y = 380.0, 314.0
    for sign, matrix, color in (("=", first, one), ("+", second, two), ("=", first + second, both)):
        drawing.text(x + 9, y + 32, sign, size=17, anchor="middle")
        x = _matrix(drawing, x + 22, y, matrix, [color] * 4) + 4
    for i, color in enumerate((one, two)):
        drawing.rect(20 + i * 90, 398, 11, 11, color)
        drawing.text(37 + i * 90, 408, f"GPU {i}", size=12)
    return drawing


def _matrix(
    drawing: svg.Drawing, x: float, y: float, matrix: torch.Tensor, colors: Sequence[str], cell: int = 25
) -> float:
    """Draw it with its columns' colours, centred on a height of two rows; where it ends."""
    rows, columns = matrix.shape
    top = y + (2 - rows) * cell / 2
    for i in range(rows):
        for j in range(columns):
            drawing.rect(x + j * cell, top + i * cell, cell - 2, cell - 2, colors[j], rx=3)
            number = str(int(matrix[i, j]))
            drawing.text(
                x + j * cell + cell / 2 - 1,
                top + i * cell + cell * 0.64,
                number,
                anchor="middle",
                fill=svg.ink_on(colors[j]),
            )
    return x + columns * cell


def draw_block_splits(shapes: Mapping[str, tuple[int, ...]], heads: int) -> svg.Drawing:
    """A block's attention and MLP on two ranks. shapes: of one rank's weights, as `tensor_parallel` returns them."""
    title = tr(ko="블록 하나를 rank 두 개로 나누기", en="One block on two ranks")
    drawing = svg.Drawing(760, 350, f"{title}: {dict(shapes)}")
    drawing.text(20, 30, title, size=16, bold=True)
    size = {name: f"{shape[1]}×{shape[0]}" for name, shape in shapes.items()}
    half = tr(ko=f"헤드 {heads // 2}개", en=f"{heads // 2} heads")
    columns, rows = tr(ko="열로", en="columns"), tr(ko="행으로", en="rows")
    chains = (
        (
            tr(ko="셀프 어텐션", en="self-attention"),
            ("Q, K, V", size["attention.query_key_value"], columns),
            (tr(ko="어텐션", en="attention"), half, ""),
            (tr(ko="출력 투영", en="projection"), size["attention.dense"], rows),
        ),
        (
            "MLP",
            (tr(ko="첫째 행렬", en="first matrix"), size["mlp.dense_h_to_4h"], columns),
            ("GELU", "", ""),
            (tr(ko="둘째 행렬", en="second matrix"), size["mlp.dense_4h_to_h"], rows),
        ),
    )
    for i, (name, *boxes) in enumerate(chains):
        top = 62 + i * 146
        drawing.text(20, top, name, size=13, bold=True)
        for rank in range(2):
            y = top + 12 + rank * 54
            color = svg.RANKS[rank]
            drawing.text(24, y + 28, "X", size=15)
            drawing.line(40, y + 23, 66, y + 23, color, stroke_width=2)
            for j, (what, detail, cut) in enumerate(boxes):
                x = 66 + j * 180
                drawing.rect(x, y, 152, 46, color, rx=4)
                label = f"{what} ({cut})" if cut else what
                drawing.text(
                    x + 76, y + (20 if detail else 28), label, size=svg.fit_size(label, 140, 13), anchor="middle",
                    fill=svg.ink_on(color),
                )  # fmt: skip
                drawing.text(x + 76, y + 38, detail, size=12, anchor="middle", fill=svg.ink_on(color))
                drawing.line(x + 152, y + 23, x + 180, y + 23, color, stroke_width=2)
        drawing.rect(606, top + 12, 100, 100, svg.GRID, rx=4)
        drawing.text(656, top + 58, "all-reduce", size=13, anchor="middle", bold=True)
        drawing.text(656, top + 78, tr(ko="더하기", en="sum"), size=12, anchor="middle", fill=svg.MUTED)
        drawing.text(716, top + 66, "Y", size=15)
    for rank in range(2):
        drawing.rect(20 + rank * 80, 330, 11, 11, svg.RANKS[rank])
        drawing.text(37 + rank * 80, 340, f"rank {rank}", size=12)
    return drawing


# -- pipeline ------------------------------------------------------------------------------------------------------


def draw_pipeline(runs_of: Mapping[str, Sequence[PipelineRun]], moment: int | None = None) -> svg.Drawing:
    """For each schedule, who works on which micro-batch when: the order as recorded, a backward twice a forward.

    A rank's second stage is drawn paler than its first. moment: a time of the timetable, behind which all is faint; on
    the right stands what each rank holds then.
    """
    tables = {name: timetable(runs) for name, runs in runs_of.items()}
    length = max(start + duration for rows in tables.values() for row in rows for _, start, duration in row)
    ranks = max(map(len, tables.values()))
    title = tr(ko="누가 언제 일하는가: 실행에서 기록한 순서", en="Who works when: the order as recorded")
    summary = ", ".join(f"{name}: {bubble(runs)}" for name, runs in runs_of.items())
    drawing = svg.Drawing(760, 84 + len(tables) * (ranks * 30 + 56), f"{title} ({summary})")
    drawing.text(20, 30, title, size=16, bold=True)
    unit, top = 600 / length, 70.0
    for name, rows in tables.items():
        share = float(bubble(runs_of[name]))
        drawing.text(20, top, name, size=14, bold=True)
        idle = tr(ko=f"버블 {share:.1%}", en=f"bubble {share:.1%}")
        drawing.text(740, top, idle, size=13, anchor="end", fill=svg.RED)
        for rank, row in enumerate(rows):
            y = top + 12 + rank * 30
            drawing.text(72, y + 18, f"rank {rank}", size=12, anchor="end")
            drawing.rect(80, y, 600, 26, svg.GRID)
            for work, start, duration in row:
                x, width = 80 + start * unit, duration * unit
                paler = 0.65 if work.stage >= len(rows) else None
                drawing.rect(x + 0.5, y, width - 1, 26, svg.PAPER)
                drawing.rect(x + 0.5, y, width - 1, 26, _WORK[work.kind], fill_opacity=paler)
                drawing.text(
                    x + width / 2, y + 18, f"{work.micro_batch}", size=12 if width > 11 else 9, anchor="middle",
                    fill=svg.ink_on(_WORK[work.kind]) if paler is None else svg.DARK_INK,
                )  # fmt: skip
            in_flight = f"{runs_of[name][rank].in_flight:g}"
            label = tr(ko=f"최대 {in_flight}", en=f"at most {in_flight}")
            if moment is not None:
                held = f"{held_at(runs_of[name], moment)[rank]:g}"
                label = tr(ko=f"지금 {held}", en=f"now {held}")
            drawing.text(740, y + 18, label, size=12, anchor="end", fill=svg.MUTED)
        if moment is not None:
            x, bottom = 80 + moment * unit, top + 12 + len(rows) * 30
            drawing.rect(x, top + 10, 680 - x, bottom - top - 12, svg.PAPER, fill_opacity=0.6)
            drawing.line(x, top + 6, x, bottom, svg.INK, stroke_width=2)
        top += ranks * 30 + 56
    legend = [
        (svg.BLUE, tr(ko="순전파", en="forward")),
        (svg.ORANGE, tr(ko="역전파", en="backward")),
        (svg.GRID, tr(ko="쉬는 시간(버블)", en="waiting (bubble)")),
    ]
    if any(work.kind == "W" for rows in tables.values() for row in rows for work, _, _ in row):
        halves = ((svg.RED, tr(ko="입력의 그레이디언트", en="input's gradient")),
                  (svg.GREEN, tr(ko="가중치의 그레이디언트", en="weights' gradient")))  # fmt: skip
        legend[2:2] = halves
    x = 80.0
    for color, label in legend:
        drawing.rect(x, top - 20, 11, 11, color)
        drawing.text(x + 17, top - 10, label, size=12)
        x += 34 + svg.text_width(label, 12)
    note = tr(ko="오른쪽: 한꺼번에 붙들고 있는 마이크로 배치", en="right: micro-batches held at once")
    if moment is not None:
        note = tr(ko="오른쪽: 지금 붙들고 있는 마이크로 배치", en="right: micro-batches held now")
    drawing.text(740, 30, note, size=12, anchor="end", fill=svg.MUTED)
    return drawing


def working_at(runs: Sequence[PipelineRun], moment: int) -> list[Work | None]:
    """What each rank works on in the unit of time that ends at the moment; None where it waits."""
    return [
        next((work for work, start, duration in row if start < moment <= start + duration), None)
        for row in timetable(runs)
    ]


def held_at(runs: Sequence[PipelineRun], moment: int) -> list[float]:
    """Each rank's micro-batches whose activations it holds at that moment; one of two stages' is half a one.

    From the end of a forward to the end of its whole backward, as `PipelineRun.in_flight` counts them.
    """
    held = []
    for row in timetable(runs):
        over = [work for work, start, duration in row if start + duration <= moment]
        stages = len({work.stage for work, _, _ in row})
        held.append((sum(w.kind == "F" for w in over) - sum(w.kind in "BW" for w in over)) / stages)
    return held


_WORK = {"F": svg.BLUE, "B": svg.ORANGE, "I": svg.RED, "W": svg.GREEN}
