"""What every panel has from its base: labels, a picture with a text, one line for an error, a stop that is heard.

And every knob turned, oddly: a few times in every run of the tests, more often in `make stress` and `make fuzz`.
"""

import asyncio
import os
import re
import signal
import threading
from itertools import cycle
from pathlib import Path

import ipywidgets as widgets
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from moved_panels import PANELS, controls_of, drive, ends_well, moves

import helpers
from helpers import memory_panel, use_gpu
from helpers.ahead import IDLE_S, JUST_S, nearby
from helpers.chapters.c9_planner import panel as planner
from helpers.gpu import current_gpu
from helpers.panel import Answer, Kept, Panel
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.language import set_language
from virtual_gpu.units import human_bytes

GPT2 = "openai-community/gpt2"
ROOT = Path(__file__).resolve().parent.parent


class Picture:
    def __init__(self, value):
        self.value = value

    def _repr_svg_(self):
        return f"<svg>{self.value}</svg>"


class SquarePanel(Panel):
    """As small as a panel can be."""

    prefix = "square"

    def __init__(self):
        super().__init__()
        self.controls = {"side": self.control(widgets.IntSlider, "side", "변(m)", value=2, max=9)}
        self.seen = []
        self.lay_out([self.controls["side"]], [])
        self.move(self._changed)

    def _changed(self):
        side = self.values()["side"]
        self.seen.append((side, threading.current_thread() is threading.main_thread()))
        self.act(side)
        self.show(f"{side**2} m²", picture=Picture(side**2))

    def act(self, side):
        """Something to go wrong."""


def interrupt(*_):
    """What the notebook's stop button does."""
    os.kill(os.getpid(), signal.SIGINT)


def is_empty_after_a_stop(panel):
    return "중단했다" in panel.status.value and 'role="status"' in panel.status.value and panel.picture.value == ""


# -- every knob -------------------------------------------------------------------------------------------------------


def odd_moves(name, times, most):
    """Drive new panels, as often as that."""
    drawn = settings(
        max_examples=times, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip

    @drawn
    @given(moves(most, least=2))
    def each(groups):
        drive(name, groups)

    each()


@pytest.mark.parametrize("name, language", zip(PANELS, cycle(("ko", "en"))))
def test_a_panel_survives_odd_moves(name, language):
    set_language(language)
    odd_moves(name, times=1, most=3)


@pytest.mark.stress
@pytest.mark.parametrize("name", PANELS)
def test_a_panel_survives_hundreds_of_odd_moves(name):
    odd_moves(name, times=40, most=8)


@pytest.mark.parametrize("name", ["lora_panel", "number_panel", "quantization_panel"])
@pytest.mark.parametrize("typed", ["9" * 5000, "-" + "9" * 5000, "a" * 100_000], ids=["digits", "below 0", "letters"])
def test_a_long_text_is_named_in_a_short_line(name, typed):
    panel = getattr(helpers, name)()
    field = next(control for control in controls_of(panel) if isinstance(control, widgets.Text))
    field.value = typed
    ends_well(panel)
    assert len(panel.status.value) < 500


def test_a_long_list_of_names_is_folded():
    panel = helpers.planner_panel()
    panel.controls["model"].value = "no/such-model"
    panel.search.click()
    said, _, folded = panel.status.value.partition("<details>")
    assert "모르는 모델 이름" in said and "허브에서도" in said and len(re.sub("<[^>]+>", "", said)) < 300
    assert "EleutherAI/polyglot-ko-1.3b" in folded and "EleutherAI/polyglot-ko-1.3b" not in said


def test_a_field_shows_what_a_format_prescribes():
    panel = helpers.quantization_panel()
    bits, method = panel.controls["bits"], panel.controls["method"]
    bits.value = "5"
    method.value = "nf4"
    assert bits.disabled and bits.value == "4" and "NF4" in panel.status.value
    method.value = "mxfp4"
    assert bits.disabled and bits.value == "4"
    method.value = "absmax"
    assert not bits.disabled and bits.value == "5" and "<svg" in panel.picture.value


def test_every_panel_has_a_notebook():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "notebooks/src").glob("*.py"))
    assert [name for name in PANELS if f"{name}(" not in sources] == []


def test_every_panel_is_moved():
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "helpers/chapters").rglob("*.py"))
    assert sorted(re.findall(r"^def (\w+_panel)\(", code, re.MULTILINE)) == sorted(PANELS)


