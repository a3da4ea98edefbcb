"""What a loss over a large vocabulary costs on the virtual GPU, memory and multiplications, and whether it is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils.flop_counter import FlopCounterMode

from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.units import human_bytes

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LossCost:
    """peak_bytes: the most that forward and backward hold beside their inputs. flops: of their matrix products."""

    peak_bytes: int
    flops: int

    def __repr__(self) -> str:
        return f"{human_bytes(self.peak_bytes)}, {self.flops / 1e12:.2f} TFLOP"


def whole_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy, in fp32 as in transformers, of hidden (tokens, width) @ head (vocabulary, width).T."""
    return cross_entropy(linear(hidden, head).float(), labels)


def loss_cost(loss: Loss, tokens: int = 4096, width: int = 2048, vocabulary: int = 128256) -> LossCost:
    """Forward and backward of `loss(hidden, head, labels)` in fp16 on a virtual T4 without a limit.

    The defaults are those of Llama-3.2-1B with 4096 tokens.
    """
    gpu = VirtualGPU(CATALOG["T4"], limited=False)
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}  # PyTorch's counter passes it over
    with gpu, FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        hidden = torch.randn(tokens, width, dtype=torch.float16, requires_grad=True)
        head = torch.randn(vocabulary, width, dtype=torch.float16, requires_grad=True)
        labels = torch.zeros(tokens, dtype=torch.int64)
        inputs = gpu.memory_allocated()
        loss(hidden, head, labels).backward()
    return LossCost(gpu.max_memory_allocated() - inputs, counter.get_total_flops())


def loss_error(loss: Loss) -> float:
    """The relative error to `whole_loss`, the norm of loss and both gradients together, on 60 real tokens in fp32."""
    random = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 8, generator=random) for n in (60, 50))
    labels = torch.randint(50, (60,), generator=random)

    def of(function: Loss) -> torch.Tensor:
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, head)]
        value = function(*inputs, labels)
        (3 * value).backward()  # as under a loss scale: what comes from above counts
        return torch.cat([value.detach().flatten(), *(tensor.grad.flatten() for tensor in inputs)])

    expected = of(whole_loss)
    return float((of(loss) - expected).norm() / expected.norm())
