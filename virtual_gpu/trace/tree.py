"""What is held at one moment as a tree: category → phase → layer → module → tensor; layers that are alike are one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .details import Held, Place
from .timeline import CATEGORIES

_LAYER = re.compile(r"(?P<stack>.*?\.)?(?P<number>\d+)(?:\.(?P<module>.*))?")


@dataclass(frozen=True)
class Tensors:
    """`count` tensors that are alike: one of them, and bytes of all."""

    one: Held
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        return self.one.nbytes * self.count

    @property
    def key(self) -> Hashable:
        """All that is shown of them."""
        origin = self.one.origin
        place = origin.kept and (origin.kept.operation, origin.kept.line)
        made = origin.made.operation, origin.made.line if place is None else None
        return self.one.nbytes, origin.name, origin.shape, origin.dtype, made, place, self.count


@dataclass(frozen=True)
class Rests:
    """What the allocator gave beyond what was asked for: the rests of `count` blocks that it did not split off."""

    nbytes: int
    count: int


@dataclass
class Node:
    """A part of the memory; its bytes are those of its children.

    kind: "all", "category", "phase", "layer" or "module". key: the category's name, the phase's span, the layer's name
    (None outside of all modules), the module's name in the layer ("" for the layer itself). alike: the numbers of the
    layers that it stands for, of all of which its children are the sum.
    """

    kind: str
    key: Any
    children: list[Node | Tensors | Rests]
    alike: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is in it."""
        return sum(child.nbytes for child in self.children)


def tree_of(held: Iterable[Held]) -> Node:
    """The tree of what is held."""
    groups = _grouped(held, lambda one: one.category)
    order = sorted(groups, key=CATEGORIES.index)
    return Node("all", None, [_category(name, groups[name]) for name in order])


def layer_of(place: Place) -> tuple[str | None, str]:
    """(layer, module in it) of a place: "model.layers.3.mlp.act" is "mlp.act" of "model.layers.3"."""
    if place.module is None:
        return None, ""
    found = _LAYER.fullmatch(place.module)
    if found is None:
        return place.module, ""
    return f"{found['stack'] or ''}{found['number']}", found["module"] or ""


def _category(name: str, held: list[Held]) -> Node:
    phases = _grouped(held, lambda one: one.span)
    node = Node("category", name, [Node("phase", span, _layers(phases[span])) for span in sorted(phases)])
    rests = Counter(one.held - one.nbytes for one in held if one.held > one.nbytes)
    if rests:
        node.children.append(Rests(sum(size * count for size, count in rests.items()), rests.total()))
    return node


def _layers(held: list[Held]) -> list[Node]:
    nodes = [
        Node("layer", layer, [
            Node("module", module, _alike(Tensors(one, 1) for one in inside))
            for module, inside in _grouped(of_layer, lambda one: layer_of(one.place)[1]).items()
        ])
        for layer, of_layer in _grouped(held, lambda one: layer_of(one.place)[0]).items()
    ]  # fmt: skip
    folded = []
    for same in _grouped(nodes, _signature).values():
        first = same[0]
        if len(same) > 1:
            modules = [
                Node(one.kind, one.key, [Tensors(t.one, t.count * len(same)) for t in one.children])
                for one in first.children
            ]
            first = Node("layer", first.key, modules, [_number(node.key) for node in same])
        folded.append(first)
    return folded


def _signature(layer: Node) -> Hashable:
    """The same for layers that differ in their number alone."""
    if layer.key is None or _number(layer.key) is None:
        return layer.key
    modules = tuple((module.key, tuple(tensors.key for tensors in module.children)) for module in layer.children)
    return _LAYER.fullmatch(layer.key)["stack"], modules


def _number(layer: str) -> int | None:
    found = _LAYER.fullmatch(layer)
    return None if found is None else int(found["number"])


def _alike(tensors: Iterable[Tensors]) -> list[Tensors]:
    return [Tensors(same[0].one, len(same)) for same in _grouped(tensors, lambda one: one.key).values()]


def _grouped(things: Iterable[Any], key: Callable[[Any], Hashable]) -> dict[Any, list[Any]]:
    """key → the things that have it, in their order."""
    groups: dict[Any, list[Any]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups
