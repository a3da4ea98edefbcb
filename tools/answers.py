"""Which way to train fits: the planner's answer for the models, cards and lengths that people ask about most.

    python tools/answers.py [--models MODEL...]

Writes docs/answers.json, and from it docs/answers.md and image/answers.svg. An answer takes the planner 5 to 30 seconds
of one core. With --models only those are computed, and the others stay as they are: the file can grow in pieces.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.chapters.c9_planner.heat_map import BATCH, SHOWN, TARGET, described, heat_map, short, stored
from virtual_gpu.cards import CATALOG
from virtual_gpu.language import set_language
from virtual_gpu.models.attention import REPEAT_KV
from virtual_gpu.models.configs import architectures, load_config
from virtual_gpu.models.depth import text_config
from virtual_gpu.plan.recipes import method_label
from virtual_gpu.plan.request import make_request
from virtual_gpu.plan.search import _search
from virtual_gpu.terminal import tell
from virtual_gpu.units import GiB

ROOT = Path(__file__).resolve().parent.parent
MODELS = (
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.2-1B",
    "EleutherAI/polyglot-ko-1.3b",
    "meta-llama/Llama-3.2-3B",
    "Qwen/Qwen3-4B",
    "EleutherAI/polyglot-ko-5.8b",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-14B",
)
# Those of one capability stand together: the planner keeps what it has run for one.
CARDS = (
    "RTX 4060 Laptop", "L4", "RTX 4090", "RTX 3060", "RTX 3090", "A10G", "T4", "A100-40GB", "A100-80GB", "H100",
)  # fmt: skip
LENGTHS = (512, 2048, 8192)


def answer(model: str, card: str, length: int) -> dict[str, Any]:
    """The first of the planner's ranking as plain values, bytes; method None where nothing fits."""
    request = make_request(model, card, length=length, batch=BATCH)
    plan = _search(request, lambda plans: None, first_only=True).best  # what `plan_training` ranks first, in less time
    found = {"model": model, "card": card, "length": length, "method": plan and plan.recipe.method}
    if plan is None:
        return found
    needed = request.room.needed(plan.needed_bytes)
    return found | {
        "plan": plan.title,
        "needed_bytes": plan.needed_bytes,
        "card_bytes": [needed.low, needed.high],
    }


def lengths_of(model: str, lengths: Sequence[int] = LENGTHS) -> list[int]:
    """Of these lengths those that the model has positions for."""
    most = text_config(load_config(model)).max_position_embeddings
    return [length for length in lengths if length <= most]


def command(row: dict[str, Any]) -> str:
    """What computes this answer, with all that it ranks."""
    model, card = (f'"{name}"' if " " in name else name for name in (row["model"], row["card"]))
    return f"virtual-gpu fit --model {model} --gpu {card} --length {row['length']} --batch {BATCH}"


