"""From 1.3B on one T4 to 405B on 16,384 H100: what fits best, of every method, and how long the answer takes.

Each row is answered in a process of its own. Of one and of eight cards the planner searches (`plan_training`); the
times are the search alone, after the imports: CPU seconds of one process, and how long one waits where it may fork
(`plan.forks`; on how many cores is printed first). 405B has its layouts on 16,384 ranks by `rank_step`:
everything over ZeRO-3, and ZeRO outside groups of eight for tensor parallelism. The last row is the states of a middle
stage of Meta's published layout, 8 x tensor, 16 x pipeline, 128 x data parallel, parameters not split again after
forward (The Llama 3 Herd of Models, arXiv 2407.21783, table 4 and section 3.3): eight of the 126 layers, by
`closed_form`. Its activations are in docs/levers.md, where such a stage is run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import emit, run
from virtual_gpu.cores import VARIABLE

PLANNED = {  # model → (card, number of cards, tokens, batch)
    "EleutherAI/polyglot-ko-1.3b": ("T4", 1, 512, 16),
    "meta-llama/Llama-3.1-8B": ("RTX 3090", 1, 512, 16),
    "meta-llama/Llama-3.1-70B": ("H100", 8, 2048, 16),
}
LARGEST, RANKS, LENGTH = "meta-llama/Llama-3.1-405B", 16384, 8192
TENSOR, PIPELINE, DATA = 8, 16, 128


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[*PLANNED, LARGEST])
    parser.add_argument("--worker", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        for row in layouts() if args.worker == LARGEST else plans(args.worker):
            emit(row)
        return
    print(f"{os.cpu_count()} cores")
    print(f"{'model':18}{'cards':>16}{'CPU s':>7}{'waited':>8}  {'GiB of a card':>13}  what")
    for model in args.models:
        command = [sys.executable, __file__, "--worker", model]
        child = run(command, 600, {VARIABLE: "1"}, told=model)
        again = run(command, 600, told=f"{model}, forked") if model in PLANNED else child
        nothing = {"cards": "", "seconds": 0.0, "waited": 0.0, "gib": 0.0}
        rows = child.rows or [nothing | {"what": child.last_words}]
        for row, forked in zip(rows, again.rows or rows, strict=False):
            times = f"{row['seconds']:7.2f}{forked['waited']:8.2f}"
            print(f"{model.split('/')[-1]:18}{row['cards']:>16}{times}  {row['gib']:13.2f}  {row['what']}", flush=True)


def plans(model: str) -> Iterator[dict]:
    """The best plan of each method, and the closest where none fits; the time is that of the whole search."""
    from virtual_gpu import plan_training

    card, cards, length, batch = PLANNED[model]
    start, began = time.process_time(), time.monotonic()
    found = plan_training(model, card, cards, length=length, batch=batch)
    seconds, waited = time.process_time() - start, time.monotonic() - began
    best = {plan.recipe.method: plan for plan in reversed(found.plans)}
    for plan in [*best.values()][::-1] or [found.closest]:
        missing = "" if plan.fits else ", does not fit"
        what = f"{plan.title}, length {length}{missing}"
        times = {"seconds": seconds, "waited": waited}
        yield {"cards": f"{cards} x {card}", "gib": plan.needed_bytes / 2**30, "what": what} | times


def layouts() -> Iterator[dict]:
    """One rank of 16,384 by several layouts, a sample of 8,192 tokens in each group."""
    from virtual_gpu.models.configs import load_config, model_name
    from virtual_gpu.models.depth import with_depth
    from virtual_gpu.shards.layout import Layout
    from virtual_gpu.shards.ledger import closed_form
    from virtual_gpu.shards.rank_step import rank_step

    for tensor, stage in ((1, 3), (TENSOR, 3), (TENSOR, 2)):
        start = time.process_time()
        step = rank_step(
            LARGEST, RANKS, stage, tensor_parallel=tensor, sequence_length=LENGTH, gradient_checkpointing=True
        )
        what = f"tensor {tensor}, ZeRO-{stage} over {RANKS // tensor:,}, checkpointing, length {LENGTH}"
        seconds = time.process_time() - start
        fits = "" if step.fits else ", does not fit"
        yield {
            "cards": f"{RANKS:,} x H100", "seconds": seconds, "waited": seconds,
            "gib": step.reserved_bytes / 2**30, "what": what + fits,
        }  # fmt: skip
    start = time.process_time()
    config, layers = load_config(LARGEST), -(-load_config(LARGEST).num_hidden_layers // PIPELINE)
    group = Layout(TENSOR * DATA, 2, TENSOR)
    some, one = (closed_form(model_name(with_depth(config, n)), group).total for n in (layers + 1, 1))
    what = f"states of {layers} layers: tensor {TENSOR}, pipeline {PIPELINE}, ZeRO-2 over {DATA} (Meta's layout)"
    seconds = time.process_time() - start
    times = {"seconds": seconds, "waited": seconds}
    yield {"cards": f"{RANKS:,} x H100", "gib": (some - one) / 2**30, "what": what} | times


if __name__ == "__main__":
    main()
