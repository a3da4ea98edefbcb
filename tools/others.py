"""Write docs/others.md and image/others.svg: public formulas for training memory beside what cards showed.

A row is the most that a published training step took on a card (benchmarks/measured), a formula is one that somebody
publishes for that question, evaluated on what the row states. Ours are the predictions in benchmarks/judged.json. A
formula answers only for the rows that it is made for; nothing is fitted.

    python tools/others.py
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accelerate.commands.estimate import estimate_training_usage

from benchmarks.children import ROOT
from benchmarks.truth import MEASURED
from tools.accuracy import read_judged
from virtual_gpu.drawing.svg import BLUE, GRID, INK, MUTED, ORANGE, Drawing

PAGE, PICTURE = ROOT / "docs" / "others.md", ROOT / "image" / "others.svg"
OURS = "이 저장소의 가상 GPU"
# xMem's models, with the configurations of benchmarks/recipes/xmem.py: layers, hidden, heads, words, parameters.
XMEM = {
    "distilbert/distilgpt2": (6, 768, 12, 50257, 81_912_576),
    "gpt2": (12, 768, 12, 50257, 124_439_808),
    "cerebras/Cerebras-GPT-111M": (10, 768, 12, 50257, 111_050_496),
    "EleutherAI/gpt-neo-125M": (12, 768, 12, 50257, 125_198_592),
    "facebook/opt-125m": (12, 768, 12, 50272, 125_239_296),
}


@dataclass(frozen=True)
class Run:
    """A training step that was measured, in what formulas ask for.

    method: "full", "lora" or "qlora"; bits: of the weights in memory; mixed: whether autocast computes in 16 bits;
    billions: the size in the model's name, parameters: counted. Zeros where the row does not say. measured: bytes;
    ours: how far the virtual GPU is off, of a range from its nearest end, as in docs/errors.md.
    """

    name: str
    source: str
    method: str
    bits: int
    mixed: bool
    measured: int
    ours: float
    billions: float = 0.0
    parameters: int = 0
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    words: int = 0
    batch: int = 1
    length: int = 0
    adam: bool = True
    checkpointed: bool = False
    others: tuple[tuple[str, int], ...] = ()


def accelerate(run: Run) -> int | None:
    """`accelerate estimate-memory`, its own function: of the fp32 bytes, four times for Adam, batch 1."""
    if run.method != "full" or not run.parameters or not run.adam:
        return None
    kind = "float32" if run.bits == 32 and not run.mixed else "bfloat16"
    return max(estimate_training_usage(4 * run.parameters, kind).values())


def eleuther(run: Run) -> int | None:
    """EleutherAI/cookbook, calc/calc_transformer_mem.py (069ae2e, Apache-2.0), defaults, one GPU."""
    if run.method != "full" or not run.layers or not run.adam:
        return None
    s, h, layers = run.length, run.hidden, run.layers
    parameters = 2 * run.words * h + h * s + 8 * h * layers + 2 * h + 4 * layers * h * h + 2 * layers * h * 4 * h
    weights = 2 if run.mixed else 4
    attention = 0 if run.checkpointed else (2 * 2 + 1) * run.heads * s / h
    activations = s * run.batch * h * layers * (16 * 2 + 2 + attention)
    return int(parameters * (weights + 4 + 12) + activations)


def deepspeed(run: Run) -> int | None:
    """deepspeed 0.19.8, estimate_zero2_model_states_mem_needs (Apache-2.0): states only, one GPU, no offload."""
    return 2 * run.parameters + 18 * run.parameters if run.method == "full" and run.parameters and run.adam else None


def llama_factory(run: Run) -> int | None:
    """The table "Hardware Requirement" of LLaMA-Factory's README: GB by the billions in the model's name.

    Its first row is mixed precision; for training in fp32 alone it has none.
    """
    if not run.billions or not run.adam or (run.bits == 32 and not run.mixed):
        return None
    full = {32: 18.0, 16: 8.0}
    times = full[run.bits] if run.method == "full" else 2.0 if run.method == "lora" else 0.5
    return int(times * run.billions * 1e9)


def sixteen_bytes(run: Run) -> int | None:
    """The rule "16 bytes a parameter" (ZeRO, arXiv 1910.02054, section 3.1: mixed precision with Adam), states only."""
    return 16 * run.parameters if run.method == "full" and run.parameters and run.adam else None


FORMULAS: dict[str, tuple[Callable[[Run], int | None], str, str]] = {
    "accelerate estimate-memory": (
        accelerate,
        "배치 1에서 Adam으로 학습할 때의 상태. 순전파 상태는 세지 않는다",
        "[accelerate](https://github.com/huggingface/accelerate) 1.15, `estimate_training_usage`를 그대로 부른다",
    ),
    "EleutherAI calc_transformer_mem": (
        eleuther,
        "Megatron-DeepSpeed로 학습하는 GPT의 상태와 순전파 상태",
        "[EleutherAI/cookbook](https://github.com/EleutherAI/cookbook/blob/main/calc/calc_transformer_mem.py) 069ae2e",
    ),
    "DeepSpeed estimate_zero2": (
        deepspeed,
        "ZeRO-2 혼합 정밀도의 상태만(GPU 하나, 오프로드 없음)",
        "[DeepSpeed](https://github.com/deepspeedai/DeepSpeed) 0.19.8, `estimate_zero2_model_states_mem_needs`의 식",
    ),
    "LLaMA-Factory의 표": (
        llama_factory,
        "방법과 모델 이름의 크기에서 어림한 값. 길이와 배치를 묻지 않는다",
        "[LLaMA-Factory README](https://github.com/hiyouga/LLaMA-Factory#hardware-requirement)의 18x, 8x, 2x, x/2",
    ),
    "16바이트 규칙": (
        sixteen_bytes,
        "혼합 정밀도와 Adam의 상태만",
        "[ZeRO](https://arxiv.org/abs/1910.02054) 3.1절",
    ),
}
PEERS = {  # of what xMem's authors ran themselves
    "xMem": "CPU에서 실제로 한 번 실행한 뒤의 추정",
    "DNNMem": "그래프에서 센 추정",
    "LLMem": "LLM의 식으로 한 추정",
    "SchedTune": "학습된 회귀 모델의 추정",
}


def runs() -> list[Run]:
    """Of each measured training step its highest row."""
    judged = {row.id: row for row in read_judged()["rows"] if row.counts and row.outcome == "run"}
    facts = (row for path in sorted(MEASURED.glob("*.json")) for row in json.loads(path.read_text(encoding="utf-8")))
    found: dict[tuple, Run] = {}
    for row in facts:
        if row["id"] not in judged or judged[row["id"]].measured is None:
            continue
        one = judged[row["id"]]
        for reader in (_cs336, _xmem, _litgpt, _peft):
            read = reader(row, one.measured, one.error)
            if read is None:
                continue
            key, run = read
            if key not in found or run.measured > found[key].measured:
                found[key] = run
    return list(found.values())


def _cs336(row: dict[str, Any], measured: int, ours: float) -> tuple[tuple, Run] | None:
    """The whole step of the students' 3.4B model: the highest phase of each setting."""
    s = row["settings"]
    whole = row["metric"].startswith("max_memory_allocated") and s.get("mode") == "train"
    if not (row["source"].startswith("EnzoDing") and s.get("layers") and whole):
        return None
    key = (row["source"], s["ctx"], s["precision"], s.get("segment"))
    return key, Run(
        row["id"], row["source"], "full", 32, s["precision"] != "fp32", measured, ours, s["params"] / 1e9, s["params"],
        s["layers"], s["d_model"], s["heads"], s["vocab"], s["batch"], s["ctx"],
        checkpointed=s.get("segment") not in (None, "none"),
    )  # fmt: skip


