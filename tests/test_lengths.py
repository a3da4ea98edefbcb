"""The lengths of a reader's own samples: read from his file, and what a plan's length and micro-batch make of them."""

import json

import numpy as np
import pytest

from virtual_gpu.plan.command import main
from virtual_gpu.plan.lengths import Lengths, read_lengths

FORMS = {
    "numbers": "5\n\n 7 \n512\n",
    "list": "[5, 7, 512]",
    "samples": json.dumps([{"input_ids": [1] * n, "text": "x"} for n in (5, 7, 512)]),
    "ids": json.dumps([[1] * n for n in (5, 7, 512)]),
    "jsonl": "".join(json.dumps({"length": n}) + "\n" for n in (5, 7, 512)),
    "jsonl of ids": "".join(json.dumps({"input_ids": [0] * n}) + "\n" for n in (5, 7, 512)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_read_however_it_is_written(form, tmp_path):
    path = tmp_path / "lengths"
    path.write_text(FORMS[form], encoding="utf-8-sig")
    assert read_lengths(path).all == (5, 7, 512)


@pytest.mark.parametrize(
    "text, named",
    [("5\nseven\n", "seven"), ("5\n0\n", "0"), ('{"text": "hi"}', "hi"), ("5\ntrue\n", "True"), ("[5, 1.5]", "1.5"),
     ("9" * 30, "999")],
)  # fmt: skip
def test_what_is_no_length_is_named(text, named, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"lengths\.txt") as error:
        read_lengths(path)
    assert named in str(error.value) and "input_ids" in str(error.value)


def test_no_file_and_no_numbers(tmp_path):
    with pytest.raises(ValueError, match="nothing"):
        read_lengths(tmp_path / "nothing")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("empty", "bytes"):
        with pytest.raises(ValueError):
            read_lengths(tmp_path / name)


def test_what_a_limit_cuts_and_what_padding_adds():
    lengths = Lengths((10, 20, 30, 40))
    assert (lengths.longest, lengths.up_to(0.5), lengths.up_to(0.99)) == (40, 20, 40)
    assert lengths.cut(40) == (0, 0) and lengths.cut(25) == (0.5, 20 / 100)
    assert lengths.padding(1, 40) == 0 and lengths.padding(4, 40) == 1 - 100 / 160
    assert lengths.padding(4, 20) == 1 - 70 / 80  # cut first: 10, 20, 20, 20
    assert lengths.padding(3, 40) > 0  # the last micro-batch has one sample, and no padding
    assert lengths.steps(2, 40) == (2, 2) and lengths.steps(1, 100) == (4, 1)
    assert Lengths((8,) * 100).padding(7, 8) == 0


def test_padding_is_what_a_loader_would_pad():
    """Against an epoch that is shuffled and padded by hand."""
    values = np.random.default_rng(5).integers(1, 500, size=1001)
    lengths = Lengths(tuple(int(n) for n in values))
    order = np.random.default_rng(0).permutation(np.sort(values))
    held = sum(int(order[at : at + 8].max()) * len(order[at : at + 8]) for at in range(0, len(order), 8))
    assert lengths.padding(8, 500) == pytest.approx(1 - values.sum() / held)


def test_the_terminal(capsys, tmp_path):
    path, picture = tmp_path / "lengths.txt", tmp_path / "plans" / "picture.svg"
    path.write_text("16\n64\n32\n")
    base = ["--model", "gpt2", "--batch", "2", "--methods", "lora", "--lengths", str(path), "--picture", str(picture)]
    assert main([*base, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["request"]["length"] == 64 and found["lengths"] == {
        "samples": 3, "longest": 64, "length": 64, "cut_samples": 0, "cut_tokens": 0,
        "up_to": {"0.5": 32, "0.9": 64, "0.99": 64},
    }  # fmt: skip
    assert picture.read_text().startswith("<svg") and ">1. LoRA" in picture.read_text()
    assert main(base) == 2  # the picture is there
    assert "picture.svg" in capsys.readouterr().err
    assert main([*base, "--force", "--length", "32"]) == 0
    out = capsys.readouterr().out
    assert (
        "길이 32에서 샘플의 33.3%가 잘리고 토큰의 28.6%를 잃는다" in out and "에폭마다 2스텝, 이어 담으면 2스텝" in out
    )
    for option in ("--lengths", "--picture"):
        assert main(["--from", str(path), option, str(path)]) == 2
        assert f"{option}: " in capsys.readouterr().err
    path.write_text("long\n")
    assert main(base[:-2]) == 2
    assert "'long'" in capsys.readouterr().err
