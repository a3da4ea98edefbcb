"""`make fuzz`: odd inputs to every public function and command; each gets an answer or one clear error of ours.

    python tests/fuzz.py --inputs 5000 --seed 0

An input is drawn by hypothesis (`odd_inputs`). What counts as a failure: an exception that is not ours, more than
LONGEST_S seconds, a traceback or a control character in what a command prints, somebody's text in a page as it stands,
anything of the process changed (`process_state`), bytes of a virtual GPU left, a fixed prediction that is another one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import moved_panels as panels
import odd_inputs as odd
import torch
from hypothesis import strategies as st
from process_state import code_state, differences, gpus_alive, process_state, stand_ins

import helpers
import virtual_gpu
from helpers.chapters.c12_two_models.floor import Grpo
from virtual_gpu.allocator_settings import AllocatorSettings
from virtual_gpu.command import main
from virtual_gpu.doctor import diagnose, text
from virtual_gpu.errors import VirtualGPUError
from virtual_gpu.plan.files import KINDS
from virtual_gpu.plan.lengths import Lengths, read_lengths
from virtual_gpu.plan.start import start_from
from virtual_gpu.shards.layout import Layout
from virtual_gpu.step.predict import predict_memory
from virtual_gpu.terminal import tell
from virtual_gpu.trace.saved import read

LONGEST_S = 60.0
# Whose arguments below are wrong ones.
REFUSED = {"replay", "read", "read_lengths", "compare", "largest_model", "enable_checkpointing", "compare_steps",
           "train_model", "run_ranks"}  # fmt: skip
NOT_DRAWN = {
    "MemoryReport": "an answer, which nobody makes",
    "human_bytes": "a formatter of numbers, whose TypeErrors are Python's",
    "load_ipython_extension": "what IPython calls",
    "unload_ipython_extension": "what IPython calls",
}  # public function → why; panels are moved instead
EVERY = 100  # inputs between two looks at what is slow to read
PANELS = 40  # one input of so many is a panel, which answers to several moves
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
PROGRAM = "import torch\nx = torch.ones(8, 8, device='cuda', requires_grad=True)\n(x @ x).sum().backward()\n"


class TooLong(BaseException):
    """Not an Exception: nobody may take it for an error of the input's."""


