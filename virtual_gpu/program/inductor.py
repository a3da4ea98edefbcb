"""Inductor for a card that is not there: it makes the code of the card, and its kernels are not run.

What Inductor gives is a Python module: buffers are asked for one by one, products and attention go to PyTorch's own
operations, and what was fused is a Triton kernel that fills buffers. Such a module asks for memory as it would on the
card, whether or not its kernels run; so they do not. Triton need not be installed.

Nothing of Inductor is copied here. A few of the places where it asks for the card are given the virtual one, and the
tensors of its graphs, which were traced on "cpu:0" (see `device`), are said to be on "cuda:0".
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from . import driver, known
from .device import GPU, ProgramGPU
from .patches import Patches

# What would time kernels on the card, or keep its graphs.
TIMED = (
    "triton.cudagraphs",
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "coordinate_descent_tuning",
)
_SETTINGS = {"force_disable_caches": True, "compile_threads": 1} | dict.fromkeys(TIMED, False)
_WIDTHS = {"float": (16, 32, 64), "bfloat": (16,), "int": (1, 8, 16, 32, 64), "uint": (8, 16, 32, 64)}
_ALIGNED = 16  # bytes; a tensor that begins elsewhere is copied before a kernel reads it


_compiling: list[ProgramGPU | None] = []  # whose card Inductor makes code for now; None while it traces on `GPU`


def for_card() -> bool:
    """Whether Inductor is at work: "cuda" is then the card."""
    return bool(_compiling) and _compiling[-1] is not None


@contextlib.contextmanager
def _at_work(gpu: ProgramGPU | None) -> Iterator[None]:
    _compiling.append(gpu)
    try:
        yield
    finally:
        _compiling.pop()


class _Kernel:
    """A Triton kernel: it would write into buffers that are there already. What it mutates is not known any more, by
    what its source says of that (`inductor_meta`)."""

    def __init__(self, source: str):
        mutated = re.search(r"'mutated_arg_names': \[([^\]]*)\]", source)
        names = re.search(r"^def \w+\(([^)]*)\)", source, re.MULTILINE)
        said = re.findall(r"'(\w+)'", mutated[1]) if mutated else []
        order = [name.split(":")[0].strip() for name in names[1].split(",")] if names else []
        self.mutated = [order.index(name) for name in said if name in order]

    def run(self, *args: Any, **kwargs: Any) -> None:
        for place in self.mutated:
            known.forget(args[place])


class _Kernels:
    """`torch._inductor.async_compile.AsyncCompile`, which compiles nothing."""

    def triton(self, name: str, source: str, *args: Any, **kwargs: Any) -> _Kernel:
        return _Kernel(source)

    def wait(self, scope: dict[str, Any]) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"a graph with a kernel of another kind than Triton's ({name})")


class _OnAnyBuild(TorchFunctionMode):
    """What Inductor asks of PyTorch while it compiles for a card, on a CPU build of PyTorch.

    Numbers that it folds together would lie on the card; here they lie on the CPU. Some operations on fake tensors of
    "cuda" (indexing, `copy_`) want a device guard that such a build has not; they run on "cpu:0", as they came.
    """

    def __init__(self, card: torch.device):
        self.card = card

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cuda":
                kwargs = {**kwargs, "device": "cpu"}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "not linked with support for cuda" not in str(error):
                raise
        args, kwargs = tree_map(lambda value: moved(value, self.card, GPU), (args, kwargs))
        return tree_map(lambda value: moved(value, GPU, self.card), func(*args, **kwargs))


@contextlib.contextmanager
def inductor_for(gpu: ProgramGPU) -> Iterator[None]:
    """In here Inductor finds the virtual card where it looks for one."""
    from torch._inductor import async_compile, codecache, config, graph, pattern_matcher, scheduler
    from torch._inductor.codegen import triton_split_scan
    from torch._inductor.fx_passes import joint_graph, pad_mm, post_grad
    from torch._inductor.runtime.hints import DeviceProperties

    patches = Patches()
    kind = torch.device
    try:
        driver.install(patches, gpu)
        patches.set(torch, "device", kind)  # generated code is given this one's name
        patches.set(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
        patches.set(scheduler, "has_triton", lambda: True)
        # Products are padded to aligned widths where that is faster, which the card would be asked: they are not.
        patches.set(pad_mm, "_should_pad", lambda *args, **kwargs: False)
        for module in (joint_graph, post_grad):  # patterns to look for, which are traced, and the same for every device
            patches.set(module, "lazy_init", functools.partial(_on_cpu, module.lazy_init))
        scan = triton_split_scan.TritonSplitScanKernel.scan
        patches.set(triton_split_scan.TritonSplitScanKernel, "scan", _triton()(scan))
        patches.set(pattern_matcher, "aot_function", _traced_here(pattern_matcher.aot_function, gpu.device))
        patches.set(torch.utils._triton, "triton_hash_with_backend", lambda: "virtual")
        patches.set(DeviceProperties, "create", DeviceProperties.create.__func__.__wrapped__.__get__(DeviceProperties))
        patches.set(async_compile, "AsyncCompile", _Kernels)
        patches.set(codecache.PyCodeCache, "load", classmethod(_template))
        patches.set(graph.GraphLowering, "_compile_to_module_lines", _module)
        with _at_work(gpu), config.patch(_SETTINGS), _OnAnyBuild(gpu.device):
            yield
    finally:
        patches.undo()


def _module(lowering: Any, code: Any) -> types.ModuleType:
    """What Inductor wrote, as a module whose buffers are the virtual card's."""
    from torch._inductor import codecache

    key, path = codecache.PyCodeCache.write(code.value)  # Inductor reads it again from there
    module = types.ModuleType(f"inductor_{key}")
    module.__file__ = path
    with _triton():
        exec(compile(code.value, f"<inductor>{path}", "exec"), module.__dict__)
    module.__dict__.update(
        {**lowering.constants, **lowering.torchbind_constants, **lowering.opaque_value_type_classes},
        empty_strided_cuda=_empty_strided,
        reinterpret_tensor=_reinterpreted,
        alloc_from_pool=_from_pool,
        copy_if_misaligned=_aligned,
        # Random states of attention are of no size here where no kernel would make them; nothing reads them.
        assert_size_stride=lambda *described: None,
    )
    lowering.cache_key, lowering.cache_path, lowering.cache_linemap = key, path, []
    return module