def page(rows: list[dict[str, Any]]) -> str:
    """docs/answers.md."""
    possible = len(CARDS) * sum(len(lengths_of(model)) for model in MODELS)
    counted = f"모두 {possible}가지이고, 그 가운데 {len(rows)}가지를 계산해 두었다."
    if possible == len(rows):
        counted = f"모두 {possible}가지다."
    lines = [
        "# 무엇이 들어가나",
        "",
        "<!-- tools/answers.py가 docs/answers.json에서 쓴다. 손으로 고치지 않는다. -->",
        "",
        f"모델, GPU, 길이마다 9장의 플래너가 1위로 꼽은 계획이다. GPU는 한 장이고, 배치는 누적까지 합쳐 {BATCH}이다. "
        "전체 미세 조정이 들어가면 그것을, 아니면 LoRA를, 그것도 아니면 QLoRA를 적었다. rank와 대상 층은 플래너의 "
        "기본값이다. 아무 카드에서도 재지 않은 예측이고, 실제 카드와 얼마나 다른지는 "
        "[출처마다 얼마나 틀리나](errors.md)에 있다.",
        "",
        f"![모델과 GPU마다 길이 {SHOWN}에서 들어가는 가장 큰 방법: {described(rows)}](../image/answers.svg)",
        "",
        "필요한 메모리는 할당자가 그만큼 받을 수 있으면 계획이 끝까지 가는 한도다. 텐서의 최대에서 그 128분의 1 "
        "간격으로 찾아서, 꼭 필요한 것보다 한 칸까지 클 수 있다. 카드는 할당자 밖의 것(CUDA 컨텍스트, 커널의 작업 "
        "공간)까지 더한 범위다. 마지막 열의 명령을 실행하면 다른 계획과 떨어진 까닭까지 나온다. "
        f"{counted} 모델이 받지 못하는 길이는 세지 않았다(polyglot-ko는 2048까지다).",
        "",
        "계획은 방법, 정밀도, 옵티마이저의 차례로 적었다. `4 × 4`는 마이크로 배치 4를 네 번 누적한다는 뜻이고, "
        "'체크포인팅(오프로드)'는 체크포인트(블록의 입력)를 RAM에 두는 체크포인팅(transformers 5.17부터), "
        "'나머지는 16비트'는 QLoRA에서 4비트로 줄이지 않는 임베딩, 출력층, 정규화를 fp32로 바꾸지 않고 16비트로 두는 "
        "것이다.",
        "",
        "T4에서 그룹 쿼리 모델(여기서는 polyglot-ko가 아닌 모델 모두)의 행은 `from transformers.integrations import "
        f"sdpa_attention`과 `{REPEAT_KV}`를 모델을 부르기 전에 적은 것으로 셌다. `virtual-gpu fit --save DIR`이 쓰는 "
        "`train.py`에는 들어 있다. 내 스크립트에 없으면 transformers 4.54부터 5.23까지, PyTorch 2.13까지는 패딩이 없는 "
        "배치에서 더 든다(3장의 3.12절).",
        "",
        '<div id="answers"></div>',
        "",
        "| 모델 | GPU | 길이 | 방법 | 계획 | 필요한 메모리(GiB) | 카드(GiB) | 명령 |",
        "|---|---|---:|---|---|---:|---:|---|",
        *map(_line, rows),
    ]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    method = method_label(row["method"]) if row["method"] else "없음"
    plan, needed, card = "들어가는 것이 없다", "–", "–"
    if row["method"]:
        plan, needed = row["plan"], f"{row['needed_bytes'] / GiB:.2f}"
        card = "~".join(f"{nbytes / GiB:.2f}" for nbytes in row["card_bytes"])
    cells = [short(row["model"]), row["card"], str(row["length"]), method, plan, needed, card, f"`{command(row)}`"]
    return f"| {' | '.join(cells)} |"


def write(rows: list[dict[str, Any]]) -> None:
    """The three files."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    TARGET.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    TARGET.with_suffix(".md").write_text(page(rows), encoding="utf-8")
    (ROOT / "image" / "answers.svg").write_text(heat_map(rows).svg() + "\n", encoding="utf-8")


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By model as the catalogue has them, card by its memory, length."""
    models = [*architectures()]
    return sorted(
        rows,
        key=lambda row: (models.index(row["model"]), CATALOG[row["card"]].capacity_bytes, row["card"], row["length"]),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=[*architectures()], metavar="MODEL")
    parser.add_argument("--cards", nargs="+", default=CARDS, choices=[*CATALOG], metavar="CARD")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--draw", action="store_true", help="only the page and the picture, from what is stored")
    arguments = parser.parse_args(argv)
    set_language("ko")
    rows = stored() if TARGET.exists() else []
    known = {(row["model"], row["card"], row["length"]): row for row in rows}
    for model in [] if arguments.draw else arguments.models:
        begun = time.process_time()
        for length in lengths_of(model, arguments.lengths):
            for card in arguments.cards:
                tell(f"{model}, {length} tokens, {card} … Ctrl+C stops; what is there stays")
                known[model, card, length] = answer(model, card, length)
                write(in_order(known.values()))
        print(f"{model}: {time.process_time() - begun:.0f} s", flush=True)
    write(in_order(known.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
