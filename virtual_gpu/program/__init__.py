"""Any PyTorch program on a virtual GPU, unchanged."""

from .context import cuda

__all__ = ["cuda"]
