"""Measured on a real CUDA GPU beside predicted on a virtual one: `make measure-gpu`.

Each setting runs in a process of its own, which predicts (fake tensors, nothing on the GPU) and then measures
(`gpu_memory_experiment`: random weights, nothing is downloaded), so an out-of-memory error or a crash is a row of the
table. Measured and predicted are `memory_allocated` right after the first optimizer step, the highest
`max_memory_allocated` and `max_memory_reserved` of two steps, and the same of each phase of the training. The
prediction knows the card's compute capability and its number of multiprocessors, and nothing else of it.

Of a few settings the run is recorded with PyTorch's allocation history, and its allocations are compared with the
virtual ones one by one (benchmarks/sequences.py): where they first differ, and which operation did it. What
touches CUDA is kept to `_measured`, `_record_history` and `_ask_for_the_gpu`: no test reaches it without a card.

Then the card plays the T4: `set_per_process_memory_fraction` leaves it a T4's usable bytes, and the settings of the
book must live and die as the virtual T4 says. The kernels are still the card's own (attention differs by compute
capability), so this prediction is for the T4's capacity with the card's capability.

The record goes to benchmarks/records/<gpu>-<date>.json, also when the time is up or Ctrl+C is pressed;
tools/accuracy.py makes the README's table of the records.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import sequences
from benchmarks.children import ROOT, Child, emit, run

RECORDS = ROOT / "benchmarks" / "records"
VERSION = 1  # of the record's form
NUMBERS = {"allocated_bytes": "step", "peak_bytes": "peak", "reserved_bytes": "reserved"}
PHASE_NUMBERS = ("peak_bytes", "end_bytes", "reserved_bytes")
SETTING_SECONDS = 150  # one setting may take this long
MAX_ENTRIES = 1_000_000  # of the allocation history; two steps of the largest setting here have some 30,000
STARTING_SECONDS = 15  # with less left, no further setting is started: the imports alone take about this long
NEOX, GPT2, LLAMA = "EleutherAI/polyglot-ko-1.3b", "openai-community/gpt2", "meta-llama/Llama-3.2-1B"
QWEN2, QWEN3, GEMMA = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "google/gemma-3-270m"
LLAMA8, QWEN8 = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B"
_LORA = {"precision": "bf16", "peft": "lora"}

# In the order in which they run: what says most comes first, for where the time does not reach to the end.
GRID: tuple[dict[str, Any], ...] = (
    {"model_id": NEOX, "batch_size": 4},
    {"model_id": GPT2, "batch_size": 4},
    {"model_id": LLAMA, "batch_size": 4},
    {"model_id": QWEN3, "batch_size": 4},
    {"model_id": GEMMA, "batch_size": 4},
    {"model_id": NEOX, "batch_size": 8, "gradient_checkpointing": True},
    {"model_id": NEOX, "batch_size": 4, "precision": "mixed_fp16"},
    {"model_id": NEOX, "batch_size": 4, "peft": "lora"},
    {"model_id": NEOX, "batch_size": 4, "peft": "qlora"},
    {"model_id": NEOX, "batch_size": 4, "optimizer": "adamw_8bit"},
    {"model_id": NEOX, "batch_size": 8, "attention": "eager"},
    {"model_id": QWEN2, "batch_size": 4, "sequence_length": 1024},
    {"model_id": GPT2, "batch_size": 8, "sequence_length": 1024, "attention": "eager"},
    {"model_id": LLAMA, "batch_size": 2, "sequence_length": 1024, "precision": "mixed_bf16"},
    {"model_id": QWEN3, "batch_size": 8, "precision": "bf16", "gradient_checkpointing": True},
    {"model_id": GEMMA, "batch_size": 2, "sequence_length": 1024, "precision": "mixed_bf16"},
    {"model_id": LLAMA, "batch_size": 4, "peft": "lora", "gradient_checkpointing": True},
    {"model_id": LLAMA, "batch_size": 4, "peft": "qlora"},
    {"model_id": QWEN2, "batch_size": 4, "optimizer": "adamw_fused"},
    {"model_id": QWEN2, "batch_size": 4, "optimizer": "sgd"},
    {"model_id": QWEN2, "batch_size": 4, "optimizer": "adafactor"},
    {"model_id": GPT2, "batch_size": 16, "precision": "fp16"},
    {"model_id": GPT2, "batch_size": 4, "gradient_accumulation_steps": 4},
    {"model_id": QWEN3, "batch_size": 4, "precision": "fp32", "attention": "eager"},
    {"model_id": QWEN2, "batch_size": 4, "peft": "qlora", "gradient_checkpointing": True},
    {"model_id": GEMMA, "batch_size": 8, "attention": "eager"},
    {"model_id": "openai-community/gpt2-medium", "batch_size": 8, "precision": "mixed_fp16"},
    {"model_id": NEOX, "batch_size": 4, "sequence_length": 1024},
    # More families, longer texts, and what a reader of the course would train on a card of 24 to 80 GB. Large and small
    # ones alternate: three at once stay under 80 GB.
    {"model_id": LLAMA8, "batch_size": 2, "sequence_length": 2048, "gradient_checkpointing": True, **_LORA},
    {"model_id": "Qwen/Qwen3-1.7B", "batch_size": 2, "sequence_length": 1024, "optimizer": "adamw_8bit"},
    {"model_id": LLAMA, "batch_size": 2, "sequence_length": 2048, "precision": "mixed_bf16"},
    {"model_id": "google/gemma-4-E2B", "batch_size": 1, "sequence_length": 512, **_LORA},
    {"model_id": QWEN8, "batch_size": 2, "sequence_length": 2048, "gradient_checkpointing": True, **_LORA},
    {"model_id": "LGAI-EXAONE/EXAONE-4.0-1.2B", "batch_size": 2, "sequence_length": 1024, "precision": "bf16"},
    {"model_id": LLAMA, "batch_size": 1, "sequence_length": 8192, "precision": "bf16", "gradient_checkpointing": True},
    {"model_id": "kakaocorp/kanana-nano-2.1b-base", "batch_size": 2, "sequence_length": 1024, "precision": "bf16"},
    {"model_id": "HuggingFaceTB/SmolLM3-3B", "batch_size": 2, "sequence_length": 1024, **_LORA},
    {"model_id": "microsoft/Phi-4-mini-instruct", "batch_size": 2, "sequence_length": 1024, **_LORA},
    {"model_id": LLAMA, "batch_size": 1, "sequence_length": 2048, "precision": "bf16", "attention": "eager"},
    {"model_id": "meta-llama/Llama-3.2-3B", "batch_size": 1, "sequence_length": 1024, "peft": "qlora"},
    {"model_id": "openai-community/gpt2-xl", "batch_size": 1, "sequence_length": 1024, "precision": "mixed_fp16"},
    {"model_id": QWEN2, "batch_size": 3, "sequence_length": 777, "precision": "fp32"},
    {"model_id": "allenai/OLMo-2-1124-7B", "batch_size": 2, "sequence_length": 512, **_LORA},
    {"model_id": "google/gemma-3-1b-pt", "batch_size": 2, "sequence_length": 1024, "precision": "mixed_bf16"},
)
T4_GRID: tuple[dict[str, Any], ...] = (
    {"model_id": NEOX, "batch_size": 8},
    {"model_id": NEOX, "batch_size": 16},
    {"model_id": NEOX, "batch_size": 16, "gradient_checkpointing": True},
    {"model_id": NEOX, "batch_size": 4, "gradient_accumulation_steps": 4},
)
# Recorded allocation by allocation: one setting of each family. Recording costs a second or two and some memory.
RECORDED = GRID[:5]
# The T4 is played early, after one setting of each family.
PLAN = (
    *(("grid", setting) for setting in GRID[:5]),
    *(("t4", setting) for setting in T4_GRID),
    *(("grid", setting) for setting in GRID[5:]),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the grid; 0 when it ran to its end or its time, 1 where there is no CUDA GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8, help="stop after this time with what there is (default 8)")
    parser.add_argument("--list", action="store_true", help="print the settings and end")
    parser.add_argument("--dry-run", action="store_true", help="predict only; needs no GPU, writes no record")
    parser.add_argument("--capability", default="7.5", help="compute capability that --dry-run predicts for")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    parser.add_argument("--only", default="", help="only the settings whose line contains this text")
    parser.add_argument(
        "--sequences",
        choices=("few", "all", "none"),
        default="few",
        help="compare the allocations one by one of one setting of each family (default), of all, or of none",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="so many settings at once (default 1): what they hold together must fit"
    )
    parser.add_argument("--traces", type=Path, help="keep the card's requests of what is compared in this folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: at least 1")
    if args.child:
        child(json.loads(args.child))
        return 0
    plan = [(kind, setting) for kind, setting in PLAN if args.only in title(setting, kind)]
    if args.list:
        print("\n".join(f"{title(setting, kind):<76}{missing(setting) or ''}" for kind, setting in plan))
        return 0
    # accelerate comes with peft; transformers puts a model straight on the GPU with it
    if absent := [name for name in ("torch", "transformers", "accelerate") if not _has(name)]:
        print(f"Missing: {', '.join(absent)}. Name a Python that has them: make measure-gpu PYTHON=...")
        return 1
    gpu = {"name": "(no GPU)", "capability": args.capability} if args.dry_run else _ask_for_the_gpu()
    if gpu is None:
        print("No CUDA GPU here (torch.cuda.is_available() is False): nothing to measure. --dry-run only predicts.")
        return 1
    if not _has("datasets"):
        print("datasets is missing: a plain list of tensors takes its place.")
    rows, interrupted = [], False
    try:
        options = {"dry_run": args.dry_run, "recorded": args.sequences, "traces": args.traces, "jobs": args.jobs}
        for row in measure(plan, gpu, args.minutes * 60, **options):
            rows.append(row)
            print(line(row), flush=True)
            print("".join(f"    {told}\n" for told in details(row)), end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print("Interrupted: what follows is what there is.")
    print(summary_text(summarize(rows)))
    if not args.dry_run:
        print("Written:", write_record(args.records, gpu, rows, planned=len(plan), interrupted=interrupted))
        print("Into the README's table: python tools/accuracy.py")
    return 0


# -- the run ---------------------------------------------------------------------------------------------------------


def measure(
    plan: list[tuple[str, dict]],
    gpu: dict,
    seconds: float,
    *,
    dry_run: bool = False,
    recorded: str = "few",
    traces: Path | None = None,
    jobs: int = 1,
) -> Iterator[dict]:
    """A row for each setting, in the plan's order: measured, predicted, and a status that says what became of it.

    recorded: of which settings the allocations are compared one by one, "few" (RECORDED), "all" or "none". traces:
    the folder in which the card's requests of these are kept. jobs: how many run at a time; each has its own allocator,
    so that none changes another's figures as long as the card has room for all.
    """
    end = time.monotonic() + seconds

    def row(kind: str, setting: dict) -> dict:
        row = {"kind": kind, "setting": setting, "title": title(setting, kind), "measured": None, "predicted": None}
        left = end - time.monotonic()
        if reason := missing(setting):
            return row | {"status": "skipped", "detail": reason}
        if left < STARTING_SECONDS:
            return row | {"status": "not run", "detail": "the time was up"}
        wanted = kind == "grid" and (recorded == "all" or (recorded == "few" and setting in RECORDED))
        task = {"kind": kind, "setting": setting, "gpu": gpu, "dry_run": dry_run, "record": wanted}
        if traces:
            task["trace"] = str((traces / f"{slug(row['title'])}.json.gz").resolve())
        command = [sys.executable, __file__, "--child", json.dumps(task)]
        environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        child = run(command, min(SETTING_SECONDS, left), environment, told=row["title"])
        return row | outcome(child, dry_run)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield from pool.map(lambda one: row(*one), plan)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def outcome(ended: Child, dry_run: bool = False) -> dict[str, Any]:
    """What a child found: "ok", "oom" (measured), "timeout" or "failed", with what it managed to say before."""
    found: dict[str, Any] = {}
    for part in ended.rows:
        found |= part
    if found.pop("recorded", False) and "sequence" not in found:  # both numbers are there: only the comparison is lost
        why = ended.last_words if ended.returncode is not None else "it took too long"
        found["sequence"] = {"error": why}
    elif ended.returncode is None:
        return found | {"status": "timeout", "detail": "killed: it took too long, or the time was up"}
    elif ended.returncode != 0 or "predicted" not in found or not (dry_run or "measured" in found):
        return found | {"status": "failed", "detail": f"exit code {ended.returncode}: {ended.last_words}"}
    measured = found.get("measured")
    if measured is not None and not measured["fits"]:
        return found | {"status": "oom", "detail": measured["error"]}
    return found | {"status": "ok", "detail": ""}


def missing(setting: dict) -> str | None:
    """Which library that a setting needs is not there; None where all are."""
    needed = ["peft"] if setting.get("peft") else []
    if setting.get("peft") == "qlora" or setting.get("optimizer") == "adamw_8bit":
        needed.append("bitsandbytes")
    absent = [name for name in needed if not _has(name)]
    return f"needs {' and '.join(absent)}" if absent else None


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


# -- the child -------------------------------------------------------------------------------------------------------


def child(task: dict) -> None:
    """Predict, then measure, one setting; a JSON line for each."""
    from virtual_gpu.language import set_language

    set_language("en")
    with redirect_stdout(sys.stderr):
        predicted = _predicted(task)
        emit({"predicted": predicted.numbers})
        if not task["dry_run"]:
            measured = _measured(task)
            recorded = bool(measured.snapshots) and measured.numbers["fits"]
            emit({"measured": measured.numbers, "recorded": recorded})
            if recorded:
                if "trace" in task:
                    sequences.keep(task["trace"], *measured.snapshots)
                real = sequences.read_history(*measured.snapshots)
                emit({"sequence": sequences.compare(predicted.trace, real)})


@dataclass
class _Side:
    """One side of a row, and what the comparison of the allocations takes of it."""

    numbers: dict[str, Any]
    trace: Any = None
    snapshots: list[dict[str, Any]] = field(default_factory=list)


def _predicted(task: dict) -> _Side:
    from dataclasses import replace

    from helpers.experiment import predict_memory
    from virtual_gpu.cards import CATALOG
    from virtual_gpu.counting.gpu import VirtualGPU

    capability = tuple(int(part) for part in task["gpu"]["capability"].split("."))
    spec = replace(CATALOG["T4"], compute_capability=capability)
    if "multiprocessors" in task["gpu"]:
        spec = replace(spec, multiprocessors=task["gpu"]["multiprocessors"])
    if task["kind"] == "grid" and "bytes" in task["gpu"]:
        spec = replace(spec, name=task["gpu"]["name"], memory_bytes=task["gpu"]["bytes"], usable_bytes=None)
    before = time.perf_counter()
    gpu = VirtualGPU(spec)
    report = predict_memory(gpu=gpu, **task["setting"])
    seconds = round(time.perf_counter() - before, 2)
    trace = report.timeline.trace
    capacity = gpu.capacity_bytes if report.fits else None
    reserved = sequences.reserved_by_phase(trace, capacity, expandable_segments=gpu.expandable_segments)
    return _Side(_numbers(report, reserved) | {"seconds": seconds, "method": report.method}, trace=trace)


def _measured(task: dict) -> _Side:
    import torch

    from helpers.experiment import gpu_memory_experiment
    from helpers.gpu import use_gpu
    from virtual_gpu.cards import CATALOG

    if task["kind"] == "t4":
        total = torch.cuda.mem_get_info(0)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, CATALOG["T4"].capacity_bytes / total), 0)
    gpu = use_gpu("cuda")
    snapshots = _record_history(gpu) if task["record"] else []
    before = time.perf_counter()
    report = gpu_memory_experiment(gpu=gpu, **task["setting"])
    seconds = round(time.perf_counter() - before, 2)
    reserved = [phase.reserved_bytes for phase in report.timeline.phases]
    return _Side(_numbers(report, reserved) | {"seconds": seconds}, snapshots=snapshots)


def _record_history(gpu: Any) -> list[dict[str, Any]]:
    """From now on the allocator's history of a training on `gpu` is kept: its snapshots before and after go here."""
    import torch

    snapshots: list[dict[str, Any]] = []
    record = gpu.record

    @contextmanager
    def record_with_history(model: Any, optimizer: Any):
        # The stacks of allocations only, and of Python: a C++ stack has to be looked up symbol by symbol.
        memory = torch.cuda.memory
        memory._record_memory_history(context="alloc", stacks="python", max_entries=MAX_ENTRIES)
        try:
            snapshots.append(memory._snapshot())
            with record(model, optimizer) as phases:
                yield phases
            snapshots.append(memory._snapshot())
        finally:
            memory._record_memory_history(None)

    gpu.record = record_with_history
    return snapshots


