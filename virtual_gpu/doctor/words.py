"""The sentences of a diagnosis: causes, evidence, what is excluded."""

from __future__ import annotations

from ..language import tr
from ..units import human_bytes as size
from . import foreign, places
from .message import Message, Size
from .sizes import Holes, Share, empty_card, own
from .vocabulary import Product

_CAUSES = {
    "limit": (
        "프로그램이 스스로 건 한도(set_per_process_memory_fraction)에 걸렸다",
        "the program's own limit refused it (set_per_process_memory_fraction)",
    ),
    "in_handler": (
        "앞의 OOM을 처리하는 except 안에서 다시 시도했다",
        "tried again inside the handler of the first out-of-memory error",
    ),
    "larger_than_card": (
        "이 요청 하나가 빈 카드 전체보다 크다",
        "this one request is larger than the whole empty card",
    ),
    "other_process": ("다른 프로세스가 카드를 차지하고 있다", "another process holds part of the card"),
    "outside_pytorch": (
        "이 프로세스가 PyTorch 밖에서 많이 쓴다(NCCL, 다른 라이브러리)",
        "this process holds much outside PyTorch (NCCL, other libraries)",
    ),
    "fragmentation": (
        "단편화: 빈자리를 모으면 이 요청은 통과할 수 있다",
        "fragmentation: with its holes gathered, this request may pass",
    ),
    "freed_since": (
        "메시지를 쓸 때는 빈 메모리가 넉넉했다. 그사이 누가 놓았거나 한도가 있다",
        "enough was free when the message was written: somebody let go meanwhile, or there is a limit",
    ),
    "cannot_tell": ("무엇이 카드를 채웠는지 여기에서는 알 수 없다", "cannot tell from this what fills the card"),
    places.LOADING: ("모델을 올리다가 카드가 찼다", "the model does not fit while it is loaded"),
    places.RESUMING: ("체크포인트를 읽다가 카드가 찼다", "a checkpoint is read onto a card that is full already"),
    places.SAVING: ("저장하면서 사본을 만들다가 카드가 찼다", "saving makes copies on the card"),
    places.FORWARD: ("순전파: 역전파를 위해 남기는 순전파 상태", "the forward pass: activations kept for backward"),
    places.ATTENTION: ("어텐션: 길이의 제곱으로 커지는 점수 행렬", "attention: scores that grow with length squared"),
    places.LOGITS: ("로짓과 손실: 토큰 × 어휘", "logits and loss: tokens × vocabulary"),
    places.BACKWARD: (
        "역전파: 순전파 상태가 아직 있는데 그레이디언트가 생긴다",
        "backward: gradients arise while activations are still held",
    ),
    places.OPTIMIZER_STATES: (
        "첫 스텝에서 옵티마이저 상태를 만들다가 카드가 찼다",
        "the optimizer's first step: its states are being made",
    ),
    places.OPTIMIZER_STEP: ("옵티마이저 스텝의 임시 텐서", "the optimizer's step: its temporaries"),
    places.EVALUATION_GATHERS: ("평가: 로짓을 카드에 모은다", "evaluation: logits gathered on the card"),
    places.EVALUATION: ("평가의 순전파", "the forward pass of an evaluation"),
    places.GENERATION: (
        "생성: 프롬프트의 순전파와 KV 캐시",
        "generation: the prompt's forward pass and the KV cache",
    ),
    places.WRAPPING: ("DDP나 DeepSpeed가 버퍼를 만든다", "DDP or DeepSpeed makes its buffers"),
    places.GATHERING: ("나눈 가중치를 한곳에 모은다(ZeRO-3, FSDP)", "sharded weights are gathered (ZeRO-3, FSDP)"),
    foreign.CARD: ("GPU 메모리 부족, 숫자가 없는 메시지", "out of GPU memory, in a message without numbers"),
    foreign.LIBRARY: ("라이브러리가 GPU 메모리를 얻지 못했다", "a library did not get GPU memory"),
    foreign.HOST: ("컴퓨터의 RAM이 부족하다", "the machine's RAM ran out, not the card's"),
    "host_loading": (
        "모델을 불러오다가 컴퓨터의 RAM이 부족해졌다",
        "the machine's RAM ran out: a model was loaded",
    ),
    foreign.SHARE: ("추론 엔진(vLLM)의 몫이 비어 있지 않다", "an inference engine's share of the card is not free"),
    foreign.CACHE: (
        "추론 엔진(vLLM)의 몫에 KV 캐시의 자리가 없다",
        "no room for the KV cache in an engine's share",
    ),
    foreign.OTHER: ("PyTorch CUDA가 아닌 메시지", "not a message of PyTorch on CUDA"),
    foreign.ELSE: ("메모리 부족이 아니다", "no lack of memory"),
    foreign.FP16: (
        "메모리 부족이 아니다: GradScaler는 fp16 그레이디언트를 받지 않는다",
        "no lack of memory: GradScaler refuses gradients in fp16",
    ),
    foreign.BF16: (
        "메모리 부족이 아니다: GradScaler는 bf16 그레이디언트를 받지 않는다",
        "no lack of memory: GradScaler refuses gradients in bf16",
    ),
}
_SURE = {"certain": "확실", "likely": "유력", "possible": "가능"}


