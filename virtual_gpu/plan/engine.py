"""A vLLM engine that makes GRPO's completions on the card of the training: what it takes there.

vLLM is not run here. Counted are its weights in 16 bits and the cache of keys and values, which the logs of others bear
out to the last digit that they print; what it takes beside them was read off the same logs, and is a range.

Its share of the card (`gpu_memory_utilization`, of all memory) holds weights, cache, the peak of a forward pass over
`max_num_batched_tokens` (of TRL's 4,096) with logits of `max_num_seqs` rows (of TRL's the completions of a generation),
and what is made outside PyTorch's allocator (vllm/v1/worker/gpu_worker.py, 0.8 to 0.33). CUDA graphs come after that,
until 0.20 beside the share. Asleep (TRL's level 2) weights and cache are gone, graphs and libraries' handles stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..cards import GPUSpec, Range
from ..language import tr
from ..models.build import build_model, count_parameters
from ..models.configs import cached_by_model, load_config
from ..models.depth import text_config
from ..models.kv_cache import shape_of
from ..room import KERNELS, Outside, Room
from ..step.setting import ASLEEP, AWAKE
from ..units import GiB

if TYPE_CHECKING:
    from ..shards.rank_step import RankNeed
    from ..step.predict import Need
    from .recipes import Recipe
    from .request import Request

ENGINE = "vLLM"
MODES = (AWAKE, ASLEEP)  # that may be asked for: both ways, or the second alone
TOKENS = 16  # of a block, by which the cache is handed out
LARGEST = 15e9  # parameters of models of which there are logs: up to phi-4
MOST_ROWS = 1024  # that an engine of which there is a log takes at once; of TRL's all completions of a generation
OLDEST = (7, 0)  # compute capability that vLLM asks for (its installation page)
# benchmarks/engines.json, vLLM 0.7 to 0.27 on five kinds of cards, forward passes over 256 to 8,192 tokens and 128 to
# 1,024 rows. Not among them: before 0.17 a pass whose tokens and rows no log says took up to 5.7 GiB.
BESIDE = Range(int(0.36 * GiB), int(2.49 * GiB))  # in its share: that peak, and what is outside the allocator
GRAPHS = Range(0, int(1.28 * GiB))  # beside its share, or since 0.20 in it
SOURCE = "logs of vLLM 0.7 to 0.27, benchmarks/engines.json"


@dataclass(frozen=True)
class Engine:
    """Bytes of an engine on each card: its weights, the cache of one text, and that of the texts it has to hold.

    rows: the texts of a generation. trained: what the training keeps reserved while the engine has its memory.
    """

    weights: int
    text: int
    cache: int
    rows: int
    trained: int

    @property
    def nbytes(self) -> int:
        """Weights and cache."""
        return self.weights + self.cache

    def least_share(self, request: Request) -> float:
        """vllm_gpu_memory_utilization under which it cannot start: weights and one text alone are more."""
        return _up((self.weights + self.text) / memory_of(request.spec).high)

    def share(self, request: Request) -> float:
        """vllm_gpu_memory_utilization to write, to a thousandth.

        What the training leaves for certain, or less where all texts are held by less.
        """
        memory = memory_of(request.spec)
        left = (_sure_bytes(request) - self.trained - GRAPHS.high) / memory.high
        enough = (self.weights + self.rows * self.text + BESIDE.high) / memory.low
        return min(_down(left), _up(enough))

    def texts(self, request: Request) -> int:
        """How many texts of a generation that share holds at once, at least; the others wait."""
        room = self.share(request) * memory_of(request.spec).low - self.weights - BESIDE.high
        return max(min(int(room // self.text), self.rows), 1)

    def line(self, request: Request) -> str:
        """What to set, and what that holds, as it is printed."""
        least, share, texts = self.least_share(request), self.share(request), self.texts(request)
        return tr(
            ko=f"vllm_gpu_memory_utilization={share:g} ({least:g}보다 작으면 시작하지 못한다): 답 {self.rows}개 가운데 "
            f"적어도 {texts}개의 KV 캐시까지 들어간다",
            en=f"vllm_gpu_memory_utilization={share:g} (under {least:g} it cannot start), with room for the KV cache "
            f"of {texts} of {self.rows} completions at least",
        )

    def to_dict(self, request: Request, fits: bool) -> dict[str, Any]:
        """As plain JSON values; share and texts where the plan fits."""
        found = {"share": self.share(request), "texts": self.texts(request)} if fits else {"share": None, "texts": None}
        return asdict(self) | {"least_share": self.least_share(request)} | found


def _up(share: float) -> float:
    return math.ceil(1000 * share) / 1000


def _down(share: float) -> float:
    return math.floor(1000 * share) / 1000


def _sure_bytes(request: Request) -> int:
    """What the training and the whole share of an engine may take, with the margin free."""
    context = sum(part.bytes.high for part in request.room.outside if part.what != ENGINE)
    return int((request.room.memory.low - context) / ((1 + KERNELS) * (1 + request.margin)))


@dataclass(frozen=True)
class Share:
    """An engine by what a file says of it: its share of the card, and the tokens of the longest text that it takes."""

    model: str
    share: float
    longest: int

    def reserved(self, card: int, rollout: int, memory: Range) -> int:
        """Bytes of a training that needs `card` alone; where the engine sleeps, of the `rollout` beside it (else 0)."""
        taken = int(memory.high * self.share)
        return max(card, rollout + taken) if rollout else card + taken

    def least(self, beside: int, memory: int) -> float:
        """The share that weights, the cache of the longest text and so much beside them take."""
        return _up((_weights(self.model) + text_bytes(self.model, self.longest) + beside) / memory)

    def starts(self, memory: Range) -> bool:
        """Whether it may."""
        return self.least(0, memory.high) <= self.share

    def sure_to_start(self, memory: Range) -> bool:
        """Whether it does, if it is no larger than those of which there are logs."""
        return self.least(BESIDE.high, memory.low) <= self.share

    def able(self, longest: int, memory: Range) -> Share:
        """The same; with texts of at most `longest` tokens if it is not sure to start; larger if it cannot."""
        if self.sure_to_start(memory):
            return self
        shorter = replace(self, longest=min(self.longest, longest))
        return shorter if shorter.starts(memory) else replace(shorter, share=shorter.least(BESIDE.high, memory.low))

    def others(self, card: int, rollout: int, memory: Range, limit: int) -> Iterator[Share]:
        """The same, and with the largest share that `limit` bytes leave it and that it is sure to start with."""
        yield self
        most = _down((limit - (rollout or card)) / memory.high)
        if self.least(BESIDE.high, memory.low) <= most < self.share:
            yield replace(self, share=most)


def engine_label(vllm: str) -> str:
    """Where completions are made, in the reader's language."""
    asleep = tr(ko="vLLM(학습하는 동안 재움)", en="vLLM (asleep while training)")
    return {AWAKE: ENGINE, ASLEEP: asleep}[vllm]