def _numbers(report: Any, reserved: list[int | None]) -> dict:
    names = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", *NUMBERS, "peak_phase", "fits", "error")
    curves = report.timeline.phases
    phases = [
        {"phase": name, "peak_bytes": curve.peak_bytes, "end_bytes": int(curve.total[-1]), "reserved_bytes": most}
        for name, curve, most in zip(
            sequences.numbered([curve.name for curve in curves]), curves, reserved, strict=True
        )
    ]
    return {name: getattr(report, name) for name in names} | {"phases": phases}


def _ask_for_the_gpu() -> dict | None:
    """What the first CUDA GPU is, None where there is none. Asked in a child, so that this process stays off it."""
    code = (
        "import json, torch\n"
        "if torch.cuda.is_available():\n"
        "    p = torch.cuda.get_device_properties(0)\n"
        "    print(json.dumps({'name': p.name, 'capability': f'{p.major}.{p.minor}', 'bytes': p.total_memory,\n"
        "                      'multiprocessors': p.multi_processor_count, 'cuda': torch.version.cuda}))\n"
    )
    rows = run([sys.executable, "-c", code], 120, told="Which GPU is there?").rows
    return rows[-1] if rows else None


# -- what is printed and written ---------------------------------------------------------------------------------------


def title(setting: dict, kind: str = "grid") -> str:
    """One line that names a setting."""
    parts = [setting["model_id"].split("/")[-1], f"batch {setting['batch_size']}"]
    if steps := setting.get("gradient_accumulation_steps"):
        parts[1] += f" x {steps}"
    parts.append(f"length {setting.get('sequence_length', 256)}")
    if setting.get("gradient_checkpointing"):
        parts.append("checkpointing")
    parts += [setting[name] for name in ("precision", "optimizer", "attention", "peft") if name in setting]
    return ("as a T4: " if kind == "t4" else "") + ", ".join(parts)


