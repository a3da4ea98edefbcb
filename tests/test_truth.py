"""The bench of what others measured: how it reads, what it says of rows that it cannot run, and its fast part."""

import json
from collections import Counter
from dataclasses import asdict

import pytest

from benchmarks import truth
from benchmarks.children import Child
from benchmarks.recipes.calls import Program
from benchmarks.recipes.messages import is_segment, message, stated
from benchmarks.recipes.recipe import Prediction, Recipe, Refused, from_source, gpu_of, recipes
from benchmarks.summaries import summary, table
from benchmarks.truth import MEASURED, Judged, judge, main, read, updated, whole, why_malformed

ROWS = [whole(row) for path in sorted(MEASURED.glob("*.json")) for row in read(path)]
GOOD = {"id": "a", "kind": "measurement", "source": "s", "metric": "m", "value_bytes": 100, "resolution_bytes": 2}
GOOD |= {"gpu": "T4", "reproducibility": "exact", "settings": {}}
# Rows of the fast part that are off, and why: see benchmarks/README.md.
LEFT_BEHIND = ("fused_linear_orpo_loss", "fused_linear_cpo_loss", "fused_linear_simpo_loss", "distill_jsd", "kto_loss")
CONVOLUTION = ("multi_token_attention", "sparse_multi_token_attention")


def recipe(predict, **more):
    return Recipe("some", "a program", from_source("s"), predict, **more)


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ['[{"id": "a"}, {"id": "b"}]', '{"id": "a"}\n{"id": "b"}\n', '[\n{"id": "a"},\n{"id": "b"}\n]']
)
def test_a_list_or_a_row_a_line(tmp_path, text):
    (tmp_path / "rows").write_text(text)
    assert [row["id"] for row in read(tmp_path / "rows")] == ["a", "b"]


def test_a_line_that_is_no_json_is_named(tmp_path):
    (tmp_path / "rows").write_text('{"id": "a"}\nno\n')
    with pytest.raises(ValueError, match="line 2"):
        read(tmp_path / "rows")


@pytest.mark.parametrize(
    "row, why",
    [
        ([], "is a list"),
        (GOOD | {"id": 1}, "has no id"),
        (GOOD | {"kind": "guess"}, "of the kind 'guess'"),
        (GOOD | {"value_bytes": "many"}, "no number as value_bytes"),
        (GOOD | {"value_bytes": float("nan")}, "no number as value_bytes"),
        (GOOD | {"resolution_bytes": -1}, "no number as resolution_bytes"),
        (GOOD | {"peers": {"LLMem": "much"}}, "no numbers as peers"),
        (GOOD | {"settings": [1]}, "no object as settings"),
        (GOOD | {"model": 3}, "no text as model"),
        (GOOD | {"settings": None, "gpu": None}, ""),
        (GOOD, ""),
    ],
)
def test_what_is_wrong_with_a_row(row, why):
    assert why in why_malformed(row) and bool(why_malformed(row)) == bool(why)


@pytest.mark.parametrize("source", sorted({row["source"] for row in ROWS}))
@pytest.mark.parametrize("kind", ["measurement", "oom", "trace", "capacity"])
def test_a_row_that_says_nothing_is_handled_or_not(source, kind):
    row = whole({"id": "a", "kind": kind, "source": source, "metric": "?"})
    for one in recipes():
        if one.handles(row):
            assert judge(row, one).outcome in ("refused", "failed")


def example(one):
    """A row of the files that this recipe handles."""
    return next(row for row in ROWS if one.handles(row))


@pytest.mark.parametrize("one", [one for one in recipes() if one.settings is not None], ids=lambda one: one.name)
def test_a_setting_that_is_not_known_is_not_passed_over(one):
    row = example(one)
    assert set(row["settings"]) <= set(one.settings)
    found = judge(row | {"settings": {**row["settings"], "compiled": True}}, one)
    assert found.outcome == "refused" and "compiled=True" in found.note
    for name, allowed in one.settings.items():
        if allowed != "anything":
            found = judge(row | {"settings": {**row["settings"], name: "strange"}}, one)
            assert found.outcome == "refused" and f"{name}='strange'" in found.note


@pytest.mark.parametrize(
    "name", ["attention by hand", "liger", "CS336 training", "CS336 ranks", "xMem", "Raschka's GPT-2"]
)
def test_what_a_row_does_not_state_is_not_made_up(name):
    [one] = (one for one in recipes() if one.name == name)
    row = example(one)
    needed = {"CS336 training": "ctx", "CS336 ranks": "world_size", "liger": "op_mode"}.get(name, "batch")
    left = {key: value for key, value in row["settings"].items() if key != needed}
    if name == "attention by hand":  # the batch is a constant of the scripts, and the width is what makes it such a row
        assert judge(row | {"settings": left}, one).predicted == judge(row, one).predicted
    elif one.handles(row | {"settings": left}):
        found = judge(row | {"settings": left}, one)
        assert found.outcome == "refused" and found.note == f"the row does not state {needed!r}"


