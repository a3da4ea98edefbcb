"""The course's map: one list of chapters, and what their notebooks say about themselves."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from virtual_gpu.language import tr
from virtual_gpu.units import path_of

from .environment import COURSE, html_rows
from .progress import solved

# A guess at a reader's pace, for the map only: Korean technical prose, a look at a result, an exercise.
SIGNS_A_MINUTE, MINUTES_A_RESULT, MINUTES_AN_EXERCISE = 400, 0.5, 5
ROUND_TO_MINUTES = 5
# A chapter's last section under this heading is for those who want more: neither its time nor its exercises count.
APPENDIX = re.compile(r"## (\d+\.\d+ )?더 읽을거리")

# number, notebook, (title, question) in Korean and in English
START = (
    (0, "00_start_here"),
    ("여기서 시작", "이 컴퓨터에서 무엇을 측정하고 무엇을 예측하는가?"),
    ("Start here", "What can this machine measure, and what will be predicted?"),
)
CHAPTERS = (
    (
        (1, "01_data_types"),
        ("숫자는 몇 바이트일까", "bf16은 무엇으로 이루어지고 무엇을 잃는가?"),
        ("Number formats", "What is a bf16 made of, and what does it cost?"),
    ),
    (
        (2, "02_quantization"),
        ("양자화", "16비트를 8비트나 4비트로 줄이면 무엇이 사라지는가?"),
        ("Quantization", "What is lost when 16 bits become 8 or 4?"),
    ),
    (
        (3, "03_memory_decomposition"),
        ("GPU 메모리를 채우는 것", "2.7 GB짜리 모델을 왜 16 GB GPU에서 학습하지 못하는가?"),
        ("What fills the memory", "Why does a model of 2.7 GB not train on a GPU of 16 GB?"),
    ),
    (
        (4, "04_gradient_accumulation"),
        ("그레이디언트 누적", "메모리를 늘리지 않고 큰 배치로 학습할 수 있는가?"),
        ("Gradient accumulation", "Can I have the large batch without its memory?"),
    ),
    (
        (5, "05_gradient_checkpointing"),
        ("그레이디언트 체크포인팅", "순전파 상태를 저장하지 않는 대가는 무엇인가?"),
        ("Gradient checkpointing", "What do I pay for not keeping the activations?"),
    ),
    (
        (6, "06_distributed_zero"),
        ("데이터 병렬과 ZeRO", "GPU가 N개이면 하나가 무엇을 들고 있어야 하는가?"),
        ("Data parallelism and ZeRO", "What does each of N GPUs have to hold?"),
    ),
    (
        (7, "07_split_model"),
        ("모델을 쪼개기", "층과 행렬을 GPU에 나누면 무엇이 줄고 무엇을 기다리는가?"),
        ("Splitting the model", "Layers and matrices on many GPUs: what shrinks, and who waits for whom?"),
    ),
    (
        (8, "08_lora"),
        ("LoRA와 QLoRA", "학습할 파라미터가 적으면 메모리는 얼마나 줄고, 무엇은 줄지 않는가?"),
        ("LoRA and QLoRA", "Why do few trainable parameters need so little memory, and so much?"),
    ),
    (
        (9, "09_fit_your_gpu"),
        ("내 GPU에 맞추기", "내 모델이 내 GPU에 올라가는가? 무엇을 바꿔야 하는가?"),
        ("Fit your GPU", "Will my model fit on my GPU, and what do I change?"),
    ),
    (
        (10, "10_oom_clinic"),
        ("OOM 진료실", "잘 돌다가 죽었다. 오류를 낸 줄은 어디인가?"),
        ("The OOM clinic", "It ran well and died: which line is the cause?"),
    ),
    (
        (11, "11_outside_training"),
        ("학습 스텝 밖의 OOM", "평가하고, 생성하고, 저장하고, 불러올 때는 무엇이 메모리를 채우는가?"),
        ("Out of memory outside the step", "What fills the memory while evaluating, generating, saving and loading?"),
    ),
    (
        (12, "12_two_models"),
        ("한 메모리에 모델 둘", "DPO와 GRPO에서는 SFT에 없던 무엇이 언제 카드에 함께 있는가?"),
        ("Two models in one memory", "What is on the card in DPO and GRPO that was not there in SFT, and when?"),
    ),
    (
        (13, "13_images"),
        ("이미지가 들어오면", "사진 한 장은 메모리를 얼마나 쓰고, 무엇을 줄이면 되는가?"),
        ("When images come in", "How much memory does one picture take, and what makes it less?"),
    ),
)


@dataclass(frozen=True)
class Chapter:
    """One line of the map. minutes and exercises are None where the notebook is not there; solved: so many of them."""

    number: int
    title: str
    question: str
    notebook: str | None = None
    minutes: int | None = None
    exercises: int | None = None
    solved: int = 0

    def exercises_told(self) -> str:
        """How many exercises; where the reader has solved some, how many of them, with a check mark for all."""
        if not self.solved:
            return "" if self.exercises is None else str(self.exercises)
        return f"{self.solved}/{self.exercises}" + (" ✓" if self.solved == self.exercises else "")


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
                chapter.exercises_told(),
            ]
            for chapter in self
        ]


def course_map(folder: str | Path | None = None) -> CourseMap:
    """The map of the course whose notebooks lie in `folder` (by default the Korean edition); WrongValue for no path."""
    folder = COURSE / "notebooks" / "ko" if folder is None else path_of(folder, "folder")
    return CourseMap(chapter(entry, folder) for entry in CHAPTERS)


def chapter(entry: tuple, folder: Path) -> Chapter:
    """One line of the map, from START or CHAPTERS and the notebook in `folder`, in the language that is set."""
    (number, name), korean, english = entry
    title, question = {"ko": korean, "en": english}[tr(ko="ko", en="en")]
    path = folder / f"{name}.ipynb"
    if not os.path.isfile(path):  # no error for a name that can be no path
        return Chapter(number, title, question)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    cells = [cell for cell in cells if "set-up" not in cell.get("metadata", {}).get("tags", [])]
    appendix = (i for i, cell in enumerate(cells) if APPENDIX.match("".join(cell["source"])))
    cells = cells[: next(appendix, None)]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    heading = re.search(r"^# \d+장\. (.+)$", text, re.MULTILINE) if title == korean[0] else None
    # Pictures, links' addresses and spaces are not read.
    signs = len(re.sub(r"!\[.*?\]\(.*?\)|\]\(.*?\)|\s", "", text))
    numbers = set(re.findall(r'exercise\("(\d+-\d+)"\)', "\n".join(code)))
    minutes = signs / SIGNS_A_MINUTE + len(code) * MINUTES_A_RESULT + len(numbers) * MINUTES_AN_EXERCISE
    rounded = max(1, round(minutes / ROUND_TO_MINUTES)) * ROUND_TO_MINUTES
    return Chapter(
        number, heading[1] if heading else title, question, name, rounded, len(numbers), len(numbers & solved())
    )
