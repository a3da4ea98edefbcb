"""Quantization: round trips, what is refused, and agreement with bitsandbytes and with the papers."""

import json
import math
import xml.dom.minidom

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from helpers.chapters.c2_quantization.cases import answer_in_int8, stored, train_with_states
from helpers.chapters.c2_quantization.charts import draw_code_stems, draw_errors, draw_outliers, draw_state
from helpers.chapters.c2_quantization.checks import FIXED
from helpers.chapters.c2_quantization.code_tables import load_bitsandbytes, nf4_table
from helpers.chapters.c2_quantization.examples import DISTRIBUTIONS, book_numbers, example_tensor
from helpers.chapters.c2_quantization.pictures import draw_quantized
from helpers.chapters.c2_quantization.quantization import METHODS, dequantize, double_quantize, quantize
from helpers.chapters.c2_quantization.tables import table
from helpers.chapters.c2_quantization.whole_model import (
    int8_linear,
    int8_model,
    outlier_columns,
    quantize_model,
    smoothed,
)
from helpers.small_model import adam_state, score, train_small_model, with_outlier_channels

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
SHAPES = npst.array_shapes(min_dims=1, max_dims=4, max_side=7)
TENSORS = npst.arrays("float32", SHAPES, elements=FLOATS).map(torch.from_numpy)


@st.composite
def tensors_and_settings(draw):
    tensor = draw(TENSORS)
    grouping = draw(st.sampled_from(["tensor", "channel", "block"]))
    setting = {}
    if grouping == "block":
        setting["block_size"] = draw(st.integers(1, tensor.numel()))
    elif grouping == "channel" and tensor.dim() > 1:
        setting["per_channel"] = True
    return tensor, setting


def step_of_each_number(q):
    groups = torch.arange(q.codes.numel()) // q.size
    return q.scales[groups].double().reshape(q.codes.shape)


@settings(max_examples=200, deadline=None)
@given(tensors_and_settings(), st.sampled_from(["absmax", "zero_point"]), st.integers(2, 8))
def test_even_codes_restore_within_half_a_step(tensor_and_setting, method, bits):
    tensor, setting = tensor_and_setting
    q = quantize(tensor, method, bits=bits, **setting)
    step = step_of_each_number(q)
    error = (dequantize(q).double() - tensor.double()).abs()
    # fp32 holds scale and result to 24 bits each: that much of the number itself may be lost besides.
    assert (error <= step / 2 + tensor.double().abs() * 2**-22 + 2e-45).all()
    assert q.codes.shape == tensor.shape and dequantize(q).shape == tensor.shape
    assert q.codes.min() >= q.first_code and q.codes.max() < q.first_code + 2**bits
    assert (dequantize(q)[tensor == 0] == 0).all()


@settings(max_examples=100, deadline=None)
@given(tensors_and_settings())
def test_nf4_takes_the_nearest_value(tensor_and_setting):
    tensor, setting = tensor_and_setting
    q = quantize(tensor, "nf4", **setting)
    scale = step_of_each_number(q)
    nearest = (tensor.double()[..., None] - torch.tensor(nf4_table()).double() * scale[..., None]).abs().amin(-1)
    error = (dequantize(q).double() - tensor.double()).abs()
    assert (error <= nearest + scale * 1e-6 + 2e-38).all()


@settings(max_examples=100, deadline=None)
@given(tensors_and_settings(), st.integers(2, 8))
def test_quantile_shares_are_even_and_in_order(tensor_and_setting, bits):
    tensor, setting = tensor_and_setting
    q = quantize(tensor, "quantile", bits=bits, **setting)
    numbers, codes, restored = (t.reshape(-1) for t in (tensor, q.codes, dequantize(q)))
    for start in range(0, len(numbers), q.size):
        own, own_codes, own_restored = (t[start : start + q.size] for t in (numbers, codes, restored))
        order = own.argsort()
        assert (own_codes[order].diff() >= 0).all()
        if len(own.unique()) == len(own):
            used = torch.bincount(own_codes.long(), minlength=2**bits)
            assert used.max() - used.min() <= 1
        for code in own_codes.unique():
            members = own[own_codes == code].double()
            slack = members.abs().max() * 1e-6
            value = own_restored[own_codes == code][0].double()
            assert members.min() - slack <= value <= members.max() + slack


