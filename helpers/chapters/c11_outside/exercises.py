"""Chapter 11: the exercises and the cases."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from virtual_gpu.language import tr
from virtual_gpu.models.configs import load_config
from virtual_gpu.units import choose, human_bytes, positive_int

from ...rows import LeftRows
from ...self_check import Case, Exercise, compare, filled, right
from .cache import kv_bytes
from .evaluation import KEPT, evaluate
from .resume import resumed, saved
from .tried import Outcome, attempt

_folders: list[TemporaryDirectory] = []  # removed when Python ends


def _judge_gathered(function: Callable[[int, int, int, int], int]) -> str:
    vocabulary = 151_936
    for samples, batch in ((40, 8), (64, 8), (50, 8), (8, 8)):
        last = (samples - 1) % batch + 1
        rows = samples if samples <= batch else 2 * samples - last
        got = function(samples, batch, 512, vocabulary)
        if wrong := compare(got, rows * 512 * vocabulary * 2, f"samples={samples}, batch={batch}"):
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
                ko="마지막 배치를 이어 붙이는 순간을 센다. 옛것에는 마지막 배치만 없고, 새것에는 모두 있다.",
                en="Count at the last concatenation: the old tensor lacks the last batch alone, the new one has all.",
            ),
            tr(
                ko="마지막 배치는 꽉 차지 않을 수 있고, 배치가 하나뿐이면 이어 붙일 것이 없다.",
                en="The last batch may not be full; with one batch nothing is concatenated.",
            ),
        ],
        "def gathered(samples, batch, length, vocabulary):\n"
        "    last = (samples - 1) % batch + 1\n"
        "    copies = samples if samples <= batch else 2 * samples - last\n"
        "    return copies * length * vocabulary * 2",
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
    attempt(saved(path), writes=True)
    return path


def _told(one: Outcome) -> LeftRows:
    heads = (tr(ko="GPU 최대", en="GPU, peak"), tr(ko="RAM 최대", en="RAM, peak"), tr(ko="결과", en="result"))
    return LeftRows(heads, [[human_bytes(one.gpu), human_bytes(one.ram), one.result]])


def _resume(**settings: Any) -> Outcome:
    for name in settings:
        choose(name, ("map_location", "delete", "mmap"), tr(ko="설정", en="setting"))
    return attempt(resumed(_checkpoint(), **settings))


def _judge_resume(settings: dict[str, Any]) -> str:
    one = _resume(**filled(settings))
    if one.died:
        return one.result
    said = f"GPU {human_bytes(one.gpu)}, RAM {human_bytes(one.ram)}"
    if one.ram > 2**27:
        return tr(ko=f"{said}. RAM이 128 MiB를 넘는다.", en=f"{said}: more than 128 MiB of RAM.")
    return right(said)


def _evaluate(keep: str = "logits", accumulate: int | None = None, batch_size: int = 8) -> Outcome:
    keep = choose(keep, KEPT, "keep")
    accumulate = None if accumulate is None else positive_int(accumulate, "accumulate")
    batch_size = positive_int(batch_size, "batch_size")
    return attempt(partial(evaluate, 96, batch_size, keep, accumulate), "T4", host="Colab")


def _judge_evaluate(settings: dict[str, Any]) -> str:
    settings = filled(settings)
    one = _evaluate(**settings)
    if one.died:
        return one.result
    if settings.get("keep") == "nothing":
        return tr(ko="끝까지 가지만 정확도를 계산할 것이 남지 않는다.", en="It ends, with nothing left for a metric.")
    return right(f"GPU {human_bytes(one.gpu)}, RAM {human_bytes(one.ram)}")


CASES = {
    "11-A": lambda: Case(
        "11-A",
        _judge_evaluate,
        lambda: [
            tr(
                ko="GPU에서 치운 로짓은 어디로 가는가? RAM 열을 본다.",
                en="Where do logits go that leave the GPU? Look at the RAM column.",
            ),
            tr(
                ko="정확도에 필요한 것은 어휘 전체의 점수가 아니라 토큰 하나에 수 하나다.",
                en="An accuracy needs one number a token, not a score for each word of the vocabulary.",
            ),
        ],
        'case("11-A").run(accumulate=1)\ncase("11-A").run(keep="argmax")\nanswer = {"keep": "argmax"}',
        experiment=lambda **settings: _told(_evaluate(**settings)),
        thread="https://github.com/huggingface/transformers/issues/25313",
    ),
    "11-B": lambda: Case(
        "11-B",
        _judge_resume,
        lambda: [
            tr(
                ko="map_location을 적지 않으면 텐서는 저장될 때 있던 곳으로 돌아간다.",
                en="Without map_location a tensor goes back to where it was when it was saved.",
            ),
            tr(
                ko="파일을 RAM에 읽어 들이지 않고 필요한 페이지만 가져오는 방법이 있다(11.7절의 표).",
                en="A file need not be read into RAM: see the table of 11.7.",
            ),
        ],
        'case("11-B").run(map_location="cpu")\n'
        'case("11-B").run(map_location="cpu", mmap=True)\n'
        'answer = {"map_location": "cpu", "mmap": True}',
        experiment=lambda **settings: _told(_resume(**settings)),
        thread="https://github.com/karpathy/nanoGPT/issues/158",
    ),
}