def calls(small: str) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """name → (a public function, arguments with which it answers in a moment)."""
    model = {"model_id": small, "sequence_length": 16}
    net = torch.nn.Linear(4, 4)
    return {
        "predict": (virtual_gpu.predict, {"model": small, "gpu": "T4", "sequence_length": 16, "batch_size": 1,
                    "peft": None, "precision": "auto", "optimizer": "adamw", "attention": "sdpa",
                    "gradient_checkpointing": False, "gradient_accumulation_steps": 1, "lora_rank": 4,
                    "lora_targets": "attention"}),
        "activation_budget": (virtual_gpu.activation_budget, {"model": small, "gpu": "L4", "sequence_length": 16,
                              "batch_size": 1, "peft": "lora", "precision": "auto", "moves": True, "measured": 1,
                              "gradient_accumulation_steps": 1, "attention": "sdpa"}),
        "Setting": (virtual_gpu.Setting, {"batch_size": 1, "sequence_length": 16, "lora_dropout": 0.05, "peft": "lora",
                    "precision": "fp16", "holds_outputs": False, "objective": "dpo", "reference": "same",
                    "completion_length": 0, "rollout": 0, "beta": 0.0, "iterations": 1}),
        "plan_training": (virtual_gpu.plan_training, {"model": small, "gpu": "T4", "gpus": 1, "length": 16, "batch": 2,
                          "methods": ("lora",), "precision": None, "optimizer": None, "margin": 0.1,
                          "lora_rank": 4, "lora_targets": "attention", "prefer": "speed", "price_per_hour": 0.5,
                          "objective": "dpo", "tensor_parallel": None, "completion_length": None, "generations": None,
                          "beta": None, "iterations": None, "context_parallel": None, "replicas": None,
                          "sequence_parallel": True, "optim_args": "", "optim_target_modules": ""}),
        "start_from": (start_from, {"path": f"{small}/start.json", "gpu": "T4", "gpus": 1, "model": small, "length": 16,
                       "peft": None, "objective": None, "margin": 0.1}),
        "largest_fitting": (virtual_gpu.largest_fitting, {"name": "sequence_length", "multiple": 64, "gpu": "T4",
                            **model, "batch_size": 1}),
        "largest_model": (virtual_gpu.largest_model, {"gpu": "nope", "peft": None, "batch_size": 0}),
        "card": (virtual_gpu.card, {"name": "T4"}),
        "VirtualGPU": (virtual_gpu.VirtualGPU, {"spec": virtual_gpu.card("T4"), "without": ()}),
        "cuda": (opened, {"gpu": "T4", "values": "answer", "rank": 0, "gpus": 1, "limited": True,
                 "without": (), "changes": ("checkpointing",)}),
        "Lengths": (Lengths, {"all": (5, 7, 512)}),
        "read_lengths": (read_lengths, {"path": "nowhere"}),
        "replay": (virtual_gpu.replay, {"path": "nowhere"}),
        "read": (read, {"path": "nowhere"}),
        "compare": (virtual_gpu.compare, {"before": "nowhere", "after": "nowhere", "without": None}),
        "set_language": (virtual_gpu.set_language, {"code": "en"}),
        "gpu_memory_experiment": (helpers.gpu_memory_experiment, {**model, "batch_size": 1, "precision": "fp16",
                                  "gpu": "T4", "peft": None, "gradient_accumulation_steps": 1}),
        "gpu_memory_sweep": (helpers.gpu_memory_sweep, {**model, "batch_size": [1, 2], "gpu": "T4"}),
        "predict_memory": (helpers.predict_memory, {**model, "batch_size": 1, "gpu": "T4", "full": False}),
        "load_model_and_tokenizer": (helpers.load_model_and_tokenizer, {"model_id": small, "peft": None, "gpu": "T4",
                                     "dtype": "auto", "attention": "sdpa", "lora_rank": 4}),
        "training_flops": (helpers.training_flops, {**model, "batch_size": 1, "peft": None}),
        "both_levers": (helpers.both_levers, {"batch": 2, "gpu": "T4", **model}),
        "shard_ledger": (helpers.shard_ledger, {"model": small, "ranks": 2, "stage": 3, "tensor_parallel": 1,
                         "precision": "mixed", "look_at": (0,), "peft": "lora", "lora_rank": 4}),
        "rank_step": (helpers.rank_step, {"model": small, "ranks": 2, "stage": 3, "batch_size": 1, "exact": False,
                      "sequence_length": 16, "gradient_checkpointing": False, "gpu": "H100", "peft": "qlora",
                      "lora_targets": "attention", "replicas": 1, "context_parallel": 1, "sequence_parallel": False}),
        "use_gpu": (helpers.use_gpu, {"name": "T4"}),
        "make_dummy_dataset": (helpers.make_dummy_dataset, {"size": 2, "sequence_length": 8, "vocab_size": 99,
                               "seed": 0}),
        "count_parameters": (helpers.count_parameters, {"model": net, "trainable_only": False}),
        "estimate_memory_of_gradients": (helpers.estimate_memory_of_gradients, {"model": net}),
        "estimate_memory_of_optimizer": (helpers.estimate_memory_of_optimizer,
                                         {"optimizer": torch.optim.SGD(net.parameters())}),
        "enable_checkpointing": (helpers.enable_checkpointing, {"model": 5}),
        "quantize": (helpers.quantize, {"tensor": torch.arange(16.0), "method": "absmax", "bits": 4,
                     "block_size": None, "per_channel": False}),
        "example_tensor": (helpers.example_tensor, {"distribution": "normal", "count": 9, "seed": 0}),
        "record_chain": (helpers.record_chain, {"nodes": 6, "checkpoints": (2,)}),
        "sweep_segments": (helpers.sweep_segments, {"nodes": 8}),
        "exercise": (helpers.exercise, {"number": "1-1"}),
        "case": (helpers.case, {"number": "1-A"}),
        "diagnose": (virtual_gpu.diagnose, {"error": "CUDA out of memory. Tried to allocate 2.00 GiB", "cut": False}),
        "check_environment": (helpers.check_environment, {"hub_limit_s": 0.01}),
        "machine": (virtual_gpu.machine, {"name": "Colab"}),
        "caught": (helpers.caught, {"program": torch.cuda.memory_allocated, "gpu": "T4"}),
        "course_map": (helpers.course_map, {"folder": None}),
        "compare_steps": (helpers.compare_steps, {"model": torch.nn.Identity(), "step": len}),
        "train_model": (helpers.train_model, {"model": torch.nn.Identity(), "dataset": [], "training_args": None}),
        "run_ranks": (helpers.run_ranks, {"program": "no function", "world_size": 0, "time_limit": 9.0}),
        "GPUSpec": (drawn_card, {"name": "x", "device_name": "x", "memory_bytes": 2**34, "usable_bytes": None,
                    "compute_capability": (8, 6), "platform": "cuda"}),
        "AllocatorSettings": (AllocatorSettings.parse, {"text": "max_split_size_mb:64,expandable_segments:True"}),
        "Layout": (Layout, {"ranks": 4, "stage": 3, "tensor_parallel": 2, "replicas": 1, "sequence_parallel": False,
                   "context_parallel": 1}),
        "Grpo": (floor, {"card_bytes": 2**34, "model": small, "lora": False, "generations": 2, "batch": 2, "prompt": 8,
                 "completion": 8, "reference": "none", "engine": "shared", "fraction": 0.3}),
        "guess": (helpers.guess, {"name": "x", "value": 1.0, "unit": "GiB"}),
    }  # fmt: skip


