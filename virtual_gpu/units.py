"""Bytes and how they are printed. 1 GB = 10**9 bytes, 1 GiB = 2**30 bytes."""

from __future__ import annotations

import difflib
import operator
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import UnknownName, WrongValue
from .language import tr

MiB = 2**20
GiB = 2**30
GB = 10**9
SIZE = r"(?P<size>\d+(?:\.\d+)?)\s*(?P<unit>[GM]i?B)"  # "24GiB", "12.7 GB": of a pattern that ignores case
_ONE = {"gb": GB, "gib": GiB, "mb": 10**6, "mib": MiB}


def size_in_bytes(found: re.Match[str]) -> int:
    """What a match of a pattern with `SIZE` in it says, in bytes."""
    return int(float(found["size"]) * _ONE[found["unit"].lower()])


def book_gb(nbytes: float) -> str:
    """`nbytes` as the book prints it: divided by 1024**3 and labelled "GB" (e.g. "2.481 GB")."""
    return f"{nbytes / GiB:.3f} GB"


def human_bytes(nbytes: float) -> str:
    """`nbytes` in the binary unit that fits, with PyTorch's two decimals: "512 B", "8.12 MiB", "2.48 GiB"."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.2f} {unit}"
    return f"{nbytes / 1024:,.2f} GiB"


def choose(value: str, choices: Iterable[str], what: str) -> str:
    """The member of `choices` that `value` names, in any case; UnknownName lists the nearest ones."""
    choices = list(choices)
    by_lower = {choice.lower(): choice for choice in choices}
    if isinstance(value, str) and value.lower() in by_lower:
        return by_lower[value.lower()]
    near = [by_lower[name] for name in difflib.get_close_matches(str(value).lower()[:200], by_lower, n=3, cutoff=0.5)]
    given = f"{value!r:.200}"
    hint = tr(ko=f" 혹시 {', '.join(near)}?", en=f" Did you mean {', '.join(near)}?") if near else ""
    raise UnknownName(
        tr(ko=f"{given}: 모르는 {what} 이름이다.{hint}", en=f"{given}: unknown {what}.{hint}"),
        tr(ko=f"쓸 수 있는 값: {', '.join(choices)}", en=f"Choose one of: {', '.join(choices)}"),
    )


def positive_int(value: object, what: str) -> int:
    """`value` as a positive int; WrongValue says what was given. Whole floats (4.0) and bools are refused as well."""
    try:
        number = None if _is_truth(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < 1:
        raise WrongValue(
            tr(
                ko=f"{what}={value!r:.200}: 1 이상의 정수여야 한다.",
                en=f"{what}={value!r:.200}: must be an integer of at least 1.",
            )
        )
    return number


def _is_truth(value: object) -> bool:
    """Whether it is a bool, or NumPy's, an index before NumPy 2; without importing NumPy, which may be missing."""
    return isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", None) == "b"


def seed_of_random(value: object) -> int:
    """`value` as the seed of a random generator, an int from 0 up to 2**63; WrongValue otherwise."""
    try:
        number = None if _is_truth(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not 0 <= number < 2**63:
        raise WrongValue(
            tr(
                ko=f"seed={value!r:.80}: 0 이상의 정수여야 한다.",
                en=f"seed={value!r:.80}: must be an integer of 0 or more.",
            )
        )
    return number


def with_parameters(value: Any, what: str = "model") -> Any:
    """`value` if it has parameters, as a torch.nn.Module has; WrongValue otherwise."""
    if not callable(getattr(value, "parameters", None)) or isinstance(value, type):
        raise WrongValue(
            tr(
                ko=f"{what}={value!r:.80}: 모델(torch.nn.Module)이어야 한다.",
                en=f"{what}={value!r:.80}: must be a model, a torch.nn.Module.",
            )
        )
    return value


def path_of(value: object, what: str = "path") -> Path:
    """`value` as a Path; WrongValue where it is none."""
    if not isinstance(value, (str, os.PathLike)):
        raise WrongValue(
            tr(
                ko=f"{what}={value!r:.80}: 파일이나 폴더의 경로여야 한다.",
                en=f"{what}={value!r:.80}: must be the path of a file or a folder.",
            )
        )
    return Path(value)


def boolean(value: object, what: str) -> bool:
    """`value` if it is True or False; WrongValue otherwise: the text "False" is true, and nobody means that."""
    if not isinstance(value, bool):
        raise WrongValue(
            tr(
                ko=f"{what}={value!r:.200}: True나 False여야 한다.",
                en=f"{what}={value!r:.200}: must be True or False.",
            )
        )
    return value
