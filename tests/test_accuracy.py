"""The accuracy table of the README pages is what the records say."""

import json
import shutil

import pytest

from benchmarks import measure_gpu
from benchmarks.picture import draw, place
from benchmarks.truth import Judged
from helpers.chapters.c9_planner import measured
from helpers.chapters.c9_planner.measured import how_short, played_t4
from tools import accuracy
from virtual_gpu.cards import CATALOG


def numbers(allocated, peak, reserved):
    return {
        "allocated_bytes": allocated, "peak_bytes": peak, "reserved_bytes": reserved, "fits": True, "error": None,
        "optimizer_bytes": 1,
    }  # fmt: skip


def row(measured, predicted, kind="grid", status="ok"):
    return {"kind": kind, "status": status, "title": "t", "measured": measured, "predicted": predicted, "setting": {}}


ROWS = [
    row(numbers(1000, 1000, 1000), numbers(1000, 1010, 970)),
    row(numbers(1000, 1000, 1000), numbers(1002, 1030, 1005)),
    row(numbers(1000, 1000, 1000), numbers(1004, 980, 1000)),
    row(numbers(1000, 1000, 1000), numbers(9000, 9000, 9000), kind="t4"),
    row(numbers(1000, 1000, 1000), numbers(9000, 9000, 9000), status="oom"),
    row(None, None, status="skipped"),
]


def add(folder, name, *, rows=ROWS, date="2026-01-02", **changes):
    """A record as `make measure-gpu` writes it, of a made-up card."""
    gpu = {"name": name, "capability": "7.5", "bytes": 1, "cuda": "12.8"}
    path = measure_gpu.write_record(folder, gpu, rows, planned=len(rows))
    record = json.loads(path.read_text(encoding="utf-8"))
    record |= {"date": date} | changes
    record["versions"]["torch"] = "2.13.0+cu128"
    path.unlink()
    path = folder / f"{path.stem[:-10]}{date}.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def test_the_pages_hold_what_was_judged_and_what_the_records_say():
    records, found = accuracy.read_records(), accuracy.read_judged()
    for language, page in accuracy.PAGES.items():
        stored = accuracy.MARKERS.search(page.read_text(encoding="utf-8"))
        text = accuracy.truth(language, found) + accuracy.table(language, records)
        assert stored and stored[0] == f"{stored[1]}{text}{stored[2]}", "python tools/accuracy.py"


def judged(**changes):
    texts = {"id": "a", "source": "somebody/some", "kind": "measurement", "metric": "m", "gpu": "NVIDIA H100 PCIe"}
    numbers = {"measured": 1000, "predicted": 1010, "resolution": 2, "grade": "exact", "outcome": "run"}
    return Judged(**texts | numbers | {"recipe": "liger"} | changes)


def test_what_others_measured():
    rows = [
        judged(),
        judged(id="b", predicted=1001),
        judged(id="c", gpu="not stated (Windows)", peers={"theirs": 1100}),
        judged(id="d", outcome="died"),
        judged(id="e", outcome="refused"),
    ]
    found = {"date": "2026-01-02", "versions": {"torch": "2.13.0+cpu"}, "rows": rows}
    text = accuracy.truth("en", found)
    assert "last run on 2026-01-02 (torch 2.13.0" in text
    what = "single operations and losses, forward and backward"
    assert f"| somebody/some | H100 PCIe | {what} | 2 | 0.550 % | +1.000 % | 1 / 2 |" in text
    assert "| somebody/some | not stated |" in text
    assert "Out of memory where the card was not: 1." in text and "reason in the bench's output: 1 rows" in text
    assert "On the same 1 rows, median / worst: virtual card 1.000 % / 1.000 %, theirs 10.0 % / 10.0 %." in text
    assert text.count("\n") == accuracy.truth("ko", found).count("\n")
    assert accuracy.truth("en", {"rows": []}) == ""


