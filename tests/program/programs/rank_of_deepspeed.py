"""What DeepSpeed's launcher gives a program: its rank as the first argument, and in the environment."""

import os
import sys

assert sys.argv[1:] == ["--local_rank=1", "--mine", "1"], sys.argv
assert os.environ["LOCAL_RANK"] == "1" and os.environ["WORLD_SIZE"] == "2"