def why_no_engine(model: str, spec: GPUSpec, rows: int) -> str:
    """Why an engine of a model on that card, for so many completions at once, is not counted; empty where it is."""
    if spec.compute_capability < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return tr(
            ko=f"vLLM은 컴퓨트 능력 {oldest}부터다({spec.name})",
            en=f"vLLM needs compute capability {oldest} ({spec.name})",
        )
    if rows > MOST_ROWS:
        return tr(
            ko=f"GPU마다 답 {rows}개를 한꺼번에 만드는 엔진은 모은 로그에 없다. {MOST_ROWS}개까지 센다",
            en=f"no log is of an engine that takes {rows} completions at once; {MOST_ROWS} are counted",
        )
    config = load_config(model)
    text = text_config(config)
    kinds = {*(getattr(text, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    if kinds or getattr(text, "kv_lora_rank", None) or not hasattr(text, "num_attention_heads"):
        return tr(
            ko="이 모델의 층이 키와 값을 간직하는 방식은 세지 않는다",
            en="how the layers of this model keep keys and values is not counted",
        )
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        return tr(
            ko="그림이나 소리도 받는 모델은 vLLM이 그 몫을 더 잡으므로 세지 않는다",
            en="of a model that takes pictures or sound vLLM takes more, which is not counted",
        )
    if _weights(model) > 2 * LARGEST:
        return tr(
            ko="파라미터가 150억 개를 넘는 모델에서 vLLM이 무엇을 더 쓰는지는 모은 기록에 없다",
            en="of models of over 15 billion parameters no log says what vLLM takes beside the weights",
        )
    return ""


@cached_by_model
def _weights(model: str) -> int:
    """Its weights in 16 bits: what vLLM makes of any 16- or 32-bit checkpoint."""
    return 2 * count_parameters(build_model(load_config(model), torch.float16))


def text_bytes(model: str, tokens: int) -> int:
    """The cache of a prompt with its completion: whole blocks, and the one that vLLM keeps back (since 0.30).

    All layers are taken to keep all of it: vLLM gives those with a window the window and a forward pass's tokens.
    """
    heads, size, layers = shape_of(load_config(model))
    return 2 * 2 * heads * size * len(layers) * (-(-tokens // TOKENS) + 1) * TOKENS


def least_bytes(request: Request) -> int:
    """Weights, and the cache of the completions of one prompt: what a plan leaves an engine at least.

    vLLM starts with room for one text, and the others wait.
    """
    texts = min(request.generations, request.per_gpu)
    return _weights(request.model) + texts * text_bytes(request.model, request.length)


def memory_of(spec: GPUSpec) -> Range:
    """All of a card's memory, of which an engine has a share."""
    return spec.memory_seen or Range(spec.memory_bytes, spec.memory_bytes)


def with_graphs(room: Room) -> Room:
    """The room beside an engine that is asleep, or of which all of its share is counted."""
    return Room(room.card, room.memory, (*room.outside, Outside(ENGINE, GRAPHS, SOURCE)))


def with_engine(room: Room) -> Room:
    """The room beside an engine that is awake, of which weights and cache are counted elsewhere."""
    both = Range(BESIDE.low + GRAPHS.low, BESIDE.high + GRAPHS.high)
    return Room(room.card, room.memory, (*room.outside, Outside(ENGINE, both, SOURCE)))


def beside(request: Request, recipe: Recipe, need: Need | RankNeed) -> tuple[int, dict[str, int], Engine]:
    """(bytes needed, kind → bytes of them, the engine) of a training that needs so much without.

    While an engine is asleep the training's peak has only graphs beside it. Where it wakes, beside what is reserved
    then, it is counted at its most: with all of BESIDE.
    """
    lost, weights, text = need.card - need.tensors, _weights(request.model), text_bytes(request.model, request.length)
    trained = need.card if recipe.vllm == AWAKE else need.rollout
    engine = Engine(weights, text, least_bytes(request) - weights, request.per_gpu, trained)
    if recipe.vllm == AWAKE:
        return need.card + engine.nbytes, {**need.at_peak, "engine": engine.nbytes, "fragmentation": lost}, engine
    most = engine.nbytes + BESIDE.high
    if trained + most <= need.card:
        return need.card, {**need.at_peak, "fragmentation": lost}, engine
    lost = trained - sum(need.at_generation.values())
    return trained + most, {**need.at_generation, "engine": most, "fragmentation": lost}, engine
