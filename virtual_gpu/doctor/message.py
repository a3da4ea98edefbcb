"""PyTorch's out-of-memory message taken apart: every wording since 1.0, each size with the rounding of its print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"(\d{1,20}(?:\.\d{1,4})?) ?(bytes|KiB|MiB|GiB|TiB)"

# Since 2.1, "capacty" before; to 1.x "cached", then "reserved in total"; at last the asynchronous backend's list.
# Source: c10/cuda/CUDACachingAllocator.cpp and CUDAMallocAsyncAllocator.cpp of PyTorch (format_size, malloc).
_FIELDS = {
    "tried": rf"Tried to allocate {_SIZE}|Requested *: {_SIZE}",
    "total": rf"total capaci?ty of {_SIZE}|{_SIZE} total capaci?ty|Device limit *: {_SIZE}",
    "free": rf"of which {_SIZE} is free|; {_SIZE} free|Free \(according to CUDA\) *: {_SIZE}",
    "in_use": rf"this process has {_SIZE} memory in use",
    "allocated": rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated|Currently allocated *: {_SIZE}",
    "private": rf"{_SIZE} allocated in private pools",
    "unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "reserved": rf"{_SIZE} reserved in total by PyTorch|{_SIZE} cached",
    "allowed": rf"{_SIZE} allowed;",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _FIELDS.items()}
_PROCESS = re.compile(rf"Process (\d{{1,10}}) has {_SIZE} memory in use")
_VARIABLE = re.compile(r"PYTORCH_(?:CUDA_)?ALLOC_CONF")
_DEVICE = re.compile(r"GPU (\d{1,4})\b")
_GAP = r"[\s│┃|]{1,200}"  # a terminal or a box drawn around it breaks lines
_START = re.compile(
    rf"(CUDA|HIP|XPU){_GAP}out{_GAP}of{_GAP}memory\.{_GAP}Tried{_GAP}to{_GAP}allocate"
    r"|would exceed allowed memory\. \(out of memory\)"
)
_MIDDLE = re.compile(r"has a total capac|total capacity;|already allocated;|is allocated by PyTorch|but unallocated")
_LONGEST = 4000  # characters of one message, its list of processes included
MOST_MESSAGES = 200
NOT_A_SIZE = 2**60  # WSL prints 17179869184.00 GiB for what it does not know


@dataclass(frozen=True)
class Size:
    """A printed size: its bytes, and how far the true ones may lie from them."""

    bytes: int
    slack: int = 0

    @classmethod
    def read(cls, number: str, unit: str) -> Size:
        """ "1.38", "GiB": a size as PyTorch prints it, to two decimals; whole bytes below a KiB."""
        decimals = len(number.partition(".")[2])
        slack = 0 if unit == "bytes" else round(_UNITS[unit] * 10**-decimals / 2)
        whole, _, fraction = number.partition(".")
        return cls(round(int(whole + fraction) * _UNITS[unit] / 10**decimals), slack)


@dataclass(frozen=True)
class Message:
    """What one message states; None: it does not say. `start`: where in its stream's text it begins.

    allocated counts private pools (CUDA graphs) too. in_use: of this process, what it holds outside PyTorch included.
    processes: (number, size) of those that it lists by number; inside a container this one can be among them.
    variable: the name that it gives to the variable with the allocator's settings: PyTorch 2.9 has another than before.
    """

    platform: str  # "CUDA", "HIP" or "XPU"
    start: int
    device: int | None = None
    tried: Size | None = None
    total: Size | None = None
    free: Size | None = None
    in_use: Size | None = None
    allocated: Size | None = None
    private: Size | None = None
    unallocated: Size | None = None
    reserved: Size | None = None
    allowed: Size | None = None
    processes: tuple[tuple[int, Size], ...] = ()
    variable: str | None = None

    @property
    def held(self) -> Size | None:
        """All that PyTorch's allocator holds from the driver."""
        if self.reserved or not (self.allocated and self.unallocated):
            return self.reserved
        return _sum(self.allocated, self.unallocated)

    @property
    def cached(self) -> Size | None:
        """What the allocator holds and no tensor is in."""
        if self.unallocated or not (self.reserved and self.allocated):
            return self.unallocated
        least = max(0, self.reserved.bytes - self.allocated.bytes)
        return Size(least, self.reserved.slack + self.allocated.slack)

    @property
    def stated(self) -> dict[str, Size]:
        """Name → size, of all that it states."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: size for name, size in found.items() if isinstance(size, Size)}

    def same_as(self, other: Message) -> bool:
        """Whether both state the same: a log repeats its last error."""
        return (self.stated, self.processes, self.device) == (other.stated, other.processes, other.device)

    def json(self) -> dict[str, Any]:
        """Bytes by name."""
        sizes = {f"{name}_bytes": size.bytes for name, size in self.stated.items()}
        others = [{"process": number, "bytes": size.bytes} for number, size in self.processes]
        return {"platform": self.platform, "device": self.device, **sizes, "processes": others}


def _sum(*sizes: Size) -> Size:
    return Size(sum(size.bytes for size in sizes), sum(size.slack for size in sizes))


def messages(text: str) -> Iterator[Message]:
    """Every message in the text of one stream, also one whose beginning was cut off."""
    starts = [(found.start(), found[1] or "CUDA") for found in _START.finditer(text)][:MOST_MESSAGES]
    if not starts and (middle := _MIDDLE.search(text)):
        starts = [(max(0, middle.start() - 300), "CUDA")]
    ends = [start for start, _ in starts[1:]] + [len(text)]
    for (start, platform), end in zip(starts, ends, strict=False):
        message = _message(text[start : min(end, start + _LONGEST)], platform, start)
        if message.stated:
            yield message


def _message(text: str, platform: str, start: int) -> Message:
    text = re.sub(r"[\s│┃]+", " ", text)
    sizes = {}
    for name, pattern in _PATTERNS.items():
        if found := pattern.search(text):
            size = Size.read(*filter(None, found.groups()))
            if size.bytes < NOT_A_SIZE:
                sizes[name] = size
    device = _DEVICE.search(text)
    processes = [(int(found[1]), Size.read(found[2], found[3])) for found in _PROCESS.finditer(text)]
    known = tuple((number, size) for number, size in processes if size.bytes < NOT_A_SIZE)
    variable = next(iter(_VARIABLE.findall(text)), None)
    return Message(platform, start, int(device[1]) if device else None, processes=known, variable=variable, **sizes)
