"""Kernels of Triton in a program: not run, and what is around them counted.

Triton is not among the test environment's packages. Modules of its names, whose functions fail as Triton's own do where
there is no card, show what is replaced in them; where Triton is installed, the last tests take a kernel of its own.
"""

import sys
from types import ModuleType

import pytest
import torch

from virtual_gpu.language import set_language
from virtual_gpu.program import cuda

MIB = 2**20


class DriverConfig:
    """triton/runtime/driver.py, where there is no card."""

    _active = None

    def set_active(self, driver):
        self._active = driver

    @property
    def active(self):
        if self._active is None:
            raise RuntimeError("0 active drivers ([]). There should only be one.")
        return self._active


class JITFunction:
    """triton/runtime/jit.py."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args, grid, warmup, **kwargs):
        sys.modules["triton.runtime.driver"].driver.active.get_current_device()


class CudaDriver:
    """triton/backends/nvidia/driver.py."""

    def __init__(self):
        raise AssertionError("libcuda.so cannot found!")

    def get_current_target(self):
        major, minor = self.get_device_capability(self.get_current_device())
        return "cuda", 10 * major + minor

    def get_empty_cache_for_benchmark(self):
        return torch.empty(256 * MIB // 4, dtype=torch.int, device="cuda")


def no_card(*_, **__):
    raise AssertionError("libcuda.so cannot found!")


@pytest.fixture
def modules(monkeypatch):
    """Triton's modules by their names, in `sys.modules`."""
    found = {
        "triton.runtime.driver": {"driver": DriverConfig()},
        "triton.runtime.jit": {"JITFunction": JITFunction},
        "triton.testing": {"do_bench": no_card},
        "triton.backends.nvidia.driver": {"libcuda_dirs": no_card, "CudaDriver": CudaDriver},
    }
    for name, values in found.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return {name.removeprefix("triton."): sys.modules[name] for name in found}


def test_a_launch_allocates_nothing_and_ends_what_was_known(modules):
    kernel, driver = JITFunction()[(1,)], modules["runtime.driver"].driver
    set_language("en")
    with cuda("T4") as gpu:
        values = torch.zeros(3, device="cuda")
        assert values.sum().item() == 0
        before = torch.cuda.memory_allocated()
        kernel(values, 3, BLOCK=4)
        assert torch.cuda.memory_allocated() == before
        assert values.sum().item() != 0  # an answer now: nobody knows what the kernel has written
        assert driver.active.get_current_target() == ("cuda", 75)
        assert [note for note in gpu.watch.notes if "Triton's kernels are not run" in note]
    with pytest.raises(RuntimeError, match="0 active drivers"):
        kernel(values, 3)


def test_an_autotuner_holds_what_empties_the_cache_while_it_times(modules):
    with cuda("T4"):
        do_bench, called = modules["testing"].do_bench, []
        assert do_bench(lambda: called.append(1), quantiles=(0.5, 0.2)) == [1.0, 1.0] and called == [1]
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() == torch.cuda.max_memory_reserved() == 256 * MIB
        assert do_bench(lambda: None) == 1.0
    assert modules["testing"].do_bench is no_card


def test_who_looks_for_cudas_library_finds_no_folder_and_no_error(modules):
    with cuda("A100") as gpu:
        assert modules["backends.nvidia.driver"].libcuda_dirs() == []
        described = modules["runtime.driver"].driver.active.utils.get_device_properties(0)
        assert described["multiprocessor_count"] == gpu.spec.multiprocessors
    assert modules["backends.nvidia.driver"].libcuda_dirs is no_card


KERNEL = """
import triton
import triton.language as tl

@triton.autotune(configs=[triton.Config({"BLOCK": size}) for size in (64, 128)], key=["n"])
@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, 2 * tl.load(x + place, mask=place < n), mask=place < n)
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A program's module with a kernel; Triton reads its text."""
    pytest.importorskip("triton")
    (tmp_path / "own_kernels.py").write_text(KERNEL, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    yield
    sys.modules.pop("own_kernels", None)


def test_tritons_own_autotuner_picks_and_launches(kernels):
    with cuda("T4"):
        import own_kernels
        import triton

        x = torch.ones(1000, device="cuda")
        y = torch.empty_like(x)
        for _ in range(2):  # it times once
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            own_kernels.double[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, 1000)
            timed = torch.cuda.max_memory_allocated() - before
            assert timed in (256 * MIB, 0)
        assert timed == 0 and torch.cuda.memory_allocated() == before


def test_the_compiler_sees_which_tensors_a_kernel_changes(kernels):
    """It reads the kernel's code for the card at hand; where it cannot, it takes all of them to be changed."""
    from benchmarks.recipes.compiled import compiler_on

    with compiler_on(), cuda("T4") as gpu:
        import own_kernels

        def twice(x):
            doubled = torch.empty_like(x)
            own_kernels.double.fn[(8,)](x, doubled, x.numel(), BLOCK=128)
            return x + 1, doubled.view(-1)

        given = torch.ones(10, 100, device="cuda")
        one, two = torch.compile(twice)(given)
        assert (one.shape, two.shape) == ((10, 100), (1000,))
        assert not [note for note in gpu.watch.notes if "without compiling" in note]
