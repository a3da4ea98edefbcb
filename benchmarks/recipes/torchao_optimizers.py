"""pytorch/ao, torchao/optim/README.md: low-bit optimizers and offload to the CPU, vision transformers on 16 GB.

`benchmarks/benchmark_low_bit_adam.py` there fine-tunes a transformer of timm's on pictures of 224 × 224 in 45 classes.
The models are written anew after timm's (1.0.31, whose parameters they have to the last one), the optimizers are
torchao's own; Inductor compiles their steps for each shape, here as on the card. Nothing is fitted.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from virtual_gpu.program.context import cuda

from .compiled import compiler_on, refuse_eager
from .recipe import ANY, SIZE, Recipe, Refused, Row, from_source, gpu_of

CLASSES, PIXELS, STEPS = 45, 224, 3
TORCHAO = "torchao==0.18.0"
LOW_BITS = {"ao 8-bit": "AdamW8bit", "ao 4-bit": "AdamW4bit", "ao FP8": "AdamWFp8"}
PRECISIONS = ("bf16 AMP, compiled", "full bf16, checkpointed")


@dataclass(frozen=True)
class Shape:
    """A vision transformer of timm's. hidden: of the MLP's first layer; gated: half of it gates the other; scaled:
    each branch is multiplied by a parameter before it is added.
    """

    width: int
    depth: int
    heads: int
    hidden: int
    gated: bool = False
    scaled: bool = False


MODELS = {
    "timm vit_huge_patch14_224 (630M)": Shape(1280, 32, 16, 5120),
    "timm vit_giant_patch14_dinov2 (1.1B)": Shape(1536, 40, 24, 8192, gated=True, scaled=True),
}


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.heads, self.qkv = shape.heads, nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) → the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gated, self.fc1 = shape.gated, nn.Linear(shape.width, shape.hidden)
        self.fc2 = nn.Linear(shape.hidden // (2 if shape.gated else 1), shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) → the same."""
        x = self.fc1(x)
        if not self.gated:
            return self.fc2(F.gelu(x))
        gate, value = x.chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * value)


class Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(shape.width, eps=1e-6) for _ in range(2))
        self.attn, self.mlp = Attention(shape), MLP(shape)
        self.ls1, self.ls2 = (Scale(shape.width) if shape.scaled else nn.Identity() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) → the same."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    def __init__(self, shape: Shape, checkpointed: bool):
        super().__init__()
        self.checkpointed = checkpointed
        self.patches = nn.Conv2d(3, shape.width, 14, stride=14)
        self.token = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.places = nn.Parameter(torch.zeros(1, (PIXELS // 14) ** 2 + 1, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm, self.head = nn.LayerNorm(shape.width, eps=1e-6), nn.Linear(shape.width, CLASSES)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """pictures (B, 3, 224, 224) → logits (B, 45)."""
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x)[:, 0])


def optimizer_of(settings: Row, model: nn.Module) -> Any:
    """The optimizer that a row names."""
    name, offload = settings["optimizer"], settings.get("offload", "none")
    if name in LOW_BITS:
        import torchao.optim

        return getattr(torchao.optim, LOW_BITS[name])(model.parameters(), lr=1e-4, weight_decay=0)
    if name == "bnb 8-bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-4, weight_decay=0)
    if offload == "none":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0, fused=True)
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=offload == "ao, gradients too", lr=1e-4,
        weight_decay=0, fused=True,
    )  # fmt: skip


def predict(row: Row) -> int:
    """Bytes at the peak."""
    shape, settings = MODELS.get(row["model"]), row["settings"]
    if shape is None:
        raise Refused(f"{row['model']}: no program here (of torchtune's recipe no row names batch or lengths)")
    precision, batch = settings["precision"], settings["batch"]
    amp, compiled = "AMP" in precision, "compiled" in precision
    kind = torch.float32 if amp else torch.bfloat16
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiler_on())
        gpu = stack.enter_context(cuda(gpu_of(row).spec))
        model = VisionTransformer(shape, "checkpointed" in precision).to(kind).cuda()
        if compiled:
            model.compile(fullgraph=True)
        optimizer = optimizer_of(settings, model)
        for _ in range(STEPS):
            pictures = torch.zeros(batch, 3, PIXELS, PIXELS, dtype=kind).cuda()
            with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                loss = F.cross_entropy(model(pictures), torch.zeros(batch, dtype=torch.int64).cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        refuse_eager(gpu.watch.notes)
        return torch.cuda.max_memory_allocated()


RECIPES = (
    Recipe(
        name="torchao optimizers",
        what="vision transformers, compiled and not, with optimizers of 8 and 4 bits and on the CPU",
        what_ko="ViT, 8비트와 4비트, CPU로 옮긴 옵티마이저(torchao)",
        handles=from_source("pytorch/ao"),
        predict=predict,
        packages=lambda row: (TORCHAO,) if "ao" in f"{row['settings']}" else (),
        settings={
            "batch": SIZE,
            "precision": PRECISIONS,
            "optimizer": ("PyTorch fused", "bnb 8-bit", *LOW_BITS),
            "offload": ("none", "ao", "ao, gradients too"),
            "torch": ANY,
        },
    ),
)
