"""The fake-tensor mode that counts: an operation runs on shapes, and every storage it makes is an allocation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from ..errors import NotSupported
from ..interrupts import Releases
from ..language import tr
from ..rules.registry import overload, parts
from .outputs import FakeOutputs, device_of, fake_tensor

if TYPE_CHECKING:
    import weakref

    from .details import DetailRecorder
    from .gpu import VirtualGPU

_EMPTY, _EMPTY_LIKE = torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default
_PLAIN = (torch.Tensor, torch.nn.Parameter)
DEVICE_QUERY = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default
# It gives what it is given (wait_tensor in torch/csrc/distributed/c10d/Functional.cpp); of meta tensors, a new one.
_WAIT = torch.ops._c10d_functional.wait_tensor.default if torch.distributed.is_available() else None
_CONVOLUTION = torch.ops.aten.convolution.default
_REDUCED = frozenset((torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList, torch.ops.aten.max.default))
_NOTED = _REDUCED | {_ITEM, _CONVOLUTION, _EMPTY_LIKE}  # more is done with them than their outputs are made
# With a type of the output: as large as the product alone. PyTorch's decompositions of addmm (2.8 to 2.12) and baddbmm
# take the type for beta (torch/_decomp/decompositions.py).
_TYPED = {
    op: product
    for sum_, name in (("addmm", "mm.dtype"), ("baddbmm", "bmm.dtype"))
    for kind in ("dtype", "dtype_out")
    if (op := overload(f"{sum_}.{kind}")) is not None and (product := overload(name)) is not None
}
_outputs = FakeOutputs()  # one for all virtual GPUs: shapes are the same on each


class ValueNeeded(NotSupported):
    """A program asked for a value of a tensor that has none, and goes on by it."""


@functools.cache
def is_composite(func: Any) -> bool:
    """Whether the operation is made of others. Autograd takes it apart; in inference mode it comes here whole.

    One that has a kernel besides (`silu_backward`) is not: the backends run that.
    """
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    return func.namespace == "aten" and has("CompositeImplicitAutograd") and not has("CPU")


class _PassedOn(Exception):
    """The operation is another tensor class's to run (FSDP2's, a functional one): it comes here again as its parts."""


class CountingMode(FakeTensorMode):
    """Fake tensors whose storages are counted: one storage, one allocation, released when the storage dies."""

    def __init__(self, gpu: VirtualGPU):
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # PyTorch's own: `_outputs` stands before it
        self.gpu = gpu
        self.rules = gpu.rules
        self.inside = False
        self.ruled = False  # inside an operation that asks for itself what `rules.nested` asks for it
        self.plain: dict[int, bool] = {}  # id of an operation → see `_is_plain`
        self.noticed = 0  # what rules had to notice inside other operations, each time
        self.details: DetailRecorder | None = None  # told of every operation and tensor, while there is one
        self.operation: torch._ops.OpOverload | None = None  # the one that runs
        # storage address -> (its weak references, allocation id; None while the storage is resized to nothing)
        self.storages: dict[int, tuple[tuple[weakref.ref, weakref.ref], int | None]] = {}

        def release(key: int, storages=self.storages, free=gpu.free) -> None:
            block = storages.pop(key)[1]
            if block is not None:
                free(block)

        self.releases = Releases(release)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps every call below, to keep torch.compile away from it

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # Dynamo puts modes that say so aside while it compiles

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_QUERY and type(args[0]) is FakeTensor:  # the commonest call of all
            return device_of(args[0])
        if func is _WAIT:
            return args[0]
        self.raise_interrupt()
        kwargs = kwargs or {}
        if not self.inside and self.details is None and not torch.is_inference_mode_enabled():
            plain = self.plain.get(id(func))
            if plain or (plain is None and self._is_plain(func)):
                self.operation = func
                try:
                    out = _outputs.known(self, func, args, kwargs)
                    if out is not None:
                        self._count_all(out, func, args)
                        return out
                finally:
                    self.operation = None
        if self.inside:  # how the fake tensor of an operation is found is not what a GPU would allocate
            nested = None if self.ruled else self.rules.nested.get(func)
            if nested is not None:
                self.noticed += 1
                self.rules.met.add(func)
                nested(self)
            return super().__torch_dispatch__(func, types, args, kwargs)
        if self.details is not None:
            self.details.runs(func)
        if func is _ITEM and isinstance(args[0], FakeTensor):
            answer = self.gpu.answers.to(args[0], self.gpu.in_step)
            if answer is not None:
                return answer
        if is_composite(func):
            with self:
                kernel = self.rules.composite.get(func)
                self.rules.met.add(func)
                return parts(func, *args, **kwargs) if kernel is None else kernel(self.rules, func, *args, **kwargs)
        self.operation = func
        try:
            if torch.is_inference_mode_enabled():
                # A view made in inference mode of a tensor from outside is one as that; a fake one would not be.
                with torch.inference_mode(False), torch.no_grad():
                    out = self._ruled(func, types, args, kwargs)
            else:
                out = self._ruled(func, types, args, kwargs)
            if out is not NotImplemented:
                if func in _REDUCED:
                    self.gpu.answers.note(out, func, args)
                elif func is _CONVOLUTION:
                    self.gpu.convolutions.note(out, args)
                self._count_all(out, func, args)
        finally:
            self.operation = None
        return out

    def _is_plain(self, func: Any) -> bool:
        """Whether an operation's outputs are all that is to be known of it: most are so, and come here most often."""
        rules = self.rules
        plain = not (
            func in rules.operators or func in rules.nested or func in _NOTED or func in _TYPED or is_composite(func)
        )
        self.plain[id(func)] = plain
        return plain

    def _count_all(self, out: Any, func: Any, args: tuple) -> None:
        """Count what an operation made."""
        if isinstance(out, torch.Tensor):
            if out.dtype is torch.bool:
                self.gpu.answers.note(out, func, args)
            self.count(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self.count(item)

    def raise_interrupt(self) -> None:
        """KeyboardInterrupt where Ctrl+C came in the middle of the last operation."""
        if self.gpu.interrupted:
            self.gpu.interrupted = False
            raise KeyboardInterrupt

    def _ruled(self, func, types, args, kwargs):
        """The outputs of an operation, by CUDA's rule for it where there is one."""
        rule = self.rules.operators.get(func)
        self.inside, self.ruled = True, func in self.rules.nested
        try:
            if rule is None:
                return self._run(func, types, args, kwargs)
            self.rules.met.add(func)

            def run():
                out = self._run(func, types, args, kwargs)
                if out is NotImplemented:
                    raise _PassedOn
                return out

            return rule(self, func, args, kwargs, run)
        except _PassedOn:
            return NotImplemented
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueNeeded(
                tr(
                    ko=f"가상 GPU의 텐서에는 값이 없는데 이 모델은 값을 보고 다음 계산을 정한다({func}). 토큰이 어느 "
                    "전문가로 가는지에 메모리가 달린 일부 MoE가 그렇다. 진짜 GPU에서만 잴 수 있다.",
                    en=f"Tensors on a virtual GPU have no values, and this model looks at values to go on ({func}), as "
                    "some MoE do whose memory depends on where the tokens are sent. Only a real GPU can measure it.",
                )
            ) from error
        finally:
            self.inside = False

    def _run(self, func, types, args, kwargs):
        run = super().__torch_dispatch__
        plain = func is _EMPTY_LIKE and type(args[0]) in _PLAIN and "memory_format" not in kwargs
        if plain and args[0].is_meta and args[0].is_contiguous():
            # `to_empty` of a model on meta, tensor by tensor: remembered by the shape
            func, args, kwargs = _EMPTY, (list(args[0].shape),), {"dtype": args[0].dtype, "device": "meta"} | kwargs

        def find():
            if func in _TYPED:
                out = run(_TYPED[func], types, args[1:4], {})
                return kwargs.get("out", out), True
            noticed = self.noticed
            out = run(func, types, args, kwargs)
            # What an operation of this name makes inside, the rule for it has seen to before.
            return out, self.noticed == noticed or func in self.rules.nested

        return _outputs(self, func, args, kwargs, find)

    def empty_like(self, tensor: FakeTensor, dtype: torch.dtype | None = None) -> FakeTensor:
        """A dense tensor of this shape, not counted yet: an output that a rule makes in place of the CPU's."""
        return fake_tensor(
            self, torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta"), tensor.fake_device
        )

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Operations in here find shapes, as PyTorch does between a program's own: nothing of them is on the GPU."""
        before = self.inside, self.ruled
        self.inside = self.ruled = True
        try:
            yield
        finally:
            self.inside, self.ruled = before

    def count(self, tensor: torch.Tensor, category: str = "activations") -> None:
        if tensor.layout is not torch.strided:
            raise NotImplementedError(f"{self.operation} makes a tensor of layout {tensor.layout} on a virtual GPU")
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.releases.settle()  # else an address that is used again would be taken for the storage that was there
        if key in self.storages or not storage.nbytes():
            return
        block = self.gpu._allocate(storage.nbytes(), category)
        if self.details is not None:
            self.details.holds(block, tensor)
        self.storages[key] = (self.releases.watch(storage, key), block)

    def resized(self, storage: torch.UntypedStorage, category: str) -> None:
        """Count a known storage anew after its `resize_`; what it holds from now on is `category`."""
        if storage._cdata not in self.storages:
            return
        references, block = self.storages[storage._cdata]
        if block is not None:
            self.gpu.free(block)
        block = self.gpu._allocate(storage.nbytes(), category) if storage.nbytes() else None
        self.storages[storage._cdata] = (references, block)


def on_virtual_gpu(thing: Any) -> bool:
    """Whether this is a tensor on a virtual GPU."""
    return isinstance(getattr(thing, "fake_mode", None), CountingMode)