# -- a move's end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, ImportError, OSError, RuntimeError], ids=lambda kind: kind.__name__)
def test_an_error_is_one_line_and_the_next_move_works(error):
    panel = SquarePanel()

    def fail(side):
        raise error("a < b")

    panel.act = fail
    panel.controls["side"].value = 3
    assert 'role="alert"' in panel.status.value and "a &lt; b" in panel.status.value and panel.picture.value == ""
    del panel.act
    panel.controls["side"].value = 4
    assert "16 m²" in panel.status.value and panel.picture.value == "<svg>16</svg>"


def test_an_errors_place_is_as_high_as_the_picture_that_was_there():
    panel = helpers.number_panel()
    height = re.search(r' height="(\d+)"', panel.picture.value)[1]
    panel.text.value = "a"
    panel.text.value = "ab"
    assert panel.picture.value == "" and panel.picture.layout.min_height == f"{height}px"
    panel.text.value = "1"
    assert panel.picture.value and panel.picture.layout.min_height is None


def test_a_bug_is_not_hidden():
    panel = SquarePanel()
    panel.act = lambda side: 1 / 0
    with pytest.raises(ZeroDivisionError):
        panel.controls["side"].value = 3
    assert 'role="alert"' in panel.status.value and "ZeroDivisionError: division by zero" in panel.status.value
    del panel.act
    panel.controls["side"].value = 4
    assert "16 m²" in panel.status.value


def test_a_disabled_button_drops_clicks():
    panel, pressed = SquarePanel(), []
    button = panel.button("go", "go", lambda: pressed.append(button.disabled))
    button.click()
    button.disabled = True
    button.click()
    assert pressed == [False] and list(button._dom_classes) == ["square-go"]


# -- a stop -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("presses", [1, 2])
def test_a_stop_is_said_and_the_next_move_works(presses):
    panel, handler = SquarePanel(), signal.getsignal(signal.SIGINT)

    def stopped_twice(side):
        try:
            interrupt()
        finally:
            if presses == 2:  # while the first is on its way out
                interrupt()

    panel.act = stopped_twice
    panel.controls["side"].value = 3
    assert is_empty_after_a_stop(panel) and "메모리는 모두 돌려주었다" in panel.status.value
    assert signal.getsignal(signal.SIGINT) is handler
    del panel.act
    panel.controls["side"].value = 4
    assert "16 m²" in panel.status.value


# A choice whose run no other test has left in a cache.
UNUSUAL = {
    "accumulation_panel": {"batch": 1, "model_id": GPT2, "sequence_length": 64},
    "checkpointing_memory_panel": {"model_id": GPT2, "sequence_length": 64, "batch_size": 3},
    "lora_panel": {"model_id": GPT2, "sequence_length": 64, "lora_rank": "3"},
    "memory_panel": {"model_id": GPT2, "sequence_length": 64, "batch_size": 3},
    "zero_panel": {"model": GPT2, "sequence_length": 256, "batch_size": 3},
}


@pytest.fixture
def stop_in_a_run(monkeypatch):
    """Stops the next run on a virtual GPU, in its middle; the list that it returns has what was held there."""
    record, held = VirtualGPU.record, []

    def stopped(gpu, *arguments):
        monkeypatch.setattr(VirtualGPU, "record", record)
        held.append(gpu.memory_allocated())
        interrupt()
        return record(gpu, *arguments)

    return lambda: monkeypatch.setattr(VirtualGPU, "record", stopped) or held


@pytest.mark.slow
@pytest.mark.parametrize("name", UNUSUAL)
def test_a_prediction_is_stopped(name, stop_in_a_run):
    use_gpu("T4")
    panel = getattr(helpers, name)()
    *others, (last, value) = UNUSUAL[name].items()
    for control, choice in others:
        panel.controls[control].value = choice
    shown = panel.picture.value
    held = stop_in_a_run()
    panel.controls[last].value = value
    assert held and held[0] > 0, "it ran"
    assert is_empty_after_a_stop(panel)
    assert current_gpu().memory_allocated() == 0
    panel.move(panel._changed)
    assert "<svg" in panel.picture.value and panel.picture.value != shown


