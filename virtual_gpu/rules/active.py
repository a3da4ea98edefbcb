"""The rules that hold for a card under the installed versions, and their installation in PyTorch's dispatcher."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.library import Library

from ..errors import WrongValue
from ..interrupts import interrupts_later
from ..language import tr
from ..units import choose
from . import (
    accumulate,
    attention,
    attention_memory,
    autocast,
    bitsandbytes,
    cublas,
    dropout,
    embedding,
    foreach,
    grouped_mm,
    losses,
    norms,
    one_hot,
    pinned,
    reductions,
    scans,
    softmax,
    sort,
    temporaries,
    unscale,
)
from .registry import Operator, Rule, parts, version

RULES = {
    rule.name: rule
    for rule in (
        attention.KERNEL,
        attention.CUDNN,
        attention.CUDNN_WIDE,
        attention.CUDNN_DROPOUT,
        attention.EFFICIENT_GQA,
        dropout.MASK,
        norms.STATISTICS,
        norms.FUSED_RMS,
        norms.GROUP,
        softmax.FUSED,
        softmax.BACKWARD,
        softmax.DENSE,
        scans.TEMPORARIES,
        sort.TEMPORARIES,
        autocast.CUDAS_LIST,
        grouped_mm.ALL_TYPES,
        cublas.OPERANDS,
        cublas.WORKSPACE,
        cublas.WORKSPACE_NOT_KEPT,
        cublas.LT_WORKSPACE,
        accumulate.IN_PLACE,
        attention_memory.TEMPORARIES,
        attention_memory.CUDNN_WORKSPACE,
        temporaries.INDICES,
        embedding.BACKWARD,
        embedding.ACCUMULATES,
        reductions.BUFFERS,
        losses.REDUCED,
        foreach.NORM,
        one_hot.SCATTERED,
        bitsandbytes.PACKED_PRODUCT,
        bitsandbytes.NESTED_SCALES,
        pinned.ROUNDED,
        unscale.NO_BFLOAT16,
    )
}
NEWEST = "2.13"  # of PyTorch, with which these rules were read and run


class _MathAttention(threading.local):
    """Whether math attention is under way in a thread: it adds its mask in place."""

    under_way = False


class ActiveRules:
    """What CUDA does otherwise on a card of this compute capability, with the libraries that are installed.

    While entered, PyTorch treats virtual tensors so; others are passed on as they are. without: names of `RULES` to
    leave out, there the CPU's way is taken; ValueError for a name that is none.
    """

    def __init__(self, compute_capability: tuple[int, int], without: Iterable[str] = ()):
        self.compute_capability = compute_capability
        if isinstance(without, str) or not isinstance(without, Iterable):
            raise WrongValue(
                tr(
                    ko=f"without={without!r:.200}: 규칙 이름들이어야 한다.",
                    en=f"without={without!r:.200}: must be names of rules.",
                )
            )
        self.without = {choose(name, RULES, tr(ko="규칙", en="rule")) for name in without}
        warn_of_unknown_versions()
        self._names = frozenset(
            rule.name
            for rule in RULES.values()
            if rule.name not in self.without and rule.holds(installed(rule.library), compute_capability)
        )
        self.operators: dict[Any, Operator] = {}
        for rule in self.active():
            for op, handler in rule.operators.items():
                self.operators[op] = _chained(self.operators.get(op), handler)
        self.nested = {op: notice for rule in self.active() for op, notice in rule.nested.items()}
        # Without autograd (inference mode) a composite function comes to the mode as it is.
        self.composite = {
            op: kernel for rule in self.active() for (key, op), kernel in rule.kernels.items() if key == "AutogradCPU"
        }
        self.math_attention = _MathAttention()
        self.math_for_groups = False  # heads in groups went to the math kernel, where repeated ones would not have
        self.met: set[Any] = set()  # operations that a rule saw to, and names of rules that were asked for

    def applies(self, name: str) -> bool:
        """Whether this one of `RULES` is in force."""
        self.met.add(name)
        return name in self._names

    def acted(self) -> list[str]:
        """Names of the rules in force that had a say so far: without any other, all would have gone the same way."""
        return [
            rule.name
            for rule in self.active()
            if rule.name in self.met or self.met & {*rule.operators, *rule.nested, *(op for _, op in rule.kernels)}
        ]

    def active(self) -> list[Rule]:
        """The rules in force."""
        return [rule for rule in RULES.values() if rule.name in self._names]

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """In here tensors of PyTorch's compiler, which trace a program, count as virtual ones."""
        _kinds.append((FakeTensor, FunctionalTensor))
        try:
            yield
        finally:
            _kinds.pop()

    def __str__(self) -> str:
        """One line a rule: its name, the versions it holds for, and what it does."""
        lines = [f"{rule.name} ({rule.versions}): {rule.what}" for rule in self.active()]
        return "\n".join([f"PyTorch {torch.__version__}", *lines])

    def __enter__(self) -> ActiveRules:
        with interrupts_later():
            if not _entered:
                _install()
            _entered.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        with interrupts_later():
            _entered.remove(self)
            if not _entered:
                _uninstall()


