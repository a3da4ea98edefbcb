"""The bar of a report, opened: nested `<details>`, which need no script, down to each tensor and the line behind it."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

from ..language import tr
from ..trace.details import Details, Held
from ..trace.tree import Node, Rests, Tensors, layer_of, tree_of
from ..units import human_bytes
from .frames import frame_of
from .labels import category_label, phase_label
from .report import COLORS

if TYPE_CHECKING:
    import pandas

_LONGEST = 72  # signs of a source line
# Where a page takes it away (GitHub), nested lists are left.
_STYLE = (
    "<style>.vg-zoom details{margin-left:1.1em}.vg-zoom summary{cursor:pointer;padding:.1em 0}"
    ".vg-zoom table{margin:.3em 0 .6em 1.1em;font-size:.9em}"
    ".vg-zoom td,.vg-zoom th{text-align:left!important;vertical-align:top;padding-right:1em;white-space:nowrap}"
    ".vg-zoom td code{white-space:nowrap!important;background:none!important;padding:0!important}</style>"
)


@dataclass(frozen=True)
class Zoom:
    """What was held in a phase, counted from 0, at its highest moment; in a notebook it draws itself."""

    title: str
    details: Details
    phase: int

    @cached_property
    def held(self) -> list[Held]:
        """Every block."""
        return self.details.held(self.phase)

    @cached_property
    def root(self) -> Node:
        """The blocks as a tree: children sum to their parent's bytes."""
        return tree_of(self.held)

    def to_frame(self) -> pandas.DataFrame:
        """Every block as a row: what it is, where it comes from, what keeps it, and its bytes."""
        return frame_of(map(self._row, self.held))

    def _row(self, one: Held) -> dict[str, object]:
        layer, module = layer_of(one.place)
        made, kept, origin = one.origin.made, one.origin.kept, one.origin
        return {
            "category": one.category, "phase": self._phase(one.span), "layer": layer, "module": module,
            "name": origin.name, "operation": made.operation, "shape": origin.shape, "dtype": origin.dtype,
            "nbytes": one.nbytes, "held_bytes": one.held, "kept_by": kept and kept.operation,
            "line": one.place.line and _where(*one.place.line),
        }  # fmt: skip

    def _phase(self, span: int) -> str:
        names = self.details.trace.names
        if span % 2:
            return f"{span // 2 + 1}. {phase_label(names[span // 2])}"
        if not span:
            return tr(ko="학습 전", en="before training")
        return tr(ko=f"{span // 2}단계 뒤", en=f"after phase {span // 2}")

    # -- as HTML ---------------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        return f'<div class="vg-zoom">{_STYLE}{self._opened(self.root, open_=True)}</div>'

    def _opened(self, node: Node, label: str = "", open_: bool = False) -> str:
        label = " › ".join(filter(None, (label, escape(self._label(node)))))
        if node.kind == "category":
            label = f'<span style="color:{COLORS[node.key]}">■</span> {label}'
        if len(node.children) == 1 and isinstance(node.children[0], Node):
            return self._opened(node.children[0], label, open_)
        parts = [self._opened(child) for child in node.children if isinstance(child, Node)]
        parts += [_rests(child) for child in node.children if isinstance(child, Rests)]
        leaves = [child for child in node.children if isinstance(child, Tensors)]
        share = node.nbytes / max(self.root.nbytes, 1)
        return (
            f"<details{' open' if open_ else ''}><summary>{label} <b>{human_bytes(node.nbytes)}</b> "
            f"({share:.1%}){self._bar(node)}</summary>{''.join(parts)}{_table(leaves) if leaves else ''}</details>"
        )

    @staticmethod
    def _bar(node: Node) -> str:
        """The bar of the report, again."""
        if node.kind != "all":
            return ""
        parts = "".join(
            f'<span style="display:inline-block;height:1.2em;background:{COLORS[part.key]};'
            f'width:{part.nbytes / max(node.nbytes, 1):.3%}"></span>'
            for part in node.children
        )
        return f'<div style="max-width:720px;line-height:0;margin:.3em 0">{parts}</div>'

    def _label(self, node: Node) -> str:
        if node.kind == "all":
            name = phase_label(self.details.trace.names[self.phase])
            return tr(
                ko=f"{self.title}, {self.phase + 1}. {name}의 최대",
                en=f"{self.title}, peak of {self.phase + 1}. {name}",
            )
        if node.kind == "category":
            return category_label(node.key)
        if node.kind == "phase":
            return self._phase(node.key)
        if node.kind == "layer":
            return _layer_label(node)
        return node.key

    # -- as text ---------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return "\n".join(self._lines(self.root, 0))

    def _lines(self, node: Node, depth: int) -> Iterator[str]:
        yield f"{human_bytes(node.nbytes):>12}  {'  ' * depth}{self._label(node)}"
        if node.kind in ("all", "category"):
            for child in node.children:
                if isinstance(child, Node):
                    yield from self._lines(child, depth + 1)


def _layer_label(node: Node) -> str:
    if node.key is None:
        return tr(ko="(모델 밖: 학습 루프, 옵티마이저)", en="(outside the model: the loop, the optimizer)")
    if not node.alike:
        return node.key or tr(ko="(모델 자체)", en="(the model itself)")
    stack = node.key.rpartition(".")[0]
    numbers = f"{stack + '.' if stack else ''}{_ranges(node.alike)}"
    return tr(ko=f"{numbers} (똑같은 {len(node.alike)}개 층의 합)", en=f"{numbers} (sum of {len(node.alike)} alike)")


def _ranges(numbers: list[int]) -> str:
    """0, 1, 2, 5 as "0–2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _rests(rests: Rests) -> str:
    label = tr(ko="할당자가 잘라 내지 않은 자투리", en="rests that the allocator did not split off")
    return f'<div style="margin-left:2.2em">{label} <b>{human_bytes(rests.nbytes)}</b> ({rests.count:,} ×)</div>'


def _table(leaves: list[Tensors]) -> str:
    heads = (
        tr(ko="이름 또는 만든 연산", en="name, or made by"),
        tr(ko="dtype과 모양", en="dtype and shape"),
        tr(ko="개수", en="count"),
        tr(ko="바이트의 합", en="bytes in all"),
        tr(ko="역전파까지 붙드는 연산과 그 줄", en="kept for backward by, and on which line"),
    )
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    ordered = sorted(leaves, key=lambda leaf: -leaf.nbytes)
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(leaf))}</tr>" for leaf in ordered)
    return f'<div style="overflow-x:auto"><table><tr>{head}</tr>{rows}</table></div>'


def _cells(leaf: Tensors) -> tuple[str, ...]:
    numbers = f"{leaf.count:,}", human_bytes(leaf.nbytes)
    origin, place = leaf.one.origin, leaf.one.place
    name = escape(origin.name) or f"<code>{escape(origin.made.operation)}</code>"
    if origin.shape is not None:
        shape = f"{origin.dtype} {list(origin.shape)}"
    else:
        shape = "" if origin.name else tr(ko="커널 안의 자리", en="inside a kernel")
    kept = [f"<code>{escape(place.operation)}</code>"] if origin.kept else []
    line = [_line(*place.line)] if place.line and not origin.name else []
    return name, shape, *numbers, "<br>".join(kept + line)


def _line(file: str, line: int) -> str:
    source = linecache.getline(file, line).strip()
    source = source if len(source) <= _LONGEST else source[: _LONGEST - 1] + "…"
    where = _where(file, line)
    return f'<span title="{escape(where)}">{escape(where.rpartition("/")[2])}</span> <code>{escape(source)}</code>'


def _where(file: str, line: int) -> str:
    """A line as a person finds it again: a library's file from its package on, a cell's as a cell."""
    if "ipykernel" in file or file.startswith("<"):
        return tr(ko=f"셀의 {line}번째 줄", en=f"line {line} of a cell")
    folder = max((path for path in sys.path if path and file.startswith(path)), key=len, default="")
    name = file.removeprefix(folder).lstrip("/")
    # Of our own loop the line itself stands beside it: where it is in the file changes with every version.
    return name if name.startswith(f"{__package__.partition('.')[0]}/") else f"{name}:{line}"