@given(TENSORS, st.sampled_from(METHODS))
@settings(max_examples=100, deadline=None)
def test_every_quantization_draws_itself_and_says_its_cost(tensor, method):
    q = quantize(tensor, method)
    assert q._repr_svg_().startswith("<svg") and "nan" not in q._repr_svg_()
    assert 0 <= q.wasted_codes < 2**q.bits and q.counts.sum() == tensor.numel()
    assert q.bits_per_parameter >= q.bits
    assert math.isfinite(q.relative_error)


@pytest.mark.parametrize(("outlier", "reach"), [(20.0, 32), (-32.0, 32), (0.0, 32), (1e30, 1.02e30)])
def test_an_outlier_is_marked_on_an_axis_that_stands_still(outlier, reach):
    numbers = example_tensor("normal", 64)
    numbers[0] = outlier
    q = quantize(numbers, bits=4)
    still, answers = draw_quantized(q, outlier), draw_quantized(q, outlier, "quantization-outlier")
    assert f"이상치 {outlier:g}" in still.svg() and "data-part" not in still.svg()
    mark = xml.dom.minidom.parseString(answers.svg()).getElementsByTagName("g")[0]
    left, width, low, high, _ = json.loads(mark.getAttribute("data-axis"))
    assert (low, high) == (pytest.approx(-reach), pytest.approx(reach))
    drawn = float(mark.getElementsByTagName("circle")[0].getAttribute("cx"))
    assert drawn == pytest.approx(left + width * (outlier - low) / (high - low), abs=0.01)
    assert float(mark.getAttribute("aria-valuenow")) == outlier


@pytest.mark.parametrize("method", METHODS)
def test_zeros_one_element_and_a_short_last_block(method):
    size = FIXED.get(method, (4, None))[1] or 4
    block = {} if FIXED.get(method, (4, None))[1] else {"block_size": size}
    assert (dequantize(quantize(torch.zeros(5, 3), method, **block)) == 0).all()
    assert dequantize(quantize(torch.tensor(3.0), method)).shape == ()
    if method != "type_range":
        assert dequantize(quantize(torch.tensor([3.0]), method)).item() == pytest.approx(3.0)
    q = quantize(example_tensor(count=2 * size + 2), method, **block)
    assert q.groups == 3 and dequantize(q).shape == (2 * size + 2,)


def test_the_tensor_may_change_afterwards_and_need_gradients_and_be_a_view():
    tensor = torch.nn.Parameter(example_tensor().reshape(64, 64))
    q = quantize(tensor.T)
    before = q.relative_error
    with torch.no_grad():
        tensor.zero_()
    assert q.relative_error == before > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_every_float_type(dtype):
    assert quantize(example_tensor().to(dtype)).relative_error < 0.02


@pytest.mark.parametrize(
    ("tensor", "setting", "message"),
    [
        (torch.arange(4), {}, "int64"),
        (torch.ones(4, dtype=torch.complex64), {}, "complex64"),
        (torch.ones(4, dtype=torch.bool), {}, "bool"),
        ([1.0, 2.0], {}, "list"),
        (torch.empty(0), {}, "빈 텐서"),
        (torch.tensor([1.0, float("nan")]), {}, "nan"),
        (torch.tensor([1.0, float("inf")]), {}, "inf"),
        (torch.tensor([1e300], dtype=torch.float64), {}, "fp32"),
        *[(torch.ones(4), {"bits": bits}, f"bits={bits!r}") for bits in (0, 1, 9, -1, 4.0, "8", True)],
        (torch.ones(4), {"method": "nf4", "bits": 8}, "NF4"),
        (torch.ones(64), {"method": "mxfp4", "block_size": 64}, "MXFP4의 블록은 언제나 값 32개"),
        (torch.ones(8, 8), {"method": "nvfp4", "per_channel": True}, "NVFP4의 블록은 언제나 값 16개"),
        *[(torch.ones(4), {"block_size": size}, f"block_size={size!r}") for size in (0, 5, -1, 2.0, "2", True)],
        (torch.ones(4), {"per_channel": True}, "2차원"),
        (torch.ones(2, 2), {"per_channel": True, "block_size": 2}, "함께"),
        (torch.ones(4), {"method": "absmx"}, "absmax"),
        (torch.ones(4), {"method": "type_range", "source": torch.int8}, "실수"),
        (torch.full((4,), 1e6), {"method": "type_range", "source": torch.float16}, "범위"),
    ],
)
def test_what_cannot_be_quantized_is_refused_clearly(tensor, setting, message):
    with pytest.raises(ValueError, match=message):
        quantize(tensor, **setting)


