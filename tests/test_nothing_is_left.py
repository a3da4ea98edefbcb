"""After success, error, interrupt and lack of memory the process is what it was before, all of it, and forks as well.

The trials behind it run by themselves: `make fuzz`, `make interrupts`.
"""

import contextlib
import gzip
import inspect
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from fuzz import NOT_DRAWN
from fuzz import calls as odd_calls
from fuzz import run as fuzz
from interrupts import entries, forget
from interrupts import run as interrupts
from moved_panels import PANELS
from odd_inputs import LLAMA
from process_state import code_state, differences, process_state, stand_ins
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.grad_mode import no_grad
from torch.library import Library
from torch.utils.data import DataLoader, TensorDataset

import helpers
import virtual_gpu
from virtual_gpu.errors import NotSupported, VirtualGPUError
from virtual_gpu.host.meter import HostMeter
from virtual_gpu.host.storages import HostStorages
from virtual_gpu.program.runner import run as run_program
from virtual_gpu.step.predict import predict_memory
from virtual_gpu.turns import in_turn

USUAL = ("predict", "gpu_memory_experiment", "rank_step", "cuda", "run_program", "replay", "doctor")
WRONG = {
    "predict": lambda: virtual_gpu.predict("nothing", gpu="T4"),
    "gpu_memory_experiment": lambda: helpers.gpu_memory_experiment(1, model_id="gpt2", peft="lora", lora_targets="x"),
    "rank_step": lambda: helpers.rank_step("gpt2", 3, tensor_parallel=3),
    "plan_training": lambda: virtual_gpu.plan_training("gpt2", batch=10**12),
    "cuda": lambda: virtual_gpu.cuda("T4", values="no").__enter__(),
    "run_program": lambda: run_program("nowhere.py"),
    "replay": lambda: virtual_gpu.replay("nowhere"),
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """name → (a call, its answer); what is imported and remembered at first is there, and at the end every library."""
    before = tempfile.tempdir
    tempfile.tempdir = str(tmp_path_factory.mktemp("temporary"))
    every = entries(tmp_path_factory.mktemp("entries"))
    found = {name: (every[name], every[name]()) for name in USUAL}
    for call in WRONG.values():  # with peft comes torch._dynamo, which replaces functions of PyTorch's own
        with contextlib.suppress(VirtualGPUError):
            call()
    code = code_state()
    yield found
    tempfile.tempdir = before
    # pytest catches each test's warnings with a function of its own
    assert [line for line in differences(code, code_state()) if not line.startswith("warnings._showwarn")] == []
    assert not stand_ins()


@pytest.mark.parametrize("name", USUAL)
def test_after_an_answer(calls, name):
    call, answer = calls[name]
    before = process_state()
    assert call() == answer
    assert differences(before, process_state()) == []


@pytest.mark.parametrize("name", WRONG)
def test_after_an_error(calls, name):
    before = process_state()
    with pytest.raises(VirtualGPUError):
        WRONG[name]()
    assert differences(before, process_state()) == []


def test_after_a_lack_of_memory(calls, tmp_path):
    before = process_state()
    report = helpers.gpu_memory_experiment(1, model_id="gpt2", gpu="1GiB, 8.6")
    assert not report.fits and report.error
    with pytest.raises(torch.OutOfMemoryError), virtual_gpu.cuda("1GiB, 8.6") as device:
        torch.ones(2**30, device="cuda")
    assert device.memory_allocated() == 0
    assert differences(before, process_state()) == []


class InterruptAt:
    """Ctrl+C at the n-th call of any Python function, or of one; the same call in every run."""

    def __init__(self, moment, function=None):
        self.left, self.code = moment, getattr(function, "__code__", None)

    def __call__(self, frame, event, _):
        if event == "call" and self.code in (None, frame.f_code):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


@pytest.mark.parametrize("share", [0.1, 0.6])
@pytest.mark.parametrize("name", ["predict", "cuda", "run_program"])
def test_after_an_interrupt(calls, name, share):
    call, answer = calls[name]
    forget()
    with InterruptAt(0) as counted:
        call()
    forget()
    before = process_state()
    with pytest.raises(KeyboardInterrupt), InterruptAt(int(-counted.left * share)):
        call()
    assert differences(before, process_state()) == []
    forget()
    assert call() == answer


@pytest.mark.parametrize("function", [no_grad.__exit__, FakeTensorMode.__exit__, Library._destroy])
@pytest.mark.parametrize("name", ["rank_step", "cuda", "run_program"])
def test_after_an_interrupt_in_the_middle_of_pytorch(calls, name, function):
    """Where gradients would stay off, or rules on, or a mode: then PyTorch ends the process, so it is a fork."""
    call, _ = calls[name]
    child = os.fork()
    if not child:
        end = "nothing was interrupted"
        try:
            forget()
            with InterruptAt(0, function) as counted:
                call()
            forget()
            before = process_state()
            with contextlib.suppress(KeyboardInterrupt), InterruptAt(-counted.left // 2, function):
                call()
                os._exit(1)
            end = differences(before, process_state())
        finally:
            os.write(2, f"{end}\n".encode())  # what pytest shows of a failure
            os._exit(0 if end == [] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_interrupt_in_a_finalizer_is_heard():
    """Python drops it: of `next(model.parameters())` a generator is left that ends when it is forgotten."""

    def items():
        try:
            yield 1
        finally:
            signal.raise_signal(signal.SIGINT)

    @in_turn
    def call():
        next(items())
        for _ in range(600):  # one long sleep would end first: no system call is broken off
            time.sleep(0.1)

    hook = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        call()
    assert sys.unraisablehook is hook


def interrupted_everywhere(act, before=lambda: None):
    """Ctrl+C at the first Python call of `act`, at the second and so on, to its end; how many there were."""
    for moment in itertools.count(1):
        before()
        with contextlib.suppress(KeyboardInterrupt):
            with InterruptAt(moment) as interrupt:
                act()
            if interrupt.left > 0:
                return moment - 1
            for _ in range(100):  # where Python drops it, it comes again a moment later
                time.sleep(0.001)


def test_an_interrupt_in_a_release_loses_nothing(monkeypatch):
    """Outside of any run, where the handler is Python's own; Python drops what is raised in a callback."""
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)
    gpu, held = virtual_gpu.VirtualGPU(virtual_gpu.card("T4")), []

    def make():
        assert gpu.memory_allocated() == 0
        held.append(gpu.place(torch.zeros(512)))
        assert gpu.memory_allocated() == 2048

    assert interrupted_everywhere(held.clear, make) > 3
    assert gpu.memory_allocated() == 0 and gpu.mode.storages == {}


def test_an_interrupt_in_a_release_loses_no_ram(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)
    storages, held = HostStorages(HostMeter()), []

    def make():
        assert storages.report().current == 0
        held.append(torch.zeros(512))
        storages.count(held[0])
        assert storages.report().current == 2048

    assert interrupted_everywhere(held.clear, make) > 3
    assert storages.report().current == 0


@pytest.mark.parametrize("moment", [1, 2])
def test_an_interrupt_at_a_loaders_end_loses_no_ram(moment):
    """In a program, where Ctrl+C waits for the end of a release, and the second one too."""
    with pytest.raises(KeyboardInterrupt), virtual_gpu.cuda("T4") as gpu:
        batches = iter(DataLoader(TensorDataset(torch.zeros(64, 1000)), batch_size=8, num_workers=1))
        next(batches)
        with InterruptAt(moment, weakref.finalize.__call__):
            del batches
        assert gpu.interrupted and gpu.host.meter.by_category()["workers"] == 0
        torch.zeros(1)


def test_no_interrupt_is_lost_while_a_packed_file_is_read(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b'{"devices": []}'))
    for moment in itertools.count(1):
        interrupt = InterruptAt(moment)
        with contextlib.suppress(KeyboardInterrupt):
            with interrupt:
                virtual_gpu.replay(path)
            if interrupt.left > 0:
                break
            for _ in range(100):
                time.sleep(0.001)
            raise AssertionError(f"Ctrl+C at call {moment} was lost")
    assert moment > 10


def test_interrupts_from_outside(calls):
    """A few of the thousand that `make interrupts` sends."""
    trial = interrupts(4, seed=1, only=("predict", "cuda"))
    assert not trial.wrong
    assert trial.counts.total() == 4


def test_a_few_odd_inputs():
    """The first of the five thousand of `make fuzz`."""
    trial = fuzz(50)
    assert not trial.failures
    assert trial.counts.total() == 50


def test_odd_inputs_go_to_every_public_function(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    public = {name: getattr(module, name) for module in (helpers, virtual_gpu) for name in module.__all__}
    errors = {one for one in public.values() if isinstance(one, type) and issubclass(one, BaseException)}
    made = {name: one for name, one in public.items() if callable(one) and one not in errors}
    takes = {name for name, one in made.items() if inspect.signature(one).parameters}
    assert takes - {*PANELS} == (takes & {*odd_calls(str(tmp_path))}) | {*NOT_DRAWN}


# -- threads and forks ------------------------------------------------------------------------------------------------


def in_a_thread(function):
    """What the function returns or raises in a thread of its own."""
    found = []

    def call():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    return found[0]


def small():
    return predict_memory(gpu="T4", model_id="gpt2", batch_size=1, sequence_length=16).peak_bytes


def test_beside_a_block_other_threads_are_refused_by_name():
    with virtual_gpu.cuda("T4"):
        for call in (small, lambda: helpers.rank_step("gpt2", 2), lambda: virtual_gpu.cuda("L4").__enter__()):
            error = in_a_thread(call)
            assert isinstance(error, NotSupported) and threading.main_thread().name in str(error)
        with pytest.raises(NotSupported, match="cuda"):
            small()
    assert in_a_thread(small) == small()


def test_ranks_take_turns(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")

    def step(ranks):
        return helpers.rank_step(str(tmp_path), ranks, sequence_length=16).at_peak

    alone = {ranks: step(ranks) for ranks in (2, 4)}
    forget()
    found = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: step(n)})) for n in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == alone


def test_a_fork_begins_with_a_free_turn():
    """Though another thread of the process that it was made of is in the middle of a prediction."""
    inside, ends = threading.Event(), threading.Event()

    @in_turn
    def predicts():
        inside.set()
        ends.wait(60)

    thread = threading.Thread(target=predicts)
    thread.start()
    inside.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(30)  # ends it where it waits
        os._exit(in_turn(lambda: 7)())
    ends.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_what_is_printed_does_not_move_a_terminal(capsys, tmp_path):
    from virtual_gpu.command import main

    path = Path(tmp_path, "log\x1b[2J\u202e.txt")
    path.write_bytes(b"\x1b]0;title\x07 CUDA out of memory. \x9b2J Tried to allocate 2.00 GiB")
    assert main(["doctor", str(path)]) in (0, 1)
    assert main(["replay", str(path)]) == 2
    with pytest.raises(SystemExit):
        main(["doctor", str(path), "\x1b[2J"])
    said = "".join(capsys.readouterr())
    assert "\\u001b" in said and not {"\x1b", "\x9b", "\x07", "\u202e"} & {*said}
