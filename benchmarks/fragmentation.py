"""What the caching allocator needs beyond the tensors: about a hundred settings of five families, replayed.

Each setting is run on a virtual GPU without a limit; every allocation and release of it goes through the rules of
PyTorch's caching allocator (helpers/caching_allocator.py). Printed for each, as a share of the tensors' peak: what the
smallest capacity on which the run ends lies above it (found to 8 MiB), what is reserved without a limit, and that with
expandable segments. The planner's margin stands on these numbers.

    python benchmarks/fragmentation.py            # two minutes
    python benchmarks/fragmentation.py --only gpt2
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from virtual_gpu.cards import CATALOG
from virtual_gpu.models.configs import load_config
from virtual_gpu.step.predict import virtual_run
from virtual_gpu.step.setting import Setting
from virtual_gpu.terminal import tell

MODELS = (
    "EleutherAI/polyglot-ko-1.3b",
    "openai-community/gpt2",
    "meta-llama/Llama-3.2-1B",
    "Qwen/Qwen2.5-0.5B",
    "google/gemma-3-270m",
)
STEP_BYTES = 8 * 2**20


def grid() -> Iterator[dict[str, Any]]:
    """Settings that differ in what the allocator sees."""
    for model in MODELS:
        for batch_size in (1, 4, 13, 16):
            for checkpointing in (False, True):
                yield {"model_id": model, "batch_size": batch_size, "gradient_checkpointing": checkpointing}
        for optimizer in ("adamw_fused", "adamw_8bit", "sgd", "adafactor"):
            yield {"model_id": model, "batch_size": 5, "optimizer": optimizer}
        for precision in ("mixed_fp16", "fp32"):
            yield {"model_id": model, "batch_size": 3, "precision": precision}
        for peft in ("lora", "qlora"):
            for checkpointing in (False, True):
                yield {"model_id": model, "batch_size": 7, "peft": peft, "gradient_checkpointing": checkpointing}
        yield {"model_id": model, "batch_size": 2, "sequence_length": 1000}
        yield {"model_id": model, "batch_size": 3, "sequence_length": 777, "attention": "eager"}
        yield {"model_id": model, "batch_size": 3, "gradient_accumulation_steps": 3}


def main() -> None:
    """Print a line a setting, and the middle and the worst of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="settings whose text contains this")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    print("needed  reserved  expandable")
    rows = []
    chosen = [settings for settings in grid() if only in str(settings)]
    for number, settings in enumerate(chosen, 1):
        tell(f"{number} of {len(chosen)} … Ctrl+C stops")
        setting = Setting(**settings)
        trace = virtual_run(setting, load_config(setting.model_id), CATALOG["T4"]).trace
        peak = trace.peak_bytes
        reserved = trace.reserved_peak(), trace.reserved_peak(expandable_segments=True)
        shares = [nbytes / peak - 1 for nbytes in (trace.smallest_capacity(STEP_BYTES), *reserved)]
        rows.append(shares)
        print("  ".join(f"{share:7.1%}" for share in shares), settings, flush=True)
    for name, of in (("middle", statistics.median), ("worst", max)):
        print("  ".join(f"{of(column):7.1%}" for column in zip(*rows, strict=True)), name)
    print(f"{sum(row[0] <= 0.05 for row in rows)} of {len(rows)} settings need at most 5 % more than their tensors")


if __name__ == "__main__":
    main()