def line(row: dict) -> str:
    """The row as it is printed: GiB measured, predicted and the error of each number, and how it ended."""
    cells = []
    for name, word in NUMBERS.items():
        values = [row[side][name] if row[side] else None for side in ("measured", "predicted")]
        shown = [f"{value / 2**30:8.3f}" if value else f"{'-':>8}" for value in values]
        relative = error(row, name)
        cells.append(f"{word} {' '.join(shown)}" + (f"{relative:+9.2%}" if relative is not None else f"{'':>9}"))
    text = f"{row['title']:<66} {'   '.join(cells)}   {row['status']}"
    if row["kind"] == "t4":
        text += {True: ", as predicted", False: ", NOT as predicted", None: ""}[verdict(row)]
        if row["predicted"]:
            text += f" (predicted: {'fits' if row['predicted']['fits'] else 'out of memory'})"
    return text + (f": {row['detail'][:100]}" if row["detail"] and row["status"] != "oom" else "")


def details(row: dict) -> list[str]:
    """What else there is to say of a row: where in the training it differs most, and the comparison one by one."""
    found = phase_errors(row)
    lines = []
    if found:
        worst = max(found, key=lambda one: abs(one["error"]))
        lines.append(f"by phase at most {worst['error']:+.2%}: {worst['number']} of {worst['phase']}")
    return lines + (sequences.text(row["sequence"]).splitlines() if row.get("sequence") else [])


