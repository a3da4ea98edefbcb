"""The virtual GPU beside PyTorch's `MemTracker`, our prediction by depth, and a program beside our loop.

The work is the same for both: build the model on the meta device, put it on fake tensors, train two optimizer steps
(AdamW with foreach, batch 4, 256 tokens, no cache). Each runs in a process of its own; times are after the imports,
and of a few runs the first (cold) and the median are printed. The ratios are those of the wall time, so nothing else
should run on the machine meanwhile.

How the bytes are made comparable. MemTracker counts the bytes that a tensor asks for, of everything that lives on the
fake tensors' device, and this is "cpu". Our meter counts what CUDA would hold. So three things differ, all of them
meant: (1) CUDA's allocator gives blocks of 512 bytes, (2) CUDA's kernels are not the CPU's (attention), and cuBLAS has
a workspace, (3) AdamW's step counters, 4 bytes a parameter tensor, live on the host, not on the GPU. "like for like" is
our meter with these three switched off (blocks of one byte, without all of `rules.active.RULES`, the step counted
whole); it must be equal to MemTracker to the byte. "peak, as CUDA" is what the course shows. Our time is that of the
whole prediction (`predict_memory(full=True)`, CUDA's rules, timeline and report), not of the like-for-like run.

MemTracker cannot run a Hugging Face model on fake tensors as it is: transformers asks "is this one sequence?" and the
answer is in values that are not there. It gets a fake mode that answers as ours does; nothing else is changed in it.
It also refuses a second training step unless its statistics of modules are reset, which is done between the steps.

A program (`benchmarks/programs/loop.py` under `virtual-gpu run`) beside our loop (`step.run.train`), the same work:
CPU seconds of an optimizer step, (nine steps − one) / 8, so that loading and the first step are not in it, in turns in
one process; only the ratio is to be trusted on a machine that does something else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import Child, emit, run

# torch is imported in the children only: Linux counts the parent's memory at the start as the child's.
MODELS = (
    "EleutherAI/polyglot-ko-1.3b",
    "EleutherAI/polyglot-ko-5.8b",
    "EleutherAI/polyglot-ko-12.8b",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-14B",
    "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.1-405B",
)
PROGRAM_MODELS = ("gpt2", "meta-llama/Llama-3.2-1B", "EleutherAI/polyglot-ko-1.3b")
BATCH, LENGTH, STEPS = 4, 256, 2
ENOUGH_SECONDS = 30  # no further run is started after this
DEPTH_LIMIT = 15e9  # parameters
MIB = 2**20


def main() -> None:
    """Print the first calls and both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=MODELS, help="hub ids of bundled architectures")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cap", type=float, default=240, help="seconds that MemTracker may take for a model")
    parser.add_argument("--no-depth", action="store_true", help="leave out the second table")
    parser.add_argument("--programs", action="store_true", help="only programs beside our loop")
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "MODEL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        workers = {"ours": ours, "memtracker": memtracker, "depth": by_depth, "first": first_call, "program": program}
        workers[args.worker[0]](args.worker[1], args.repeats)
        return
    compare_programs(args.repeats)
    if args.programs:
        return
    print_first_calls(args.repeats)
    compare(args.models, args.repeats, args.cap)
    if not args.no_depth:
        compare_depth(args.repeats)


# -- the parent: children and tables ---------------------------------------------------------------------------------


def print_first_calls(repeats: int) -> None:
    """What a reader waits for: the first call in a fresh process, after its imports."""
    for call in ("gpu_memory_experiment", "predict_memory"):
        seconds = [worker("first", call, 1, 60).rows[0]["seconds"] for _ in range(repeats)]
        print(f"{call}(4), {MODELS[0].split('/')[-1]}, first call: {statistics.median(seconds):.2f} s")
    print()