def in_force(name: str) -> bool:
    """Whether a rule holds on the virtual GPU that is entered; outside of one, by the installed version."""
    return _entered[-1].applies(name) if _entered else RULES[name].holds(installed(RULES[name].library), (0, 0))


_entered: list[ActiveRules] = []  # the innermost last; while it is not empty, the kernels below are in the dispatcher
_libraries: list[Library] = []
_kinds: list[tuple[type, ...]] = [(FakeTensor,)]  # what counts as a virtual tensor, the last


def _install() -> None:
    accumulate.references_alone()  # not for the first time within a backward
    libraries = {key: Library("aten", "IMPL", key) for key in ("AutogradCPU", "AutocastCPU")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for key, op, kernel in _dispatched():
            libraries[key].impl(op, kernel, with_keyset=True)
    _libraries.extend(libraries.values())


@functools.cache
def _dispatched() -> list[tuple[str, Any, Callable]]:
    """(dispatch key, operator, kernel) of every rule above autograd; made before the first is installed."""
    return [
        (key, op, _virtual_only(rule.name, op, kernel, key))
        for rule in RULES.values()
        for (key, op), kernel in rule.kernels.items()
    ]


def _uninstall() -> None:
    for library in _libraries:
        library._destroy()
    _libraries.clear()


def _virtual_only(name: str, op: Any, kernel: Callable, key: str) -> Callable:
    """The rule's kernel for virtual tensors; for others what the dispatcher had."""
    if key == "AutogradCPU":
        original = _decomposed
    else:
        original = _next if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) else _own(op, key)

    def dispatched(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        rules = _entered[-1] if _entered else None
        if rules is None or not rules.applies(name) or not _is_virtual(args):
            return original(op, keyset, args, kwargs)
        return _next(op, keyset, args, kwargs) if kernel is None else kernel(rules, op, *args, **kwargs)

    return dispatched


def _is_virtual(args: tuple) -> bool:
    """Whether a virtual tensor is among these, or a DTensor whose part on this rank is one."""
    return any(
        isinstance(item, _kinds[-1]) or isinstance(getattr(item, "_local_tensor", None), _kinds[-1])
        for value in args
        for item in (value if isinstance(value, (list, tuple)) else [value])
    )


def _decomposed(op: Any, keyset: Any, args: tuple, kwargs: dict) -> Any:
    return parts(op, *args, **kwargs)


def _next(op: Any, keyset: Any, args: tuple, kwargs: dict) -> Any:
    """Where there was no kernel at AutocastCPU: on to the next key."""
    return op.redispatch(keyset & torch._C._dispatch_keyset_full_after(DispatchKey.AutocastCPU), *args, **kwargs)


def _own(op: Any, key: str) -> Callable:
    """The CPU's own kernel at this key."""
    found = torch.library.get_kernel(op, key)

    def run(op: Any, keyset: Any, args: tuple, kwargs: dict) -> Any:
        return found.call_boxed(keyset, *args, **kwargs)

    return run


def _chained(inner: Operator | None, outer: Operator) -> Operator:
    if inner is None:
        return outer

    def both(mode: Any, op: Any, args: tuple, kwargs: dict, run: Callable[[], Any]) -> Any:
        return outer(mode, op, args, kwargs, lambda: inner(mode, op, args, kwargs, run))

    return both


@functools.cache
def installed(library: str) -> tuple[int, ...]:
    """The installed version of a library; (0, 0) where there is none."""
    if library == "torch":
        return version(torch.__version__)
    try:
        return version(importlib.metadata.version(library))
    except importlib.metadata.PackageNotFoundError:
        return 0, 0


@functools.cache
def warn_of_unknown_versions() -> None:
    """Say once that PyTorch is newer than what the rules were read for."""
    if installed("torch") > version(NEWEST):
        warnings.warn(
            tr(
                ko=f"CUDA의 규칙은 PyTorch {NEWEST}까지 확인했다. 설치된 {torch.__version__}에서 달라진 것은 모른다.",
                en=f"CUDA's rules are known up to PyTorch {NEWEST}; what changed in {torch.__version__} is not.",
            ),
            stacklevel=3,
        )