def error(row: dict, name: str) -> float | None:
    """predicted / measured − 1; None unless both are there and the measured run went to its end.

    Nor where a GradScaler skipped the first step (no optimizer state though there should be): that is another run.
    """
    measured, predicted = row["measured"], row["predicted"]
    if row["status"] != "ok" or not measured or not predicted or not measured[name] or not predicted[name]:
        return None
    if not measured.get("optimizer_bytes") and predicted.get("optimizer_bytes"):
        return None
    return predicted[name] / measured[name] - 1


def phase_errors(row: dict) -> list[dict[str, Any]]:
    """predicted / measured − 1 of every number of every phase; none where `error` says nothing."""
    if error(row, "peak_bytes") is None:
        return []
    pairs = zip(row["measured"].get("phases", ()), row["predicted"].get("phases", ()), strict=True)
    return [
        {"phase": real["phase"], "number": name, "error": virtual[name] / real[name] - 1}
        for real, virtual in pairs
        for name in PHASE_NUMBERS
        if real[name]
    ]


def verdict(row: dict) -> bool | None:
    """Whether it lived or died as predicted; None where one side is missing."""
    if not row["measured"] or not row["predicted"]:
        return None
    return row["measured"]["fits"] == row["predicted"]["fits"]


def summarize(rows: list[dict]) -> dict[str, Any]:
    """Mean, median and worst absolute error of each number over all rows that have one; the verdicts of the T4."""
    result: dict[str, Any] = {"statuses": {}}
    for row in rows:
        result["statuses"][row["status"]] = result["statuses"].get(row["status"], 0) + 1
    for name in NUMBERS:
        errors = [(abs(value), row["title"]) for row in rows if (value := error(row, name)) is not None]
        if errors:
            worst, where = max(errors)
            values = [value for value, _ in errors]
            result[name] = {
                "rows": len(errors),
                "mean": statistics.fmean(values),
                "median": statistics.median(values),
                "worst": worst,
                "worst_setting": where,
            }
    verdicts = [found for row in rows if row["kind"] == "t4" and (found := verdict(row)) is not None]
    result["t4"] = {"as_predicted": sum(verdicts), "of": len(verdicts)}
    return result


