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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import ROOT
from benchmarks.recipes.litgpt_finetune import program_of
from benchmarks.truth import MEASURED
from tools.accuracy import read_judged
from tools.others_formulas import FORMULAS, Run, gpu_poor_scores
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
# What the models' own config.json say, by litgpt's names: layers, hidden, heads, words, width of the MLP.
SHAPES = {
    "Llama-2-7b-hf": (32, 4096, 32, 32000, 11008),
    "Llama-3.2-1B": (16, 2048, 32, 128256, 8192),
    "Llama-3.2-3B": (28, 3072, 24, 128256, 8192),
    "Meta-Llama-3-8B": (32, 4096, 32, 128256, 14336),
    "Meta-Llama-3.1-8B": (32, 4096, 32, 128256, 14336),
    "Mistral-7B-v0.1": (32, 4096, 32, 32000, 14336),
    "Mistral-7B-v0.2": (32, 4096, 32, 32000, 14336),
    "falcon-7b": (32, 4544, 71, 65024, 18176),
    "gemma-2-2b": (26, 2304, 8, 256000, 9216),
    "gemma-2-9b": (42, 3584, 16, 256000, 14336),
    "gemma-2b": (18, 2048, 8, 256000, 16384),
    "phi-1_5": (24, 2048, 32, 51200, 8192),
    "stablelm-base-alpha-3b": (16, 4096, 32, 50688, 16384),
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
        s["layers"], s["d_model"], s["heads"], s["vocab"], s["batch"], s["ctx"], inner=s["d_ff"], gated=True,
        scores=True, segment=s["segment"] if s.get("segment") not in (None, "none") else 0,
    )  # fmt: skip


