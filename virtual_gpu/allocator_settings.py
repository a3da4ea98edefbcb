"""The settings of PyTorch's caching allocator: what PYTORCH_ALLOC_CONF says.

Source: c10/core/AllocatorConfig.{h,cpp} (c10/cuda/CUDAAllocatorConfig before PyTorch 2.9); the function that holds a
rule is named beside it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import WrongValue
from .language import tr

MIB = 2**20
BLOCK_BYTES = 512  # kMinBlockSize: every block is a multiple of it
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # since 2.9, before (and still read)
INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: from 1 MiB, each twice the one before
_ELSEWHERE = re.compile("pinned_|release_lock_on_|throw_on_|graph_capture_")  # of other things than where blocks lie


@dataclass(frozen=True)
class AllocatorSettings:
    """How the caching allocator finds room, in bytes; the defaults are PyTorch's.

    expandable_segments: one segment a pool that grows by pages. max_split_size: blocks from here on are not split, and
    not given to smaller requests. max_non_split_rounding_size: so much larger than the request such a block may be.
    roundup_power2_divisions: for each of 16 sizes from 1 MiB on, into how many parts the way to the next power of two
    is cut; 0 and 1 round to 512 bytes. garbage_collection_threshold: the share of the memory that may be used beyond
    which old blocks go back to the driver (0: never). memory_fraction: the share of the GPU that may be used; None
    sets no limit, and without one nothing is collected.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding_size: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    memory_fraction: float | None = None

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """PYTORCH_ALLOC_CONF's text, such as "expandable_segments:True,max_split_size_mb:128".

        ValueError for what PyTorch refuses (parseArgs), and for settings that are not known here.
        """
        if not isinstance(text, str):
            raise WrongValue(f"{VARIABLES[0]}={text!r:.80}: " + tr(ko="문자열이어야 한다.", en="must be a text."))
        found: dict[str, Any] = {}
        for key, value in _pairs(text):
            if key == "expandable_segments":
                found[key] = _boolean(key, value)
            elif key in ("max_split_size_mb", "max_non_split_rounding_mb"):
                name = "max_split_size" if key == "max_split_size_mb" else "max_non_split_rounding_size"
                found[name] = _number(key, value, int) * MIB
                if found[name] < LARGE_SEGMENT_BYTES:
                    _refuse(key, value, tr(ko="20 이상이어야 한다", en="it has to be 20 or more"))
            elif key == "garbage_collection_threshold":
                found[key] = _share(key, value)
            elif key == "per_process_memory_fraction":
                found["memory_fraction"] = _share(key, value, whole=True)
            elif key == "roundup_power2_divisions":
                found[key] = _divisions(value)
            elif key == "backend":
                if value != "native":
                    _refuse(key, value, tr(ko="native만 셀 수 있다", en="only native can be counted"))
            elif not _ELSEWHERE.match(key):
                _refuse(key, value, tr(ko="모르는 설정이다", en="unknown setting"))
        return cls(**found)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, more: str = "") -> AllocatorSettings:
        """What the environment asks PyTorch for; the newer name goes first. more: settings that go before its own."""
        said = next((environment[name] for name in VARIABLES if environment.get(name)), "")
        return cls.parse(",".join(filter(None, (said, more))))

    @classmethod
    def from_snapshot(cls, found: Mapping[str, Any] | None) -> AllocatorSettings:
        """From a memory snapshot's "allocator_settings" (torch/csrc/cuda/memory_snapshot.cpp); absent in old ones."""
        found = found or {}
        divisions = found.get("roundup_power2_divisions") or {}
        split = found.get("max_split_size", -1)
        return cls(
            expandable_segments=bool(found.get("expandable_segments", False)),
            max_split_size=split if 0 < split < 2**62 else None,
            roundup_power2_divisions=tuple(int(n) for n in divisions.values()) if any(divisions.values()) else (),
            garbage_collection_threshold=float(found.get("garbage_collection_threshold", 0.0)),
        )

    def round_size(self, nbytes: int) -> int:
        """Bytes of the block for `nbytes` (round_size, roundup_power2_next_division); nothing takes no block."""
        if self.roundup_power2_divisions and nbytes:
            place = max(nbytes.bit_length() - 21, 0)  # 0: below 2 MiB
            divisions = self.roundup_power2_divisions[min(place, INTERVALS - 1)]
            if divisions > 1 and nbytes > BLOCK_BYTES * divisions:
                part = (1 << (nbytes.bit_length() - 1)) // divisions
                return -(-nbytes // part) * part
        return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def _pairs(text: str) -> list[tuple[str, str]]:
    """key:value, separated by commas; a value in brackets has commas and colons of its own."""
    pairs = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[\]])+", "".join(text.split())):
        key, colon, value = item.partition(":")
        if not colon or not value:
            _refuse(key, value, tr(ko="이름:값으로 쓴다", en="write name:value"))
        pairs.append((key, value))
    return pairs


def _divisions(value: str) -> tuple[int, ...]:
    """(parseRoundUpPower2Divisions): one number for all sizes, or [MiB:divisions, …, >:divisions]."""
    key = "roundup_power2_divisions"

    def power(text: str, least: int) -> int:
        number = _number(key, text, int)
        if number < least or number & (number - 1):
            _refuse(key, value, tr(ko="2의 거듭제곱으로 쓴다", en="powers of two"))
        return number

    if not value.startswith("["):
        return (power(value, 1),) * INTERVALS
    table, last, first = [0] * INTERVALS, 0, True
    for item in value.strip("[]").split(","):
        size, _, number = item.partition(":")
        divisions = power(number, 0)
        if size == ">":
            table[last:] = [divisions] * (INTERVALS - last)
            continue
        index = min(power(size, 1).bit_length() - 1, INTERVALS - 1)
        if first:
            table[:index] = [divisions] * index
            first = False
        table[index], last = divisions, index
    return tuple(table)


def _boolean(key: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        _refuse(key, value, "True, False")
    return value.lower() == "true"


def _number(key: str, value: str, kind: type) -> Any:
    try:
        return kind(value)
    except ValueError:
        return _refuse(key, value, tr(ko="숫자가 아니다", en="not a number"))


def _share(key: str, value: str, whole: bool = False) -> float:
    share = _number(key, value, float)
    if not (0 < share < 1 or (whole and share == 1)):
        _refuse(key, value, tr(ko="0과 1 사이여야 한다", en="it has to lie between 0 and 1"))
    return share


def _refuse(key: str, value: str, why: str) -> Any:
    raise ValueError(f"{VARIABLES[0]}: {key}:{value}: {why}")
