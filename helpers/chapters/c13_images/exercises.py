"""The exercises of chapter 13, and its case."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from virtual_gpu.errors import WrongValue
from virtual_gpu.language import tr
from virtual_gpu.units import GiB, human_bytes, positive_int

from ...rows import LeftRows
from ...self_check import Case, Exercise, compare, filled, right
from ..c11_outside.tried import Outcome, attempt
from .tokens import FEWEST, MOST, grid_of
from .trained import train

GPU, STEP = "T4", 65_536  # pixels: 64 tokens
PHOTO, PHOTOS = (4032, 3024), 4
HEADS, ASKED = 16, 272 * GiB  # Qwen2-VL's vision tower; what sdpa asked for in the message


def _judge_pixels(function: Callable[[int, int], int]) -> str:
    for tokens, images in ((1280, 1), (4096, 4), (1000, 3), (64, 1)):
        pixels = filled(function(tokens, images))
        expected, token = tokens // images * 32 * 32, 32 * 32
        if pixels // token != expected // token and (wrong := compare(pixels, expected, f"{tokens=}, {images=}")):
            return wrong  # what is less than a token does not matter
    return right()


def _judge_patches(patches: int) -> str:
    patches = positive_int(filled(patches), tr(ko="패치", en="patches"))
    asked = 4 * HEADS * patches**2
    if abs(asked / ASKED - 1) < 0.005:
        return right(human_bytes(asked))
    return tr(
        ko=f"패치 {patches:,}개의 점수 행렬은 {human_bytes(asked)}다. 메시지는 272.00 GiB를 요청했다.",
        en=f"The scores of {patches:,} patches take {human_bytes(asked)}; the message asked for 272.00 GiB.",
    )


def _photos(max_pixels: int = 1_048_576) -> Outcome:
    grid_of(*PHOTO, max_pixels)  # what is wrong with it is said here
    program = partial(train, *PHOTO, PHOTOS, checkpointing=True, repeat_kv=True, max_pixels=max_pixels)
    return attempt(program, GPU)


def _told(one: Outcome) -> LeftRows:
    return LeftRows(
        [tr(ko="GPU 최대", en="GPU, peak"), tr(ko="결과", en="result")], [[human_bytes(one.gpu), one.result]]
    )


def _judge_max_pixels(max_pixels: int) -> str:
    max_pixels = positive_int(filled(max_pixels), "max_pixels")
    if max_pixels % STEP or not FEWEST <= max_pixels <= MOST:
        raise WrongValue(
            tr(
                ko=f"max_pixels={max_pixels:,}: {STEP:,}의 배수로, {FEWEST:,}에서 {MOST:,} 사이로 적는다.",
                en=f"max_pixels={max_pixels:,}: a multiple of {STEP:,} between {FEWEST:,} and {MOST:,}.",
            )
        )
    one = _photos(max_pixels)
    if one.died:
        return one.result
    if max_pixels < MOST and not _photos(max_pixels + STEP).died:
        return tr(
            ko=f"들어간다({human_bytes(one.gpu)}). 그런데 {max_pixels + STEP:,}도 들어간다.",
            en=f"It fits ({human_bytes(one.gpu)}), and so does {max_pixels + STEP:,}.",
        )
    return right(human_bytes(one.gpu))


EXERCISES = {
    "13-1": lambda: Exercise(
        "13-1",
        _judge_pixels,
        lambda: [
            tr(ko="토큰 하나가 차지하는 픽셀은 32 × 32다.", en="A token stands for 32 × 32 pixels."),
            tr(
                ko="max_pixels는 이미지 한 장의 한도다. 한 장에 돌아갈 토큰부터 정수로 나눈다.",
                en="max_pixels is one picture's: first how many tokens, a whole number, each picture gets.",
            ),
        ],
        "def max_pixels_for(tokens, images):\n    return tokens // images * 32 * 32",
    ),
    "13-2": lambda: Exercise(
        "13-2",
        _judge_patches,
        lambda: [
            tr(
                ko="math 커널의 점수 행렬은 fp32다: 헤드 × 패치 × 패치 × 4바이트.",
                en="The math kernel's scores are in fp32: heads × patches × patches × 4 bytes.",
            ),
            tr(ko="272 × 2**30을 4 × 16으로 나누고 제곱근을 구한다.", en="272 × 2**30 by 4 × 16, then the root."),
        ],
        "patches = round((272 * 2**30 / (4 * 16)) ** 0.5)",
    ),
}

CASES = {
    "13-A": lambda: Case(
        "13-A",
        _judge_max_pixels,
        lambda: [
            tr(
                ko="가중치를 뺀 나머지는 토큰의 수에 비례한다. (토큰, 최대) 두 점으로 14.64 GiB까지 직선을 긋는다.",
                en="All but the weights grows with the tokens: draw a line through two (tokens, peak) up to 14.64 GiB.",
            ),
            tr(
                ko="네 장에 5,700토큰쯤이다. grid_of(*photo, max_pixels).tokens * 4가 그 아래인 가장 큰 max_pixels다.",
                en="Some 5,700 for the four: the largest max_pixels with grid_of(*photo, max_pixels).tokens * 4 below.",
            ),
        ],
        'case("13-A").run(max_pixels=524288)\ncase("13-A").run(max_pixels=1048576)\n'
        'case("13-A").run(max_pixels=1507328)\nmax_pixels = 1441792',
        experiment=lambda **settings: _told(_photos(**settings)),
        thread="https://github.com/unslothai/unsloth/issues/1326",
    ),
}
