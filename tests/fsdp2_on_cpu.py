"""Started by the tests: a script under accelerate's own FSDP2, which it otherwise keeps to GPUs.

accelerate takes FSDP2 where its distributed type is one for accelerators. Here it is told so, with gloo and the CPU;
everything after that is its own code.
"""

import os
import runpy
import sys

import accelerate
from accelerate.state import PartialState
from accelerate.utils import DistributedType

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
init, state = accelerate.Accelerator.__init__, PartialState.__init__
accelerate.Accelerator.__init__ = lambda self, cpu=True, **settings: init(self, **settings)
PartialState.__init__ = lambda self, cpu=True, **settings: state(self, **settings)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
