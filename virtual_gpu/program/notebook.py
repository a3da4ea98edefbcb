"""In a notebook: `%load_ext virtual_gpu`, `%virtual_gpu T4`, and `%%gpu_memory` over a cell.

From `%virtual_gpu` on the kernel has that card, until another one is chosen or `%virtual_gpu off`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from ..drawing.svg import BLUE, ORANGE, SKY
from ..language import tr
from ..units import human_bytes
from . import words
from .context import cuda
from .phases import peaks_by_phase
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
        name, room = device.spec.device_name, human_bytes(device.capacity_bytes)
        return tr(ko=f"가상 {name}: PyTorch가 쓸 수 있는 메모리 {room}", en=f"{name}, virtual: {room} for PyTorch")

    def gpu_memory(self, line: str, cell: str) -> None:
        """Run a cell, and show what it held: the highest, and what stayed; of a real card too."""
        if not torch.cuda.is_available():
            raise RuntimeError(
                tr(ko="GPU가 없다. `%virtual_gpu T4`로 고른다", en="no GPU: `%virtual_gpu T4` gives this kernel one")
            )
        before = torch.cuda.memory_allocated()
        with peaks_by_phase() as peaks:
            self.shell.run_cell(cell)
        from IPython.display import HTML, display

        total = torch.cuda.get_device_properties(0).total_memory
        display(HTML(bars(before, torch.cuda.memory_allocated(), peaks, total)))


def bars(before: int, after: int, peaks: dict[str, int], total: int) -> str:
    """One bar of the card's memory (held before the cell, held after it, its highest), and one for each phase."""
    highest = max([before, after, *peaks.values()])
    whole = max(total, highest)
    numbers = [human_bytes(n) for n in (before, after, highest, total)]
    words_of = tr(
        ko="앞 {} · 뒤 {} · 최대 {} / {}".format(*numbers),
        en="before {} · after {} · highest {} of {}".format(*numbers),
    )
    rows = [_bar(words_of, ((highest, ORANGE), (after, BLUE), (min(before, after), SKY)), whole, 18)]
    for name, peak in peaks.items():
        if name != BETWEEN and peak:
            rows.append(_bar(f"{words.phase(name)} {human_bytes(peak)}", ((peak, ORANGE),), whole, 6))
    return f'<div style="max-width:{_WIDTH}px">{"".join(rows)}</div>'


def _bar(label: str, parts: tuple[tuple[int, str], ...], whole: int, height: int) -> str:
    drawn = "".join(f'<rect width="{part / whole * 100:.2f}" height="1" fill="{color}"/>' for part, color in parts)
    return (
        f'<svg viewBox="0 0 100 1" preserveAspectRatio="none" width="100%" height="{height}" role="img" '
        f'style="border:1px solid #888" aria-label="{label}">{drawn}</svg><div>{label}</div>'
    )


def load_ipython_extension(shell: Any) -> None:
    """IPython's entry."""
    kernel = shell.virtual_gpu_kernel = Kernel(shell)
    shell.register_magic_function(kernel.virtual_gpu, "line", "virtual_gpu")
    shell.register_magic_function(kernel.gpu_memory, "cell", "gpu_memory")


def unload_ipython_extension(shell: Any) -> None:
    """Take the card away."""
    shell.virtual_gpu_kernel.stack.close()
