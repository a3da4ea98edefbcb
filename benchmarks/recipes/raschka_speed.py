"""rasbt/LLMs-from-scratch, ch05/10_llm-training-speed: GPT-2 124M by hand, and what was reserved after an epoch.

The README changes the script in ten steps, each kept by the next: 1 the causal mask made on the fly, 2 to 4 nothing
that lies in memory but AdamW's fused kernel, 5 weights in bfloat16, 6 PyTorch's LayerNorm and GELU, 7 fused attention,
8 torch.compile, 9 a vocabulary of a multiple of 64, 10 a larger batch. Nothing is fitted. The model is written anew
after its equations. What is compiled is compiled by the installed Inductor, not by that of the README's PyTorch.
"""

from __future__ import annotations

import re
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from virtual_gpu.program.context import cuda

from .compiled import compiler_on, refuse_eager
from .recipe import ANY, NUMBER, SIZE, Recipe, Refused, Row, from_source, gpu_of

VOCABULARY, WIDTH, HEADS, LAYERS = 50_257, 768, 12, 12
NEW_TOKENS = 50  # that are generated after an epoch
MASK, FUSED_ADAM, BFLOAT16, LIBRARY_LAYERS, FLASH, COMPILED, PADDED, LARGER = 1, 3, 5, 6, 7, 8, 9, 10  # the README's


def predict(row: Row) -> int:
    """Bytes allocated or reserved at the end of an epoch."""
    settings = row["settings"]
    step = re.match(r"\d+", str(settings.get("variant", "")))
    if step is None or int(step[0]) >= LARGER:
        raise Refused(f"the variant {settings.get('variant')!r} is unknown, or of a batch that the row does not state")
    batch, length, dropout = int(settings["batch"]), int(settings["seq"]), float(settings["dropout"])
    found = _run(int(step[0]), batch, length, dropout, gpu_of(row).spec.name)
    for name in ("memory_allocated", "memory_reserved"):
        if row["metric"].startswith(name):
            return found[name]
    raise Refused(f"the metric {row['metric']!r} is not printed there")


@cache
def _run(step: int, batch: int, length: int, dropout: float, card: str) -> dict[str, int]:
    """Two training steps, an evaluation of two batches after the first, the generation of 50 tokens at the end."""
    with compiler_on(), cuda(card) as gpu:
        model = GPT(step, length, dropout)
        model = (model.to(torch.bfloat16) if step >= BFLOAT16 else model).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=step >= FUSED_ADAM or None)
        if step >= COMPILED:
            model = torch.compile(model)
        ids = torch.ones(batch, length, dtype=torch.int64)

        def loss_of() -> torch.Tensor:
            inputs, targets = ids.cuda(), ids.cuda()
            logits = model(inputs)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        for number in range(2):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            if number == 0:
                model.eval()
                with torch.no_grad():
                    for _ in range(2):
                        loss_of().item()
                model.train()
        model.eval()
        text = torch.ones(1, 4, dtype=torch.int64).cuda()
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                text = torch.cat((text, model(text)[:, -1].argmax(-1, keepdim=True)), dim=1)
        del text
        refuse_eager(gpu.watch.notes)
        return {name: getattr(torch.cuda, name)() for name in ("memory_allocated", "memory_reserved")}


class GPT(nn.Module):
    """The model after `step` steps of the README."""

    def __init__(self, step: int, length: int, dropout: float):
        super().__init__()
        vocabulary = -(-VOCABULARY // 64) * 64 if step >= PADDED else VOCABULARY
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(length, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*[Block(step, length, dropout) for _ in range(LAYERS)])
        self.norm = norm(step)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (B, T) → logits (B, T, vocabulary)."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(self.dropout(x))))


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and beside a shortcut."""

    def __init__(self, step: int, length: int, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = norm(step), norm(step)
        self.attention = Attention(step, length, dropout)
        gelu = nn.GELU(approximate="tanh") if step >= LIBRARY_LAYERS else GELU()
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), gelu, nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, width) → the same shape."""
        shortcut = x
        x = self.norm1(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.feed_forward(x)
        x = self.dropout(x)
        return x + shortcut


class Attention(nn.Module):
    """Causal attention; its mask is a buffer of floats, one made on the fly, or none (fused)."""

    def __init__(self, step: int, length: int, dropout: float):
        super().__init__()
        self.step, self.p = step, dropout
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        if step < MASK:
            self.register_buffer("mask", torch.triu(torch.ones(length, length), diagonal=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, width) → the same shape."""
        batch, length, width = x.shape
        keys, queries, values = self.key(x), self.query(x), self.value(x)
        keys, queries, values = (
            t.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for t in (keys, queries, values)
        )
        if self.step >= FLASH:
            p = self.p if self.training else 0.0
            mixed = F.scaled_dot_product_attention(queries, keys, values, dropout_p=p, is_causal=True)
        else:
            scores = queries @ keys.transpose(2, 3)
            if self.step < MASK:
                mask = self.mask.bool()[:length, :length]
            else:
                mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
            scores.masked_fill_(mask, -torch.inf)
            weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
            weights = self.dropout(weights)
            mixed = weights @ values
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def norm(step: int) -> nn.Module:
    """Layer normalization: the library's, or in single operations."""
    return nn.LayerNorm(WIDTH) if step >= LIBRARY_LAYERS else LayerNorm()


class LayerNorm(nn.Module):
    """Layer normalization in single operations."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, width) → the same shape."""
        mean = x.mean(dim=-1, keepdim=True)
        var = x.var(dim=-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(var + 1e-5)
        return self.scale * normed + self.shift


class GELU(nn.Module):
    """GELU by its tanh formula in single operations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x of any shape → the same shape."""
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))))


RECIPES = (
    Recipe(
        name="Raschka's GPT-2",
        what="ch05/10_llm-training-speed of LLMs-from-scratch, step by step, batch 8 of 1,024 tokens",
        what_ko="책의 학습 속도 높이기, 단계별, 배치 8, 1,024토큰",
        handles=from_source("rasbt/LLMs-from-scratch"),
        predict=predict,
        settings={
            **dict.fromkeys(("batch", "seq"), SIZE),
            "dropout": NUMBER,
            "qkv_bias": (False,),
            "optimizer": ("AdamW lr 5e-4 wd 0.1",),
            **dict.fromkeys(("variant", "torch"), ANY),
        },
    ),
)
