"""Pinned memory of the host: the caching host allocator rounds a request up (see `host.pinned`, which asks this)."""

from __future__ import annotations

from .registry import Rule

ROUNDED = Rule(
    name="pinned_power_of_two",
    what="pinned memory of the host is taken in powers of two, and kept when it is released",
    source="aten/src/ATen/core/CachingHostAllocator.h, CachingHostAllocatorImpl::allocate: PowerOf2Ceil",
)
