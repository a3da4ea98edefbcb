"""The number formats against torch: every code of the 8- and 16-bit ones, random numbers, and what is typed."""

import json
import math
import xml.dom.minidom

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.chapters.c1_numbers.cases import train_adapter, train_weights
from helpers.chapters.c1_numbers.formats import FORMATS, NumberFormat, parse_number, stochastic_round_to_bf16
from helpers.chapters.c1_numbers.pictures import draw_layouts, draw_number, draw_spacing
from helpers.chapters.c1_numbers.tables import FormatTable, ModelSizes

NARROW = [f for f in FORMATS.values() if f.dtype is not None and f.bits <= 16]
INTEGERS = {8: torch.uint8, 16: torch.int16}


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@pytest.mark.parametrize("f", NARROW, ids=lambda f: f.name)
def test_every_code_is_torch_s(f):
    codes = torch.arange(2**f.bits, dtype=torch.int32).to(INTEGERS[f.bits])
    for code, value in enumerate(codes.view(f.dtype).double().tolist()):
        assert same(f.decode(code), value)
        if not math.isnan(value):
            assert f.encode(value) == code


@pytest.mark.parametrize("f", NARROW, ids=lambda f: f.name)
@given(value=st.floats(width=32))
def test_rounding_is_torch_s(f, value):
    expected = torch.tensor(value, dtype=torch.float32).to(f.dtype).double().item()
    got = f.round(value)
    assert (math.isnan(got) and math.isnan(expected)) or got == expected


@given(value=st.floats())
def test_fp64_and_fp32_are_python_s_and_torch_s(value):
    assert same(FORMATS["fp64"].round(value), value) or math.isnan(value)
    expected = torch.tensor(value, dtype=torch.float64).float().double().item()
    assert same(FORMATS["fp32"].round(value), expected) or math.isnan(value)


@pytest.mark.parametrize("f", [f for f in FORMATS.values() if f.dtype], ids=lambda f: f.name)
def test_limits_are_finfo_s(f):
    info = torch.finfo(f.dtype)
    assert (f.largest, f.smallest_normal, f.epsilon) == (info.max, info.tiny, info.eps)
    assert f.round(f.smallest) == f.smallest and f.round(f.smallest / 2) == 0
    assert f.spacing(1.0) == info.eps


def test_tf32_has_fp32_s_range_and_fp16_s_mantissa():
    tf32 = FORMATS["tf32"]
    assert (tf32.bits, tf32.bias, tf32.epsilon) == (19, 127, FORMATS["fp16"].epsilon)
    assert tf32.round(1 + 2**-11) == 1 and tf32.round(1 + 3 * 2**-11) == 1 + 2**-9  # ties to even


@given(exponent=st.integers(2, 9), mantissa=st.integers(1, 12), value=st.floats(-1e6, 1e6))
def test_any_split_rounds_to_the_nearest(exponent, mantissa, value):
    f = NumberFormat("any", exponent, mantissa)
    stored = f.round(value)
    assert f.round(stored) == stored
    if abs(value) <= f.largest:
        assert abs(stored - value) <= f.spacing(value) / 2
    assert f.round(-value) == -stored


@pytest.mark.parametrize(
    "text, value",
    [("0.1", 0.1), ("1/3", 1 / 3), (" 70,000 ", 7e4), ("2**-14", 2**-14), ("1e-8", 1e-8), ("-inf", -math.inf)],
)
def test_what_a_reader_types(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize("text", ["", "abc", "1/0", "0x10", "1..2", "--1", "2**"])
def test_what_is_no_number_is_refused_in_korean(text):
    with pytest.raises(ValueError, match="숫자로 읽을 수 없다"):
        parse_number(text)


def test_stochastic_rounding_keeps_the_mean_and_the_neighbours():
    x = torch.full((100_000,), 1.001)
    rounded = stochastic_round_to_bf16(x, torch.Generator().manual_seed(0))
    assert set(rounded.float().unique().tolist()) == {1.0, 1.0078125}
    assert rounded.double().mean().item() == pytest.approx(1.001, abs=1e-4)


@pytest.mark.parametrize("value", [0.1, 70000.0, -0.0, math.inf, math.nan, 1e-40, 127.5, -128.0])
def test_pictures_are_well_formed(value):
    xml.dom.minidom.parseString(draw_number(value).svg())


@pytest.mark.parametrize("value", [0.1, 70000.0, -0.0, math.inf, math.nan, 1e-40, 127.5, -128.0])
def test_a_pressed_bit_writes_the_number_that_differs_in_it(value):
    """What is written is read as the number whose pattern differs in that bit, and in no other: but for nan's."""
    document = xml.dom.minidom.parseString(draw_number(value, to="number-text").svg())
    parts = {part.getAttribute("data-part"): part for part in document.getElementsByTagName("g")}
    for name, f in FORMATS.items():
        for place in range(f.bits):
            part = parts[f"{name}-{place}"]
            assert part.getAttribute("data-to") == "number-text"
            (text,) = json.loads(part.getAttribute("data-value"))
            wanted = f.encode(value) ^ 1 << (f.bits - 1 - place)
            found = parse_number(text)
            assert math.isnan(f.decode(wanted)) if math.isnan(found) else f.encode(found) == wanted
            assert part.getAttribute("tabindex") == ("0" if place == 0 else "-1")


def test_int8s_bits_are_a_twos_complement():
    document = xml.dom.minidom.parseString(draw_number(-128.0, to="number-text").svg())
    parts = {part.getAttribute("data-part"): part for part in document.getElementsByTagName("g")}
    written = [json.loads(parts[f"int8-{place}"].getAttribute("data-value")) for place in range(8)]
    assert written == [["0.0"], ["-64.0"], ["-96.0"], ["-112.0"], ["-120.0"], ["-124.0"], ["-126.0"], ["-127.0"]]


def test_tables_and_other_pictures():
    for drawing in (draw_layouts(), draw_layouts("fp16"), draw_spacing(("fp4 e2m1",), (-8, 5)), draw_spacing()):
        xml.dom.minidom.parseString(drawing.svg())
    assert FormatTable()._repr_html_().count("<tr>") == len(FORMATS) + 2
    html = ModelSizes(("EleutherAI/polyglot-ko-1.3b",))._repr_html_()
    assert "1,331,810,304" in html and "2.7 GB" in html


def test_fp4_is_the_standards():
    fp4 = FORMATS["fp4 e2m1"]
    assert [fp4.decode(code) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert fp4.round(1e9) == 6 and fp4.round(-5.0) == -4  # ties to even


def test_only_the_linear_layers_are_quantized():
    sizes = ModelSizes(("meta-llama/Llama-3.1-8B",))
    count, linear = sizes.counts["meta-llama/Llama-3.1-8B"]
    embeddings = 2 * 128_256 * 4096
    norms = (2 * 32 + 1) * 4096
    assert (count, linear) == (8_030_261_248, 8_030_261_248 - embeddings - norms)
    assert sizes.nbytes("meta-llama/Llama-3.1-8B", "NF4") == (linear * 4.127 + (count - linear) * 16) / 8


def test_trainings_of_the_cases_go_wrong_as_reported():
    assert "unscale FP16" in train_adapter().error
    assert not train_adapter(adapter="fp16", scaler=False).learned  # its gradients underflow
    assert train_adapter(adapter="fp32").learned
    assert not train_weights().learned and not train_weights("bf16", rounding="nearest").learned
    for setting in ({"weights": "fp32"}, {"master": True}, {"rounding": "stochastic"}):
        assert train_weights(**setting).learned
