"""In a notebook: `%load_ext virtual_gpu.program.notebook`, `%virtual_gpu T4`, and `%%gpu_memory` over a cell.

From `%virtual_gpu` on the kernel has that card, until another one is chosen or `%virtual_gpu off`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from ..units import human_bytes
from .context import cuda
from .watch import BETWEEN, Watch

_WIDTH = 640


class Kernel:
    """The virtual GPU of this kernel, and the two magics."""

    def __init__(self, shell: Any):
        self.shell = shell
        self.stack = ExitStack()
        self.watch: Watch | None = None

    def virtual_gpu(self, line: str) -> str | None:
        """Give the kernel this card; "off" takes it away."""
        self.stack.close()
        self.watch = None
        if line.strip() in ("", "off"):
            return None
        device = self.stack.enter_context(cuda(line.strip()))
        self.watch = device.watch
        return f"{device.spec.device_name}, virtual: {human_bytes(device.capacity_bytes)} for PyTorch"

    def gpu_memory(self, line: str, cell: str) -> None:
        """Run a cell, and show what it held: the highest, and what stayed; of a real card too."""
        if not torch.cuda.is_available():
            raise RuntimeError("no GPU: `%virtual_gpu T4` gives this kernel one")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if self.watch is not None:
            self.watch.enter(BETWEEN)
        self.shell.run_cell(cell)
        peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        from IPython.display import HTML, display

        display(HTML(bar(before, after, peak, torch.cuda.get_device_properties(0).total_memory)))


def bar(before: int, after: int, peak: int, total: int) -> str:
    """One bar of the card's memory: held before the cell, held after it, and its highest."""
    highest = max(total, peak)
    parts = ((peak, "#f28e2b"), (after, "#4e79a7"), (min(before, after), "#9ebcda"))
    drawn = "".join(
        f'<rect width="{part / highest * _WIDTH:.1f}" height="18" fill="{color}"/>' for part, color in parts
    )
    before, after, peak, total = map(human_bytes, (before, after, peak, total))
    words = f"before {before} · after {after} · highest {peak} of {total}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} 20" width="{_WIDTH}" role="img" aria-label="{words}">{drawn}'
        f'<rect width="{_WIDTH}" height="18" fill="none" stroke="#888"/></svg><div>{words}</div>'
    )


def load_ipython_extension(shell: Any) -> None:
    """IPython's entry."""
    kernel = shell.virtual_gpu_kernel = Kernel(shell)
    shell.register_magic_function(kernel.virtual_gpu, "line", "virtual_gpu")
    shell.register_magic_function(kernel.gpu_memory, "cell", "gpu_memory")


def unload_ipython_extension(shell: Any) -> None:
    """Take the card away."""
    shell.virtual_gpu_kernel.stack.close()
