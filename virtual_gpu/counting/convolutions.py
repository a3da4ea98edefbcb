"""What is seen of convolutions: cuDNN's workspaces for them are not counted, and whoever reports says so."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Convolutions:
    """count: how many ran forward. largest_bytes: the most that input, weight and output of one take together.

    tuned: whether torch.backends.cudnn.benchmark was on at any, which tries every algorithm once.
    """

    count: int = 0
    largest_bytes: int = 0
    tuned: bool = False

    def note(self, out: torch.Tensor, args: tuple) -> None:
        """aten.convolution(*args) made `out`."""
        self.count += 1
        self.largest_bytes = max(self.largest_bytes, sum(t.numel() * t.element_size() for t in (*args[:2], out)))
        self.tuned |= torch.backends.cudnn.benchmark
