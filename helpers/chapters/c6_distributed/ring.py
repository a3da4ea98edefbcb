"""All-reduce in a ring, message by message, over lists whose r-th entry is rank r's, and a panel of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ipywidgets as widgets
import torch

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr
from virtual_gpu.units import human_bytes

from ...panel import Answer, Panel


@dataclass(frozen=True)
class RingMoment:
    """After so many steps. held: rank → its vector in pieces. summed: rank → piece → how many ranks' are in it.

    sent: of the step before, (from, to, piece); at the beginning none. bytes_sent: of rank 0, in all.
    """

    held: list[list[torch.Tensor]]
    summed: list[list[int]]
    sent: list[tuple[int, int, int]]
    bytes_sent: int


def ring_all_reduce(vectors: Sequence[torch.Tensor]) -> list[RingMoment]:
    """Every moment of summing the ranks' vectors: N - 1 steps that add (reduce-scatter), N - 1 that copy (all-gather).

    In each step every rank sends one of N pieces to the next rank. ValueError where a vector has fewer numbers than
    there are ranks (Patarasuk and Yuan, 2009).
    """
    n = len(vectors)
    if n < 2 or min(map(len, vectors)) < n:
        raise ValueError(
            tr(
                ko=f"rank {n}개: 둘 이상이어야 하고, 벡터에 수가 rank만큼은 있어야 한다.",
                en=f"{n} ranks: two at least, and as many numbers in each vector as ranks.",
            )
        )
    held = [list(vector.tensor_split(n)) for vector in vectors]
    summed = [[1] * n for _ in range(n)]
    moments = [RingMoment([row.copy() for row in held], [row.copy() for row in summed], [], 0)]
    for step in range(2 * (n - 1)):
        adds = step < n - 1
        sent = [(rank, (rank + 1) % n, (rank - step) % n) for rank in range(n)]
        messages = [(target, piece, held[source][piece], summed[source][piece]) for source, target, piece in sent]
        for target, piece, numbers, count in messages:  # all at once: what was sent is what lay there before
            held[target][piece] = held[target][piece] + numbers if adds else numbers
            summed[target][piece] = summed[target][piece] + count if adds else count
        nbytes = moments[-1].bytes_sent + messages[0][2].nbytes
        moments.append(RingMoment([row.copy() for row in held], [row.copy() for row in summed], sent, nbytes))
    return moments


def draw_ring(moments: Sequence[RingMoment], moment: int) -> svg.Drawing:
    """A column for each rank, a row for each piece; what was sent as arrows, what is a whole sum in green."""
    now, n = moments[moment], len(moments[0].held)
    title = tr(ko=f"고리 모양의 all-reduce, rank {n}개", en=f"All-reduce in a ring of {n} ranks")
    drawing = svg.Drawing(760, 96 + 34 * n + 44, f"{title}: {_said(moments, moment)}")
    drawing.text(20, 30, title, size=16, bold=True)
    text = _said(moments, moment)
    drawing.text(20, 52, text, size=svg.fit_size(text, 720, 13))
    step = 720 / n
    wide = step - 34
    arrived = {(target, piece) for _, target, piece in now.sent}
    for rank in range(n):
        x = 37 + rank * step
        drawing.text(x + wide / 2, 82, f"rank {rank}", size=12, anchor="middle", bold=True)
        for piece in range(n):
            y = 92 + 34 * piece
            whole = now.summed[rank][piece] == n
            fill = svg.GREEN if whole else svg.SKY if now.summed[rank][piece] > 1 else svg.GRID
            ring = {"stroke": svg.INK, "stroke_width": 2.5} if (rank, piece) in arrived else {}
            drawing.rect(x, y, wide, 26, fill, rx=4, **ring)
            numbers = " ".join(f"{number:g}" for number in now.held[rank][piece].tolist())
            size = svg.fit_size(numbers, wide - 4, 13)
            drawing.text(x + wide / 2, y + 18, numbers, size=size, anchor="middle", fill=svg.ink_on(fill))
    for source, target, piece in now.sent:
        y = 105 + 34 * piece
        if target == source + 1:
            _arrow(drawing, 37 + source * step + wide + 3, 37 + target * step - 4, y)
        else:  # from the last round to the first
            _arrow(drawing, 37 + source * step + wide + 3, 37 + source * step + wide + 26, y)
            _arrow(drawing, 10, 33, y)
    y, x = 92 + 34 * n + 22, 37.0
    for fill, name in (
        (svg.GRID, tr(ko="자기 것", en="its own")),
        (svg.SKY, tr(ko="더해 가는 것", en="partly summed")),
        (svg.GREEN, tr(ko="모두의 합", en="the sum of all")),
    ):
        drawing.rect(x, y - 10, 11, 11, fill)
        drawing.text(x + 17, y, name, size=12)
        x += 40 + svg.text_width(name, 12)
    drawing.text(
        740, y, tr(ko="테두리: 방금 받은 조각", en="outlined: just received"), size=12, anchor="end", fill=svg.MUTED
    )
    return drawing


def _arrow(drawing: svg.Drawing, x1: float, x2: float, y: float) -> None:
    drawing.line(x1, y, x2 - 5, y, svg.INK, stroke_width=2)
    drawing.polygon([(x2, y), (x2 - 7, y - 4), (x2 - 7, y + 4)], svg.INK)


def _said(moments: Sequence[RingMoment], moment: int) -> str:
    now, n = moments[moment], len(moments[0].held)
    whole = sum(piece.nbytes for piece in now.held[0])
    phase = tr(ko="시작", en="start") if not moment else "reduce-scatter" if moment < n else "all-gather"
    vectors = [torch.cat(row) for row in now.held]
    done = all(torch.equal(vector, vectors[0]) for vector in vectors)
    same = tr(ko=". 모든 rank가 같다", en=". All ranks have the same") if done else ""
    return tr(
        ko=f"{moment}/{len(moments) - 1} {phase}: rank마다 보낸 것 {human_bytes(now.bytes_sent)}, "
        f"벡터는 {human_bytes(whole)}{same}",
        en=f"{moment}/{len(moments) - 1} {phase}: each rank has sent {human_bytes(now.bytes_sent)}, "
        f"a vector is {human_bytes(whole)}{same}",
    )


class RingPanel(Panel):
    """Choose how many ranks; step through the messages, or let them run."""

    prefix = "ring"
    still = True

    def __init__(self) -> None:
        super().__init__()
        ranks, moment = tr(ko="rank 수", en="ranks"), tr(ko="순간", en="moment")
        self.controls = {
            "ranks": self.control(widgets.IntSlider, "ranks", ranks, value=4, min=2, max=8),
            "moment": self.control(widgets.IntSlider, "moment", moment, value=2, min=0, max=6),
        }
        self.lay_out([self.controls["ranks"]], [self.controls["moment"], self.player(self.controls["moment"], 800)])
        self.move(self._changed)

    def _changed(self) -> None:
        self.controls["moment"].max = 2 * (self.controls["ranks"].value - 1)
        super()._changed()

    def answer(self, *, ranks: int, moment: int) -> Answer:
        vectors = [torch.arange(1, ranks + 1, dtype=torch.float32) * 10 ** (rank % 3) for rank in range(ranks)]
        moments = ring_all_reduce(vectors)
        moment = min(moment, len(moments) - 1)
        now = moments[moment]
        sent = ", ".join(f"{source}→{target} [{piece}]" for source, target, piece in now.sent)
        line = tr(ko=f"보낸 조각: {sent or '없다'}", en=f"pieces sent: {sent or 'none'}")
        return Answer((line,), draw_ring(moments, moment))


def ring_panel() -> RingPanel:
    """Chapter 6: ranks, moment → which piece goes where, what it becomes, what was sent in bytes."""
    return RingPanel()