@pytest.mark.slow
@pytest.mark.parametrize("where", ["beginning", "forward", "backward", "step"])
def test_a_run_is_stopped(where, monkeypatch):
    """The button's run on the GPU in use: all that it took is given back, and it can be pressed again."""
    import torch

    gpu = use_gpu("T4")
    panel = memory_panel()
    panel.controls["model_id"].value, panel.controls["sequence_length"].value = GPT2, 64
    place, name = {
        "beginning": (VirtualGPU, "record"),
        "forward": (torch.nn.functional, "cross_entropy"),
        "backward": (torch.Tensor, "backward"),
        "step": (torch.optim.AdamW, "step"),
    }[where]
    whole, held = getattr(place, name), []

    def stopped(*arguments, **named):
        held.append(gpu.memory_allocated())
        interrupt()
        return whole(*arguments, **named)

    monkeypatch.setattr(place, name, stopped)
    panel.run.click()
    monkeypatch.undo()
    assert held[0] > 10**8, "it ran"
    # What gives memory back has a backward of its own: the stop is pressed again there, and a third time in the panel.
    assert len(held) == (3 if where == "backward" else 1)
    assert is_empty_after_a_stop(panel)
    assert gpu.memory_allocated() == 0 and not panel.run.disabled
    panel.run.click()
    assert "가상 GPU에서 실행 (T4)" in panel.status.value and "<svg" in panel.picture.value


# -- what is kept, and computed ahead ----------------------------------------------------------------------------------


class CountingPanel(Panel):
    """It counts how often it is asked."""

    prefix = "counting"

    def __init__(self):
        super().__init__()
        self.asked = []
        self.controls = {
            "side": self.control(widgets.IntSlider, "side", "side", value=2, max=9),
            "kind": self.control(widgets.Dropdown, "kind", "kind", options=[("a", 1), ("b", 2)]),
            "long": self.control(widgets.Dropdown, "long", "long", options=[*range(20)]),
            "even": self.control(widgets.Checkbox, "even", "even", value=False),
        }
        self.lay_out([*self.controls.values()], [])
        self.move(self._changed)

    def answer(self, *, side, **rest):
        self.asked.append(side)
        if side == 4:
            raise ValueError("not 4")
        if side == 5:
            interrupt()
        return Answer((f"{side**2} m²",), Picture(side**2))


def test_an_answer_is_kept():
    panel = CountingPanel()
    for side in (3, 2, 3, 2):
        panel.controls["side"].value = side
    assert panel.asked == [2, 3] and "4 m²" in panel.status.value
    kept = Kept(2)
    for name in "abc":
        kept[name] = name
    assert kept == {"b": "b", "c": "c"}


def test_what_is_nearby():
    panel = CountingPanel()
    chosen = panel.values()
    found = [{name: one[name] for name in one if one[name] != chosen[name]} for one in nearby(panel)]
    assert found == [{"side": 3}, {"side": 1}, {"kind": 2}, {"even": True}]
    panel.controls["side"].value = 9
    found = [one["side"] for one in nearby(panel, panel.controls["side"]) if one["side"] != 9]
    assert found == [8, 7]


def kernel_after(side):
    """A panel in a kernel's loop whose slider is moved there, after what it computes ahead."""

    async def kernel():
        panel = CountingPanel()
        panel.controls["side"].value = side
        for _ in range(1000):
            await asyncio.sleep(0.05)
            if panel.ahead._timer is None:
                break
        return panel

    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        panel = asyncio.run(kernel())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        return panel
    finally:
        signal.signal(signal.SIGINT, handler)


def test_the_next_moves_are_computed_ahead():
    panel = kernel_after(1)
    shown = panel.picture.value
    assert panel.asked == [2, 1, 0, 3, 1, 1]  # 2 is known; then the other kind, and even
    assert shown == "<svg>1</svg>" and "1 m²" in panel.status.value


def test_where_a_move_takes_long_nothing_is_computed_ahead(monkeypatch):
    """As of a large model: what a hand does next would wait for it in silence."""
    monkeypatch.setattr("helpers.ahead.LONG_S", -1.0)
    assert kernel_after(1).asked == [2, 1]


def test_the_real_layer_is_not_trained_ahead():
    panel = helpers.quantization_panel()
    assert "layer" not in {one["distribution"] for one in panel.nearby()}
    assert "layer" in {one["distribution"] for one in helpers.quantization_panel(torch.ones(8, 64)).nearby()}


def test_an_error_ahead_is_said_only_if_it_is_chosen():
    panel = kernel_after(2 + 1)
    assert panel.asked[:3] == [2, 3, 4] and "9 m²" in panel.status.value


