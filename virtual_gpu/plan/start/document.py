"""A configuration file: read as data alone, and written again with some of its values changed, all else as it was."""

from __future__ import annotations

import copy
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import BadConfiguration, NotSupported
from ...language import tr
from ...optional import require
from ...units import path_of

MOST_BYTES = 256 * 2**10  # the longest example of any of the tools has 10 KiB
MOST_DEPTH = 16
MOST_NODES = 20_000
Place = tuple[str, ...]  # the keys that lead to a value


@dataclass(frozen=True)
class Document:
    """A file's values, and where they stand in its text.

    spans: place → (start, end) of a value that stands on one line. lines: place of a mapping → (offset behind the line
    of its last such value, indentation): where a new key goes.
    """

    path: Path
    text: str = field(repr=False)
    values: dict[str, Any]
    spans: dict[Place, tuple[int, int]] = field(repr=False)
    lines: dict[Place, tuple[int, str]] = field(repr=False)

    @property
    def is_json(self) -> bool:
        """Whether the file is JSON; YAML otherwise."""
        return self.path.suffix.lower() == ".json"

    def get(self, place: Place) -> Any:
        """The value at a place; None where there is none."""
        found: Any = self.values
        for key in place:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def written(self, value: Any) -> str:
        """A value as this file would have it."""
        if self.is_json:
            return json.dumps(value, ensure_ascii=False)
        import yaml

        text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
        return text.removesuffix("\n").removesuffix("\n...")

    def with_values(self, changes: Mapping[Place, Any]) -> Document:
        """What is read where these values stand in the file; the text is as it was."""
        wanted = copy.deepcopy(self.values)
        for place, value in changes.items():
            parent = wanted
            for key in place[:-1]:
                if not isinstance(parent.get(key), dict):
                    parent[key] = {}
                parent = parent[key]
            parent[place[-1]] = value
        return replace(self, values=wanted)

    def with_changes(self, changes: Mapping[Place, Any]) -> str:
        """The text with these values; NotSupported where one of them does not stand on a line of its own."""
        edits = []
        wanted = self.with_values(changes).values
        for place, value in changes.items():
            new = self.written(value)
            if place in self.spans:
                start, end = self.spans[place]
                edits.append((start, end, new if self.text[start - 1 : start].isspace() or self.is_json else f" {new}"))
            elif self.get(place) is None and place[:-1] in self.lines:
                at, indent = self.lines[place[:-1]]
                line = f'{indent}"{place[-1]}": {new},' if self.is_json else f"{indent}{place[-1]}: {new}"
                ending = "\r\n" if "\r\n" in self.text else "\n"
                edits.append((at, at, line + ending if self.text[at - 1] == "\n" else ending + line))
            else:
                raise self._by_hand(place)
        text = self.text
        for start, end, new in sorted(edits, key=lambda edit: edit[:2], reverse=True):
            text = text[:start] + new + text[end:]
        if _parse(self.path, text).values != wanted:
            raise self._by_hand(next(iter(changes)))
        return text

    def _by_hand(self, place: Place) -> NotSupported:
        name = ".".join(place)
        return NotSupported(
            tr(
                ko=f"{self.path}: {name}은(는) 한 줄에 있는 값이 아니라서 바꿔 쓰지 못한다. 손으로 고친다.",
                en=f"{self.path}: {name} does not stand on a line of its own; change it by hand.",
            )
        )


def read_document(path: str | Path) -> Document:
    """The file at `path`, *.json as JSON and everything else as YAML.

    Nothing in it is run and nothing made but plain values. BadConfiguration for what is no file, too large, or no
    mapping with texts as keys; for anchors, aliases and tags; for a key that stands twice.
    """
    path = path_of(path)
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(tr(ko="파일이 아니다", en="it is no file"))
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(tr(ko=f"{MOST_BYTES:,}바이트보다 크다", en=f"more than {MOST_BYTES:,} bytes"))
        text = data.decode("utf-8").removeprefix("\ufeff")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return _parse(path, text)


def _unreadable(path: Any, error: object) -> BadConfiguration:
    said = " ".join(str(error).split())[:300]
    return BadConfiguration(tr(ko=f"{path}: 읽을 수 없다. {said}", en=f"{path} cannot be read: {said}"))


def _parse(path: Path, text: str) -> Document:
    return _parse_json(path, text) if path.suffix.lower() == ".json" else _parse_yaml(path, text)


def _twice(path: Path, key: str, line: int) -> BadConfiguration:
    return BadConfiguration(
        tr(ko=f"{path}, {line}번째 줄: {key}이(가) 두 번 나온다.", en=f"{path}, line {line}: {key} stands there twice.")
    )


