"""Chapter 7's panel: a pipeline's schedule, moment by moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ipywidgets as widgets

from virtual_gpu.language import tr

from ...panel import Answer, Panel
from .drawings import draw_pipeline, held_at, working_at
from .pipeline import PipelineRun, timetable


class PipelinePanel(Panel):
    """Choose a recorded schedule and step through its moments, or let it run: who works on what, who holds how much."""

    prefix = "pipeline"
    still = True

    def __init__(self, runs_of: Mapping[str, Sequence[PipelineRun]]) -> None:
        super().__init__()
        self._runs = dict(runs_of)
        ends = [_end(runs) for runs in self._runs.values()]
        schedule, moment = tr(ko="순서", en="schedule"), tr(ko="순간", en="moment")
        self.controls = {
            "schedule": self.control(widgets.Dropdown, "schedule", schedule, options=[*self._runs]),
            "moment": self.control(widgets.IntSlider, "moment", moment, value=min(ends) // 3, min=0, max=ends[0]),
        }
        self.lay_out([self.controls["schedule"]], [self.controls["moment"], self.player(self.controls["moment"])])
        self.move(self._changed)

    def _changed(self) -> None:
        self.controls["moment"].max = _end(self._runs[self.controls["schedule"].value])
        super()._changed()

    def answer(self, *, schedule: str, moment: int) -> Answer:
        runs = self._runs[schedule]
        moment = min(moment, _end(runs))
        lines = []
        for rank, (work, held) in enumerate(zip(working_at(runs, moment), held_at(runs, moment), strict=True)):
            what = tr(ko="쉰다", en="waits") if work is None else f"{_kinds()[work.kind]} {work.micro_batch}"
            lines.append(tr(ko=f"rank {rank}: {what}, 붙든 것 {held:g}", en=f"rank {rank}: {what}, holds {held:g}"))
        return Answer((" · ".join(lines),), draw_pipeline({schedule: runs}, moment))


def _kinds() -> dict[str, str]:
    return {
        "F": tr(ko="순전파", en="forward"),
        "B": tr(ko="역전파", en="backward"),
        "I": tr(ko="입력의 그레이디언트", en="input's gradient"),
        "W": tr(ko="가중치의 그레이디언트", en="weights' gradient"),
    }


def _end(runs: Sequence[PipelineRun]) -> int:
    return max(start + duration for row in timetable(runs) for _, start, duration in row)


def pipeline_panel(runs_of: Mapping[str, Sequence[PipelineRun]]) -> PipelinePanel:
    """Chapter 7: schedule, moment → who works on which micro-batch, and how many each rank holds for its backward."""
    return PipelinePanel(runs_of)