def compare_programs(repeats: int) -> None:
    """CPU seconds of a step, as a program and in our loop."""
    print(f"{'model':<20}{'program':>10}{'our loop':>10}{'ratio':>8}   CPU seconds of an optimizer step")
    for model in PROGRAM_MODELS:
        rows = worker("program", model, repeats, 600).rows
        seconds = [statistics.median(row[name] for row in rows) for name in ("program", "loop")]
        ratio = statistics.median(row["program"] / row["loop"] for row in rows)
        print(f"{model.split('/')[-1]:<20}{seconds[0]:>10.3f}{seconds[1]:>10.3f}{ratio:>8.2f}", flush=True)
    print()


def compare(models: list[str], repeats: int, cap: float) -> None:
    """Ours beside MemTracker, one line a model."""
    print(f"Two optimizer steps, batch {BATCH} × {LENGTH} tokens. Seconds after imports: first run, then median.")
    print("ratio: MemTracker's median to ours; peaks in bytes; RSS: the process's peak, in MiB above the imports.\n")
    print(
        f"{'model':<18}{'ours, full':>14}{'by depth':>10}{'MemTracker':>16}{'ratio':>7}{'by depth':>10}"
        f"{'peak, as CUDA':>19}{'like for like':>19}{'MemTracker':>19}  {'equal':<6}{'RSS ours':>10}{'MemTracker':>12}"
    )
    for model in models:
        us = worker("ours", model, repeats, 600)
        them = worker("memtracker", model, repeats, cap)
        print(_line(model.split("/")[-1], us, them, cap), flush=True)


def _line(name: str, us: Child, them: Child, cap: float) -> str:
    if us.returncode != 0:
        return f"{name:<18} failed: {us.last_words or 'out of time'}"
    *runs, last = us.rows
    line = f"{name:<18}{_times(runs):>14}{last['depth_seconds']:>10.2f}"
    bytes_and_rss = f"{runs[0]['peak']:>19,}{last['like']:>19,}", f"{runs[-1]['rss'] / MIB:>10.0f}"
    if not them.rows:
        why = f"not run: over {cap:.0f} s" if them.returncode is None else f"failed: {them.last_words[:60]}"
        return f"{line}  {why:<31}" + f"{'-':>19}  {'-':<6}".join(bytes_and_rss) + f"{'-':>12}"
    theirs = statistics.median(row["seconds"] for row in them.rows)
    ratios = [theirs / seconds for seconds in (statistics.median(r["seconds"] for r in runs), last["depth_seconds"])]
    peak = them.rows[0]["peak"]
    equal = "yes" if peak == last["like"] else f"{last['like'] - peak:+,}"
    line += f"{_times(them.rows):>16}{ratios[0]:>7.1f}{ratios[1]:>10.1f}"
    return line + f"{peak:>19,}  {equal:<6}".join(bytes_and_rss) + f"{them.rows[-1]['rss'] / MIB:>12.0f}"


def _times(rows: list[dict]) -> str:
    seconds = [row["seconds"] for row in rows]
    median = f"{statistics.median(seconds):.2f}" if len(seconds) > 1 else "(one)"
    return f"{seconds[0]:.2f}  {median}"


def compare_depth(repeats: int) -> None:
    """By depth beside the full run, one line for each bundled architecture of up to about 14B."""
    print("\nPrediction by depth beside the full run: seconds (median), and every number of the report equal?\n")
    print(f"{'model':<20}{'by depth':>10}{'full':>8}{'method':>8}{'peak bytes':>18}  equal")
    child = worker("depth", "all", repeats, 1200)
    for row in child.rows:
        print(
            f"{row['model']:<20}{row['depth_seconds']:>10.2f}{row['full_seconds']:>8.2f}{row['method']:>8}"
            f"{row['peak']:>18,}  {'yes' if row['equal'] else 'NO: ' + row['differs']}"
        )
    if child.returncode != 0:
        print("ended early:", child.last_words)
    print("\nmethod run: not linear in depth (or at most 5 layers), so every layer was run.")


def worker(kind: str, model: str, repeats: int, seconds: float) -> Child:
    """A child of this file. The wall-clock limit includes its imports."""
    command = [sys.executable, __file__, "--worker", kind, model, "--repeats", str(repeats)]
    return run(command, seconds, told=f"{kind}, {model}")


# -- the children ----------------------------------------------------------------------------------------------------


