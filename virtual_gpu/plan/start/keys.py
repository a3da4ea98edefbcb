"""What a configuration file says, taken key by key; and what it says that is not counted, by what that does."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import NotSupported, WrongValue
from ...language import tr
from .document import Document, Place

LESS, MORE, EITHER, UNKNOWN = "less", "more", "either", "unknown"
_OFF = (None, False, 0, "", "no", "none", "None", "false")


@dataclass(frozen=True)
class Note:
    """A key that is not counted. effect: LESS, MORE or EITHER of the peak; UNKNOWN: nobody here knows the key."""

    key: str
    value: Any
    effect: str
    why: str = ""

    def __str__(self) -> str:
        said = {
            LESS: tr(ko="세지 않았다. 실제로는 덜 든다", en="not counted; it takes less"),
            MORE: tr(ko="세지 않았다. 실제로는 더 든다", en="not counted; it takes more"),
            EITHER: tr(ko="세지 않았다. 더 들 수도 덜 들 수도 있다", en="not counted; more or less"),
            UNKNOWN: tr(ko="모르는 키다", en="a key that is not known here"),
        }[self.effect]
        return f"{self.key}: {self.value!r:.60} — {self.why or said}"


class Keys:
    """The values of a file. What is taken is understood; `rest` says what nobody took."""

    def __init__(self, document: Document):
        self.document = document
        self.taken: set[str] = set()
        self.notes: list[Note] = []

    def get(self, name: str, default: Any = None) -> Any:
        """The value at a key ("model.lora_rank": of a mapping in the file); the default where it is absent or null."""
        place = place_of(name)
        self.taken.add(place[0])
        value = self.document.get(place)
        if isinstance(value, str) and "${" in value:
            raise self.wrong(name, tr(ko="값을 그대로 적는다", en="write the value itself"))
        return default if value is None else value

    def whole(self, name: str, default: int | None) -> Any:
        """A whole number of at least 1."""
        value = self.get(name, default)
        if value is None and default is None:
            return None
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise self.wrong(name, tr(ko="1 이상의 정수여야 한다", en="must be an integer of at least 1"))
        return value

    def share(self, name: str, default: float) -> float:
        """A number from 0 up to 1."""
        value = self.get(name, default)
        try:
            number = math.nan if isinstance(value, bool) else float(value)  # YAML 1.1 takes 5e-2 for a text
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number < 1:
            raise self.wrong(name, tr(ko="0 이상 1 미만이어야 한다", en="must be from 0 to 1"))
        return number

    def flag(self, name: str, default: bool = False) -> bool:
        """True or False; their names as texts too, as transformers' parser takes them."""
        value = self.get(name, default)
        known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if isinstance(value, (str, int)) and str(value).lower() in known:
            return known[str(value).lower()]
        raise self.wrong(name, tr(ko="true나 false여야 한다", en="must be true or false"))

    def word(self, name: str, default: str | None = None, among: Iterable[str] = ()) -> Any:
        """A text, of `among` where that says something: NotSupported for another one."""
        value = self.get(name, default)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, tr(ko="글자여야 한다", en="must be a text"))
        if among and value not in among:
            raise self.not_counted(name, tr(ko="세는 값", en="counted") + f": {', '.join(map(str, among))}")
        return value

    def words(self, name: str) -> tuple[str, ...]:
        """A list of texts, or one text with commas."""
        value = self.get(name)
        value = [] if value is None else value.split(",") if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.wrong(name, tr(ko="이름의 목록이어야 한다", en="must be a list of names"))
        return tuple(word.strip() for word in value if word.strip())

    def refuse(self, *names: str) -> None:
        """NotSupported for the first of these keys that is on: what it trains is something else."""
        for name in names:
            if not off(value := self.get(name)):
                raise self.not_counted(name, f"{value!r:.60}")

    def note(self, name: str, effect: str, why: str = "") -> None:
        """Say that this key's value is not counted."""
        self.notes.append(Note(name, self.document.get(place_of(name)), effect, why))

    def rest(self, effects: Mapping[str, Iterable[str]], free: Iterable[str]) -> tuple[Note, ...]:
        """The notes, with one for each key of the file that is on and nobody took. effects: effect → keys."""
        by_key = {name: effect for effect, names in effects.items() for name in names}
        free = {*free}
        for name, value in self.document.values.items():
            if name in self.taken or name in free or value is None or (off(value) and name in by_key):
                continue
            self.note(name, by_key.get(name, UNKNOWN))
        return tuple(self.notes)

    def wrong(self, name: str, what: str) -> WrongValue:
        """The error to raise for a key's value."""
        value = self.document.get(place_of(name))
        return WrongValue(f"{self.document.path}: {name}: {value!r:.80}: {what}.")

    def not_counted(self, name: str, what: str) -> NotSupported:
        """The error to raise for a key whose value makes another training of it."""
        where = f"{self.document.path}: {name}"
        return NotSupported(
            tr(ko=f"{where}: 흉내 내지 않는 설정이다 ({what}).", en=f"{where}: is not simulated ({what}).")
        )


@functools.cache
def free(tool: str) -> set[str]:
    """The keys of a tool that change nothing of a step's memory, beside those that its module takes or tells of."""
    return {*json.loads(Path(__file__).with_name("free.json").read_text(encoding="utf-8"))[tool]["keys"]}


def place_of(name: str) -> Place:
    """ "model.lora_rank" → ("model", "lora_rank")."""
    return tuple(name.split("."))


def off(value: Any) -> bool:
    return value in _OFF if isinstance(value, (str, int, float, type(None))) else not value


def end_to_end() -> str:
    """Why samples that are laid end to end take more."""
    return tr(
        ko="마이크로 배치를 한 줄로 이어 붙였을 때 생기는 길이 × 길이의 마스크는 세지 않았다(플래시 어텐션에는 없다)",
        en="the mask of a micro-batch laid end to end, length × length, is not counted (flash attention has none)",
    )