def _xmem(row: dict[str, Any], measured: int, ours: float) -> tuple[tuple, Run] | None:
    if not row["source"].startswith("Stone") or row["model"] not in XMEM:
        return None
    layers, hidden, heads, words, parameters = XMEM[row["model"]]
    s, others = row["settings"], tuple(sorted((row.get("peers") or {}).items()))
    return (row["id"],), Run(
        row["id"], row["source"], "full", 32, False, measured, ours, parameters / 1e9, parameters, layers, hidden,
        heads, words, int(s["batch"]), 128, s["optimizer"] == "AdamW", inner=4 * hidden,
        scores="gpt-neo" in row["model"], others=others,
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
    program = program_of(row)
    layers, hidden, heads, words, inner = SHAPES[program.checkpoint]
    return (row["id"],), Run(
        row["id"], row["source"], method, 16, False, measured, ours, float(named[1]), 0, layers, hidden, heads, words,
        program.batch, program.length, inner=inner, scores=program.checkpoint.startswith("gemma-2-"),  # softcapped
        other_adapter=program.method.startswith("adapter"),
    )  # fmt: skip


def _peft(row: dict[str, Any], measured: int, ours: float) -> tuple[tuple, Run] | None:
    """PEFT's comparison: LoRA and full fine-tuning of a 3.2B model. Its length is the most that the settings allow."""
    s = row["settings"]
    method = str(s.get("method", ""))
    if row["source"] != "huggingface/peft" or row["metric"] != "max_memory_reserved over the run":
        return None
    kind = "lora" if method.startswith("lora--") else "full" if "full" in method else ""
    if not kind:
        return None
    layers, hidden, heads, words, inner = SHAPES["Llama-3.2-3B"]
    return (row["id"],), Run(
        row["id"], row["source"], kind, 16, False, measured, ours, 3.0, 0, layers, hidden, heads, words, s["batch"],
        s["max_seq"], inner=inner,
    )  # fmt: skip


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

Unsloth의 표와 웹의 계산기 가운데 식을 공개하지 않은 것은 비교하지 않았다. Unsloth Studio의 추정기는 소스가 \
공개되어 있으나 \
AGPL이라 옮겨 쓰지 않았고, Hugging Face의 Model Memory Utility는 accelerate로 계산하므로 따로 세지 않았다. \
EleutherAI의 식은 저장소의 \
기본값(그레이디언트 4바이트, \
옵티마이저 12바이트, MLP 배율 4)으로 계산했고, fp32 행에는 `--disable-mixed-precision`을 준 것과 같다.

llm-analysis와 gpu_poor의 식은 새로 쓰고, 원래 프로그램을 실행해 얻은 값과 같은지 테스트(`tests/test_others.py`)가 \
견준다. llm-analysis는 기본값(Adam, 가중치의 fp32 사본, GPU 하나)으로 계산했다. 원래 프로그램은 이 행들에서 답을 \
내기 전에 멈춘다(그런 값은 그 검사를 끄고 실행해 얻었다). 메모리가 아니라 시간을 어림하는 단계가, 가중치가 32비트인 \
모델과, MLP의 FLOPs가 보통의 것(폭이 은닉층의 네 배인 행렬 둘)과 다른 모델을 받지 않기 때문이다. 여러 층을 묶어 다시 \
계산하는 것은 그 식에 없으므로 그런 행은 다루지 않는다. gpu_poor의 답에서는 CUDA 컨텍스트의 몫으로 더하는 650 MiB를 \
뺐다. 이 행들의 측정값은 할당자가 센 것이라 컨텍스트가 들어 있지 않다. 길이는 litgpt의 행에서는 우리 예측에 쓴 것을, \
PEFT의 행에서는 설정된 최대 길이를 넣었다. \
실제로 가장 긴 배치는 그보다 짧을 수 있다.

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
    adapters = {"LLaMA-Factory의 표": ("LoRA와 어댑터(2x)", "QLoRA(x/2)"), "gpu_poor": ("LoRA", "QLoRA")}
    lines = []
    for name, (lora, qlora) in adapters.items():
        for method, said in (("full", "전체 미세 조정"), ("lora", lora), ("qlora", qlora)):
            lines.append(f"- {name}, {said}: {_spread([e for e, run in found[name] if run.method == method])}")
    shares = [gpu_poor_scores(run) / ((1 + e) * run.measured) for e, run in found["gpu_poor"] if not run.scores]
    lines.append(
        "- gpu_poor는 어텐션의 점수 행렬도 역전파까지 저장한다고 센다. 그 행렬을 저장하지 않는 어텐션으로 잰 "
        f"{len(shares)}행에서, 점수 행렬의 몫은 식의 값의 {statistics.median(shares) * 100:.0f} %(중앙값), "
        f"많으면 {max(shares) * 100:.0f} %다."
    )
    over = [e for e, _ in found["llm-analysis"] if e > 0]
    lines.append(
        f"- llm-analysis: {_spread([e for e, _ in found['llm-analysis']])} 하한을 어림하는 식이지만 "
        f"{len(over)}행에서는 측정값보다 크다. 이 행들은 fp32 가중치 하나로 학습하는데 식은 옵티마이저의 fp32 사본을 "
        "따로 세기 때문이다."
    )
    for name in ("DeepSpeed estimate_zero2", "accelerate estimate-memory"):
        points = found[name]
        lines.append(
            f"- {name}: 상태만 세지만 {sum(error > 0 for error, _ in points)}/{len(points)}행에서 측정값보다 크다. "
            "이 행들은 fp32 가중치 하나로 학습하는데 식은 16비트 사본까지 세기 때문이다."
            if any(error > 0 for error, _ in points)
            else f"- {name}: {len(points)}행 모두에서 모자란다. 순전파 상태를 세지 않기 때문이다."
        )
    return lines


def _spread(values: list[float]) -> str:
    """How many of them fall short, their median and their range, in two sentences."""
    count, short = len(values), sum(value < 0 for value in values)
    how = {0: f"{count}행 모두에서 남는다.", count: f"{count}행 모두에서 모자란다."}
    return (
        f"{how.get(short, f'{count}행 가운데 {short}행에서 모자란다.')} "
        f"중앙값 {per_cent(statistics.median(values))}, 범위 {per_cent(min(values))}에서 {per_cent(max(values))}."
    )


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
