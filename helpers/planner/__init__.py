"""The name under which the planner was first known: `virtual_gpu.plan`, and `python -m helpers.planner`."""

from virtual_gpu.plan import *  # noqa: F403
from virtual_gpu.plan import __all__ as __all__