def test_errors_that_are_small_are_not_nothing():
    assert [accuracy._percent(e, sign=True) for e in (0.0, 1e-7, -0.0123, 0.5, None)] == [
        "0 %", "< 0.001 %", "−1.230 %", "+50.0 %", "–",
    ]  # fmt: skip


def test_the_picture_names_the_worst_and_is_the_same_again():
    rows = [judged(), judged(id="worst of all", predicted=2000), judged(id="c", grade="near", predicted=999)]
    text = draw(rows).svg()
    assert text == draw(rows).svg() and "worst of all" in text and text.count("<circle") == 3 + 2
    assert text.count("stroke-dasharray") == 1  # what a margin covers
    assert [round(place(e), 3) for e in (0, 1e-4, -1e-4, 1, -3)] == [0, 0.111, -0.111, 1, -1]


def test_without_a_record_one_line_says_not_yet_measured(tmp_path):
    assert accuracy.read_records(tmp_path) == {}
    for language, words in (("en", "Not yet measured by us: T4, L4,"), ("ko", "직접 재지 않은 카드: T4, L4,")):
        text = accuracy.table(language, {})
        assert text.startswith(words) and text.count("\n") == 1 and "|" not in text


def test_a_record_makes_its_row(tmp_path):
    add(tmp_path, CATALOG["T4"].device_name)
    records = accuracy.read_records(tmp_path)
    for language in ("en", "ko"):
        lines = accuracy.table(language, records).splitlines()
        assert lines[2] == "| T4 | 3 | 0.20 / +0.40 | 2.00 / +3.00 | 0.50 / −3.00 | 2.13.0 | 2026-01-02 |"
        assert [line.count("|") for line in lines[:3]] == [8, 8, 8]
        assert "L4" in lines[-1] and "T4," not in lines[-1]


def test_a_number_that_nothing_was_compared_of_is_a_dash(tmp_path):
    add(tmp_path, "Tesla T4", rows=[row(numbers(1000, 1000, None), numbers(1000, 1000, None))])
    assert "| T4 | 1 | 0.00 / +0.00 | 0.00 / +0.00 | – |" in accuracy.table("en", accuracy.read_records(tmp_path))


def test_a_card_of_the_catalogue_comes_before_others_under_its_name_there(tmp_path):
    for name in ("AMD of nobody", "NVIDIA H200", "Tesla T4"):
        add(tmp_path, name)
    assert list(accuracy.read_records(tmp_path)) == ["T4", "H200", "AMD of nobody"]


def test_of_a_gpu_the_newest_complete_record_counts(tmp_path):
    add(tmp_path, "Tesla T4", date="2026-01-02")
    add(tmp_path, "Tesla T4", date="2026-03-04")
    add(tmp_path, "Tesla T4", date="2026-05-06", complete=False)
    assert accuracy.read_records(tmp_path)["T4"]["date"] == "2026-03-04"


def test_a_record_of_another_version_is_named(tmp_path):
    path = add(tmp_path, "Tesla T4", version=99)
    with pytest.raises(ValueError, match=path.name):
        accuracy.read_records(tmp_path)


def test_writing_changes_the_table_and_nothing_else_and_once(tmp_path):
    pages = {language: tmp_path / page.name for language, page in accuracy.PAGES.items()}
    for language, page in accuracy.PAGES.items():
        shutil.copy(page, pages[language])
    before = {language: page.read_text(encoding="utf-8") for language, page in pages.items()}
    records = tmp_path / "records"
    add(records, "Tesla T4")
    assert accuracy.write(pages, records) == list(pages.values())
    assert accuracy.write(pages, records) == []
    for language, page in pages.items():
        text = page.read_text(encoding="utf-8")
        assert "| T4 | 3 |" in text
        assert accuracy.MARKERS.sub("", text) == accuracy.MARKERS.sub("", before[language])


def test_a_page_without_markers_is_refused(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match="markers"):
        accuracy.write({"en": page}, tmp_path)
    assert page.read_text(encoding="utf-8") == "nothing\n"