def test_a_stop_ends_what_is_computed_ahead():
    panel = kernel_after(6)
    assert panel.asked == [2, 6, 7, 5] and "36 m²" in panel.status.value


def test_nothing_is_computed_ahead_for_a_panel_that_waits_for_a_button():
    assert [*SquarePanel().ahead.pieces()] == []


# -- a report that is compared ----------------------------------------------------------------------------------------


def comparing_panel():
    """Chapter 3's, as it is in a notebook."""
    use_gpu("T4")
    panel = memory_panel()
    panel.compares = True
    return panel


def test_the_setting_before_stays_with_the_difference():
    panel = comparing_panel()
    panel.controls["model_id"].value, panel.controls["sequence_length"].value = GPT2, 64
    panel.controls["batch_size"].value = 8
    small = panel.report
    panel.controls["batch_size"].value = 16
    more = human_bytes(panel.report.needed_bytes - small.needed_bytes)
    assert f"gpt2 · 배치 8 · 길이 64 · 가상 T4보다 +{more}" in panel.picture.value
    panel.hold.value = True
    held = panel.report
    panel.controls["batch_size"].value = 8
    assert f"배치 16 · 길이 64 · 가상 T4보다 −{more}" in panel.picture.value
    panel.controls["batch_size"].value = 24
    assert f"보다 +{human_bytes(panel.report.needed_bytes - held.needed_bytes)}" in panel.picture.value
    panel.controls["batch_size"].value = 16
    assert "보다" not in panel.picture.value  # held itself
    panel.hold.value = False
    assert "배치 24 · 길이 64 · 가상 T4보다 −" in panel.picture.value


def limit_of(picture):
    return re.search(r'<line x1="([0-9.]+)" y1="78"', picture)[1]


def test_the_axis_stands_still_while_settings_are_compared():
    panel = comparing_panel()
    panel.controls["model_id"].value = GPT2
    panel.controls["batch_size"].value = 40
    over = limit_of(panel.picture.value)
    panel.controls["batch_size"].value = 36
    assert panel.report.title != panel._before.title and limit_of(panel.picture.value) == over
    panel.controls["gpu"].value = "H200"  # it needs more
    assert limit_of(panel.picture.value) != over


def test_the_tensors_of_a_moment_are_shown():
    panel = comparing_panel()
    panel.controls["model_id"].value, panel.controls["sequence_length"].value = GPT2, 64
    assert "wte.weight" not in panel.picture.value
    panel.look.click()
    assert "wte.weight" in panel.picture.value and "50257×768" in panel.picture.value


def test_in_a_script_a_setting_has_one_picture():
    use_gpu("T4")
    panel = memory_panel()
    panel.controls["model_id"].value = GPT2
    shown = panel.picture.value
    panel.controls["batch_size"].value = 8
    assert "보다" not in panel.picture.value and panel.picture.value == panel.report._repr_svg_() != shown
    panel.controls["batch_size"].value = 4
    assert panel.picture.value == shown == panel.answer(**panel.values()).picture._repr_svg_()


# -- in JupyterLab: messages come to a thread, and the loop of the main thread ignores interrupts ---------------------


def in_a_kernel(steps, made=SquarePanel):
    """Run `steps(panel)` in a thread beside a loop in which the panel was made, as ipykernel 7 does; the panel then."""

    async def kernel():
        panel = made()
        await asyncio.to_thread(steps, panel)
        await asyncio.sleep(0.1)  # what was handed over last
        return panel

    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        panel = asyncio.run(kernel())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        return panel
    finally:
        signal.signal(signal.SIGINT, handler)


def test_a_move_runs_in_the_main_thread():
    def steps(panel):
        panel.controls["side"].value = 3

    panel = in_a_kernel(steps)
    assert panel.seen == [(2, True), (3, True)] and "9 m²" in panel.status.value


def test_a_stop_is_heard_there_too():
    def steps(panel):
        panel.act = interrupt
        panel.controls["side"].value = 3

    panel = in_a_kernel(steps)
    assert is_empty_after_a_stop(panel)


class StoppedAheadPanel(CountingPanel):
    """The stop button is pressed in the first piece that is computed ahead, once `before_it` has come about."""

    def __init__(self):
        self.before_it = None
        super().__init__()

    def answer(self, *, side, **rest):
        answer = super().answer(side=side, **rest)
        if self.before_it is not None and not self._moving:
            before_it, self.before_it = self.before_it, None
            before_it()
            interrupt()
        return answer


