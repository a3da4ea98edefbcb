"""The self-test: programs that die on a virtual card, what killed them, and the doctor beside the reader."""

from __future__ import annotations

import linecache
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import cache
from html import escape
from tempfile import TemporaryDirectory

import numpy as np
import torch

from virtual_gpu.doctor import diagnose
from virtual_gpu.doctor.message import Message
from virtual_gpu.errors import WrongValue
from virtual_gpu.language import tr
from virtual_gpu.units import choose, human_bytes

from ...environment import html_rows
from ...gpu import allocator_set_to
from ...rows import LeftRows
from ...watched import telling
from .caught import Dead, caught

CAUSES = (
    "logits", "attention", "longest", "optimizer", "kept", "handler", "evaluation", "generate", "loading", "limit",
)  # fmt: skip
_HEAD = "import torch\nfrom transformers import AutoModelForCausalLM\n\n"
_MODEL = 'model = AutoModelForCausalLM.from_pretrained("gpt2").cuda()\n'


@dataclass(frozen=True)
class Program:
    """One broken program: its source, what kills it (of CAUSES), and what is to be learned, in Korean and English."""

    source: str
    cause: str
    lesson: tuple[str, str]


PROGRAMS = {
    1: Program(
        _HEAD + _MODEL + "optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
        'tokens = torch.zeros(12, 1024, dtype=torch.long, device="cuda")\n'
        "for step in range(100):\n"
        "    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n",
        "logits",
        ("T는 12 × 1,024 × 50,257 × 4다.", "T is 12 × 1,024 × 50,257 × 4."),
    ),
    2: Program(
        "import torch\n\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192) for _ in range(16)]).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        'x = torch.randn(8, 8192, device="cuda")\n'
        "for step in range(100):\n"
        "    model(x).square().mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n",
        "optimizer",
        (
            "AdamW의 상태는 첫 step()에서 생긴다. 배치는 8이라 줄일 것이 없다.",
            "AdamW's states arise in the first step(); at batch 8 there is nothing to make smaller.",
        ),
    ),
    3: Program(
        _HEAD + 'model = AutoModelForCausalLM.from_pretrained("gpt2", attn_implementation="eager").cuda()\n'
        'tokens = torch.zeros(16, 1024, dtype=torch.long, device="cuda")\n'
        "model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()\n",
        "attention",
        ("T는 16 × 12 × 1,024 × 1,024 × 4, 점수 행렬이다.", "T is 16 × 12 × 1,024 × 1,024 × 4: the scores."),
    ),
    4: Program(
        _HEAD + _MODEL + "lengths = [120, 96, 208, 152, 88, 176, 136, 944, 104, 160]\n"
        "optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
        "for step, length in enumerate(lengths):\n"
        '    tokens = torch.zeros(16, length, dtype=torch.long, device="cuda")\n'
        "    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n",
        "longest",
        (
            "일곱 스텝은 멀쩡했다. 메시지 하나에는 그것이 적혀 있지 않으니 의사는 자리만 말한다.",
            "Seven steps went well. One message does not say so: the doctor names the place alone.",
        ),
    ),
    5: Program(
        _HEAD + _MODEL + "losses = []\n"
        "for step in range(100):\n"
        '    tokens = torch.zeros(4, 512, dtype=torch.long, device="cuda")\n'
        "    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss\n    losses.append(loss)\n"
        "print(sum(losses) / len(losses))\n",
        "kept",
        (
            "검증 손실마다 그래프가 달려 있다. 의사가 본 것은 마지막 요청뿐이다.",
            "Each validation loss has its graph. What the doctor saw is the last straw.",
        ),
    ),
    6: Program(
        _HEAD + "def step(batch_size):\n"
        '    model = AutoModelForCausalLM.from_pretrained("gpt2").cuda()\n'
        '    tokens = torch.zeros(batch_size, 1024, dtype=torch.long, device="cuda")\n'
        "    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()\n\n\n"
        "try:\n    step(16)\nexcept torch.OutOfMemoryError:\n    torch.cuda.empty_cache()\n    step(4)\n",
        "handler",
        (
            "4는 들어간다. except 안에서는 예외가 앞 시도의 텐서를 붙들고 있다.",
            "4 fits. Inside except the exception holds the tensors of the first attempt.",
        ),
    ),
    7: Program(
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n\n"
        'model = AutoModelForCausalLM.from_pretrained("gpt2")\n'
        'texts = [{"input_ids": [1] * 512, "labels": [1] * 512}] * 128\n'
        'arguments = TrainingArguments("out", per_device_eval_batch_size=8, report_to="none", disable_tqdm=True)\n'
        "trainer = Trainer(model, arguments, eval_dataset=texts, compute_metrics=lambda found: {})\n"
        "trainer.evaluate()\n",
        "evaluation",
        (
            "Trainer가 배치마다 로짓 785 MiB를 카드에 모은다(11장).",
            "The Trainer gathers 785 MiB of logits on the card for each batch (chapter 11).",
        ),
    ),
    8: Program(
        _HEAD + 'model = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.float16).cuda()\n'
        'prompts = torch.zeros(400, 900, dtype=torch.long, device="cuda")\n'
        "mask = torch.ones_like(prompts)\n"
        "model.generate(prompts, attention_mask=mask, max_new_tokens=50, pad_token_id=0)\n",
        "generate",
        (
            "프롬프트를 읽다가 죽었다. T는 400 × 900 × 3,072 × 2바이트, MLP의 중간값이다. KV 캐시도 다 차면 "
            "2 × 12층 × 400 × 900 × 768 × 2바이트다(11장). 한 번에 넣는 글을 줄이면 둘 다 준다.",
            "It died reading the prompts: T is 400 × 900 × 3,072 × 2 bytes, inside an MLP. The KV cache, when full, is "
            "2 × 12 layers × 400 × 900 × 768 × 2 bytes (chapter 11). Fewer prompts at once make both smaller.",
        ),
    ),
    9: Program(
        "import copy\n\nimport torch\n\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(16)]).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "best = []\n"
        "for epoch in range(100):\n"
        '    model(torch.randn(8, 4096, device="cuda")).square().mean().backward()\n'
        "    optimizer.step()\n    optimizer.zero_grad()\n"
        "    best.append(copy.deepcopy(model.state_dict()))\n",
        "kept",
        (
            "에폭마다 가중치의 사본 1 GiB가 카드에 남는다. 범인은 죽은 줄이 아니라 best.append다.",
            "A copy of the weights, 1 GiB, stays on the card for each epoch: the culprit is best.append, not the line "
            "that died.",
        ),
    ),
    10: Program(
        _HEAD + "torch.cuda.set_per_process_memory_fraction(0.25)\n" + _MODEL
        + 'tokens = torch.zeros(4, 1024, dtype=torch.long, device="cuda")\n'
        "model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()\n",
        "limit",
        (
            "카드의 4분의 1만 쓰겠다고 프로그램이 스스로 정했다.",
            "The program itself had asked for a quarter of the card.",
        ),
    ),
}  # fmt: skip


def _known(number: int) -> int:
    if number not in PROGRAMS:
        raise WrongValue(
            tr(ko=f"프로그램 {number!r}: 1부터 {len(PROGRAMS)}까지다.", en=f"program {number!r}: 1 to {len(PROGRAMS)}.")
        )
    return number


@contextmanager
def _seeds_kept() -> Iterator[None]:
    """Random numbers go on afterwards as if the block had not been: the Trainer seeds all three generators."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


@contextmanager
def _unheard() -> Iterator[None]:
    """What a program's libraries warn of would stand below whichever cell happens to be the last."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@cache
def dead(number: int, settings: str | None = None) -> Dead:
    """The traceback of a program, run on a virtual T4. settings: PYTORCH_ALLOC_CONF, as it is by default."""
    program = PROGRAMS[_known(number)]
    name = f"program_{number}.py"
    linecache.cache[name] = len(program.source), None, program.source.splitlines(True), name
    code = compile(program.source, name, "exec")
    with (
        TemporaryDirectory() as folder,
        chdir(folder),
        _seeds_kept(),
        _unheard(),
        allocator_set_to(settings),
    ):  # the Trainer makes a folder of its own
        found = caught(lambda: exec(code, {"__name__": "__main__"}))
    assert isinstance(found, Dead), f"program {number} did not die: {found}"
    return found


def _code(text: str) -> str:
    return f'<pre style="font-family:monospace;white-space:pre-wrap">{escape(text)}</pre>'


class Ward:
    """Ten messages; under each, folded, the traceback that it ends, which is what the doctor sees, and the program."""

    def __repr__(self) -> str:
        return "\n\n".join(f"# {n}\n{dead(n)}\n{one.source}" for n, one in PROGRAMS.items())

    def _repr_html_(self) -> str:
        return "".join(
            f"<h4>{n}</h4>{_code(dead(n).splitlines()[-1])}{_folded(f'traceback {n}', dead(n))}"
            + _folded(tr(ko=f"프로그램 {n}", en=f"program {n}"), one.source)
            for n, one in PROGRAMS.items()
        )