def _xmem(row: dict[str, Any], measured: int, ours: float) -> tuple[tuple, Run] | None:
    if not row["source"].startswith("Stone") or row["model"] not in XMEM:
        return None
    layers, hidden, heads, words, parameters = XMEM[row["model"]]
    s, others = row["settings"], tuple(sorted((row.get("peers") or {}).items()))
    return (row["id"],), Run(
        row["id"], row["source"], "full", 32, False, measured, ours, parameters / 1e9, parameters, layers, hidden,
        heads, words, int(s["batch"]), 128, s["optimizer"] == "AdamW", others=others,
    )  # fmt: skip


def _litgpt(row: dict[str, Any], measured: int, ours: float) -> tuple[tuple, Run] | None:
    """litgpt's scripts in bf16: the method is in the file's name or in the row's settings."""
    if row["source"] != "Lightning-AI/litgpt":
        return None
    named = re.search(r"(\d+(?:\.\d+)?) ?b", row["model"].lower())
    if named is None:
        return None
    text = row["id"].lower()
    quantized = "qlora" in text or "nf4" in text
    method = "qlora" if quantized else "full" if "/full" in text else "lora"
    return (row["id"],), Run(row["id"], row["source"], method, 16, False, measured, ours, float(named[1]))


def _peft(row: dict[str, Any], measured: int, ours: float) -> tuple[tuple, Run] | None:
    """PEFT's comparison: LoRA and full fine-tuning of a 3.2B model."""
    method = str(row["settings"].get("method", ""))
    if row["source"] != "huggingface/peft" or row["metric"] != "max_memory_reserved over the run":
        return None
    kind = "lora" if method.startswith("lora--") else "full" if "full" in method else ""
    return ((row["id"],), Run(row["id"], row["source"], kind, 16, False, measured, ours, 3.0)) if kind else None


