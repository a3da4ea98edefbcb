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
from ..room import Outside, Room
from ..units import GiB, human_bytes

if TYPE_CHECKING:
    from ..step.predict import Need
    from .recipes import Recipe
    from .request import Request

SERVER, AWAKE, ASLEEP = "server", "colocate", "asleep"  # elsewhere; beside the training; without its memory meanwhile
MODES = (AWAKE, SERVER)  # of GRPOConfig's vllm_mode
TOKENS = 16  # of a block, by which the cache is handed out
LARGEST = 15e9  # parameters of models of which there are logs: up to phi-4
# benchmarks/engines.json, vLLM 0.7 to 0.27 on five kinds of cards, forward passes over 256 to 8,192 tokens and 128 to
# 1,024 rows. Not among them: before 0.17 1,024 rows took up to 5.7 GiB.
BESIDE = Range(int(0.36 * GiB), int(2.46 * GiB))  # in its share: that peak, and what is outside the allocator
GRAPHS = Range(int(0.17 * GiB), int(1.28 * GiB))  # beside its share
SOURCE = "logs of vLLM 0.7 to 0.27, benchmarks/engines.json"


@dataclass(frozen=True)
class Engine:
    """Bytes of an engine on each card: its weights, the cache of one text, and how many of `rows` texts it holds.

    trained: what the training keeps reserved while the engine has its memory.
    """

    weights: int
    text: int
    texts: int
    rows: int
    trained: int

    @property
    def nbytes(self) -> int:
        """Weights and cache."""
        return self.weights + self.texts * self.text

    def shares(self, request: Request) -> tuple[float, float]:
        """vllm_gpu_memory_utilization, to a hundredth: below the first it cannot start, and the one to write.

        That is what the training leaves for certain, or less where all texts are held by less.
        """
        memory = memory_of(request.spec)
        least = (self.weights + self.text + BESIDE.low) / memory.high
        left = (request.limit_bytes - self.trained + BESIDE.high) / memory.high
        enough = (self.weights + self.rows * self.text + BESIDE.high) / memory.low
        return math.ceil(100 * least) / 100, min(math.floor(100 * left), math.ceil(100 * enough)) / 100

    def line(self, request: Request) -> str:
        """What to set, and what that holds, as it is printed."""
        least, share = self.shares(request)
        held = human_bytes(self.nbytes)
        return tr(
            ko=f"vllm_gpu_memory_utilization={share:.2f} ({least:.2f}보다 작으면 시작하지 못한다): 가중치와, 답 "
            f"{self.rows}개 가운데 {self.texts}개의 KV 캐시로 {held}",
            en=f"vllm_gpu_memory_utilization={share:.2f} (under {least:.2f} it cannot start): {held} of weights and of "
            f"the KV cache of {self.texts} of {self.rows} completions",
        )

    def to_dict(self, request: Request) -> dict[str, Any]:
        """As plain JSON values."""
        least, share = self.shares(request)
        return asdict(self) | {"least_share": least, "share": share}


@dataclass(frozen=True)
class Share:
    """An engine by what a file says of it: its share of the card, whether it sleeps while the model is trained.

    longest: tokens of the longest text that it takes.
    """

    model: str
    share: float
    sleeps: bool
    longest: int

    def reserved(self, card: int, rollout: int, memory: Range) -> int:
        """Bytes of a training that needs `card` alone, and `rollout` while the engine is at work, with this engine."""
        taken = int(memory.high * self.share)
        return max(card, rollout + taken) if self.sleeps else card + taken

    def least(self, memory: Range, beside: int) -> int:
        """In hundredths of the card, what weights, the cache of the longest text and so much beside them take."""
        return math.ceil(100 * (_weights(self.model) + text_bytes(self.model, self.longest) + beside) / memory.low)

    def able(self, longest: int, memory: Range) -> Share:
        """The same; with texts of at most `longest` tokens if it is not sure to start; larger if it cannot."""
        if self.least(memory, BESIDE.high) <= 100 * self.share:
            return self
        shorter = replace(self, longest=min(self.longest, longest))
        starts = shorter.least(memory, BESIDE.low) <= 100 * self.share
        return shorter if starts else replace(shorter, share=min(shorter.least(memory, BESIDE.high) / 100, 1.0))

    def others(self, card: int, rollout: int, memory: Range, limit: int) -> Iterator[Share]:
        """The same asleep; with the largest share that `limit` bytes leave it, and that it is sure to start with."""
        for sleeps in dict.fromkeys((self.sleeps, True)):
            yield replace(self, sleeps=sleeps)
        for sleeps in dict.fromkeys((self.sleeps, True)):
            most = math.floor(100 * (limit - (rollout if sleeps else card)) / memory.high)
            if self.least(memory, BESIDE.high) <= most < 100 * self.share:
                yield replace(self, share=most / 100, sleeps=sleeps)


def engine_label(vllm: str) -> str:
    """Where completions are made, in the reader's language."""
    asleep = tr(ko="vLLM(학습하는 동안 재움)", en="vLLM (asleep while training)")
    return {SERVER: tr(ko="vLLM(다른 GPU)", en="vLLM (elsewhere)"), AWAKE: "vLLM", ASLEEP: asleep}[vllm]


def why_no_engine(model: str) -> str:
    """Why the engine of a model is not counted; empty where it is."""
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
    """What an engine of the request holds at least: it does not start without room for one text."""
    return _weights(request.model) + text_bytes(request.model, request.length)


def memory_of(spec: GPUSpec) -> Range:
    """All of a card's memory, of which an engine has a share."""
    return spec.memory_seen or Range(spec.memory_bytes, spec.memory_bytes)


def with_graphs(room: Room) -> Room:
    """The room beside an engine of which all of its share is counted."""
    return Room(room.card, room.memory, (*room.outside, Outside("vLLM", GRAPHS, SOURCE)))


def with_engine(room: Room) -> Room:
    """The room beside an engine, of which weights and cache are counted elsewhere."""
    both = Range(GRAPHS.low, BESIDE.high + GRAPHS.high)  # asleep it keeps no more than the graphs
    return Room(room.card, room.memory, (*room.outside, Outside("vLLM", both, SOURCE)))


def beside(request: Request, recipe: Recipe, need: Need, smallest: bool) -> tuple[int, dict[str, int], Engine]:
    """(bytes needed, kind → bytes of them, the engine) of a training that needs so much without.

    The engine has to hold the texts of all completions of a generation; of the `smallest` micro-batch, which leaves
    the most room, so many of them as fit, and one at least. While it is asleep the training's peak has no engine beside
    it, and before it wakes TRL empties the allocator's cache: counted is then what tensors hold while completions are
    made, and as much more as the allocator loses at the training's peak.
    """
    lost, rows = need.card - need.tensors, request.per_gpu
    weights, text = _weights(request.model), text_bytes(request.model, request.length)
    trained = need.card if recipe.vllm == AWAKE else need.generation + lost
    fitting = (request.limit_bytes - trained - weights) // text
    texts = min(max(fitting, 1), rows) if smallest else rows
    engine = Engine(weights, text, texts, rows, trained)
    if recipe.vllm == AWAKE:
        kinds, needed = need.at_peak, need.card + engine.nbytes
    elif trained + engine.nbytes > need.card:
        kinds, needed = need.at_generation, trained + engine.nbytes
    else:
        return need.card, {**need.at_peak, "fragmentation": lost}, engine
    return needed, {**kinds, "engine": engine.nbytes, "fragmentation": lost}, engine
