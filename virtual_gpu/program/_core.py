"""The names of the core that running a program needs, in one place."""

import os

from helpers.caching_allocator import SMALL_BYTES, CachingAllocator, expandable_segments_asked, round_size
from helpers.cuda_kernels import DIFFERENCES, cublas_workspace_bytes
from helpers.gpu_catalog import CATALOG, GPUSpec
from helpers.timeline import CATEGORIES
from helpers.units import choose, human_bytes
from helpers.virtual_gpu import AllocationMeter, VirtualGPU, _CountingMode

import helpers

__all__ = [
    "CATALOG",
    "CATEGORIES",
    "CORE_FOLDER",
    "DIFFERENCES",
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

CountingMode = _CountingMode


def bundled_config(name: str) -> dict | None:
    """The configuration of a bundled architecture, as config.json would have it; None where there is none."""
    from helpers.models import architectures, resolve_model_id

    entry = architectures().get(resolve_model_id(name))
    return None if entry is None else {"dtype": entry["dtype"], **entry["config"]}


CORE_FOLDER = os.path.dirname(os.path.realpath(helpers.__file__))