def cause(name: str) -> str:
    """A cause in a few words."""
    return tr(*_CAUSES[name])


def sure(how: str) -> str:
    """How sure, in a word."""
    return tr(ko=_SURE[how], en=how)


def late(step: str, steps: str) -> str:
    """That the steps before passed, and what then comes before a cause of one moment."""
    return tr(
        ko=f"진행 막대가 {step}/{steps}이다. 앞의 스텝은 통과했다. 그렇다면 가장 긴 배치나 무엇인가 붙들린 것을 먼저 "
        "의심한다. 스텝이 끝날 때마다 torch.cuda.memory_allocated()를 적어, 느는지 튀는지 본다.",
        en=f"The progress bar is at {step}/{steps}: the steps before passed. Look first for the longest batch and for "
        "something that is kept: note torch.cuda.memory_allocated() after each step, and see if it grows or jumps.",
    )


def little(share: float, run: str | None) -> str:
    """That the request is little beside what is alive, and the command that shows the rest, where one is known."""
    said = tr(
        ko=f"T는 살아 있는 텐서의 {share:.0%}다. 카드를 채운 것은 나머지이니, 그것이 무엇인지 먼저 본다",
        en=f"T is {share:.0%} of what is alive: the rest fills the card. Find out first what that is",
    )
    return f"{said}: $ {run}" if run else f"{said}."


def cut() -> str:
    """That only the end of a log was read."""
    return tr(ko="기록이 길어 끝부분만 읽었다.", en="The log is long: only its end was read.")


def in_handler() -> str:
    """What an exception holds while it is handled."""
    return tr(
        ko="except가 끝날 때까지 예외가 앞 시도의 프레임과 그 지역 변수(텐서)를 붙들고 있다.",
        en="Until except ends the exception holds the frames of the first attempt, and the tensors in them.",
    )


def spilled() -> str:
    """What more than the card's capacity means."""
    return tr(
        ko="할당한 것이 카드보다 많다. 윈도우와 WSL은 RAM을 GPU에 빌려주므로 카드가 얼마나 찼는지는 알 수 없다.",
        en="More is allocated than the card has: Windows and WSL lend it the machine's RAM, so how full the card is "
        "cannot be read off.",
    )


def pools(private: Size) -> str:
    """That most lies in pools of CUDA graphs."""
    return tr(
        ko=f"할당한 것의 절반 이상인 {_of(private)}가 CUDA 그래프의 풀에 있다(torch.compile의 reduce-overhead, vLLM).",
        en=f"{_of(private)}, half of what is allocated or more, lie in pools of CUDA graphs (torch.compile's "
        "reduce-overhead, vLLM): they stay as long as the graphs do.",
    )


def _sum(holes: Holes) -> str:
    total = size(holes.free + holes.cached)
    return f"F + R = {size(holes.free)} + {size(holes.cached)} = {total}"