def errors() -> dict[str, list[tuple[float, Run]]]:
    """name → (prediction over measurement, less 1; the run) of every run that it answers for."""
    found: dict[str, list[tuple[float, Run]]] = defaultdict(list)
    for run in runs():
        found[OURS].append((run.ours, run))
        for name, (formula, _, _) in FORMULAS.items():
            said = formula(run)
            if said is not None:
                found[name].append((said / run.measured - 1, run))
        for name, said in run.others:
            found[name].append((said / run.measured - 1, run))
    return dict(found)


def per_cent(value: float) -> str:
    return f"{value * 100:+.1f} %".replace("-", "−")


def line(name: str, points: list[tuple[float, Run]], of_ours: dict[str, float]) -> str:
    """A formula's row of the table, beside ours on the same rows."""
    sizes = [abs(error) for error, _ in points]
    worst, run = max(points, key=lambda point: abs(point[0]))
    same = [abs(of_ours[run.name]) for _, run in points]
    below = sum(error < 0 for error, _ in points)
    return (
        f"| {name} | {len(points)} | {statistics.median(sizes) * 100:.1f} % | {per_cent(worst)} (`{run.name}`) | "
        f"{below} | {statistics.median(same) * 100:.2f} % | {max(same) * 100:.2f} % |"
    )


HEAD = """# 다른 계산기들은 얼마나 맞나

<!-- tools/others.py가 쓴다. 손으로 고치지 않는다. -->

학습에 필요한 메모리를 어림하는 공개된 식을, 카드에서 잰 값 옆에 놓는다. 행은 [출처마다 얼마나 \
틀리나](errors.md)에서 \
비교한 것 가운데 학습 한 스텝의 최대 메모리를 말하는 {count}행이다. 한 설정에 여러 구간의 값이 있으면 가장 큰 \
것만 쓴다. \
오차는 식의 값 ÷ 측정값 − 1이고, 식은 그 식이 다루는 행에만 답한다. 아무것도 맞추지 않았다.

**공정하게 읽으려면**: 이 식들은 대부분 최대 메모리를 맞히려는 것이 아니다. 상태(가중치, 그레이디언트, \
옵티마이저)만 세는 식은 \
순전파 상태와 로짓이 큰 행에서 모자라는 것이 당연하고, 모델 크기 하나로 답하는 표는 길이와 배치를 물어보지 \
않는다. 그래서 무엇을 \
어림하는 식인지를 따로 적는다. 반대로 이 저장소의 값은 같은 프로그램을 연산까지 실행한 것이라 입력이 훨씬 많고, \
PEFT의 행에서는 \
밝혀지지 않은 가장 긴 배치의 길이 하나를 한 행에 맞추어 썼다(그 행은 세지 않는다).

![식마다 한 줄, 행마다 한 점: 식의 값이 측정값과 다른 비율](../image/others.svg)

| 누구 | 행 | 중앙값 | 최악 | 모자란 행 | 같은 행에서 우리: 중앙값 | 우리: 최악 |
|---|---:|---:|---|---:|---:|---:|
{table}

xMem의 네 줄(xMem, DNNMem, LLMem, SchedTune)은 우리가 계산한 것이 아니라 xMem의 저자들이 같은 행에 함께 공개한 값이다.

## 무엇을 어림하는 식인가

| 누구 | 어림하는 것 | 출처 |
|---|---|---|
{what}

Unsloth의 표와 웹의 계산기 가운데 식을 공개하지 않은 것은 비교하지 않았다. EleutherAI의 식은 저장소의 \
기본값(그레이디언트 4바이트, \
옵티마이저 12바이트, MLP 배율 4)으로 계산했고, fp32 행에는 `--disable-mixed-precision`을 준 것과 같다.

## 읽어 볼 것

{reading}

식이 모자라면 OOM으로, 남으면 빌리지 않아도 될 카드로 값을 치른다. 내 프로그램이라면 \
[9.10 마지막으로, 내 프로그램](../notebooks/ko/09_fit_your_gpu.ipynb)의 명령으로 실행해 보는 것이 가장 짧다.
"""