def judged_row(name, source="a", gpu="NVIDIA L4 (spot)", predicted=100, **other):
    row = {"id": f"{source}/{name}", "source": source, "gpu": gpu, "measured": 100, "predicted": predicted}
    row |= {"low": None, "high": None}
    return {**row, "outcome": "run", "counts": True, **other}


def test_chapter_9_reads_what_was_judged(tmp_path):
    rows = [judged_row("far", predicted=80), judged_row("equal"), judged_row("left out", counts=False)]
    rows += [judged_row("died", outcome="died"), judged_row("unknown", measured=None)]
    path = tmp_path / "judged.json"
    path.write_text(json.dumps({"date": "2026-01-01", "rows": rows}), encoding="utf-8")
    assert [row["id"] for row in measured.published(path)] == ["a/far", "a/equal"]


def test_a_range_errs_from_its_nearest_end():
    rows = [judged_row("range", predicted=low, low=low, high=low + 15) for low in (80, 90, 120)]
    assert [round(measured.error(row), 2) for row in rows] == [-0.05, 0, 0.2]


def test_what_a_margin_does_not_cover():
    peak, reserved, programs, highest, moment, tensors, single = how_short()
    assert sum(int(row[1]) for row in (highest, moment, tensors, single)) == len(measured.published())
    assert (highest[1], highest[-1], moment[1], moment[-1]) == ("86", "2: xMem × 2", "95", "0")  # as the text has it
    assert (tensors[-1], single[-1]) == ("1: torchtune", "17: Liger-Kernel × 17")
    assert (peak[1], peak[2], peak[-1]) == ("46", "0.03%", "0") and reserved[-1] == "0"
    assert peak[3].startswith("−0.07%") and reserved[3].startswith("−3.68%")  # as the text has it
    assert programs[-1].startswith("3: ") and "dcgan" in programs[3]
    assert [row[-1] for row in how_short(margin=20.0)] == ["0"] * 7
    assert int(how_short(margin=0.0)[0][-1].partition(":")[0]) > 0


def test_levers_one_on_top_of_the_other_as_chapter_9_has_them():
    rows = {row[0]: float(row[3].replace("−", "-").rstrip("%")) for row in measured.lever_by_lever()}
    assert len(rows) == 8 and [name for name, off in rows.items() if abs(off) > 0.5] == ["+ 8-bit AdamW", "LoRA"]
    assert rows["+ activation checkpointing"] == 0.01


def test_the_chapter_says_how_many_there_are():
    rows = json.loads(measured.JUDGED.read_text(encoding="utf-8"))["rows"]
    ran, compared = sum(row["outcome"] in ("run", "died") for row in rows), len(measured.published())
    text = (measured.COURSE / "notebooks" / "src" / "09_fit_your_gpu.py").read_text(encoding="utf-8")
    assert f"자기 GPU에서 재어 공개한 {compared}개로" in text
    assert f"{len(rows)}개를 모아 {ran}개를 실행했고, 그 가운데 {compared}개의 바이트를" in text


def test_a_peak_of_what_is_reserved_is_no_average_of_it():
    metrics = (
        "max_memory_reserved over the run",
        "NVML peak used",
        "memory_reserved average at step end",
        "nvidia-smi: memory of the card in use",
        "peak_allocated",
    )
    assert [measured.kind("a/b", metric) for metric in metrics] == ["highest", "highest", "moment", "moment", "tensors"]
    assert measured.kind("linkedin/Liger-Kernel", "max_memory_allocated") == "single"


def test_the_played_t4_is_what_the_record_says():
    record = json.loads(measured.OURS.read_text(encoding="utf-8"))
    found = played_t4()
    assert len(found) == record["summary"]["t4"]["of"] == 4
    assert sum(row[1] == row[2] for row in found) == record["summary"]["t4"]["as_predicted"]
    assert [row[0] for row in found if row[2] == "OOM"] == ["polyglot-ko-1.3b, batch 16, length 256"]
