"""The bar of a report, opened: every level sums to the byte, names are right, and it draws itself in both languages."""

from contextlib import redirect_stdout
from html.parser import HTMLParser
from io import StringIO

import numpy as np
import pytest
import torch

from helpers import gpu_memory_experiment
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.errors import WrongValue
from virtual_gpu.language import set_language
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.depth import with_depth
from virtual_gpu.step.predict import predict_memory
from virtual_gpu.trace.details import Held, Origin, Place
from virtual_gpu.trace.timeline import CATEGORIES
from virtual_gpu.trace.tree import Node, Rests, Tensors, layer_of, tree_of

LAYERS = 6
MODEL = with_depth(load_config("Qwen/Qwen3-0.6B"), LAYERS)
SMALL = {"model_id": MODEL, "sequence_length": 128, "batch_size": 2, "gpu": "T4"}


def experiment(**settings):
    with redirect_stdout(StringIO()):
        return gpu_memory_experiment(**settings)


def nodes(node):
    yield node
    for child in node.children:
        if isinstance(child, Node):
            yield from nodes(child)


def leaves(node):
    for child in node.children:
        yield from leaves(child) if isinstance(child, Node) else [child]


@pytest.fixture(scope="module")
def predicted():
    return predict_memory(**SMALL)


@pytest.fixture(scope="module")
def qlora():
    return experiment(**SMALL, peft="qlora", precision="mixed_fp16")


@pytest.fixture(scope="module")
def stopped():
    return experiment(model_id=MODEL, batch_size=40, gpu="T4")


@pytest.mark.parametrize("name", ["predicted", "qlora", "stopped"])
def test_every_level_sums_to_the_byte(name, request):
    report = request.getfixturevalue(name)
    root = report.zoom().root
    assert {part.key: part.nbytes for part in root.children} == {k: n for k, n in report.at_peak.items() if n}
    for node in nodes(root):
        assert node.nbytes == sum(child.nbytes for child in node.children) > 0
    # Counted anew, past the tree: its leaves are all the blocks there are.
    held = report.zoom().held
    tensors = [leaf for leaf in leaves(root) if isinstance(leaf, Tensors)]
    assert sum(leaf.count for leaf in tensors) == len(held)
    assert sum(leaf.nbytes for leaf in leaves(root)) == sum(one.held for one in held)


@pytest.mark.parametrize("name", ["predicted", "stopped"])
def test_every_phase_opens(name, request):
    report = request.getfixturevalue(name)
    for number, phase in enumerate(report.timeline.phases, start=1):
        held = report.zoom(number).held
        sums = [sum(one.held for one in held if one.category == category) for category in CATEGORIES]
        assert sums == phase.live[phase.total.argmax()].tolist()


def test_watching_changes_nothing(predicted):
    assert all(
        np.array_equal(getattr(predicted.zoom().details.trace, column), getattr(predicted.timeline.trace, column))
        for column in ("born", "nbytes", "category", "span", "held", "stream")
    )


def test_parameters_and_states_have_their_names(predicted):
    found = {(one.category, one.origin.made.module, one.origin.name): one.origin for one in predicted.zoom(4).held}
    weight = found["parameters", "model.layers.3.mlp.up_proj", "weight"]
    assert (weight.shape, weight.dtype) == ((3072, 1024), "float32")
    assert found["optimizer", "model.layers.3.mlp.up_proj", "weight: exp_avg"].shape == (3072, 1024)
    gradients = {one.origin.name for one in predicted.zoom(3).held if one.category == "gradients"}
    assert gradients == {"weight.grad"}
    unnamed = [one for one in predicted.zoom(4).held if one.category != "activations" and not one.origin.name]
    assert [one.origin.dtype for one in unnamed] == ["int64"] * len(unnamed)  # the batch


def test_what_is_saved_belongs_to_the_line_that_keeps_it(predicted):
    saved = [one for one in predicted.zoom(4).held if one.place.module == "model.layers.3.mlp.down_proj" and
             one.category == "activations"]  # fmt: skip
    [product] = [one for one in saved if one.origin.made.operation == "mul"]  # act(gate) * up, the projection's input
    assert product.origin.shape == (2, 128, 3072)
    assert product.origin.made.module == "model.layers.3.mlp"
    assert product.origin.kept.operation in ("MmBackward0", "UnsafeViewBackward0", "ViewBackward0")
    file, line = product.origin.kept.line
    with open(file) as source:
        assert "self.down_proj(" in source.read().splitlines()[line - 1]