def opened(**arguments: Any) -> int:
    """`with cuda(...)` around one tensor."""
    with virtual_gpu.cuda(**arguments) as device:
        torch.ones(3, device="cuda")
        return device.memory_allocated()


def drawn_card(**arguments: Any) -> virtual_gpu.MemoryReport:
    """A step on a card of one's own."""
    return virtual_gpu.predict("gpt2", gpu=virtual_gpu.GPUSpec(**arguments), sequence_length=16)


def floor(card_bytes: Any, **arguments: Any) -> dict:
    """What a step of GRPO holds at least."""
    return Grpo(**arguments).floor(card_bytes)


def commands(small: str) -> dict[str, list[str]]:
    """subcommand → arguments with which it answers in a moment; those of `NEEDS` are files that are made for it."""
    return {
        "fit": ["--model", small, "--gpu", "T4", "--length", "16", "--batch", "2", "--methods", "lora", "--gpus", "1"],
        "largest": [
            "--model",
            small,
            "--gpu",
            "T4",
            "--of",
            "sequence_length",
            "--peft",
            "lora",
            "--precision",
            "fp16",
        ],
        "shards": ["--model", small, "--gpu", "H100", "--gpus", "2", "--stage", "3", "--length", "16", "--batch", "1"],
        "run": ["--gpu", "T4", "--steps", "1", "--values", "answer", "--change", "checkpointing", "PROGRAM"],
        "compare": ["FILE", "FILE"],
        "replay": ["FILE"],
        "doctor": ["FILE"],
    }


