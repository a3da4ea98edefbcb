"""Single operations: the bench's own parts, and a sample of one card's record that the virtual GPU repeats."""

import gzip
import json

import pytest
import torch

import virtual_gpu
from benchmarks.children import ROOT
from benchmarks.operations.cases import by_hand
from benchmarks.operations.cases.run import Run, real
from benchmarks.operations.recorders import Card, Virtual, record_case
from benchmarks.operations.verdicts import blocks, differences, judge, read, table

RECORD = ROOT / "benchmarks" / "records" / "h100-2026-11-23" / "operations.jsonl.gz"


def row(*requests, peak=0, **more):
    return {"case": "x", "runs": [{"requests": list(requests), "peak": peak, **more}]}


def kind(ours, theirs):
    return judge(ours, theirs)[0]


def test_requests_are_compared_in_blocks_and_releases_in_any_order():
    assert blocks([1, 600, -600, -1, 0]) == [512, 1024, -512, -1024, 0]
    assert blocks([1, 600, -1, -600, 0]) == blocks([1, 600, -600, -1, 0])


def test_verdicts():
    assert kind(row(8, -8, 0), row(512, -512, 0)) == "equal"
    assert kind(row(8, -8, 0), row(513, -513, 0)) == "same peak"
    assert kind(row(8, -8, 0), row(8, -8, 0, peak=2**20)) == "other blocks"
    assert kind(row(8, -8, 0), row(8, -8, 0, peak=77_824)) == "equal"  # the recorder's own
    assert kind(row(8, 0, -8), row(0, 8, -8)) == "other order"
    raised = {"case": "x", "error": "RuntimeError: no"}
    assert kind(row(), raised) == "card raised" and kind(raised, row()) == "virtual raised"
    assert kind(raised, raised) == "both raised"
    assert kind(row(), row(error="RuntimeError: in a run")) == "card raised"


def test_the_worst_run_is_the_verdict_and_one_run_stands_for_two_equal_ones():
    twice = {"case": "x", "runs": [*row(8)["runs"], *row(9999)["runs"]]}
    assert judge(row(8), twice) == ("same peak", judge(row(8), twice)[1])
    assert "run 1: at 0: +512 here, +10,240 on the card" in judge(row(8), twice)[1]
    samples = [{"case": "samples: x", "runs": made["runs"]} for made in (row(8), twice)]
    assert judge(*samples) == ("differs", "run 1: only one side has this run")


def test_a_table_by_family(tmp_path):
    for name, case in (
        ("ours", {"a: 1": row(8), "b: 1": row(8)}),
        ("card", {"a: 1": row(8), "b: 1": row(0), "b: 2": row()}),
    ):
        with gzip.open(tmp_path / name, "wt") as file:
            file.writelines(json.dumps({**made, "case": key}) + "\n" for key, made in case.items())
            file.write('{"case": "cut o')
    found = differences(tmp_path / "ours", tmp_path / "card")
    assert [kind for kind, _ in found.values()] == ["equal", "same peak", "card only"]
    assert "| b | 2 | 0 | 0 | 0 | 1 | 0 | 0 | 0 | 0 | 1 |" in table(found)
    assert "| **all** | 3 | 1 | 0 | 0 | 1 | 0 | 0 | 0 | 0 | 1 |" in table(found)


def test_a_file_without_rows_is_said_to_be_none(tmp_path):
    with gzip.open(tmp_path / "empty", "wt") as file:
        file.write("{}\n")
    with pytest.raises(ValueError, match="no record of operations"):
        read(tmp_path / "empty")


def run_on_h100(*names, recorder=Virtual):
    """name → the row of a case of the bench on the virtual GPU."""
    cases = {name: make for name, make in by_hand() if name in names}
    assert set(cases) == set(names)
    with virtual_gpu.cuda("H100") as gpu:
        x = torch.ones(8, 8, device="cuda", requires_grad=True)
        (x @ x).sum().backward()
        used = recorder(gpu) if recorder is Virtual else recorder()
        return {name: record_case((name, make), used) for name, make in cases.items()}


def test_the_cases_are_those_of_the_record():
    names = [name for name, _ in by_hand()]
    assert len(set(names)) == len(names)
    theirs = {name for name in read(RECORD) if not name.endswith("[stacks]")}
    assert {name for name in theirs if not name.startswith("samples")} == set(names)


def test_a_case_that_raises_is_a_row():
    def broken():
        return Run(lambda x: x.no_such_thing(), real(2))

    with virtual_gpu.cuda("H100") as gpu:
        (run,) = record_case(("x", broken), Virtual(gpu))["runs"]
    assert run["error"].startswith("AttributeError: ")


def test_a_card_is_read_as_the_meter_is():
    """PyTorch's history, which the virtual GPU writes too, says what its meter says."""
    name = "norms: layer_norm wb (8, 512)×768 bf16"
    ours, theirs = (run_on_h100(name, recorder=recorder)[name] for recorder in (Virtual, Card))
    assert kind(ours, theirs) == "equal"


# Of the record's families, cases whose rules are the same in every version of PyTorch since that of the record.
EQUAL = [
    "attention: bf16 64  train",
    "attention: bf16 128 bool mask train",
    "attention: fp32 80 causal train",
    "attention: gqa 2 bf16 train",
    "attention: mask trained for all bf16 train",
    "attention_forced: efficient bf16 192 ",
    "attention_forced: flash bf16 64 transposed causal",
    "attention_forced: math fp32 64 bool mask",
    "elementwise: gelu (8, 512, 1024) bf16",
    "elementwise: dropout (8, 512, 1024) bf16",
    "embedding: one_hot",
    "indexing: index 50257×768 4096 fp32",
    "indexing: index_select 50257×768 4096 bf16",
    "losses: cross_entropy 2048×50257 fp32",
    "losses: mse_loss mean bf16",
    "losses: logsigmoid fp32",
    "low_precision: grouped_mm fp32 3d train",
    "norms: layer_norm wb (8, 512)×768 bf16",
    "optimizers: clip_grad_norm_ of 100",
    "products: linear 8192×4096×4096 bf16",
    "reductions: amax 0 (4096, 4096) bf16",
    "reductions: any (4096, 4096) fp32",
    "reductions: logsumexp 0 (4096, 4096) fp32",
    "reductions: norm (4096, 4096) fp32",
    "reductions: std 0 (4096, 4096) fp32",
    "reductions: sum (4096, 4096) torch.bool",
    "sorting: sort (8, 50257) fp32",
    "sorting: sort descending (100, 5000) bf16",
]


def test_what_one_h100_asked_for():
    card = read(RECORD)
    ours = run_on_h100(*EQUAL)
    assert {name: found for name in EQUAL if (found := judge(ours[name], card[name]))[0] != "equal"} == {}
