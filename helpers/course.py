"""The course's map: one list of chapters, and what their notebooks say about themselves."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from virtual_gpu.language import tr

from .environment import COURSE, html_rows

# A guess at a reader's pace, for the map only: Korean technical prose, a look at a result, an exercise.
SIGNS_A_MINUTE, MINUTES_A_RESULT, MINUTES_AN_EXERCISE = 400, 0.5, 5
ROUND_TO_MINUTES = 10

CHAPTERS = (
    (1, "01_data_types", "숫자는 몇 바이트일까", "bf16은 무엇으로 이루어지고 무엇을 잃는가?"),
    (2, "02_quantization", "양자화", "16비트를 8비트나 4비트로 줄이면 무엇이 사라지는가?"),
    (3, "03_memory_decomposition", "GPU 메모리를 채우는 것", "2.7 GB짜리 모델을 왜 16 GB GPU에서 학습하지 못하는가?"),
    (4, "04_gradient_accumulation", "그레이디언트 누적", "메모리를 늘리지 않고 큰 배치로 학습할 수 있는가?"),
    (5, "05_gradient_checkpointing", "그레이디언트 체크포인팅", "순전파 상태를 저장하지 않는 대가는 무엇인가?"),
    (6, "06_distributed_zero", "분산 학습과 ZeRO", "GPU가 N개이면 하나가 무엇을 들고 있어야 하는가?"),
    (7, "08_lora", "LoRA와 QLoRA", "학습할 파라미터가 적으면 메모리는 얼마나 줄고, 무엇은 줄지 않는가?"),
    (8, "09_fit_your_gpu", "내 GPU에 맞추기", "내 모델이 내 GPU에 올라가는가? 무엇을 바꿔야 하는가?"),
)


@dataclass(frozen=True)
class Chapter:
    """One line of the map. minutes and exercises are None where the notebook is not there."""

    number: int
    title: str
    question: str
    notebook: str | None = None
    minutes: int | None = None
    exercises: int | None = None


class CourseMap(list):
    """The chapters in their order; in a notebook, a table with links to the notebooks that are there."""

    def __repr__(self) -> str:
        return "\n".join(" | ".join(cells) for cells in self._rows())

    def _repr_html_(self) -> str:
        heads = ("", tr(ko="장", en="chapter"), tr(ko="답하려는 질문", en="question"))
        heads += (tr(ko="걸리는 시간", en="time"), tr(ko="연습 문제", en="exercises"))
        rows = []
        for chapter, cells in zip(self, self._rows(), strict=True):
            row = [escape(text) for text in cells]
            if chapter.notebook:
                row[1] = f'<a href="{escape(chapter.notebook)}.ipynb">{row[1]}</a>'
            rows.append(row)
        return html_rows(heads, rows)

    def _rows(self) -> list[list[str]]:
        coming = tr(ko="준비 중", en="planned")
        return [
            [
                str(chapter.number),
                chapter.title,
                chapter.question,
                coming if chapter.minutes is None else tr(ko=f"약 {chapter.minutes}분", en=f"{chapter.minutes} min"),
                "" if chapter.exercises is None else str(chapter.exercises),
            ]
            for chapter in self
        ]


def course_map(folder: Path | None = None) -> CourseMap:
    """The map of the course whose notebooks lie in `folder` (by default the Korean edition)."""
    folder = COURSE / "notebooks" / "ko" if folder is None else folder
    return CourseMap(_chapter(*entry, folder / f"{entry[1]}.ipynb") for entry in CHAPTERS)


def _chapter(number: int, name: str, title: str, question: str, path: Path) -> Chapter:
    if not path.exists():
        return Chapter(number, title, question)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    cells = [cell for cell in cells if "set-up" not in cell.get("metadata", {}).get("tags", [])]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    heading = re.search(r"^# (?:\d+장\. )?(.+)$", text, re.MULTILINE)
    # Pictures, links' addresses and spaces are not read.
    signs = len(re.sub(r"!\[.*?\]\(.*?\)|\]\(.*?\)|\s", "", text))
    exercises = len(set(re.findall(r'exercise\("(\d+-\d+)"\)', "\n".join(code))))
    minutes = signs / SIGNS_A_MINUTE + len(code) * MINUTES_A_RESULT + exercises * MINUTES_AN_EXERCISE
    rounded = max(1, round(minutes / ROUND_TO_MINUTES)) * ROUND_TO_MINUTES
    return Chapter(number, heading[1] if heading else title, question, name, rounded, exercises)
