"""When bitsandbytes makes a 16-bit copy of a 4-bit weight in forward."""

from __future__ import annotations

from .registry import Rule

PACKED_ROWS = 4  # up to so many rows every architecture multiplies with the packed weight
"""_GEMM_4BIT_CUSTOM_FLOOR_M. Above 1,536 rows none does; between, a table by architecture, shape and number of
multiprocessors decides (large weights from 32 to 512 rows on), which is not repeated: the copy is counted."""

PACKED_PRODUCT = Rule(
    name="gemm_4bit",
    what=f"up to {PACKED_ROWS} rows are multiplied with the packed 4-bit weight, without a dequantized copy in forward",
    source="gemm_4bit, _gemm_4bit_use_custom_cuda in bitsandbytes/backends/cuda/ops.py; before, MatMul4Bit.forward in "
    "bitsandbytes/autograd/_functions.py dequantized always",
    since="0.50",
    library="bitsandbytes",
)
