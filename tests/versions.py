"""What holds for some versions of PyTorch only: marks for tests that assert it."""

import pytest

from virtual_gpu.rules.active import RULES, in_force

keeps_workspaces = pytest.mark.skipif(
    not in_force("cublas_workspace"), reason=f"of PyTorch before {RULES['cublas_workspace'].until}"
)
