"""Chapter 3's machinery: what a layer keeps, grouped heads, the out-of-memory message, the loss as memory golf."""

import pytest
import torch

from helpers import predict_memory
from helpers.chapters.c3_memory.attention import grouped_heads, kept_by_a_layer
from helpers.chapters.c3_memory.exercises import BEST_LOSS_BYTES, EXERCISES
from helpers.chapters.c3_memory.losses import loss_cost, loss_error, whole_loss
from helpers.chapters.c3_memory.oom import parse_oom, read_oom
from helpers.chapters.c3_memory.tables import largest_at_peak, table
from virtual_gpu.errors import WrongValue
from virtual_gpu.units import GiB, MiB

# PyTorch's words; the numbers are the cases'.
MESSAGE = (
    "CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 14.74 GiB of which {free} is free. "
    "Including non-PyTorch memory, this process has {in_use} memory in use. Of the allocated memory 12.00 GiB is "
    "allocated by PyTorch, and {unallocated} is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_layers_tensors_are_what_the_virtual_gpu_counts(attention):
    """Two ways to the same number: hooks on saved tensors, and the bytes alive after a forward at two depths."""
    total = float(kept_by_a_layer("EleutherAI/polyglot-ko-1.3b", "T4", 512, attention)[-1][-1])
    report = predict_memory(batch_size=4, sequence_length=512, attention=attention, gpu="T4")
    logits = 4 * 512 * 30080 * 4
    counted = (report.timeline.at_end(0)["activations"] - logits) / (24 * 4 * 512 * 2048)
    assert total == pytest.approx(counted, abs=0.25)  # what lies outside the layers is spread over them)


def test_grouped_heads_go_to_math_on_a_t4_alone():
    rows = {(gpu, call): kernel for gpu, call, kernel, *_ in grouped_heads(256)}
    assert rows == {
        ("T4", "enable_gqa"): "math",
        ("T4", "repeat_kv"): "efficient",
        ("A100-40GB", "enable_gqa"): "flash",
        ("A100-40GB", "repeat_kv"): "flash",
    }


def test_the_peak_of_batch_16_holds_three_sets_of_logits():
    rows = largest_at_peak(predict_memory(batch_size=16, gpu="T4"))
    assert rows[0][:2] == ["470.00 MiB", "3"]


@pytest.mark.parametrize(
    "tried, free, in_use, unallocated, verdict",
    [
        ("382.00 MiB", "363.06 MiB", "14.39 GiB", "1015.32 MiB", "단편화"),
        ("470.00 MiB", "213.06 MiB", "14.53 GiB", "339.39 MiB", "알 수 없다"),
        ("2.00 GiB", "213.06 MiB", "14.53 GiB", "339.39 MiB", "모자란다"),
        ("20.00 MiB", "10.00 MiB", "9.00 GiB", "5.00 GiB", "다른 프로세스"),
    ],
)
def test_the_message_is_judged(tried, free, in_use, unallocated, verdict):
    rows = read_oom(MESSAGE.format(tried=tried, free=free, in_use=in_use, unallocated=unallocated))
    assert verdict in rows[-1][-1]


def test_the_messages_numbers_are_bytes():
    sizes = parse_oom(MESSAGE.format(tried="20.00 MiB", free="512 bytes", in_use="14.00 GiB", unallocated="1.50 KiB"))
    assert sizes["tried"] == 20 * MiB and sizes["free"] == 512 and sizes["in_use"] == 14 * GiB
    assert sizes["unallocated"] == 1536 and sizes["allocated"] == 12 * GiB


def test_another_text_is_no_message():
    with pytest.raises(WrongValue, match="unallocated"):
        parse_oom("CUDA out of memory. Tried to allocate 20.00 MiB.")
    assert "없이" in read_oom(None)[0][-1]


def test_the_best_known_loss_is_the_solutions():
    names = {"torch": torch}
    exec(EXERCISES["3-3"]().answer, names)
    best = loss_cost(names["small_loss"])
    assert best.peak_bytes == BEST_LOSS_BYTES and best.flops == loss_cost(whole_loss).flops
    assert loss_error(names["small_loss"]) < 1e-6


def test_a_wrong_gradient_is_seen():
    def detached(hidden, head, labels):
        return whole_loss(hidden.detach(), head, labels) + 0 * hidden.sum()

    assert loss_error(detached) > 0.1


def test_a_table_has_heads_and_one_decimal():
    rows = table("length eager", [[256, 1.25]])
    assert rows == [["256", "1.2"]] and "길이" in rows._repr_html_()