def test_a_number_in_words_and_a_card_that_is_not_known():
    [one] = (one for one in recipes() if one.name == "attention by hand")
    row = example(one)
    words = {name: str(value) if type(value) is int else value for name, value in row["settings"].items()}
    assert words != row["settings"] and judge(row | {"settings": words}, one).predicted == judge(row, one).predicted
    found = judge(row | {"gpu": "NVIDIA X"}, one)
    assert found.outcome == "refused" and "NVIDIA X" in found.note


def test_a_program_that_ends_its_process_takes_no_other_row_with_it(monkeypatch):
    """The second of three rows ends its process: the third has one of its own."""
    calls = []

    def run(command, seconds, environment, told):
        rows = read(command[-1])
        calls.append([row["id"] for row in rows])
        ends = calls[-1][0] == "a"
        kept = [
            Judged(row["id"], "s", "measurement", "m", "T4", "exact", "r", "run") for row in rows[: 1 if ends else 3]
        ]
        return Child([asdict(row) for row in kept], -9 if ends else 0, "Killed\n" if ends else "")

    monkeypatch.setattr(truth, "run", run)
    found = truth._in_a_process(("r", ()), [GOOD | {"id": name} for name in "abc"])
    assert calls == [["a", "b", "c"], ["c"]]
    assert [(row.id, row.outcome) for row in found] == [("a", "run"), ("b", "failed"), ("c", "run")]
    assert found[1].note == "the process ended with -9: Killed"


def test_strange_rows_stop_nothing(tmp_path, capsys):
    rows = [1, {}, GOOD | {"kind": "guess"}, GOOD | {"id": "b", "source": "nobody's"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert main([str(tmp_path / "rows.json"), str(tmp_path / "absent.json")]) == 1
    found = capsys.readouterr()
    assert "absent.json" in found.err
    assert "is a int" in found.out and "of the kind 'guess'" in found.out and "nobody's" in found.out


def test_a_row_in_its_recipe_s_process(tmp_path, capsys):
    row = next(row for row in ROWS if row["id"] == "magma27-attention/d128/S256")
    (tmp_path / "rows.json").write_text(json.dumps([row, GOOD]))
    assert main([str(tmp_path / "rows.json"), "--json", str(tmp_path / "judged.json")]) == 0
    [unknown, found] = json.loads((tmp_path / "judged.json").read_text())["rows"]
    assert unknown["outcome"] == "no recipe"
    assert (found["outcome"], found["predicted"], found["measured"]) == ("run", 23_330_816, 23_330_816)
    assert "MAGMA27/assignment2-systems · attention by hand" in capsys.readouterr().out


def test_rows_judged_again_replace_their_own_and_leave_the_others():
    """`--update`: a part of the bench can be run after a change of one recipe."""
    before = [{"id": name, "recipe": "r", "predicted": 1} for name in ("a", "b")]
    found = [Judged(name, "s", "measurement", "m", "T4", "exact", "r", "run", predicted=2) for name in ("b", "c")]
    assert [(row["id"], row["predicted"]) for row in updated(before, found)] == [("a", 1), ("b", 2), ("c", 2)]


# -- judging ----------------------------------------------------------------------------------------------------------


def test_errors_ranges_and_resolutions():
    def judged(predicted, **row):
        return judge(GOOD | row, recipe(lambda row: predicted))

    assert judged(102).within and judged(102).error == pytest.approx(0.02)
    assert not judged(103).within
    assert judged(Prediction(90, low=80, high=99)).within and judged(
        Prediction(90, low=80, high=97)
    ).error == pytest.approx(-0.03)
    assert judged(0, value_bytes=0).error == 0 and judged(1, value_bytes=0).error == float("inf")
    assert judged(Prediction(None, agrees=False)).within is False


def test_what_cannot_be_run_is_said():
    def broken(row):
        raise ZeroDivisionError("by zero")

    def refused(row):
        raise Refused("no card")

    assert (judge(GOOD, recipe(broken)).outcome, judge(GOOD, recipe(broken)).note) == (
        "failed", "ZeroDivisionError: by zero",
    )  # fmt: skip
    assert (judge(GOOD, recipe(refused)).outcome, judge(GOOD, recipe(refused)).note) == ("refused", "no card")
    found = [judge(GOOD, recipe(one)) for one in (broken, refused, lambda row: 101)]
    text = table(found)
    assert "1 rows refused: no card" in text and "1 rows failed: ZeroDivisionError" in text


def test_what_is_fitted_counts_nowhere():
    fitted = recipe(lambda row: 100, fitted="the length", fitted_on=frozenset({"a"}))
    found = summary([judge(GOOD, fitted), judge(GOOD | {"id": "b"}, fitted)])
    assert len(found.errors) == 1 and sum(found.aside.values()) == 1
    assert not summary([judge(GOOD | {"reproducibility": "no"}, recipe(lambda row: 1))]).errors


def test_it_fits_where_the_card_died_and_the_reverse():
    def dies(row):
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")

    found = judge(GOOD, recipe(dies))
    assert (found.outcome, found.note) == ("died", "Tried to allocate 2.00 GiB")
    message_row = GOOD | {"kind": "oom"}
    fits = judge(message_row, recipe(lambda row: Prediction(None)))
    counted = summary([found, fits, judge(message_row, recipe(lambda row: Prediction(100, died=True, agrees=True)))])
    assert (counted.died_wrongly, counted.fits_wrongly, counted.agreed, counted.disagreed) == (["a"], ["a"], 1, 0)


def test_percentiles_and_the_worst():
    found = summary([judge(GOOD | {"id": str(n)}, recipe(lambda row, n=n: 100 + n)) for n in range(-20, 1)])
    assert (found.median, found.worst, found.worst_id) == (pytest.approx(0.1), pytest.approx(-0.2), "-20")
    assert found.percentile(0.95) == pytest.approx(0.19)
    assert (found.exact, found.exact_within) == (21, 3)


def test_modes_of_a_call():
    with pytest.raises(Refused, match="backward"):
        Program(lambda: None).calls("backward")


@pytest.mark.parametrize(
    "name, ours",
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A800-SXM4-80GB", "A100-80GB"), ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"), ("not stated", "A100-80GB"),
    ],
)  # fmt: skip
def test_cards_as_others_name_them(name, ours):
    assert gpu_of({"gpu": name}).name == ours


