"""What a rule is: one thing that CUDA does otherwise than a CPU, with its source and the versions it holds for.

A rule acts at the place where PyTorch's dispatcher would act on a card, so that functions, methods, modules and
recomputed checkpoints meet it alike:

- `kernels`: replacements at a dispatch key above autograd ("AutogradCPU", which virtual tensors carry, for composite
  functions; "AutocastCPU" for what autocast casts), installed while a virtual GPU is entered;
- `operators`: replacements below autograd, where the counting mode sees every operation;
- a rule with neither is asked by its name (`ActiveRules.applies`) by whoever makes the thing it speaks of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Kernel = Callable[..., Any]  # (rules, op, *args, **kwargs) → outputs
Operator = Callable[..., Any]  # (mode, op, args, kwargs, run) → outputs; run() is what happens without the rule


def with_temporaries(sizes: Callable[[tuple], tuple[int, ...]]) -> Operator:
    """The operation, and for the time of its kernel, after its outputs, blocks of `sizes(args)` bytes."""

    def operator(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> Any:
        out = run()
        for item in out if isinstance(out, (tuple, list)) else [out]:
            if item is not None:
                mode.count(item)
        mode.gpu.temporaries(*sizes(args))
        return out

    return operator


def version(text: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" → (2, 13)."""
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in text.split("+")[0].split(".")[:2])


@dataclass(frozen=True)
class Rule:
    """One difference between CUDA and a CPU.

    what: in words. source: where PyTorch (or `library`) says so. since, until: the first version that does it and the
    first that no longer does. capability: the least compute capability, and the first that is too high. kernels: (key,
    operator) → replacement above autograd (None: what the next key has). operators: operator → replacement below it.
    nested: operator → what it asks for also where it is met inside another.
    """

    name: str
    what: str
    source: str
    since: str = "2.6"
    until: str | None = None
    capability: tuple[tuple[int, int], tuple[int, int] | None] = ((0, 0), None)
    library: str = "torch"
    kernels: Mapping[tuple[str, Any], Kernel | None] = field(default_factory=dict)
    operators: Mapping[Any, Operator] = field(default_factory=dict)
    nested: Mapping[Any, Callable[[Any], None]] = field(default_factory=dict)

    def holds(self, installed: tuple[int, ...], compute_capability: tuple[int, int]) -> bool:
        """Whether a card of this compute capability does it, under the installed version of `library`."""
        least, too_high = self.capability
        return (
            version(self.since) <= installed
            and (self.until is None or installed < version(self.until))
            and least <= compute_capability
            and (too_high is None or compute_capability < too_high)
        )

    @property
    def versions(self) -> str:
        """ "torch 2.6 to before 2.14"."""
        return f"{self.library} {self.since}" + (f" to before {self.until}" if self.until else " on")


def overload(name: str) -> Any:
    """The operator of aten, "softmax.int" or "exp"; None where this PyTorch has none of that name."""
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), which or "default", None)


def parts(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What a composite function is made of, in C++ (`op.decompose` may take another way, meant for the compiler)."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
