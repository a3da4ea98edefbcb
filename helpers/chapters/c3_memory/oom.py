"""PyTorch's out-of-memory message, number by number, with what each one asks for."""

from __future__ import annotations

import re

from virtual_gpu.errors import WrongValue
from virtual_gpu.language import tr
from virtual_gpu.units import human_bytes

from ...rows import LeftRows
from .tables import table

_UNIT = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|[KMGT]iB)"
# The words around each number, as c10/cuda/CUDACachingAllocator.cpp writes them.
_NUMBERS = {
    "tried": rf"Tried to allocate {_SIZE}",
    "total": rf"total capacity of {_SIZE}",
    "free": rf"of which {_SIZE} is free",
    "in_use": rf"this process has {_SIZE} memory in use",
    "allocated": rf"{_SIZE} is allocated by PyTorch",
    "unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
_OTHERS_FROM = 0.02  # of the card: less may be rounding


def parse_oom(message: str) -> dict[str, int]:
    """The bytes of a CUDA out-of-memory message: tried, total, free, in_use, allocated, unallocated.

    Raises WrongValue for a text that is no such message (PyTorch 2.1 and later).
    """
    found = {name: re.search(words, message) for name, words in _NUMBERS.items()}
    if missing := [name for name, match in found.items() if match is None]:
        raise WrongValue(
            tr(
                ko=f"CUDA의 메모리 부족 메시지가 아니다. 찾지 못한 수: {', '.join(missing)}",
                en=f"Not CUDA's out-of-memory message; not found: {', '.join(missing)}",
            )
        )
    return {name: round(float(match[1]) * _UNIT[match[2]]) for name, match in found.items()}


def read_oom(message: str | None) -> LeftRows:
    """Each number of the message with what to do about it, and last what they say together.

    None, the `error` of a report that came to its end, gets a row that says so.
    """
    if message is None:
        return table("words size meaning", [["", "", tr(ko="OOM 없이 끝났다", en="no error")]])
    sizes = parse_oom(message)
    others = sizes["total"] - sizes["free"] - sizes["in_use"]
    rows = [
        ["Tried to allocate", "tried", _tried()],
        ["free", "free", tr(ko="드라이버가 아직 내줄 수 있는 양", en="what the driver can still give")],
        [
            "this process … in use",
            "in_use",
            tr(ko="이 프로세스의 것 모두. CUDA 컨텍스트도 들어 있다", en="all of this process, context included"),
        ],
        ["allocated by PyTorch", "allocated", _allocated()],
        ["reserved … but unallocated", "unallocated", _unallocated()],
    ]
    rows = [[words, human_bytes(sizes[name]), meaning] for words, name, meaning in rows]
    rows.append(
        [
            tr(ko="총량 − free − in use", en="total − free − in use"),
            human_bytes(max(others, 0)),
            tr(ko="다른 프로세스의 것. 크다면 nvidia-smi로 찾는다", en="other processes; if large, see nvidia-smi"),
        ]
    )
    rows.append([tr(ko="판단", en="together"), "", _judged(sizes, others)])
    return table("words size meaning", rows)


def _tried() -> str:
    return tr(ko="이 요청 하나의 크기. 어느 텐서인지 나누어 본다", en="this one request: find the tensor it is")


def _allocated() -> str:
    return tr(ko="살아 있는 텐서. 배치, 길이, 상태를 줄인다", en="living tensors: less batch, length, state")


def _unallocated() -> str:
    return tr(ko="할당자가 쥔 빈자리. 흩어져 있을 수 있다", en="holes that the allocator keeps, maybe scattered")


def _judged(sizes: dict[str, int], others: int) -> str:
    if others > _OTHERS_FROM * sizes["total"]:
        return tr(ko="다른 프로세스가 메모리를 쓰고 있다. 그것부터 끝낸다.", en="Another process holds memory.")
    if sizes["unallocated"] >= sizes["tried"]:
        return tr(
            ko="빈자리의 합이 요청보다 크다. 단편화다. expandable_segments를 켠다.",
            en="The holes together exceed the request: fragmentation. Try expandable_segments.",
        )
    if sizes["unallocated"] + sizes["free"] >= sizes["tried"]:
        return tr(
            ko="빈자리를 다 모으면 이 요청 하나는 들어간다. 그다음 요청까지 들어갈지는 이 메시지로 알 수 없다.",
            en="All room together would hold this one request; of the next one the message says nothing.",
        )
    return tr(ko="빈자리를 다 모아도 모자란다. 텐서를 줄인다.", en="Not enough even together: make tensors smaller.")
