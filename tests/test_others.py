"""docs/others.md and its picture are what the judged rows and the public formulas say."""

import pytest

from tools import others
from tools import others_formulas as formulas
from virtual_gpu.units import MiB


def test_the_page_and_its_picture_are_computed():
    assert others.PAGE.read_text(encoding="utf-8") == others.page(), "python tools/others.py"
    assert others.PICTURE.read_text(encoding="utf-8") == others.picture().svg(), "python tools/others.py"


def run(method="full", bits=32, mixed=True, **changes):
    """Of 24 layers of 2048 numbers, 16 heads and 50,000 words: four sequences of 512 tokens."""
    shape = (1.0, 10**9, 24, 2048, 16, 50_000, 4, 512)
    return formulas.Run("a", "b", method, bits, mixed, 10**9, 0.0, *shape, **{"inner": 8192} | changes)


def test_each_formula_by_hand():
    assert formulas.deepspeed(run()) == 20 * 10**9
    assert formulas.sixteen_bytes(run()) == 16 * 10**9
    assert formulas.llama_factory(run()) == 18 * 10**9
    assert formulas.accelerate(run()) == 8 * 10**9  # "step": two states in fp32
    parameters = 2 * 50_000 * 2048 + 2048 * 512 + 8 * 2048 * 24 + 2 * 2048 + 12 * 24 * 2048**2
    attention = 5 * 16 * 512 / 2048
    assert formulas.eleuther(run()) == parameters * (2 + 4 + 12) + int(512 * 4 * 2048 * 24 * (34 + attention))
    assert formulas.eleuther(run(segment=1)) == parameters * 18 + 512 * 4 * 2048 * 24 * 34


# "Total" of getAllComputedData in src/App.js of RahulSChand/gpu_poor ad2fc0e, run by node on an uploaded configuration.
@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({"method": "full"}, 25253),
        ({"method": "full", "segment": 1}, 16114),
        ({"method": "full", "adam": False}, 18328),
        ({"method": "lora"}, 14883),
        ({"method": "lora", "segment": 1, "adam": False}, 5732),
        ({"method": "qlora"}, 13302),
        ({"method": "qlora", "segment": 1}, 4162),
        ({"method": "qlora", "adam": False}, 13300),
    ],
)
def test_gpu_poor_says_what_the_site_says(changes, total):
    assert formulas.gpu_poor(run(bits=16, mixed=False, **changes)) == (total - 650) * MiB


def llama(method, length, batch, **changes):
    shape = (7.0, 0, 32, 4096, 32, 32_000, batch, length)
    return formulas.Run("a", "b", method, 16, False, 10**9, 0.0, *shape, inner=11008, **changes)


@pytest.mark.parametrize(
    ("method", "length", "batch", "adam", "total"),
    [
        ("full", 512, 1, True, 58219),
        ("full", 40, 2, False, 27022),
        ("lora", 768, 4, True, 56655),
        ("qlora", 512, 1, True, 11067),
        ("qlora", 40, 2, False, 5395),  # shorter than 50 tokens
    ],
)
def test_gpu_poor_says_what_the_site_says_of_llama_2(method, length, batch, adam, total):
    assert formulas.gpu_poor(llama(method, length, batch, adam=adam)) == (total - 650) * MiB


# "estimated_peak_memory_per_gpu" of LLMAnalysis.training in cli99/llm-analysis d841e40, with its own checks off
# (python -O) where weights have 32 bits or the MLP is gated.
@pytest.mark.parametrize(
    ("changes", "peak"),
    [
        ({}, 23793078272),
        ({"segment": 1}, 23793078272),  # the gradients are more than what is kept, with or without
        ({"scores": True}, 24116359168),
        ({"gated": True}, 31104487424),
        ({"mixed": False}, 29181116416),
    ],
)
def test_llm_analysis_says_what_the_package_says(changes, peak):
    assert formulas.llm_analysis(run(**changes)) == peak


def gpt2(mixed=True, **changes):
    shape = (0.1, 10**8, 12, 768, 12, 50_257, 10, 128)
    return formulas.Run("a", "b", "full", 32, mixed, 10**9, 0.0, *shape, inner=3072, **changes)


@pytest.mark.parametrize(
    ("changes", "peak"),
    [({}, 2478061568), ({"segment": 1}, 2352580096), ({"scores": True}, 2523772928), ({"mixed": False}, 3363407872)],
)
def test_llm_analysis_says_what_the_package_says_of_gpt2(changes, peak):
    assert formulas.llm_analysis(gpt2(**changes)) == peak


@pytest.mark.parametrize("formula", [formula for formula, _, _ in formulas.FORMULAS.values()])
def test_a_formula_answers_only_for_what_it_is_made_for(formula):
    assert formula(run(adam=False)) is None
    if formula is not formulas.llama_factory:
        assert formula(run("lora", 16, False, other_adapter=True)) is None


def test_gpu_poor_knows_16_bits_alone_and_llm_analysis_segments_of_one_layer():
    assert formulas.gpu_poor(run()) is None and formulas.gpu_poor(run(mixed=False)) is None
    assert formulas.llm_analysis(run(segment=8)) is None
    assert formulas.llm_analysis(run(bits=16, mixed=False)) is None
    assert formulas.eleuther(run(bits=16, mixed=False)) is None


def test_adapters_whose_shape_is_not_known_have_an_answer_in_one_table_alone():
    lora = formulas.Run("a", "b", "lora", 16, False, 10**9, 0.0, 7.0)
    said = {name: formula(lora) for name, (formula, _, _) in formulas.FORMULAS.items()}
    assert said.pop("LLaMA-Factory의 표") == 14 * 10**9 and set(said.values()) == {None}


def test_ours_stand_beside_each_formula_on_the_same_rows():
    found = others.errors()
    ours = {run.name for _, run in found[others.OURS]}
    assert len(ours) == len(found[others.OURS])
    assert all({run.name for _, run in points} <= ours for points in found.values())