def _folded(head: str, text: str) -> str:
    return f"<details><summary>{head}</summary>{_code(text)}</details>"


def ward() -> Ward:
    """Ten broken programs with their tracebacks, made by running them."""
    with telling() as told:
        for n in PROGRAMS:
            told(f"{n}/{len(PROGRAMS)}")
            dead(n)
    return Ward()


def _last_message(text: str) -> Message:
    """What the error says that ended a program, not one that it had caught."""
    message = diagnose(text.splitlines()[-1]).message
    assert message is not None
    return message


def with_expandable_segments(*numbers: int) -> LeftRows:
    """Programs as they died, and run again with expandable_segments:True: what they asked for, what was alive."""
    rows = []
    with telling() as told:
        for n in numbers:
            told(f"{n}")
            first, again = (_last_message(dead(n, how)) for how in (None, "expandable_segments:True"))
            room = first.free.bytes + first.unallocated.bytes
            sizes = first.tried.bytes, room, first.allocated.bytes, again.tried.bytes, again.allocated.bytes
            rows.append([n, *map(human_bytes, sizes)])
    alive, then = tr(ko="텐서", en="tensors"), tr(ko="켜면", en="then")
    return LeftRows((tr(ko="프로그램", en="program"), "T", "F + R", alive, f"{then} T", f"{then} {alive}"), rows)


class Rounds:
    """The reader's answers beside the truth and the doctor's verdict; what he has not answered stays folded."""

    def __init__(self, answers: Mapping[int, str | None]):
        what = tr(ko="까닭", en="cause")
        self.answers = {_known(n): None if said is None else choose(said, CAUSES, what) for n, said in answers.items()}

    @property
    def score(self) -> str:
        """How many were answered, how many rightly, and how many of all the doctor named."""
        written = [n for n, said in self.answers.items() if said]
        right = sum(self.answers[n] == PROGRAMS[n].cause for n in written)
        doctors = sum(named(n) for n in PROGRAMS)
        return tr(
            ko=f"{len(PROGRAMS)}개 가운데 {len(written)}개를 답해 {right}개를 맞혔다. 의사는 {doctors}개.",
            en=f"{len(written)} of {len(PROGRAMS)} answered, {right} rightly. The doctor: {doctors}.",
        )

    def _rows(self, numbers: list[int]) -> list[list[str]]:
        return [
            [
                str(n),
                self.answers.get(n) or "–",
                PROGRAMS[n].cause,
                doctors(n),
                "○" if named(n) else "×",
                tr(*PROGRAMS[n].lesson),
            ]
            for n in numbers
        ]

    def __repr__(self) -> str:
        return "\n".join([*(" | ".join(row) for row in self._rows(list(PROGRAMS))), self.score])

    def _repr_html_(self) -> str:
        heads = (
            "", tr(ko="내 답", en="mine"), tr(ko="까닭", en="cause"), tr(ko="의사의 진단", en="the doctor says"),
            "", tr(ko="배울 것", en="to learn"),
        )  # fmt: skip

        def table(numbers: list[int]) -> str:
            return html_rows(heads, [list(map(escape, row)) for row in self._rows(numbers)]) if numbers else ""

        open_, folded = [n for n in PROGRAMS if self.answers.get(n)], [n for n in PROGRAMS if not self.answers.get(n)]
        shut = tr(ko="아직 답하지 않은 것의 답", en="those not answered yet")
        shut = f"<details><summary>{escape(shut)}</summary>{table(folded)}</details>" if folded else ""
        return f"{table(open_)}<p>{escape(self.score)}</p>{shut}"


def rounds(answers: Mapping[int, str | None]) -> Rounds:
    """Program → its cause, one of CAUSES, or None: marked, with the doctor's verdict beside."""
    return Rounds(answers)


# The doctor's names for what kills a program; where none fits, it cannot know from one message.
_DOCTORS = {
    "logits": ("logits_and_loss",), "attention": ("attention",), "optimizer": ("optimizer_first_step",),
    "handler": ("in_handler",), "evaluation": ("evaluation_gathers",), "generate": ("generation",),
    "loading": ("loading",), "limit": ("limit",), "longest": (), "kept": (),
}  # fmt: skip


def named(number: int) -> bool:
    """Whether the doctor's verdict is what kills the program."""
    return diagnose(dead(number)).verdict in _DOCTORS[PROGRAMS[number].cause]


def doctors(number: int) -> str:
    """The doctor's verdict in words."""
    from virtual_gpu.doctor import words

    found = diagnose(dead(number))
    how = f" ({words.sure(found.sure)})" if found.sure else ""
    return words.cause(found.verdict) + how