@pytest.mark.parametrize("name", ["Voodoo 2", "RTX 3080 12GB", "NVIDIA GeForce RTX 4060 Ti 8GB", "NVIDIA H100 NVL"])
def test_a_card_is_not_guessed(name):
    with pytest.raises(Refused, match=name):
        gpu_of({"gpu": name})


# -- what is read off messages ----------------------------------------------------------------------------------------


def test_what_a_message_states():
    text = "Tried to allocate 18.00 GiB. … Of the allocated memory 54.07 GiB is allocated by PyTorch, and 1.50 MiB is "
    text += "reserved by PyTorch but unallocated."
    assert message(text) == {
        "tried_bytes": 18 * 2**30, "allocated_bytes": round(54.07 * 2**30), "reserved_unallocated_bytes": 3 * 2**19,
    }  # fmt: skip
    assert is_segment(236 * 2**20) and is_segment(2 * 2**20) and is_segment(20 * 2**20)
    assert not is_segment(235 * 2**20) and not is_segment(round(381.88 * 2**20)) and not is_segment(4 * 2**20)
    assert stated("14.56-14.76 GiB") == (round(14.56 * 2**30), round(14.76 * 2**30))
    assert stated("12,622,168,064 B = 11.755 GiB") == (12_622_168_064,) * 2 and stated("2 MiB (NVML)") == (2**21,) * 2


# -- the fast part: single operations, traces, messages ---------------------------------------------------------------


def sample():
    """Of each recipe's fast rows the first of each program, and of attention each moment at one size."""
    chosen = {}
    for row in ROWS:
        for one in recipes():
            if one.handles(row) and one.fast(row) and not one.packages(row):
                settings = sorted(name for name in row.get("settings", {}))
                key = one.name, row["source"], row.get("model"), row["metric"], row.get("gpu"), tuple(settings)
                chosen.setdefault(key, (one, row))
    return list(chosen.values())


SAMPLE = sample()


def test_there_is_a_sample_of_every_fast_recipe():
    counts = Counter(one.name for one, _ in SAMPLE)
    assert counts["liger"] >= 30 and counts["attention by hand"] >= 5 and counts["replay"] >= 10


@pytest.mark.parametrize("one, row", SAMPLE, ids=lambda value: value["id"] if isinstance(value, dict) else value.name)
def test_the_card_s_bytes_come_out(one, row):
    found = judge(row, one)
    if found.outcome == "refused":
        assert found.note and (one.name != "liger" or "embedding" in row["model"])
        return
    assert found.outcome == "run", found.note
    if any(name in row["model"] for name in LEFT_BEHIND):
        assert found.predicted < found.measured  # what Liger's compiled twin left in the process is not known
    elif row["reproducibility"] == "exact":
        assert found.within, (found.predicted, found.measured)
    elif one.name == "liger" and not any(name in row["model"] for name in CONVOLUTION):
        assert abs(found.error) < 0.001