def ours(model_id: str, repeats: int) -> None:
    """Time the full prediction and the one by depth, then count once like for like."""
    from helpers.experiment import predict_memory
    from virtual_gpu.cards import CATALOG
    from virtual_gpu.counting.gpu import VirtualGPU

    _import_everything()
    gpu, start, reports = VirtualGPU(CATALOG["T4"]), _rss(), []

    def predict(full: bool) -> None:
        reports.append(predict_memory(full=full, gpu=gpu, **_setting(model_id)))

    for seconds in _repeat(lambda: predict(True), repeats):
        emit({"seconds": seconds, "peak": reports[-1].peak_bytes, "rss": _rss() - start})
    depth_seconds = statistics.median(_repeat(lambda: predict(False), repeats))
    emit({"like": _like_for_like(model_id), "depth_seconds": depth_seconds})


def first_call(name: str, _: int) -> None:
    """Time one call of a function of `helpers`, on a virtual T4."""
    import helpers

    function = getattr(helpers, name)
    _import_everything()
    gpu = helpers.use_gpu("T4")
    before = time.perf_counter()
    with redirect_stdout(sys.stderr):
        function(batch_size=BATCH, gpu=gpu)
    emit({"seconds": time.perf_counter() - before})


def program(model_id: str, repeats: int) -> None:
    """Time a step of a program and of our loop, in turns."""
    from types import SimpleNamespace

    import torch

    from virtual_gpu.cards import CATALOG
    from virtual_gpu.counting.gpu import VirtualGPU
    from virtual_gpu.models.build import build_model
    from virtual_gpu.models.configs import load_config
    from virtual_gpu.program.runner import run as run_program
    from virtual_gpu.step.run import train

    _import_everything()
    sample = {name: torch.zeros(LENGTH, dtype=torch.int64) for name in ("input_ids", "labels")}

    def ours(steps: int) -> None:
        gpu = VirtualGPU(CATALOG["H200"])
        arguments = SimpleNamespace(per_device_train_batch_size=BATCH, max_steps=steps)
        train(gpu.place(build_model(load_config(model_id), torch.float32)), [sample] * BATCH, arguments, gpu=gpu)

    def theirs(steps: int) -> None:
        report = run_program(str(Path(__file__).parent / "programs" / "loop.py"), [model_id], gpu="H200", steps=steps)
        if report.status != "fits":
            raise RuntimeError(report.text())

    def of_a_step(run) -> float:
        before = time.process_time()
        run(1)
        middle = time.process_time()
        run(9)
        return (time.process_time() - middle - (middle - before)) / 8

    of_a_step(ours), of_a_step(theirs)  # fills what is remembered
    for _ in range(repeats):
        emit({"program": of_a_step(theirs), "loop": of_a_step(ours)})


def memtracker(model_id: str, repeats: int) -> None:
    """Time `MemTracker` on the same work."""
    _import_everything()
    from torch.distributed._tools.mem_tracker import MemTracker

    start, peaks = _rss(), []

    def once() -> None:
        fake, tracker = _answering_fake_mode(), MemTracker()
        peak = 0

        def place(model):
            _to_fake(model, fake)
            tracker.track_external(model)

        @contextmanager
        def phase(name):
            nonlocal peak
            if name == "forward":
                tracker.reset_mod_stats()
            # Without the fake mode AdamW's step counters are real, as they must be: it reads their values.
            with nullcontext() if name == "step" else fake, tracker:
                yield
            peak = max(peak, *(device["Total"] for device in tracker.get_tracker_snapshot("peak").values()))

        _train(model_id, place, phase)
        peaks.append(peak)

    for seconds in _repeat(once, repeats):
        emit({"seconds": seconds, "peak": peaks[-1], "rss": _rss() - start})