def no_fragmentation(holes: Holes) -> str:
    """Why gathering the holes would not do."""
    return tr(
        ko=f"단편화가 아니다: T = {size(holes.tried)} > {_sum(holes)}. 빈자리를 다 모아도 모자란다.",
        en=f"not fragmentation: T = {size(holes.tried)} > {_sum(holes)}. All holes together are too small.",
    )


def fragmentation(holes: Holes) -> str:
    """Why gathering the holes may do."""
    sign = "≤" if holes.enough else "≈"
    return tr(
        ko=f"T = {size(holes.tried)} {sign} {_sum(holes)}. 그다음 요청까지 통과한다는 뜻은 아니다.",
        en=f"T = {size(holes.tried)} {sign} {_sum(holes)}. What follows may still fail.",
    )


def freed_since(holes: Holes) -> str:
    """That the free memory alone was enough."""
    return tr(
        ko=f"T = {size(holes.tried)} < F = {size(holes.free)}.", en=f"T = {size(holes.tried)} < F = {size(holes.free)}."
    )


def nobody_else(message: Message) -> str:
    """That the card's memory is all accounted for."""
    mine = own(message)
    free, held = size(message.free.bytes if message.free else 0), size(mine.bytes if mine else 0)
    return tr(
        ko=f"다른 프로세스가 아니다: 남은 {free}와 이 프로세스의 {held}를 더하면 카드 전체다.",
        en=f"not another process: {free} free and this process's {held} are the whole card.",
    )


def others(message: Message, share: Share, enough: bool) -> str:
    """What the others hold, and whether the request would pass without it."""
    if share.listed:
        said = tr(
            ko=f"메시지에 적힌 다른 프로세스가 {size(share.bytes)}를 쓴다.",
            en=f"The other processes that it lists hold {size(share.bytes)}.",
        )
    else:
        said = tr(
            ko=f"적어도 {size(share.bytes)}가 남아 있지도, 이 프로세스의 PyTorch와 컨텍스트의 것도 아니다.",
            en=f"At least {size(share.bytes)} are neither free nor this process's PyTorch and context.",
        )
    if share.doubtful:
        said += " " + tr(
            ko="이 프로세스의 다른 라이브러리일 수도 있다.", en="It may be this one's other libraries, too."
        )
    if not enough:
        return said
    return said + " " + tr(ko="그것이 없었다면 이 요청은 통과했다.", en="Without that, this request would have passed.")


def outside(share: Share) -> str:
    """What is held beside the allocator."""
    return tr(
        ko=f"이 프로세스가 쓰는 것 가운데 {size(share.bytes)}가 PyTorch 할당자의 것이 아니다.",
        en=f"{size(share.bytes)} of what this process uses are not PyTorch's allocator's.",
    )


def limit(message: Message) -> str:
    """What is held, tried and allowed."""
    held, tried, allowed = (_of(one) for one in (message.held, message.tried, message.allowed))
    return tr(ko=f"{held} + {tried} > 한도 {allowed}", en=f"{held} + {tried} > {allowed} allowed")


def larger(message: Message) -> str:
    """The request against the empty card."""
    room = size(empty_card(message) or 0)
    return tr(
        ko=f"요청 {_of(message.tried)} > 빈 카드에서 쓸 수 있는 {room}",
        en=f"{_of(message.tried)} asked for > {room}, all that an empty card has for this process",
    )


def _of(stated: Size | None) -> str:
    return "?" if stated is None else size(stated.bytes)


def product(one: Product) -> str:
    """A factoring, written out."""
    models = ", ".join(one.models[:3]) + ("…" if len(one.models) > 3 else "")
    return f"{one.tokens:,} × {one.vocabulary:,} × {one.width} = {size(one.bytes)} ({models})"


def products(by_chance: float) -> str:
    """What factorings are worth."""
    return tr(
        ko="토큰 × 어휘 × 바이트를 2 MiB의 배수로 올리면 이 크기가 된다. 단서일 뿐이다. 우연히 맞을 확률도 "
        f"{by_chance:.0%}쯤 된다.",
        en="tokens × vocabulary × bytes, rounded up to 2 MiB, give this size. It is a hint only: about "
        f"{by_chance:.0%} of all sizes fit so by chance.",
    )
