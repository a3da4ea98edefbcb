"""docs/others.md and its picture are what the judged rows and the public formulas say."""

import pytest

from tools import others


def test_the_page_and_its_picture_are_computed():
    assert others.PAGE.read_text(encoding="utf-8") == others.page(), "python tools/others.py"
    assert others.PICTURE.read_text(encoding="utf-8") == others.picture().svg(), "python tools/others.py"


def run(**changes):
    return others.Run("a", "b", "full", 32, True, 10**9, 0.0, 1.0, 10**9, 24, 2048, 16, 50_000, 4, 512, **changes)


def test_each_formula_by_hand():
    assert others.deepspeed(run()) == 20 * 10**9
    assert others.sixteen_bytes(run()) == 16 * 10**9
    assert others.llama_factory(run()) == 18 * 10**9
    assert others.accelerate(run()) == 8 * 10**9  # "step": two states in fp32
    parameters = 2 * 50_000 * 2048 + 2048 * 512 + 8 * 2048 * 24 + 2 * 2048 + 12 * 24 * 2048**2
    attention = 5 * 16 * 512 / 2048
    assert others.eleuther(run()) == parameters * (2 + 4 + 12) + int(512 * 4 * 2048 * 24 * (34 + attention))
    assert others.eleuther(run(checkpointed=True)) == parameters * 18 + 512 * 4 * 2048 * 24 * 34


@pytest.mark.parametrize("formula", [formula for formula, _, _ in others.FORMULAS.values()])
def test_a_formula_answers_only_for_what_it_is_made_for(formula):
    assert formula(run(adam=False)) is None


def test_adapters_have_an_answer_in_one_table_alone():
    lora = others.Run("a", "b", "lora", 16, False, 10**9, 0.0, 7.0)
    said = {name: formula(lora) for name, (formula, _, _) in others.FORMULAS.items()}
    assert said.pop("LLaMA-Factory의 표") == 14 * 10**9 and set(said.values()) == {None}


def test_ours_stand_beside_each_formula_on_the_same_rows():
    found = others.errors()
    ours = {run.name for _, run in found[others.OURS]}
    assert len(ours) == len(found[others.OURS])
    assert all({run.name for _, run in points} <= ours for points in found.values())