def test_before_backward_what_will_keep_it_is_known(stopped):
    assert not stopped.fits
    assert stopped.last_phase == "forward"
    held = [one for one in stopped.zoom().held if one.origin.made.operation == "silu"]
    assert held and {one.origin.kept.operation for one in held} == {"MulBackward0"}


def test_a_checkpoint_runs_forward_again():
    details = predict_memory(**SMALL, gradient_checkpointing=True).zoom().details
    spans = details.trace.span[details.trace.allocates].tolist()
    places = [(span, one.made.module, one.kept) for span, one in zip(spans, details.origins, strict=True)
              if one.made.operation == "silu"]  # fmt: skip
    names = [f"model.layers.{n}.mlp.act_fn" for n in range(LAYERS)]
    assert [(span, name) for span, name, _ in places if span > 6] == [
        *((7, name) for name in names), *((9, name) for name in reversed(names))
    ]  # fmt: skip
    assert {kept and kept.operation for span, _, kept in places if span == 9} == {"MulBackward0"}


def test_layers_that_are_alike_are_one(predicted):
    [forward] = [node for node in nodes(predicted.zoom(4).root) if node.kind == "phase" and node.key == 7
                 and len(node.children) > 2]  # fmt: skip
    folded = [layer for layer in forward.children if layer.alike]
    assert [layer.alike for layer in folded] == [list(range(1, LAYERS))]
    assert all(leaf.count % (LAYERS - 1) == 0 for leaf in leaves(folded[0]))


def held_in(module, nbytes=512, held=None, **origin):
    return Held("activations", 1, nbytes, held or nbytes, Origin(Place("mul", module, ("a.py", 1)), **origin))


def test_what_differs_is_not_folded():
    root = tree_of([held_in("h.0.mlp"), held_in("h.1.mlp"), held_in("h.2.mlp", 1024), held_in("g.3.mlp")])
    [[phase]] = [category.children for category in root.children]
    assert [(layer.key, layer.alike) for layer in phase.children] == [("h.0", [0, 1]), ("h.2", []), ("g.3", [])]


def test_rests_are_told_apart():
    [category] = tree_of([held_in("h.0", 512, 2048), held_in("h.1", 512, 512)]).children
    assert category.children[-1] == Rests(1536, 1)
    assert category.nbytes == 2560


@pytest.mark.parametrize(
    "module, expected",
    [
        ("model.layers.3.mlp.act", ("model.layers.3", "mlp.act")),
        ("model.layers.3.mlp.experts.5", ("model.layers.3", "mlp.experts.5")),
        ("model.layers.3", ("model.layers.3", "")),
        ("0", ("0", "")),
        ("0.weight", ("0", "weight")),
        ("lm_head", ("lm_head", "")),
        ("", ("", "")),
        (None, (None, "")),
    ],
)
def test_layers_of_modules(module, expected):
    assert layer_of(Place("mul", module, None)) == expected


def test_an_unknown_phase_and_a_report_without_tensors(predicted):
    for phase in (0, 7, True, "forward"):
        with pytest.raises(WrongValue, match="1~6"):
            predicted.zoom(phase)
    gpu = VirtualGPU(CATALOG["T4"])
    mine = gpu.place(torch.zeros(2**20))
    beside = experiment(**SMALL | {"gpu": gpu})
    assert gpu.owns(mine)
    with pytest.raises(WrongValue, match="predict_memory"):
        beside.zoom()


class Balanced(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.seen = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, _):
        self.seen.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("language", ["ko", "en"])
@pytest.mark.parametrize("name", ["predicted", "stopped"])
def test_it_draws_itself(name, language, request):
    zoom = request.getfixturevalue(name).zoom()
    set_language(language)
    try:
        page, text = zoom._repr_html_(), repr(zoom)
    finally:
        set_language("ko")
    parsed = Balanced(page)
    assert "script" not in parsed.seen and parsed.seen.count("details") > 10
    assert len(page) < 64 * 1024
    assert ("순전파" in page) == ("순전파" in text) == (language == "ko")
    assert "/work/" not in page and "site-packages" not in page


def test_rows_for_those_who_go_on(predicted):
    pytest.importorskip("pandas")
    zoom = predicted.zoom()
    frame = zoom.to_frame()
    assert frame.groupby("category").held_bytes.sum().to_dict() == {k: n for k, n in predicted.at_peak.items() if n}
    assert len(frame) == len(zoom.held)
