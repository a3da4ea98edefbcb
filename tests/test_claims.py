"""benchmarks/claims: an H100's record beside the virtual card, where it needs neither the card nor its versions."""

import gzip
import json

import pytest

from benchmarks.children import ROOT
from benchmarks.claims import allocator, compare, table
from benchmarks.programs.table import PAGE
from virtual_gpu import cuda, diagnose

CARD = ROOT / "benchmarks" / "records" / "h100-2026-11-23"


@pytest.fixture(scope="module")
def card():
    return compare.rows_of(CARD, "claims*.jsonl.gz")


def test_the_page_holds_the_table(card):
    rows = json.loads(table.BESIDE.read_text(encoding="utf-8"))
    assert table.MARKERS.search(PAGE.read_text(encoding="utf-8"))[0].count(table.block(rows)) == 1
    for row in rows:
        measured = card[row["case"], row["row"]]
        assert [row["peak"][0], row["reserved"][0]] == list(compare._most(measured)) and not measured.get("error")


def test_random_requests_with_a_limit(card, tmp_path, monkeypatch):
    """Counters, deaths and every segment after each hundred of 1,800 requests and releases are the card's."""
    monkeypatch.setenv("CLAIMS_CASE", "allocator-default")
    monkeypatch.setenv("CLAIMS_ROWS", str(tmp_path / "rows"))
    monkeypatch.delenv("CLAIMS_TRACES", raising=False)
    with cuda("H100"):
        allocator.sequence()
    lines = (tmp_path / "rows").read_text(encoding="utf-8").splitlines()
    ours = [row for row in map(json.loads, lines) if "segments" in row]
    assert len(ours) == 3 * (6 + 2)
    for row in ours:
        theirs = card["allocator-default", row["row"]]
        assert dict(compare.numbers(row)) == dict(compare.numbers(theirs))
        assert compare.layout(row["segments"]) == compare.layout(theirs["segments"])


# Of each message: the cause, and how sure. The last pieces of a full card: 2.00 MiB tried, 2.19 MiB free.
VERDICTS = {
    ("oom-default", "first request too large"): ("larger_than_card", "certain"),
    ("oom-default", "five by five"): ("cannot_tell", None),
    ("oom-default", "a quarter of the card"): ("limit", "certain"),
    ("oom-default", "a quarter, first too large"): ("limit", "certain"),
    ("oom-default", "small pieces"): ("fragmentation", "possible"),
    ("oom-another", "beside another process"): ("other_process", "certain"),
    ("oom-graphs", "with a graph's pool"): ("larger_than_card", "certain"),
    ("oom-libraries", "mm"): ("library_call", "likely"),
    ("oom-libraries", "pinned, too large"): ("no_numbers", "certain"),
}


@pytest.mark.parametrize("case, row", VERDICTS)
def test_what_the_card_said_is_understood(card, case, row):
    found = diagnose(card[case, row]["error"]["traceback"])
    assert (found.verdict, found.sure) == VERDICTS[case, row]


def test_a_difference_is_found(card, tmp_path, capsys, monkeypatch):
    """A row that is another is told with its number, and one that is equal is not."""
    rows = [dict(card["levers-lora-base", name]) for name in ("1.3b-lora base", "1.3b-lora checkpointing")]
    phases = [list(phase) for phase in rows[0]["phases"]]
    phases[1][1] += 512
    rows[0]["phases"] = phases
    with gzip.open(tmp_path / "virtual.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    kept = tmp_path / "beside.json"
    monkeypatch.setattr(
        "sys.argv", ["compare", str(CARD), str(tmp_path), "--only", "levers-lora-base", "--json", str(kept)]
    )
    compare.main()
    said = capsys.readouterr().out
    assert "1.3b-lora base: " in said and "phases[1][1]" in said and "(+512)" in said
    assert "1.3b-lora checkpointing" not in said
    assert {row["row"] for row in json.loads(kept.read_text())} == {row["row"] for row in rows}
