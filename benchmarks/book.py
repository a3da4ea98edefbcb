"""The book's experiments on the virtual T4, with the book's library (transformers 4.40.1): do its numbers come out?

The first run builds an environment of its own in build/book-env (about half a minute, 140 MB): transformers 4.40.1 with
the tokenizers, huggingface_hub and peft of its time. Everything else, torch above all, is the running environment's,
through a .pth file behind the new environment's own packages. transformers 5 cannot stand in: since 2024 GPT-NeoX lost
its mask and rotary buffers (0.117 GiB) and got another attention, and that is what the numbers show.

What is compared is what the book prints: `torch.cuda.memory_allocated()` in GiB (labelled GB), after loading and right
after the first optimizer step. `use_cache` stays on, as in the book; the loop runs the whole epoch of 64 samples. The
book's optimizer is transformers' own AdamW, a loop over the parameters, ours is torch's with foreach: after the step
both hold the same, at its peak they do not, so the peak printed here is ours alone.

"ours" is what the virtual GPU's caching allocator has given out, as `memory_allocated` counts.

Exits with 1 unless each of ours is within 0.1 % and batch 16 runs out of memory.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import emit, run
from benchmarks.environments import CannotBuild, python_with

PACKAGES = ("transformers==4.40.1", "tokenizers==0.19.1", "huggingface_hub==0.36.2", "peft==0.10.0")
MODEL = "EleutherAI/polyglot-ko-1.3b"
OUT_OF_MEMORY = "OOM"
# What is done, its batch size (None: only load) and checkpointing, and what the book printed for it.
EXPERIMENTS = (
    ("load the model (fp16)", None, False, 2.599),
    ("batch 4, after the first step", 4, False, 10.586),
    ("batch 16, checkpointing, after the first step", 16, True, 10.290),
    ("batch 16", 16, False, OUT_OF_MEMORY),
)
TOLERANCE = 0.001


def main() -> int:
    """Build the environment, run the book's experiments in it, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().inside:
        inside()
        return 0
    child = run(
        [str(build_environment()), __file__, "--inside"], 600, {"HF_HUB_OFFLINE": "1"}, told="the book's experiments"
    )
    if child.returncode != 0 or len(child.rows) != len(EXPERIMENTS) + 1:
        print(f"The experiments failed (exit code {child.returncode}).\n{child.stderr[-3000:]}")
        return 1
    versions, *rows = child.rows
    print(f"{MODEL} on a virtual T4, transformers {versions['transformers']}, torch {versions['torch']}, in GiB\n")
    return 0 if compare(rows) else 1


def compare(rows: list[dict]) -> bool:
    """Print the table; whether every row is as the book has it."""
    print(f"{'experiment':<48}{'book':>8}{'ours':>9}{'difference':>12}{'our peak':>10}")
    good = []
    for (title, _, _, book), row in zip(EXPERIMENTS, rows, strict=True):
        ours, peak = (row[name] / 2**30 for name in ("allocated", "peak"))
        if book == OUT_OF_MEMORY:
            good.append(row["error"] is not None)
            found = OUT_OF_MEMORY if row["error"] else "fits"
            print(f"{title:<48}{book:>8}{found:>9}{'':>12}{peak:>10.3f}  {row['when']}")
        else:
            difference = ours / book - 1
            good.append(row["error"] is None and abs(difference) <= TOLERANCE)
            print(f"{title:<48}{book:>8.3f}{ours:>9.4f}{difference:>12.3%}{peak:>10.3f}  {row['when']}")
        if not good[-1]:
            print(f"    not as in the book. {row['error'] or ''}")
    print("\nAll as in the book." if all(good) else "\nNot as in the book.")
    return all(good)


def build_environment() -> Path:
    """The Python of the book's environment."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise SystemExit(f"tokenizers 0.19 has no wheel for Python {sys.version.split()[0]}: use 3.11 or 3.12.")
    try:
        return python_with(PACKAGES, "book-env")
    except CannotBuild as error:
        raise SystemExit(str(error)) from error


def inside() -> None:
    """In the book's environment: run every experiment, a JSON line for each."""
    import torch
    import transformers

    emit({"transformers": transformers.__version__, "torch": torch.__version__})
    with redirect_stdout(sys.stderr):
        for _, batch_size, checkpointing, _ in EXPERIMENTS:
            emit(_experiment(batch_size, checkpointing))


def _experiment(batch_size: int | None, checkpointing: bool) -> dict:
    import torch

    from helpers import load_model_and_tokenizer, make_dummy_dataset, train_model, use_gpu
    from virtual_gpu.step.run import TrainingLog

    gpu = use_gpu("T4")
    model, _ = load_model_and_tokenizer(MODEL, attention="eager")  # the only one that GPT-NeoX had
    row = {"allocated": gpu.memory_allocated(), "peak": gpu.max_memory_allocated(), "error": None, "when": ""}
    if batch_size is None:
        return row

    log = TrainingLog()
    args = SimpleNamespace(
        per_device_train_batch_size=batch_size,
        gradient_checkpointing=checkpointing,
        use_cache=True,
        holds_outputs=True,  # the book's loop gives them a name
    )
    try:
        train_model(model, make_dummy_dataset(), args, log=log)
    except torch.OutOfMemoryError as error:
        row["error"] = str(error)
    row |= {"allocated": log.allocated_bytes, "peak": log.timeline.peak_bytes}
    if row["error"]:  # the last phase is the one that broke off; the highest may be an earlier one
        row["when"] = f"in the {log.timeline.phases[-1].name} of step {log.optimizer_steps + 1}"
    else:
        row["when"] = f"peak in {log.timeline.peak_phase}, {log.optimizer_steps} steps run"
    return row


if __name__ == "__main__":
    sys.exit(main())
