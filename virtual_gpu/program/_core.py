"""The names of the core that running a program needs, in one place."""

from pathlib import Path

from ..allocator import SMALL_BYTES, CachingAllocator, expandable_segments_asked, round_size
from ..cards import CATALOG, GPUSpec
from ..counting.gpu import VirtualGPU
from ..counting.meter import AllocationMeter
from ..counting.mode import CountingMode
from ..models.configs import architectures, resolve_model_id
from ..rules.cublas import cublas_workspace_bytes
from ..trace.timeline import CATEGORIES
from ..units import choose, human_bytes

__all__ = [
    "CATALOG",
    "CATEGORIES",
    "CORE_FOLDER",
    "SMALL_BYTES",
    "AllocationMeter",
    "CachingAllocator",
    "CountingMode",
    "GPUSpec",
    "VirtualGPU",
    "bundled_config",
    "choose",
    "cublas_workspace_bytes",
    "expandable_segments_asked",
    "human_bytes",
    "round_size",
]


def bundled_config(name: str) -> dict | None:
    """The configuration of a bundled architecture, as config.json would have it; None where there is none."""
    entry = architectures().get(resolve_model_id(name))
    return None if entry is None else {"dtype": entry["dtype"], **entry["config"]}


CORE_FOLDER = str(Path(__file__).resolve().parent.parent)