def page() -> str:
    """The page's text."""
    found = errors()
    ours = {run.name: error for error, run in found[OURS]}
    order = [OURS, *FORMULAS, *PEERS]
    table = [line(name, found[name], ours) for name in order if name in found]
    what = [f"| {name} | {what} | {source} |" for name, (_, what, source) in FORMULAS.items()]
    source = "[Stone-ResearchLife/xMem](https://github.com/Stone-ResearchLife/xMem)에 공개된 값"
    what += [f"| {name} | {what} | {source} |" for name, what in PEERS.items()]
    return HEAD.format(
        count=len(found[OURS]), table="\n".join(table), what="\n".join(what), reading="\n".join(reading(found))
    )


def reading(found: dict[str, list[tuple[float, Run]]]) -> list[str]:
    """What the rows show, each in numbers of the table."""
    by_method: dict[str, list[float]] = defaultdict(list)
    for error, run in found["LLaMA-Factory의 표"]:
        by_method[run.method].append(error)
    names = {"full": "전체 미세 조정", "lora": "LoRA와 어댑터(2x)", "qlora": "QLoRA(x/2)"}
    lines = [
        f"- LLaMA-Factory의 표, {names[method]}: {len(values)}행 가운데 {sum(v < 0 for v in values)}행에서 모자란다. "
        f"중앙값 {per_cent(statistics.median(values))}, 범위 {per_cent(min(values))}에서 {per_cent(max(values))}."
        for method, values in by_method.items()
    ]
    for name in ("DeepSpeed estimate_zero2", "accelerate estimate-memory"):
        points = found[name]
        lines.append(
            f"- {name}: 상태만 세지만 {sum(error > 0 for error, _ in points)}/{len(points)}행에서 측정값보다 크다. "
            "이 행들은 fp32 가중치 하나로 학습하는데 식은 16비트 사본까지 세기 때문이다."
            if any(error > 0 for error, _ in points)
            else f"- {name}: {len(points)}행 모두에서 모자란다. 순전파 상태를 세지 않기 때문이다."
        )
    return lines


def picture() -> Drawing:
    """A line for each formula, a point for each row."""
    found = errors()
    names = [name for name in (OURS, *FORMULAS, *PEERS) if name in found]
    left, width, top, step = 250, 900, 56, 34
    right, bottom = width - 40, top + step * len(names)
    edge = 1.5  # what is further off stands at the edge

    def place(error: float) -> float:
        return left + (min(max(error, -1), edge) + 1) / (edge + 1) * (right - left)

    alt = "공개된 식과 가상 GPU의 예측이 카드에서 잰 값과 다른 비율: 식마다 한 줄, 행마다 한 점"
    drawing = Drawing(width, bottom + 50, alt)
    drawing.text(16, 28, "식의 값 ÷ 카드에서 잰 값 − 1", size=16, bold=True)
    for tick in (-1, -0.5, 0, 0.5, 1, 1.5):
        drawing.line(place(tick), top - 8, place(tick), bottom, stroke=INK if tick == 0 else GRID)
        label = "0" if tick == 0 else f"{tick * 100:+.0f} %".replace("-", "−")
        drawing.text(place(tick), bottom + 18, label, size=11, anchor="middle", fill=MUTED)
    for index, name in enumerate(names):
        y = top + step * index + step / 2
        drawing.text(16, y + 4, f"{name} ({len(found[name])})", size=12)
        for error, _ in found[name]:
            drawing.circle(place(error), y, 4, BLUE if name == OURS else ORANGE, fill_opacity=0.55)
    drawing.text(left, bottom + 38, "왼쪽은 모자란 것, 오른쪽은 남는 것. +150 %를 넘으면 끝에", size=11, fill=MUTED)
    return drawing


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    PICTURE.write_text(picture().svg(), encoding="utf-8")
    print(f"wrote {PAGE} and {PICTURE}")