def test_the_books_example():
    q = quantize(book_numbers())
    assert q.scales.item() == pytest.approx(17 / 127)
    assert (int(q.codes.min()), int(q.codes.max())) == (-127, 112)


def test_nf4_is_bitsandbytes():
    bnb = load_bitsandbytes()
    theirs = bnb.functional.get_4bit_type("nf4", device="cpu")
    assert (torch.tensor(nf4_table()) - theirs).abs().max() < 1e-6
    for distribution in DISTRIBUTIONS:
        tensor = example_tensor(distribution, 64 * 100)
        packed, state = bnb.functional.quantize_4bit(tensor, blocksize=64, quant_type="nf4")
        q = quantize(tensor, "nf4", block_size=64)
        codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten()
        assert torch.equal(codes.short(), q.codes)
        assert torch.equal(state.absmax, q.scales)
        restored = bnb.functional.dequantize_4bit(packed, state)
        assert torch.allclose(restored, dequantize(q), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method, size, scale_bits", [("mxfp4", 32, 8), ("nvfp4", 16, 8)])
def test_four_bit_floats_cost_what_the_rule_says(method, size, scale_bits):
    x = example_tensor(count=4096)
    whole = 32 if method == "nvfp4" else 0  # one fp32 number for the tensor
    q = quantize(x, method)
    assert q.bits_per_parameter == 4 + scale_bits / size + whole / 4096
    assert q.relative_error < 0.13 and q.codes.max() < 16


def test_mxfp4_is_the_standards_example():
    # Scale 2: the largest is 10, whose exponent is 3, and that of 6 is 2.
    q = quantize(torch.tensor([10.0, 0.9, 1.0, -5.0, 13.0, 0.5, 1.6, 0.0]).repeat(4), "mxfp4")
    assert q.scales.tolist() == [2.0]
    assert dequantize(q)[:8].tolist() == [8.0, 1.0, 1.0, -4.0, 12.0, 0.0, 2.0, 0.0]  # ties to the even code


def test_nvfp4_scales_are_fp8_numbers():
    q = quantize(example_tensor(count=4096), "nvfp4")
    whole = q.original.abs().max() / 6 / 448
    eight = (q.scales / whole).to(torch.float8_e4m3fn).float()
    assert torch.allclose(eight * whole, q.scales, rtol=1e-6) and eight.max() == 448


def test_double_quantization_costs_what_the_paper_says():
    q = quantize(example_tensor(count=64 * 256 * 8), "nf4", block_size=64)
    twice = double_quantize(q)
    # 8/64 + 32/(64 · 256), and one mean a tensor
    assert twice.bits_per_parameter == pytest.approx(4 + 0.126953125 + 32 / q.codes.numel())
    assert q.relative_error < twice.relative_error < q.relative_error * 1.01
    assert double_quantize(quantize(torch.zeros(4), "nf4", block_size=1)).relative_error == 0
    with pytest.raises(ValueError, match="스케일"):
        double_quantize(quantize(example_tensor(), "quantile", bits=4))


def test_outlier_columns_and_int8_product_are_bitsandbytes():
    x = example_tensor(count=64 * 128).reshape(64, 128)
    x[:, [3, 70]] *= 20
    weight = example_tensor(count=32 * 128, seed=5).reshape(32, 128)
    functional = load_bitsandbytes().functional
    codes, absmax, columns = functional.int8_vectorwise_quant(x.half(), threshold=6.0)
    assert outlier_columns(x.half()).tolist() == columns.tolist() == [3, 70]
    kept = [i for i in range(128) if i not in (3, 70)]
    ours = quantize(x.half()[:, kept], per_channel=True)
    # Theirs takes a row's absmax over what is below 6 in the outlier columns too, and divides in fp16.
    alike = (absmax / 127 / ours.scales - 1).abs() < 1e-3
    assert alike.sum() > 40
    assert (ours.codes - codes[:, kept])[alike].abs().max() <= 1
    exact = x @ weight.T
    errors = [float((int8_linear(x, weight, threshold) - exact).norm() / exact.norm()) for threshold in (None, 6.0)]
    assert errors[1] < errors[0] / 3
    restored = dequantize(quantize(weight, per_channel=True))
    assert torch.equal(int8_linear(x, weight, 1e-9), x @ restored.T)  # every column is an outlier


def test_bits_per_parameter_all_in():
    x = example_tensor(count=4096)
    assert quantize(x).bits_per_parameter == 8 + 32 / 4096
    assert quantize(x, block_size=64).bits_per_parameter == 8.5
    assert quantize(x, "zero_point", bits=4, block_size=64).bits_per_parameter == 4 + 36 / 64
    assert quantize(x, "quantile", bits=4, block_size=64).bits_per_parameter == 12
    assert quantize(x, "type_range").bits_per_parameter == 8


@pytest.mark.slow
def test_the_small_model_and_what_quantization_does_to_it():
    model = train_small_model()
    assert train_small_model() is model
    loss, known = score(model)
    assert known == 64 and loss < 0.03
    wild = with_outlier_channels(model, where="weights")
    assert score(wild)[0] == pytest.approx(loss, rel=1e-3)
    bad = quantize_model(wild, bits=4)
    good = quantize_model(wild, method="nf4", block_size=32)
    assert score(bad.model)[1] < 5 and score(good.model)[1] >= 62
    assert bad.bits_per_parameter < 4.01 and good.bits_per_parameter == 5
    assert bad.relative_error > good.relative_error > 0
    assert score(wild)[0] == pytest.approx(loss, rel=1e-3)  # the copy was quantized, not the model
    assert "head" not in bad.weights and len(bad.weights) == 8


@pytest.mark.slow
def test_outliers_in_activations_are_held_by_columns_or_by_smoothing():
    model = train_small_model()
    loss, _ = score(model)
    wild = with_outlier_channels(model, 100.0, channels=6)
    calm = smoothed(wild)
    for same in (wild, calm):
        assert score(same)[0] == pytest.approx(loss, rel=1e-3)
    assert score(int8_model(wild))[1] < 60
    for held in (int8_model(wild, threshold=6.0), int8_model(calm)):
        assert score(held)[1] == 64
    assert answer_in_int8(threshold=6.0).columns == 6 and answer_in_int8(smooth=0.5).columns == 0


def test_a_variance_needs_codes_near_zero():
    assert train_with_states("fp32", "fp32").learned
    assert train_with_states("linear", "dynamic").learned
    assert not train_with_states("dynamic", "linear").learned
    small = torch.logspace(-6, 0, 256)
    for kind, lost in (("linear", 100), ("dynamic", 0)):
        restored, bits = stored(small, kind)
        assert bits == 8.125 and (restored == 0).sum() >= lost and (lost or (restored > 0).all())


@pytest.mark.slow
def test_adam_s_state_is_that_of_the_small_model():
    momentum, variance = adam_state()
    assert momentum.shape == variance.shape == train_small_model().blocks[0].up.weight.shape
    assert variance.min() > 0 and (momentum.abs() <= 10 * variance.sqrt()).all()


def test_charts_and_tables():
    x = example_tensor()
    absmax, shares = quantize(x, bits=4), quantize(x, "quantile", bits=4)
    linear = torch.arange(256) / 255
    rows = [{"factor": factor, "int8": 0.1 * factor} for factor in (1, 10)]
    for chart in (
        draw_errors([absmax, quantize(x, bits=8), shares]),
        draw_code_stems(absmax, shares),
        draw_state(x.square(), {"linear": linear}),
        draw_outliers(rows),
    ):
        xml.dom.minidom.parseString(chart.svg())
    assert draw_errors([absmax, shares]).svg() == draw_errors([absmax, shares]).svg()
    shown = table([{"setting": "a", "error": 0.1234, "capitals": 64}])
    assert "12.3%" in repr(shown) and "상대 오차" in shown._repr_html_() and "64" in repr(shown)
