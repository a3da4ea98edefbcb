"""The ledger of sharded models from 64 to 16,384 ranks and 7B to 405B: its time, its memory, and what it says.

Each row runs PyTorch's FSDP2 (stage 3) on the first rank under a fake process group, one, two and three layers deep, in
a process of its own; the time is after the imports and after one small ledger, memory is the most that the process held
resident. Beside it: what the rank holds (counted), the paper's 16Ψ/N, and the elements that travel in a step over Ψ
(3 by the paper; more where FSDP2 pads dim 0). `closed form` is the time of the same bytes from the shapes alone.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import Child, emit, run

MODELS = ("ZeRO-7.5B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-405B")
RANKS = (64, 1024, 16384)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--ranks", nargs="*", type=int, default=RANKS)
    parser.add_argument("--tensor-parallel", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "RANKS", "DEGREE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        measure(args.worker[0], int(args.worker[1]), int(args.worker[2]))
        return
    heads = f"{'model':16}{'ranks':>7}{'TP':>4}{'s':>8}{'closed form':>13}{'MiB':>7}"
    print(f"{heads}{'GB a rank':>11}{'paper':>9}{'sent/Ψ':>8}")
    for model in args.models:
        for degree in args.tensor_parallel:
            if degree > 1 and model.startswith("ZeRO"):  # GPT-2 has no tensor-parallel plan
                continue
            for ranks in args.ranks:
                child = worker(model, ranks, degree)
                if not child.rows:
                    print(f"{model.split('/')[-1]:16}{ranks:7}{degree:4}  {child.last_words}")
                    continue
                row = child.rows[0]
                print(
                    f"{model.split('/')[-1]:16}{ranks:7}{degree:4}{row['seconds']:8.2f}{row['closed']:12.4f}s"
                    f"{row['mib']:7.0f}{row['gb']:11.3f}{row['paper']:9.3f}{row['sent']:8.2f}",
                    flush=True,
                )


def worker(model: str, ranks: int, degree: int) -> Child:
    """One ledger in a process of its own."""
    return run([sys.executable, __file__, "--worker", model, str(ranks), str(degree)], 300,
               told=f"{model}, {ranks} ranks, TP {degree}")  # fmt: skip


def measure(model: str, ranks: int, degree: int) -> None:
    """Emit the row of one ledger."""
    from virtual_gpu.shards.ledger import closed_form, shard_ledger

    shard_ledger("gpt2", 2)
    start = time.perf_counter()
    ledger = shard_ledger(model, ranks, tensor_parallel=degree, look_at=[0])
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    memory = closed_form(model, ledger.layout)
    closed = time.perf_counter() - start
    assert memory == ledger.ranks[0]
    emit(
        {
            "seconds": seconds,
            "closed": closed,
            "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "gb": memory.total / 1e9,
            "paper": ledger.paper / 1e9,
            "sent": ledger.travelled / (ledger.parameters / degree),
        }
    )


if __name__ == "__main__":
    main()