def _no_mapping(path: Path) -> BadConfiguration:
    return BadConfiguration(
        tr(ko=f"{path}: 키와 값(key: value)으로 된 파일이 아니다.", en=f"{path} is no mapping of keys to values.")
    )


# -- JSON ------------------------------------------------------------------------------------------------------------


def _parse_json(path: Path, text: str) -> Document:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(values, dict):
        raise _no_mapping(path)
    spans: dict[Place, tuple[int, int]] = {}
    first = 0
    for key, at, start, end in _members(text):
        if (key,) in spans:
            raise _twice(path, key, text.count("\n", 0, at) + 1)
        spans[key,] = start, end
        first = first or at
    indent = text[text.rfind("\n", 0, first) + 1 : first]
    on_a_line = first and "\n" in text[:first] and not indent.strip()
    lines: dict[Place, tuple[int, str]] = {(): (text.rfind("\n", 0, first) + 1, indent)} if on_a_line else {}
    return Document(path, text, values, spans, lines)


def _members(text: str) -> Iterator[tuple[str, int, int, int]]:
    """(key, where it stands, start and end of its value) of the object that a JSON text is."""
    decoder = json.JSONDecoder()
    blank = " \t\r\n"

    def skip(at: int, more: str = "") -> int:
        while at < len(text) and text[at] in blank + more:
            at += 1
        return at

    at = skip(skip(0) + 1)
    while at < len(text) and text[at] != "}":
        key, end = decoder.raw_decode(text, at)
        start = skip(end, ":")
        _, end = decoder.raw_decode(text, start)
        yield key, at, start, end
        at = skip(end, ",")


# -- YAML ------------------------------------------------------------------------------------------------------------


def _parse_yaml(path: Path, text: str) -> Document:
    require("yaml")
    import yaml

    try:
        _check_events(path, text)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        values = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, BadConfiguration):
            raise
        raise _unreadable(path, error) from error
    if not isinstance(values, dict):
        raise _no_mapping(path)
    spans: dict[Place, tuple[int, int]] = {}
    lines: dict[Place, tuple[int, str]] = {}
    _walk(path, text, node, (), spans, lines)
    return Document(path, text, values, spans, lines)


def _check_events(path: Path, text: str) -> None:
    """BadConfiguration for what no configuration needs and a trap is made of: aliases, anchors, tags, deep nests."""
    import yaml

    depth = documents = 0
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        line = event.start_mark.line + 1
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        documents += isinstance(event, yaml.DocumentStartEvent)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            what = tr(
                ko="앵커와 별칭(&, *)은 읽지 않는다. 값을 그대로 적는다", en="no anchors and aliases (&, *): write out"
            )
        elif getattr(event, "tag", None):
            what = tr(ko=f"태그({event.tag})는 읽지 않는다", en=f"no tags ({event.tag})")
        elif depth > MOST_DEPTH or count > MOST_NODES or documents > 1:
            what = tr(ko="너무 깊거나 길거나 문서가 여럿이다", en="too deep, too long, or more than one document")
        else:
            continue
        raise BadConfiguration(tr(ko=f"{path}, {line}번째 줄: {what}.", en=f"{path}, line {line}: {what}."))


def _walk(
    path: Path, text: str, node: Any, place: Place, spans: dict[Place, tuple[int, int]], lines: dict[Place, Any]
) -> None:
    """Fill spans and lines of a mapping node, and of the mappings in it."""
    import yaml

    seen = set()
    for key, value in node.value:
        name, at = key.value, key.start_mark
        if key.tag != "tag:yaml.org,2002:str":
            if place:
                continue  # a mapping of numbers, such as max_memory: nothing that is read here
            shown, line = text[at.index : key.end_mark.index], at.line + 1
            raise BadConfiguration(
                tr(
                    ko=f"{path}, {line}번째 줄: 키 {shown!r:.80}이(가) 글자가 아니다.",
                    en=f"{path}, line {line}: the key {shown!r:.80} is no text.",
                )
            )
        if name in seen:
            raise _twice(path, name, at.line + 1)
        seen.add(name)
        here = (*place, name)
        if isinstance(value, yaml.MappingNode):
            _walk(path, text, value, here, spans, lines)
        start, end = value.start_mark, value.end_mark
        block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        if block or start.line != at.line or end.line != at.line:
            continue
        spans[here] = start.index, end.index
        if not node.flow_style:
            newline = text.find("\n", end.index)
            lines[place] = (len(text) if newline < 0 else newline + 1), " " * at.column