@dataclass
class Trial:
    """What came of the inputs: kinds of answers, and each failure once, with the input of it that came first."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)
    looks: int = 0
    slowest: tuple[float, str] = (0.0, "")
    tells: bool = False

    def fails(self, what: str, given: str) -> None:
        """Take a failure down."""
        self.counts["FAILURE"] += 1
        if what[:600] not in self.failures and self.tells:
            print(f"FAILURE {what[:600]}\n  {given[:1000]}", flush=True)
        self.failures.setdefault(what[:600], given[:1000])


class Fuzz:
    """The trial: draws inputs, judges what comes of each, and looks at the process in between."""

    def __init__(self, folder: Path, tells: bool = False):
        self.folder, self.trial, self.number = folder, Trial(tells=tells), 0
        small = folder / "small"
        small.mkdir()
        (small / "config.json").write_text(json.dumps(odd.LLAMA), encoding="utf-8")
        (small / "start.json").write_text('{"per_device_train_batch_size": 1}', encoding="utf-8")
        (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
        self.calls, self.commands = calls(str(small)), commands(str(small))
        self.small = str(small)
        for name, (function, arguments) in self.calls.items():  # what is imported and remembered at a first call
            refused = contextlib.suppress(VirtualGPUError, ValueError) if name in REFUSED else contextlib.nullcontext()
            with refused, contextlib.redirect_stdout(io.StringIO()):
                function(**arguments)
        with contextlib.suppress(Exception), quiet():
            main(["run", str(folder / "program.py")])
        virtual_gpu.set_language("en")
        self.canary, self.code = self.predictions(), code_state()

    def inputs(self) -> st.SearchStrategy:
        """(what it is, what it is given)."""
        call = st.sampled_from(sorted(self.calls)).flatmap(
            lambda name: st.tuples(
                st.just("call"), st.just(name),
                st.dictionaries(st.sampled_from(sorted(self.calls[name][1])), odd.ODD, min_size=1, max_size=2),
            )
        )  # fmt: skip
        command = st.sampled_from(sorted(self.commands)).flatmap(
            lambda name: st.tuples(
                st.just("command"), st.just(name),
                st.dictionaries(st.integers(0, len(self.commands[name]) - 1), st.one_of(odd.NAMES,
                                odd.NUMBERS.map(str)), max_size=2),
                st.lists(st.one_of(odd.NAMES, st.sampled_from(["--json", "--save", "--help", "--language", "ko"])),
                         max_size=2),
                odd.records(),
            )
        )  # fmt: skip
        folder = st.tuples(
            st.just("folder"), odd.NAMES, odd.configurations(), st.sampled_from(["predict", "plan_training"])
        )
        panel = st.tuples(
            st.just("panel"), st.sampled_from(panels.PANELS), st.sampled_from(["ko", "en"]), panels.moves(6)
        )
        others = st.one_of(
            call,
            call,
            folder,
            command,
            st.tuples(st.just("start"), st.sampled_from([".yaml", ".json"]), odd.starts(self.small)),
            st.tuples(st.just("record"), odd.records()),
            st.tuples(st.just("log"), odd.logs()),
        )
        return st.integers(1, PANELS).flatmap(lambda number: panel if number == PANELS else others)

    def one(self, given: tuple) -> None:
        """Try an input."""
        self.number += 1
        place = self.folder / "inputs" / str(self.number)
        place.mkdir(parents=True)
        shown, before, started = repr(given)[:4000], process_state(), time.perf_counter()
        told = io.StringIO()
        try:
            with contextlib.redirect_stderr(told), time_limit(LONGEST_S):
                kind = getattr(self, f"try_{given[0]}")(place, *given[1:])
        except TooLong:
            self.trial.fails(f"{given[0]} {given[1]!r:.30}: longer than {LONGEST_S:g} s", shown)
        except VirtualGPUError as error:
            self.trial.counts[f"{given[0]}: {type(error).__name__}"] += 1
            if len(str(error)) > 5000:
                self.trial.fails(f"{given[0]}: an error of {len(str(error))} characters", shown)
        except BaseException as error:
            if odd.is_clear(error):
                self.trial.counts[f"{given[0]}: {type(error).__name__} in our words"] += 1
            else:
                last = traceback.extract_tb(error.__traceback__)
                where = next(
                    (f"{f.filename}:{f.lineno}" for f in reversed(last) if f.filename.startswith(odd.OURS)), "?"
                )
                self.trial.fails(f"{type(error).__name__}: {str(error)[:150]} at {where}", shown)
        else:
            self.trial.counts[f"{given[0]}: {kind}"] += 1
        if "Traceback" in told.getvalue():
            self.trial.fails(f"{given[0]}: a traceback is printed: {told.getvalue()[-200:]}", shown)
        spent = time.perf_counter() - started
        self.trial.slowest = max(self.trial.slowest, (spent, shown[:200]))
        virtual_gpu.set_language("en")
        shutil.rmtree(place)
        for line in differences(before, process_state()):
            self.trial.fails(f"changed: {line}", shown)
        if self.number % EVERY == 0:
            self.look(shown)

    def try_call(self, place: Path, name: str, changed: dict[str, Any]) -> str:
        """Call a function with a value or two that are odd."""
        function, arguments = self.calls[name]
        with contextlib.redirect_stdout(io.StringIO()):
            found = function(**{**arguments, **changed})
            return self.shown(found)

    def try_folder(self, place: Path, name: str, config: bytes, function: str) -> str:
        """A model's folder with an odd name and an odd configuration."""
        folder = place / (name.replace("/", "_").replace("\0", "") or "x")[:60].encode("utf-8", "replace").decode()
        folder = place / "x" if folder == place or folder.name in (".", "..") else folder
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_bytes(config)
        call, arguments = self.calls[function]
        found = call(**{**arguments, "model": str(folder)})
        if function == "plan_training" and found.best:
            for kind in KINDS:
                compile(found.best.files(kind)["train.py"], "train.py", "exec")
        return self.shown(found)

    def try_command(self, place: Path, name: str, changed: dict[int, str], more: list[str], record: tuple) -> str:
        """A command line; its files are records."""
        ending, data = record
        (place / f"file{ending}").write_bytes(data)
        words = [*self.commands[name]]
        for at, word in changed.items():
            words[at] = word
        files = {"FILE": str(place / f"file{ending}"), "PROGRAM": str(self.folder / "program.py")}
        words = [name, *(files.get(word, word) for word in words), *more]
        with quiet() as (out, err), contextlib.chdir(place):
            try:
                status = main(words)
            except SystemExit as exit:
                status = exit.code
        out, err = out(), err()
        if status not in (0, 1, 2) or (status == 2 and not err):
            raise AssertionError(f"status {status!r}")
        if "Traceback" in err and name != "run":
            raise AssertionError(f"a traceback: {err[-300:]}")
        if _UNSHOWN.search(out) or (name != "run" and _UNSHOWN.search(err)):
            raise AssertionError(f"a control character is printed by {name}: {(_UNSHOWN.search(out + err) or '')!r}")
        return f"status {status}"

    def try_record(self, place: Path, record: tuple) -> str:
        """Somebody's file, replayed and read."""
        ending, data = record
        path = place / f"file{ending}"
        path.write_bytes(data)
        try:
            return self.shown([one.text() for one in virtual_gpu.replay(path)])
        except VirtualGPUError:
            return self.shown(read(path))

    def try_start(self, place: Path, ending: str, data: bytes) -> str:
        """Somebody's configuration of another tool, and a copy of it with the lines changed that are proposed."""
        path = place / f"file{ending}"
        path.write_bytes(data)
        found = start_from(path, "24GiB, 8.6", length=16)
        if found.lines:
            found.save(place / f"copy{ending}")
        return self.shown(found)

    def try_log(self, place: Path, data: bytes) -> str:
        """Somebody's log, read by the doctor."""
        said = text(diagnose(data, False))
        if _UNSHOWN.search(said):
            raise AssertionError("a control character in a diagnosis")
        return "diagnosis"

    def try_panel(self, place: Path, name: str, language: str, groups: list) -> str:
        """A panel, moved."""
        virtual_gpu.set_language(language)
        panels.drive(name, groups)
        return f"{name} answers"

    def shown(self, found: Any) -> str:
        """Everything that a reader sees of an answer; nothing in a page may be somebody's text as it stands."""
        repr(found)
        for name in ("_repr_html_", "_repr_svg_"):
            if (draw := getattr(found, name, None)) and not isinstance(found, type):
                page = draw() or ""
                if odd.MARK in page or re.search(r"<script[^>]*\ssrc|https?://(?!www\.w3\.org)[^\"' <]*\.js", page):
                    raise AssertionError(f"{name} of {type(found).__name__} has somebody's text as it stands")
        return "answer"

    def predictions(self) -> list[tuple]:
        """The canary: what must come out the same at any moment."""
        settings = ({}, {"peft": "lora"}, {"precision": "mixed_fp16", "gradient_checkpointing": True})
        reports = [
            predict_memory(gpu="T4", full=True, model_id=self.small, batch_size=2, sequence_length=16, **more)
            for more in settings
        ]
        return [(report.peak_bytes, report.reserved_bytes, report.parameters_bytes) for report in reports]

    def look(self, shown: str) -> None:
        """What is slow to look at: the canary, the functions of all libraries, bytes of virtual GPUs that are left."""
        self.trial.looks += 1
        if (found := self.predictions()) != self.canary:
            self.trial.fails(f"the canary: {found} instead of {self.canary}", shown)
        for line in differences(self.code, code_state()):
            self.trial.fails(f"replaced: {line}", shown)
        for name in stand_ins():
            self.trial.fails(f"a stand-in is left: {name}", shown)
        left = [one for one in gpus_alive() if one.memory_allocated()]
        if left:
            self.trial.fails(f"bytes are left on {len(left)} virtual GPUs: {left[0].memory_allocated()}", shown)


