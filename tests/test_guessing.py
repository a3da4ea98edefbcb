"""Guesses meet their results; cases count their experiments."""

import pytest

from helpers import guess, guesses
from helpers.guessing import _made
from helpers.self_check import Case, right
from virtual_gpu.errors import UnknownName, WrongValue
from virtual_gpu.units import GiB


@pytest.fixture(autouse=True)
def no_guesses():
    _made.clear()
    yield
    _made.clear()


def test_a_guess_is_drawn_beside_its_result():
    mine = guess("3.1", 12, "GiB")
    assert repr(mine) == "[3.1] 12 GiB"
    picture = mine.against(15 * GiB)
    assert picture.alt == "3.1: 내 예상 12 GiB, 결과 15 GiB"
    assert "(-20%)" in picture.svg() and mine.is_close


def test_an_empty_guess_shows_the_result_alone():
    mine = guess("3.1", None, "%")
    assert "아직 비어 있다" in repr(mine)
    assert mine.against(0.25).alt == "3.1: 결과 25%. 예상은 적지 않았다"
    assert not mine.is_close


def test_a_choice():
    assert guess("a", "OOM", ("fits", "oom")).against("oom") == "맞혔다. 예상 oom, 결과 oom."
    assert guess("b", "fits", ("fits", "oom")).against("oom").startswith("빗나갔다")
    assert guess("c", None, ("fits", "oom")).against("oom") == "결과는 oom."


@pytest.mark.parametrize("value", ["열두", -1, True, float("nan"), float("inf")])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(WrongValue, match="0 이상의 숫자"):
        guess("3.1", value, "GiB")


def test_what_is_no_choice_is_refused():
    with pytest.raises(UnknownName, match="fits, oom"):
        guess("3.1", "maybe", ("fits", "oom"))


def test_the_tally_counts_what_met_its_result():
    guess("not met", 3)
    guess("far", 3).against(6)
    guess("empty", None).against(6)
    guess("near", 5.5).against(6)
    guess("near", 6.5).against(6)  # again: the later one counts
    tally = guesses()
    assert [one.name for one in tally] == ["far", "empty", "near"]
    assert repr(tally).splitlines() == [
        "far · 3 · 6 · -50%",
        "empty · – · 6 · –",
        "near · 6.5 · 6 · +8%",
        "예상 3개 가운데 2개를 적었고, 1개가 20% 안에 들었다.",
    ]
    assert "<table" in tally._repr_html_()
    assert "예상 0개" in repr(type(tally)())
    named = guess("named", "b", ("a", "b"))
    named.against("b")
    assert repr(type(tally)([named])).endswith("1개가 맞았다.")  # a name has no 20 %
    assert repr(type(tally)([named, tally[0]])).endswith("1개를 맞혔다(수는 20% 안이면 맞힌 것으로 센다).")


def a_case(**changes):
    def experiment(length=1):
        if length < 1:
            raise WrongValue("length")
        return 2 * length

    settings = {"experiment": experiment, "thread": "somewhere #1", "budget": 2}
    return Case("0-A", lambda answer: right() if answer == 3 else "wrong", lambda: ["look"], "3", **settings | changes)


def test_a_case_counts_its_experiments(capsys):
    one = a_case()
    assert one.run(length=4) == 8
    assert one.run(length=0) is None and one.run(foo=3) is None and one.run(length="x") is None  # said, not counted
    assert one.run() == 2
    assert one.run(length=9) is None
    said = capsys.readouterr().out
    assert "length=0: 쓸 수 없는 설정" in said and "'foo': 모르는 설정" in said and "length='x': 쓸 수 없는" in said
    assert "[0-A] 1/2 length=4" in said and "[0-A] 2/2" in said and "모두 썼다" in said
    one.check(2)
    assert "somewhere" not in capsys.readouterr().out
    one.check(3)
    assert capsys.readouterr().out == "[0-A] 정답!\n[0-A] 실험 2번 · somewhere #1\n"
    one.restart()
    assert one.run(length=2) == 4
