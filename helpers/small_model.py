"""A language model small enough to train in the notebook: it knows 64 capitals, in Korean sentences."""

from __future__ import annotations

import copy
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional

from virtual_gpu.units import choose

_CAPITALS = """
대한민국 서울, 일본 도쿄, 중국 베이징, 몽골 울란바토르, 베트남 하노이, 태국 방콕,
라오스 비엔티안, 캄보디아 프놈펜, 필리핀 마닐라, 말레이시아 쿠알라룸푸르,
인도네시아 자카르타, 인도 뉴델리, 네팔 카트만두, 방글라데시 다카, 이란 테헤란,
이라크 바그다드, 튀르키예 앙카라, 러시아 모스크바, 우크라이나 키이우, 폴란드 바르샤바,
체코 프라하, 헝가리 부다페스트, 루마니아 부쿠레슈티, 불가리아 소피아, 세르비아 베오그라드,
크로아티아 자그레브, 그리스 아테네, 이탈리아 로마, 오스트리아 빈, 스위스 베른,
독일 베를린, 프랑스 파리, 스페인 마드리드, 포르투갈 리스본, 영국 런던, 아일랜드 더블린,
네덜란드 암스테르담, 벨기에 브뤼셀, 덴마크 코펜하겐, 노르웨이 오슬로, 스웨덴 스톡홀름,
핀란드 헬싱키, 아이슬란드 레이캬비크, 이집트 카이로, 모로코 라바트, 튀니지 튀니스,
가나 아크라, 케냐 나이로비, 에티오피아 아디스아바바, 미국 워싱턴, 캐나다 오타와,
멕시코 멕시코시티, 쿠바 아바나, 콜롬비아 보고타, 베네수엘라 카라카스, 에콰도르 키토,
페루 리마, 칠레 산티아고, 브라질 브라질리아, 파라과이 아순시온, 우루과이 몬테비데오,
아르헨티나 부에노스아이레스, 호주 캔버라, 뉴질랜드 웰링턴
"""
CAPITALS = dict(pair.split() for pair in _CAPITALS.replace("\n", " ").split(","))
_PAD = "\n"
_SENTENCES = [(f"{country}의 수도는 ", f"{capital}이다.") for country, capital in CAPITALS.items()]
_CHARACTERS = sorted({_PAD, *"".join(start + end for start, end in _SENTENCES)})
_NUMBER = {character: number for number, character in enumerate(_CHARACTERS)}


def _encode(text: str) -> list[int]:
    return [_NUMBER[character] for character in text]


def _lesson() -> tuple[torch.Tensor, torch.Tensor]:
    """All sentences as (64, length) characters, and which of them belong to the answer (the capital and the ending)."""
    length = max(len(start + end) for start, end in _SENTENCES)
    tokens = torch.tensor([_encode((start + end).ljust(length, _PAD)) for start, end in _SENTENCES])
    places = torch.arange(length)
    first = torch.tensor([[len(start)] for start, _ in _SENTENCES])
    last = torch.tensor([[len(start + end)] for start, end in _SENTENCES])
    return tokens, (first <= places) & (places < last)


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    """The 64 sentences to learn: (64, length) characters, and for each the next one, or -100 outside the answer."""
    tokens, answer = _lesson()
    return tokens[:, :-1], tokens[:, 1:].masked_fill(~answer[:, 1:], -100)


class Block(nn.Module):
    """Attention and MLP, as in GPT-2."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    @property
    def readers(self) -> tuple[tuple[nn.LayerNorm, nn.Linear], ...]:
        """Each normalisation with the layer that alone reads what it gives."""
        return (self.norm_1, self.query_key_value), (self.norm_2, self.up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, length, width) → the same shape."""
        parts = self.query_key_value(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class SmallLanguageModel(nn.Module):
    """A GPT of characters."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4, positions: int = 32):
        super().__init__()
        self.embedding, self.position = nn.Embedding(len(_CHARACTERS), width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(_CHARACTERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens (batch, length) → logits (batch, length, characters)."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def complete(self, start: str = "프랑스의 수도는 ", most: int = 12) -> str:
        """The start of a sentence with the likeliest continuation, up to its full stop."""
        text = start
        while len(text) < len(start) + most and text[-1] != ".":
            text += _CHARACTERS[int(self(torch.tensor([_encode(text)]))[0, -1].argmax())]
        return text


def _loss(model: SmallLanguageModel) -> torch.Tensor:
    tokens, answer = _lesson()
    return functional.cross_entropy(model(tokens[:, :-1])[answer[:, 1:]], tokens[:, 1:][answer[:, 1:]])


@torch.no_grad()
def score(model: SmallLanguageModel) -> tuple[float, int]:
    """(loss, known): mean cross-entropy of the answers' characters; how many of the 64 capitals it would complete."""
    tokens, answer = _lesson()
    right = (model(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]) | ~answer[:, 1:]
    return float(_loss(model)), int(right.all(1).sum())


def train_small_model() -> SmallLanguageModel:
    """The model, trained (once; ask again and get the same one), in fp32."""
    return _trained()[0]


def adam_state() -> tuple[torch.Tensor, torch.Tensor]:
    """(momentum, variance) that AdamW held for the first MLP's weights when the training ended, in fp32."""
    model, optimizer = _trained()
    state = optimizer.state[model.blocks[0].up.weight]
    return state["exp_avg"].float(), state["exp_avg_sq"].float()


@lru_cache(maxsize=1)
def _trained(steps: int = 100, seed: int = 0) -> tuple[SmallLanguageModel, torch.optim.Optimizer]:
    """The trained model with its optimizer.

    It trains in fp64, where the order in which a CPU adds does not show in any digit that we print, and on one
    thread, which is faster for matrices as small as these.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = SmallLanguageModel().double()
            optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps, pct_start=0.2)
            for _ in range(steps):
                optimizer.zero_grad()
                _loss(model).backward()
                optimizer.step()
                schedule.step()
    finally:
        torch.set_num_threads(threads)
    return model.float().eval().requires_grad_(False), optimizer


@torch.no_grad()
def with_outlier_channels(
    model: SmallLanguageModel, factor: float = 20.0, where: str = "activations", channels: int = 1
) -> SmallLanguageModel:
    """A copy that computes the same function with outliers in it.

    where: "activations", as large models have them: the first channels leave each normalisation `factor` times larger,
    and the columns that read them are as many times smaller; "weights": the other way round.
    """
    grown = factor if choose(where, ("activations", "weights"), "where") == "activations" else 1 / factor
    model = copy.deepcopy(model)
    for block in model.blocks:
        for norm, reader in block.readers:
            norm.weight[:channels] *= grown
            norm.bias[:channels] *= grown
            reader.weight[:, :channels] /= grown
    return model
