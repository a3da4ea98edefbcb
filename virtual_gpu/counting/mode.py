"""The fake-tensor mode that counts: an operation runs on shapes, and every storage it makes is an allocation."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from ..language import tr
from ..rules.cuda import grouped_mm_shape
from .outputs import FakeOutputs

if TYPE_CHECKING:
    from .gpu import VirtualGPU

_aten = torch.ops.aten
_DEVICE_QUERY = torch.ops.prim.device.default
_ITEM = _aten._local_scalar_dense.default
_LAYER_NORM = _aten.native_layer_norm.default
_GROUPED_MM = getattr(getattr(_aten, "_grouped_mm", None), "default", None)  # since torch 2.8
# What asks cuBLAS for a handle, and with it for a workspace.
_CUBLAS_OPS = frozenset(
    (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.addmv.default)
)
_outputs = FakeOutputs()  # one for all virtual GPUs: shapes are the same on each


class CountingMode(FakeTensorMode):
    """Fake tensors whose storages are counted: one storage, one allocation, released when the storage dies."""

    def __init__(self, gpu: VirtualGPU):
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # PyTorch's own: `_outputs` stands before it
        self.gpu = gpu
        self.inside = False
        self.products = 0  # made inside other operations: they ask for a workspace, each time
        # storage address -> (its weak reference, allocation id; None while the storage is resized to nothing)
        self.storages: dict[int, tuple[weakref.ref, int | None]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps every call below, to keep torch.compile away from it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE_QUERY and type(args[0]) is FakeTensor:  # nearly half of all calls
            return args[0].fake_device
        if self.gpu.interrupted:
            self.gpu.interrupted = False
            raise KeyboardInterrupt
        if func is _ITEM and isinstance(args[0], FakeTensor):
            if args[0].dtype == torch.bool:
                # As in the data of the experiments: "is all of it a token?" yes, "is any of it padding?" no.
                return not getattr(args[0], "says_any", False)
            if self.gpu.in_step:
                return 1.0  # Adafactor scales its update by a norm: any number does, there are no values
        if func in _CUBLAS_OPS:
            self.gpu._reserve_workspace()
            self.products += self.inside
        if self.inside:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        # How the fake tensor of an operation is found (a decomposition, or a cache) is not what a GPU would allocate.
        self.inside = True
        try:
            if func is _GROUPED_MM and self.gpu.kernels.applies("grouped_mm"):
                out = args[0].new_empty(grouped_mm_shape(*args[:3]))
            else:
                out = self._run(func, types, args, kwargs or {})
            if func is _LAYER_NORM:
                out = self.gpu.kernels.layer_norm(out)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                tr(
                    ko=f"가상 GPU의 텐서에는 값이 없는데 이 모델은 값을 보고 다음 계산을 정한다({func}). 토큰이 어느 "
                    "전문가로 가는지에 메모리가 달린 일부 MoE가 그렇다. 진짜 GPU에서만 잴 수 있다.",
                    en=f"Tensors on a virtual GPU have no values, and this model looks at values to go on ({func}), as "
                    "some MoE do whose memory depends on where the tokens are sent. Only a real GPU can measure it.",
                )
            ) from error
        finally:
            self.inside = False
        if isinstance(out, torch.Tensor):
            if func.overloadpacket is _aten.any:
                out.says_any = True
            self.count(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self.count(item)
        return out

    def _run(self, func, types, args, kwargs):
        run = super().__torch_dispatch__

        def find():
            products = self.products
            return run(func, types, args, kwargs), func in _CUBLAS_OPS or self.products == products

        return _outputs(self, func, args, kwargs, find)

    def count(self, tensor: torch.Tensor, category: str = "activations") -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.storages or not storage.nbytes():
            return
        block = self.gpu._allocate(storage.nbytes(), category)

        def release(_, key=key, storages=self.storages, meter=self.gpu.meter):
            block = storages.pop(key)[1]
            if block is not None:
                meter.free(block)

        self.storages[key] = (weakref.ref(storage, release), block)

    def resized(self, storage: torch.UntypedStorage, category: str) -> None:
        """Count a known storage anew after its `resize_`; what it holds from now on is `category`."""
        if storage._cdata not in self.storages:
            return
        reference, block = self.storages[storage._cdata]
        if block is not None:
            self.gpu.meter.free(block)
        block = self.gpu._allocate(storage.nbytes(), category) if storage.nbytes() else None
        self.storages[storage._cdata] = (reference, block)


def on_virtual_gpu(thing: Any) -> bool:
    """Whether this is a tensor on a virtual GPU."""
    return isinstance(getattr(thing, "fake_mode", None), CountingMode)