@contextlib.contextmanager
def quiet() -> Iterator[tuple[Callable[[], str], Callable[[], str]]]:
    """Streams as a terminal's, that refuse what UTF-8 cannot say; what was written is read by calling them."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in ("strict", "backslashreplace")]

    def reader(stream: io.TextIOWrapper) -> Callable[[], str]:
        def said() -> str:
            stream.flush()
            return stream.buffer.getvalue().decode("utf-8")

        return said

    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        yield reader(streams[0]), reader(streams[1])


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TooLong after so many seconds of the processor, or ten times as many of the clock; where there are signals."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def late(*_: Any) -> None:
        raise TooLong

    limits = (signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, 10 * seconds)
    before = [signal.signal(number, late) for _, number, _ in limits]
    try:
        for timer, _, limit in limits:
            signal.setitimer(timer, limit)
        yield
    finally:
        for (timer, number, _), handler in zip(limits, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def run(inputs: int, seed: int = 0, told: Callable[[Fuzz], None] | None = None) -> Trial:
    """Try so many inputs; the same for the same seed."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        tempfile.tempdir = str(Path(name, "tmp"))
        os.mkdir(tempfile.tempdir)
        try:
            fuzz = Fuzz(Path(name), told is not None)

            @hypothesis.seed(seed)
            @hypothesis.settings(
                max_examples=inputs, database=None, deadline=None, phases=[hypothesis.Phase.generate],
                suppress_health_check=list(hypothesis.HealthCheck),
            )  # fmt: skip
            @hypothesis.given(fuzz.inputs())
            def each(given: tuple) -> None:
                fuzz.one(given)
                if told is not None:
                    told(fuzz)

            each()
            fuzz.look("the end")
        finally:
            tempfile.tempdir = before
    return fuzz.trial


def program() -> int:
    """The command; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.perf_counter()

    def told(fuzz: Fuzz) -> None:
        if fuzz.number % EVERY == 0:
            seconds = time.perf_counter() - started
            print(f"{fuzz.number} inputs, {len(fuzz.trial.failures)} failures, {seconds:.0f} s", flush=True)
        elif fuzz.number % 10 == 0:
            tell(f"{fuzz.number} of {args.inputs}")

    tell("each call is made once, then inputs come … Ctrl+C stops")
    trial = run(args.inputs, args.seed, told)
    for kind, count in sorted(trial.counts.items(), key=lambda item: -item[1]):
        print(f"{count:6} {kind}")
    print(
        f"{trial.looks} looks at the canary, the libraries' functions and the memory; slowest {trial.slowest[0]:.1f} s"
    )
    return 1 if trial.failures else 0


if __name__ == "__main__":
    sys.exit(program())