def summary_text(summary: dict) -> str:
    """The summary in a few lines."""
    lines = ["", "Rows: " + ", ".join(f"{count} {status}" for status, count in summary["statuses"].items())]
    for name in NUMBERS:
        if name in summary:
            s = summary[name]
            lines.append(
                f"{name}: mean error {s['mean']:.2%} over {s['rows']}, worst {s['worst']:.2%} ({s['worst_setting']})"
            )
    if summary["t4"]["of"]:
        lines.append(f"Played T4: {summary['t4']['as_predicted']} of {summary['t4']['of']} as predicted.")
    return "\n".join(lines)


def write_record(folder: Path, gpu: dict, rows: list[dict], *, planned: int, interrupted: bool = False) -> Path:
    """Write folder/<gpu>-<date>.json; a second record of the same day takes the place of the first."""
    today = datetime.date.today().isoformat()
    ran = [row for row in rows if row["status"] not in ("skipped", "not run")]
    cut = ("not run", "timeout")
    record = {
        "version": VERSION,
        "gpu": gpu,
        "date": today,
        "versions": versions() | {"cuda": gpu.get("cuda"), "driver": driver_version()},
        "allocator_setting": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
        "complete": not interrupted and len(rows) == planned and not any(row["status"] in cut for row in rows),
        "settings_run": len(ran),
        "summary": summarize(rows),
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{slug(gpu['name'])}-{today}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def slug(name: str) -> str:
    """The name as that of a file: small letters and digits, with lines between."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions() -> dict[str, str | None]:
    """Versions of what decides the bytes; None for what is not there."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "bitsandbytes", "datasets"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def driver_version() -> str | None:
    """The NVIDIA driver's version, as nvidia-smi says it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return lines[0] if lines else None


if __name__ == "__main__":
    sys.exit(main())