def test_a_stop_that_meets_what_is_computed_ahead_is_the_waiting_moves():
    stopped = []

    def steps(panel):
        running, changed = threading.Event(), threading.Event()

        def wait():
            running.set()
            assert changed.wait(10)

        panel.before_it = wait
        panel.controls["side"].value = 1
        assert running.wait(10)
        panel.controls["side"].value = 7
        panel.controls["side"].value = 8
        changed.set()
        stopped.append(asyncio.run_coroutine_threadsafe(after_a_while(panel), panel._loop).result(10))
        panel.controls["side"].value = 9

    async def after_a_while(panel):
        await asyncio.sleep(3 * IDLE_S)  # nothing is computed ahead of a move that was stopped
        return is_empty_after_a_stop(panel), [*panel.asked]

    panel = in_a_kernel(steps, StoppedAheadPanel)
    assert stopped == [(True, [2, 1, 0])]
    assert "81 m²" in panel.status.value and panel.picture.value == "<svg>81</svg>" and panel.asked == [2, 1, 0, 9]


def test_where_messages_come_to_the_main_thread_too():
    """As in Colab: the move comes right after the piece that the stop has met; one that comes later is another."""

    async def kernel():
        panel, loop = StoppedAheadPanel(), asyncio.get_running_loop()
        side, ended = panel.controls["side"], asyncio.Event()

        def move():
            side.value = 7
            seen.append(is_empty_after_a_stop(panel))
            loop.call_later(JUST_S, ended.set)

        panel.before_it = lambda: loop.call_soon(move)
        side.value = 1
        await ended.wait()
        side.value = 8
        seen.append("64 m²" in panel.status.value)

    seen, handler = [], signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(kernel())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert seen == [True, True]


def test_a_stop_is_that_of_all_moves_that_wait():
    """A hand that drags a slider makes many; the one that runs when the button is pressed is not the last."""

    def steps(panel):
        running, changed = threading.Event(), threading.Event()

        def stopped(side):
            running.set()
            assert changed.wait(10)
            interrupt()

        panel.act = stopped
        panel.controls["side"].value = 3
        assert running.wait(10)
        for side in (4, 5):
            panel.controls["side"].value = side
        changed.set()

    panel = in_a_kernel(steps)
    assert [side for side, _ in panel.seen] == [2, 3] and is_empty_after_a_stop(panel)


def test_after_changes_during_a_move_the_last_counts():
    def steps(panel):
        running, changed = threading.Event(), threading.Event()

        def wait(side):
            running.set()
            assert changed.wait(10)

        panel.act = wait
        panel.controls["side"].value = 3
        assert running.wait(10)
        for side in (4, 5, 6):
            panel.controls["side"].value = side
        changed.set()

    panel = in_a_kernel(steps)
    assert panel.seen[1] == (3, True) and panel.seen[-1] == (6, True)
    assert "36 m²" in panel.status.value and panel.picture.value == "<svg>36</svg>"


def test_a_click_during_a_run_is_dropped():
    pressed = []

    def steps(panel):
        running, clicked = threading.Event(), threading.Event()

        def run():
            button.disabled = True
            pressed.append(running.set() or clicked.wait(10))
            button.disabled = False

        button = panel.button("go", "go", run)
        button.click()
        assert running.wait(10)
        button.click()
        clicked.set()

    in_a_kernel(steps)
    assert pressed == [True]


def test_the_planner_draws_its_plans_as_they_are_found(monkeypatch):
    search, seen = planner.plan_training, []

    def small(*, progress, **request):
        def told(plans):
            progress(plans)
            panel = progress.__self__
            rows = max(panel.table.value.count("<tr>") - 1, 0)
            seen.append((len(plans), rows, "<svg" in panel.picture.value, panel.status.value, panel.plans))

        return search(**request | {"model": GPT2, "length": 64, "batch": 4}, progress=told)

    monkeypatch.setattr(planner, "plan_training", small)
    panel = planner.PlannerPanel()
    counts = [found for found, *_ in seen]
    assert counts == sorted(counts) and len({*counts}) > 1 and counts[-1] == len(panel.plans)
    for found, rows, drawn, status, done in seen:
        assert (rows, drawn, done) == (found, found > 0, None) and f"{found}가지" in status  # the search goes on