def by_depth(_: str, repeats: int) -> None:
    """Every bundled architecture of up to about 14B, by depth and in full."""
    from helpers.experiment import predict_memory
    from virtual_gpu.cards import CATALOG
    from virtual_gpu.counting.gpu import VirtualGPU
    from virtual_gpu.models.build import build_model, count_parameters
    from virtual_gpu.models.configs import architectures, checkpoint_dtype, load_config

    _import_everything()
    gpu = VirtualGPU(CATALOG["T4"])
    for model_id in architectures():
        config = load_config(model_id)
        if count_parameters(build_model(config, checkpoint_dtype(model_id, config))) > DEPTH_LIMIT:
            continue
        reports = []

        def predict(full: bool, model_id=model_id, reports=reports) -> float:
            before = time.perf_counter()
            reports.append(predict_memory(full=full, gpu=gpu, **_setting(model_id)))
            return time.perf_counter() - before

        seconds = {full: statistics.median(predict(full) for _ in range(repeats)) for full in (False, True)}
        a, b = reports[0].to_dict(), reports[-1].to_dict()
        differs = [name for name in a if name != "method" and a[name] != b[name]]
        emit(
            {"model": model_id.split("/")[-1], "depth_seconds": seconds[False], "full_seconds": seconds[True]}
            | {"method": a["method"], "peak": b["peak_bytes"], "equal": not differs, "differs": ", ".join(differs)}
        )


def _like_for_like(model_id: str) -> int:
    """The peak of what is asked for with CUDA's rules switched off; see above."""
    from virtual_gpu import allocator as caching_allocator
    from virtual_gpu.cards import CATALOG
    from virtual_gpu.counting.gpu import VirtualGPU
    from virtual_gpu.rules.active import RULES
    from virtual_gpu.trace.recorder import TimelineRecorder

    caching_allocator.BLOCK_BYTES = 1
    gpu = VirtualGPU(CATALOG["T4"], limited=False, without=RULES)
    recorder = gpu.meter.recorder = TimelineRecorder({})

    @contextmanager
    def phase(name):
        gpu.in_step = name == "step"  # the meter's mode then answers for the values of the step counters
        with gpu:
            yield
        gpu.in_step = False

    _train(model_id, gpu.place, phase)
    return recorder.trace().peak_bytes  # as asked for, without the rests that the allocator does not split off


def _train(model_id: str, place, phase) -> None:
    """The same work for both: build, place, two steps."""
    import torch

    from virtual_gpu.models.build import build_model
    from virtual_gpu.models.configs import checkpoint_dtype, load_config

    config = load_config(model_id)
    model = build_model(config, checkpoint_dtype(model_id, config))
    place(model)
    model.train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(STEPS):
        with phase("forward"):
            ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
            loss = model(input_ids=ids, labels=ids).loss
        with phase("backward"):
            loss.backward()
        with phase("step"):
            optimizer.step()
        optimizer.zero_grad()


def _answering_fake_mode():
    """A plain fake mode, but for the questions that transformers asks about values: yes, it is one sequence."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.utils import import_utils

    class Answering(FakeTensorMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                return True
            return super().__torch_dispatch__(func, types, args, kwargs)

    import_utils.is_fake_tensor = lambda x: False  # no masks that only a trace needs, as on the virtual GPU
    return Answering(allow_non_fake_inputs=True)


def _to_fake(model, fake) -> None:
    import torch

    placed = {}

    def once(tensor):
        if id(tensor) not in placed:  # tied weights stay tied
            with fake:
                new = torch.empty_like(tensor, device="cpu")
            placed[id(tensor)] = torch.nn.Parameter(new) if isinstance(tensor, torch.nn.Parameter) else new
        return placed[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: once(tensor) for name, tensor in tensors.items() if tensor is not None})


def _setting(model_id: str) -> dict:
    return {"model_id": model_id, "batch_size": BATCH, "sequence_length": LENGTH}


def _repeat(work, repeats: int):
    """Seconds of each run, given as soon as it ends; no further run after ENOUGH_SECONDS."""
    start = time.perf_counter()
    for _ in range(repeats):
        before = time.perf_counter()
        work()
        yield time.perf_counter() - before
        if time.perf_counter() - start > ENOUGH_SECONDS:
            return


def _import_everything() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401


def _rss() -> int:
    """Peak resident bytes of this process so far."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
