"""What a matrix product takes beside its output: a workspace of the library, copies of operands it cannot read."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Rule, overload

_aten = torch.ops.aten
# With an output that is given or of another type (addmm_out_cuda_impl, bmm_out_cuda_impl, _addmm_dtype_out_cuda, …), as
# without; PyTorch has the types from 2.8 on.
_KINDS = ("default", "out", "dtype", "dtype_out")
_OF_MATRICES = [overload(f"{name}.{kind}") for name in ("mm", "addmm", "bmm", "baddbmm") for kind in _KINDS]
_OF_MATRICES = tuple(filter(None, _OF_MATRICES))
PRODUCTS = (*_OF_MATRICES, _aten.addmv.default, _aten.addmv.out, _aten.dot.default, _aten.vdot.default)

LT_WORKSPACE_BYTES = 1024 * 1024  # parseCUDABlasLtWorkspaceSize
_LT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Bytes that PyTorch gives each cuBLAS handle: 32 MiB on Hopper (9.0), else 8.125 MiB (":4096:2:16:8").

    Torch of 2026 may give Blackwell (10.x, 12.x) 32 MiB too; that is not settled between its versions.

    Source: parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    return 4096 * 8 * 1024 if compute_capability == (9, 0) else 4096 * 1024 * 2 + 16 * 1024 * 8


def _kept(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> Any:
    """The output first, then the handle and with it the workspace, as `bmm_out_cuda_impl` does."""
    out = run()
    mode.count(out)
    mode.gpu.reserve_workspace()
    return out


def _fresh(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> Any:
    out = run()
    mode.count(out)
    mode.gpu.temporaries(cublas_workspace_bytes(mode.gpu.spec.compute_capability))
    return out


def _lt_kept(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> Any:
    out = run()
    if with_epilogue(*args[:3], kwargs.get("beta", 1)):
        mode.count(out)
        mode.gpu.keep_for_thread("cuBLASLt", LT_WORKSPACE_BYTES)
    return out


def with_epilogue(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: float) -> bool:
    """Whether cuBLASLt multiplies and adds the bias in one kernel: a vector, whole, to more than one row and column.

    Source: isInputCompliesAddmmCudaLt in aten/src/ATen/native/cuda/Blas.cpp.
    """
    return (
        beta == 1
        and left.dtype in _LT_TYPES
        and bias.dim() == 1
        and bias.is_contiguous()
        and len(bias) == right.shape[1]
        and min(*left.shape, *right.shape) > 1
    )


def _nested(mode: Any) -> None:
    mode.gpu.reserve_workspace()


def _operand_copies(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> Any:
    """Operands with no dimension of stride 1 that rows can be read along are copied for the time of the product."""
    out = run()
    matrices = args[:2] if op.overloadpacket in (_aten.bmm, _aten.mm) else args[1:3]
    copies = [m.numel() * m.element_size() for m in matrices if isinstance(m, torch.Tensor) and not _readable(m)]
    if copies:
        mode.count(out)
        with mode.gpu.holding(*copies):
            if mode.rules.applies("cublas_workspace"):  # the handle is asked for when the operands are ready
                mode.gpu.reserve_workspace()
    return out


def _readable(matrix: torch.Tensor) -> bool:
    """Whether rows or columns lie densely, and far enough apart from one another."""
    (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


WORKSPACE = Rule(
    name="cublas_workspace",
    what="a workspace for each thread that multiplies, sized by architecture and kept",
    source="parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp",
    until="2.15",
    operators=dict.fromkeys(PRODUCTS, _kept),
    nested=dict.fromkeys(PRODUCTS, _nested),
)
# Kept since 2.9 (pull request 156495; CUDAContextLight.h of the wheels). In 2.11 a size is asked of the shared one, but
# a variable of the environment that is not set makes no sharing: an H100's requests. Put right by pull request 175879.
LT_WORKSPACE = Rule(
    name="cublaslt_workspace",
    what="1 MiB more for cuBLASLt, for each thread that multiplies and adds a bias; from 2.12 on it shares the other",
    source="getCUDABlasLtWorkspace in aten/src/ATen/cuda/CublasHandlePool.cpp, gemm_and_bias in CUDABlas.cpp",
    since="2.9",
    until="2.12",
    operators={_aten.addmm.default: _lt_kept},
)
# The 2.14 branch was cut on 10 August 2026, before the pull request; the wheel of 2.15.0 has its functions and its
# environment variable (CUDAContextLight.h, libtorch_cuda.so), that of 2.14.1 has neither.
WORKSPACE_NOT_KEPT = Rule(
    name="cublas_workspace_not_kept",
    what="the workspace of a product is given back after it (TORCH_CUBLAS_WORKSPACE_CACHE brings the old way back)",
    source="CUDABlasHandleWithWorkspace in aten/src/ATen/cuda/CublasHandlePool.cpp, pull request 194311",
    since="2.15",
    operators=dict.fromkeys(PRODUCTS, _fresh),
)
OPERANDS = Rule(
    name="cublas_operands",
    what="a copy of an operand whose rows do not lie densely (an expanded gradient), for the time of the product",
    source="prepare_matrix_for_cublas, prepare_batch_matrix_for_cublas in aten/src/ATen/native/cuda/Blas.cpp",
    operators=dict.fromkeys(_OF_MATRICES, _operand_copies),
)
