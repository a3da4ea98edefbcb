"""Chapter 11: the exercises and the cases."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from virtual_gpu.cards import Range
from virtual_gpu.errors import WrongValue
from virtual_gpu.host.machines import PROCESS, Machine
from virtual_gpu.language import tr
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.kv_cache import kv_bytes
from virtual_gpu.units import choose, human_bytes, positive_int

from ...rows import LeftRows
from ...self_check import Case, Exercise, compare, filled, right
from .evaluation import KEPT, evaluate
from .resume import KEYS, resumed, saved
from .tried import Outcome, attempt

_folders: list[TemporaryDirectory] = []  # removed when Python ends


def _judge_gathered(function: Callable[[int, int, int, int, int], int]) -> str:
    vocabulary = 151_936
    for samples, batch, each in ((40, 8, 2), (64, 8, 4), (50, 8, 2), (8, 8, 2), (5, 8, 2)):
        rows = samples if samples <= batch else 2 * samples
        got = function(samples, batch, 512, vocabulary, each)
        if wrong := compare(got, rows * 512 * vocabulary * each, f"samples={samples}, batch={batch}, each={each}"):
            return wrong
    return right()


def _judge_kv(function: Callable[[Any, int, int, float], float]) -> str:
    for name in ("EleutherAI/polyglot-ko-1.3b", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"):
        config = load_config(name)
        for tokens, batch, each in ((1, 1, 2), (4096, 8, 1)):
            expected = kv_bytes(config, tokens, batch, each)
            if wrong := compare(function(config, tokens, batch, each), expected, f"{name}, {tokens} × {batch}"):
                return wrong
    return right()


EXERCISES = {
    "11-1": lambda: Exercise(
        "11-1",
        _judge_gathered,
        lambda: [
            tr(
                ko="그 순간에는 옛것(마지막 배치만 없다), 마지막 배치의 것, 다 이어 붙인 것이 함께 있다.",
                en="There are then the old tensor (all but the last batch), the last batch's and the new one.",
            ),
            tr(
                ko="배치가 하나뿐이면 이어 붙일 것이 없으니 한 벌이다.",
                en="With one batch nothing is concatenated: its logits are there once.",
            ),
        ],
        "def gathered(samples, batch, length, vocabulary, each):\n"
        "    copies = 1 if samples <= batch else 2\n"
        "    return copies * samples * length * vocabulary * each",
    ),
    "11-2": lambda: Exercise(
        "11-2",
        _judge_kv,
        lambda: [
            tr(
                ko="키와 값 둘, 층마다. 헤드는 쿼리가 아니라 키와 값의 헤드다: getattr(config, …, None).",
                en="Keys and values, in each layer; heads are those of keys and values: getattr(config, …, None).",
            ),
            tr(
                ko="Qwen3-0.6B는 head_dim이 hidden_size / num_attention_heads와 다르다.",
                en="Qwen3-0.6B's head_dim is not hidden_size / num_attention_heads.",
            ),
        ],
        "def cache_size(config, tokens, batch, each):\n"
        '    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads\n'
        '    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads\n'
        "    return 2 * config.num_hidden_layers * heads * size * tokens * batch * each",
    ),
}


@cache
def _checkpoint() -> Path:
    """A checkpoint, written when it is first asked for."""
    folder = TemporaryDirectory()
    _folders.append(folder)
    path = Path(folder.name) / "checkpoint.pt"
    attempt(saved(path, ema=True), writes=True)
    return path


def _told(one: Outcome) -> LeftRows:
    heads = (tr(ko="GPU 최대", en="GPU, peak"), tr(ko="RAM 최대", en="RAM, peak"), tr(ko="결과", en="result"))
    return LeftRows(heads, [[human_bytes(one.gpu), human_bytes(one.ram), one.result]])


_LITTLE = 2**27  # bytes of RAM that tensors may take in case 11-B; Python's own come on top
_SHARE = 0.024  # of a T4: 362 MiB, so that the file can be read, and one copy of the weights is still too much
_HOST = Machine("11-B", Range(_LITTLE + PROCESS.low, _LITTLE + PROCESS.low), Range(0, 0), ("of the case",))


def _resume(**settings: Any) -> Outcome:
    for name in settings:
        choose(name, ("map_location", *KEYS), tr(ko="설정", en="setting"))
    return attempt(resumed(_checkpoint(), share=_SHARE, **settings), host=_HOST)


def _judge_resume(settings: dict[str, Any]) -> str:
    settings = filled(settings)
    one = _resume(**settings)
    if settings.get("ema") == "drop":
        return tr(ko="EMA가 남아 있지 않다.", en="The average of the weights is gone.")
    return one.result if one.died else right(f"GPU {human_bytes(one.gpu)}, RAM {human_bytes(one.ram)}")


_LARGEST = 2**14  # of the powers of two, the most scores of a token that get through case 11-A


def _evaluate(**settings: Any) -> Outcome:
    for name in settings:
        choose(name, ("keep", "accumulate"), tr(ko="설정", en="setting"))
    keep, accumulate = settings.get("keep", "logits"), settings.get("accumulate")
    if isinstance(keep, str):
        keep = choose(keep, KEPT, "keep")
    elif positive_int(keep, "keep") > 2**17 or keep & (keep - 1):
        raise WrongValue(
            tr(ko=f"keep={keep}: 131,072까지의 2의 거듭제곱이어야 한다.", en=f"keep={keep}: a power of 2, to 131,072.")
        )
    accumulate = None if accumulate is None else positive_int(accumulate, "accumulate")
    return attempt(partial(evaluate, 96, 8, keep, accumulate), "T4", host="Colab")


def _judge_evaluate(settings: dict[str, Any]) -> str:
    settings = filled(settings)
    one = _evaluate(**settings)
    if one.died:
        return one.result
    keep = settings["keep"]  # without it all logits are kept, and it dies
    if keep == "nothing":
        return tr(ko="끝까지 가지만 점수가 하나도 남지 않는다.", en="It ends, with no score left.")
    if keep < _LARGEST:
        return tr(ko=f"{keep}개면 끝까지 가지만 더 남길 수 있다.", en=f"It ends with {keep}, but more can be kept.")
    return right(f"GPU {human_bytes(one.gpu)}, RAM {human_bytes(one.ram)}")


CASES = {
    "11-A": lambda: Case(
        "11-A",
        _judge_evaluate,
        lambda: [
            tr(
                ko="토큰마다 k × (점수 2바이트 + 번호 8바이트)다. 샘플 96개와 길이 512를 곱해 RAM과 견준다.",
                en="A token keeps k × (2 bytes of a score + 8 of an index): times 96 samples of 512, against the RAM.",
            ),
            tr(
                ko="RAM에 들어가는 k라도 끝까지 GPU에 모으면 GPU가 먼저 찬다. 둘을 함께 바꾼다.",
                en="What fits in RAM may fill the GPU first, gathered there to the end: change both settings.",
            ),
        ],
        'case("11-A").run(keep=32768, accumulate=1)\n'
        'case("11-A").run(keep=16384)\n'
        'case("11-A").run(keep=16384, accumulate=1)\n'
        'answer = {"keep": 16384, "accumulate": 1}',
        experiment=lambda **settings: _told(_evaluate(**settings)),
        thread="https://github.com/huggingface/transformers/issues/25313",
    ),
    "11-B": lambda: Case(
        "11-B",
        _judge_resume,
        lambda: [
            tr(
                ko="읽는 순간에는 파일이 통째로 어딘가에 있다. RAM은 좁고, GPU는 학습하기 전이라 비어 있다.",
                en="Once read, the whole file is somewhere: RAM is short, and the GPU is empty before the training.",
            ),
            tr(
                ko="학습은 GPU 294 MiB를 쓰고 한도는 362 MiB다. 셋 가운데 무엇이 사본이고 RAM에는 몇 개가 들어가는가?",
                en="Training takes 294 of the GPU's 362 MiB: which of the three are copies, and how many fit in RAM?",
            ),
        ],
        'case("11-B").run(map_location="cpu")\n'
        'case("11-B").run(model="drop")\n'
        'case("11-B").run(model="drop", ema="cpu")\n'
        'answer = {"model": "drop", "ema": "cpu"}',
        experiment=lambda **settings: _told(_resume(**settings)),
        thread="https://github.com/karpathy/nanoGPT/issues/158",
    ),
}