def _traced_here(aot_function: Callable, card: torch.device) -> Callable:
    """`aot_function` for what Inductor puts in a pattern's place: autograd knows no fake tensor on a card."""

    def aot(function: Callable, compiler: Callable, *, partition_fn: Callable, **settings: Any) -> Callable:
        def partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> Any:
            to_card(joint, card)
            return partition_fn(joint, inputs, **kwargs)

        traced = aot_function(function, compiler, partition_fn=partition, **settings)

        def run(*args: Any) -> Any:
            with _at_work(None):
                return traced(*(_leaf(value, card) for value in args))

        return run

    return aot


def _leaf(value: Any, card: torch.device) -> Any:
    here = moved(value, card, GPU)
    return here.requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else here


def _on_cpu(init: Callable, *devices: Any) -> None:
    init(*(torch.device("cpu") for _ in devices))  # once for each device that it is called with, or with none


def _template(cache: Any, code: str, extra: str = "", **_: Any) -> types.ModuleType:
    """The module of a kernel that Inductor makes from a template, to measure it beside others; not loaded."""
    module = types.ModuleType("template")
    module.key, module.__file__ = cache.write(code, extra)
    return module


@contextlib.contextmanager
def _triton() -> Iterator[None]:
    """`import triton` works where it is not installed: kernels are text here, and of types only widths are asked."""
    package, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    package.language = language
    for kind, widths in _WIDTHS.items():
        for width in widths:
            setattr(language, f"{kind}{width}", types.SimpleNamespace(primitive_bitwidth=width))
    stubs = {"triton": package, "triton.language": language}
    names = [name for name in stubs if name not in sys.modules]
    sys.modules.update({name: stubs[name] for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _reinterpreted(
    tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _from_pool(
    pool: torch.Tensor, offset: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """A buffer that begins so many bytes into a pool (`memory_planning`)."""
    entries = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    part = pool.view(torch.uint8)[offset : offset + entries * dtype.itemsize]
    return part.view(dtype).as_strided(size, stride)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.storage_offset() * tensor.element_size() % _ALIGNED == 0 else tensor.clone()


def to_card(graph: GraphModule, card: torch.device) -> None:
    """Say of the tensors of a graph that was traced on `GPU`, and of graphs in it, that they are on the card."""

    def there(value: Any) -> Any:
        return moved(value, GPU, card)

    for part in graph.modules():
        if isinstance(part, GraphModule):
            for node in part.graph.nodes:
                known = {key: node.meta[key] for key in ("val", "example_value") if key in node.meta}
                node.meta.update({key: tree_map(there, value) for key, value in known.items()})
                node.args = torch.fx.node.map_aggregate(node.args, there)
                node.kwargs = torch.fx.node.map_aggregate(node.kwargs, there)
            part.recompile()


def moved(value: Any, here: torch.device, there: torch.device) -> Any:
    """A fake tensor of the compiler's, or a device, that is `here`, as one `there`; all else as it is."""
    if isinstance(value, torch.device):
        return there if value == here else value
    if not isinstance(value, FakeTensor) or value.fake_device != here:
        return value
    with _disable_current_modes():
        meta = torch.empty(0, dtype=value.dtype, device="meta")
        meta.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    return FakeTensor(value.fake_mode, meta, there)


def on_gpu(graph: GraphModule, inputs: Any) -> bool:
    """Whether a tensor of this graph is on the virtual GPU."""
    values = [*inputs, *(node.meta.get("example_value") for node in graph.graph.nodes)]
    return any(isinstance(value, FakeTensor) and value.fake_device == GPU for value in values)
