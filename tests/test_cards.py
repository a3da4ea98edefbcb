"""The cards: what stands in cards.json, what a name means, and what is refused."""

import json
from importlib.resources import files

import pytest

from virtual_gpu.cards import CATALOG, UNKNOWN_CONTEXT, GPUSpec, card
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.errors import NotSupported, UnknownName, WrongValue
from virtual_gpu.language import set_language
from virtual_gpu.room import READING, room_on

MiB = 2**20
# Bytes that a process holds outside PyTorch: of the message that is the card's value, rounded to MiB.
CONTEXTS = {
    "T4": 100, "L4": 251, "A100-40GB": 501, "A100-80GB": 409, "H100": 685, "H200": 522, "V100": 383, "RTX 3060": 148,
    "RTX 3090": 304, "RTX 4090": 504, "RTX 5090": 619, "P100": 303, "V100-32GB": 385, "A10G": 307, "A10": 224,
    "L40S": 522, "A40": None, "RTX A6000": 358, "B200": 712, "RTX 3080": 217, "RTX 4060": None, "RTX 4060 Laptop": 115,
    "RTX 4060 Ti 16GB": 256, "RTX 4070": None, "RTX 4080": None, "RTX 5080": None, "RTX PRO 6000": 692, "MI300X": 460,
}  # fmt: skip
RAW = json.loads(files("virtual_gpu").joinpath("cards.json").read_text(encoding="utf-8"))


def test_every_context_is_pinned():
    found = {
        name: None if spec.usable_bytes is None else round((spec.memory_bytes - spec.usable_bytes) / MiB)
        for name, spec in CATALOG.items()
    }
    assert found == CONTEXTS


def test_threads_that_a_card_holds():
    """What the sums' buffers and `get_device_properties` are computed from; a free card counts as an A100."""
    names = ("T4", "L40S", "A10G")
    held = {name: (card(name).multiprocessors, card(name).threads_per_multiprocessor) for name in names}
    assert held == {"T4": (40, 1024), "L40S": (142, 1536), "A10G": (80, 1536)}
    assert card("H100").threads_per_multiprocessor == card("V100").threads_per_multiprocessor == 2048
    a100, free = card("A100-80GB"), card("24GiB, 8.6")
    assert (free.multiprocessors, free.l2_cache_bytes) == (a100.multiprocessors, a100.l2_cache_bytes) == (108, 40 * MiB)


def test_every_value_has_a_source():
    assert RAW["schema"] == 1 and len(RAW["cards"]) == len(CATALOG) >= 25
    for one in RAW["cards"]:
        for name, value in one.items():
            if isinstance(value, dict):
                assert len(value["source"]) > 10, (one["name"], name)


def test_rents_say_where_and_when():
    """On demand alone; where both are known of one maker's larger card, it costs no less at the most."""
    rented = {name: spec.rent for name, spec in CATALOG.items() if spec.rent}
    assert len(rented) >= 20 and {"T4", "RTX 4090", "A100-80GB", "H100"} <= {*rented}
    for one in RAW["cards"]:
        rent, found = CATALOG[one["name"]].rent, one["usd_per_hour"]
        assert (rent is None) == (found["low"] is None) == found["source"].startswith("none found")
        if rent is not None:
            assert 0 < rent.low <= rent.high < 20 and rent.low_at and rent.high_at
            assert rent.date.startswith("2026-") and found["source"].count("https://") >= 1 + (rent.low < rent.high)
    for less, more in (("T4", "L4"), ("L4", "A100-80GB"), ("A100-80GB", "H100"), ("H100", "B200")):
        assert rented[less].high <= rented[more].high


def test_ranges_hold_their_values():
    for name, spec in CATALOG.items():
        room = room_on(spec)
        assert room.memory.low <= spec.memory_bytes <= room.memory.high
        context = room.outside[0].bytes
        if spec.usable_bytes is None:
            assert context == UNKNOWN_CONTEXT and "none published" in room.outside[0].source, name
        else:
            value = spec.memory_bytes - spec.usable_bytes
            assert context.low + READING <= value <= context.high - READING, name
        assert room.sure_bytes < room.possible_bytes < room.memory.high


@pytest.mark.parametrize("name", CATALOG)
def test_every_name_of_a_card_means_it(name):
    spec = CATALOG[name]
    for called in (name, name.lower(), *spec.also_called):
        assert card(called) is spec


@pytest.mark.parametrize(
    ("text", "nbytes", "capability"),
    [
        ("24GiB", 24 * 2**30, (8, 0)),
        ("24GB, 8.6", 24 * 10**9, (8, 6)),
        ("11.5gib,7.5", int(11.5 * 2**30), (7, 5)),
        (" 8192 MiB , 12.0 ", 2**33, (12, 0)),
    ],
)
def test_a_free_card(text, nbytes, capability):
    spec = card(text)
    assert (spec.memory_bytes, spec.capacity_bytes, spec.compute_capability) == (nbytes, nbytes, capability)
    assert spec.has_bf16 == (capability >= (8, 0))
    assert card(spec.name) == spec  # its name is one, too
    assert VirtualGPU(spec).capacity_bytes == nbytes


@pytest.mark.parametrize("text", ["24", "24GiB 8.6", "24GiB, 99.9", "0GiB", "99999GiB", "-24GiB", "GiB"])
def test_what_is_no_card(text):
    with pytest.raises(WrongValue):
        card(text)


def test_unknown_and_foreign_cards_are_named():
    with pytest.raises(UnknownName, match=r"혹시 .*T4"):
        card("T44")
    with pytest.raises(WrongValue, match="gpu=3"):
        card(3)
    with pytest.raises(NotSupported, match=r"MI300X.*ROCM"):
        VirtualGPU(CATALOG["MI300X"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_bytes": 0}, {"memory_bytes": 1.5}, {"usable_bytes": 2**35}, {"usable_bytes": -1},
        {"compute_capability": 8.6}, {"compute_capability": (8,)}, {"platform": "metal"}, {"platform": []},
        {"name": "\x1b[2J"}, {"name": 5},
    ],
    ids=str,
)  # fmt: skip
def test_a_card_of_ones_own_that_cannot_be(wrong):
    card = {"name": "x", "device_name": "x", "memory_bytes": 2**34, "usable_bytes": 2**33, "compute_capability": (8, 6)}
    assert GPUSpec(**card).capacity_bytes == 2**33
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GPUSpec(**card | wrong)


@pytest.mark.parametrize(("language", "said"), [("ko", "이하여야 한다"), ("en", "must be at most")])
def test_a_card_that_can_use_more_than_it_has_is_refused_in_words(language, said):
    set_language(language)
    with pytest.raises(WrongValue, match=r"usable_bytes=9: .*memory_bytes=8") as refused:
        GPUSpec("x", "x", memory_bytes=8, usable_bytes=9, compute_capability=(8, 6))
    assert said in str(refused.value)
