"""The course's drawings as files: `python -m helpers.figures` writes them to image/, named after their chapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from virtual_gpu.cards import card
from virtual_gpu.drawing import svg
from virtual_gpu.drawing.report import draw_report
from virtual_gpu.drawing.shards import draw_step
from virtual_gpu.language import tr
from virtual_gpu.program.again import advice
from virtual_gpu.program.picture import draw_run
from virtual_gpu.program.runner import run
from virtual_gpu.report import MemoryTable
from virtual_gpu.shards.rank_step import rank_step
from virtual_gpu.step.predict import predict_memory
from virtual_gpu.step.splits import splits

from .chapters.c1_numbers.pictures import draw_number
from .chapters.c2_quantization.charts import draw_code_stems
from .chapters.c2_quantization.examples import NINE_NUMBERS, book_numbers, example_tensor
from .chapters.c2_quantization.pictures import draw_codes, draw_mappings
from .chapters.c2_quantization.quantization import quantize
from .chapters.c4_accumulation.accumulation import draw_splits
from .chapters.c5_checkpointing.chain import record_chain
from .chapters.c5_checkpointing.pictures import draw_moments
from .chapters.c11_outside.pictures import draw_cache
from .chapters.c12_two_models.floor import Grpo
from .chapters.c12_two_models.pictures import draw_blocks


def batch_4_on_a_t4() -> svg.Drawing:
    """Chapter 3: polyglot-ko-1.3b at batch 4, in fp16 with AdamW, on a T4."""
    return draw_report(predict_memory(batch_size=4, gpu="T4", full=True))


def batch_16_on_a_t4() -> svg.Drawing:
    """Chapter 3: the same at batch 16, which does not fit."""
    return draw_report(predict_memory(batch_size=16, gpu="T4", full=True))


def quantization_by_type_range() -> svg.Drawing:
    """Chapter 2: the range of a type onto the range of int8; most codes are out of reach."""
    numbers = book_numbers()
    parts = []
    for source in (torch.float32, torch.float8_e4m3fn):
        label = tr(ko=f"{str(source)[6:]}의 범위를 int8의 범위로", en=f"the range of {str(source)[6:]} onto int8's")
        parts.append((label, torch.finfo(source).max, quantize(numbers, "type_range", source=source)))
    return draw_mappings(parts)


def quantization_of_an_outlier() -> svg.Drawing:
    """Chapter 2: nine numbers with an outlier, with one scale and with blocks of 3."""
    numbers = torch.tensor(NINE_NUMBERS)
    return draw_codes(quantize(numbers, bits=4), quantize(numbers, bits=4, block_size=3))


def quantization_by_quantiles() -> svg.Drawing:
    """Chapter 2: even steps and even shares, 4 bits on the same numbers."""
    numbers = example_tensor("normal", 4096)
    return draw_code_stems(quantize(numbers, "absmax", bits=4), quantize(numbers, "quantile", bits=4))


def quantization_in_blocks() -> svg.Drawing:
    """Chapter 2: numbers with outliers in blocks of 64, as the panel draws them."""
    return quantize(example_tensor("outliers"), bits=4, block_size=64).draw()


def one_tenth() -> svg.Drawing:
    """Chapter 1: 0.1 in every format, the panel's first picture."""
    return draw_number(0.1)


def splits_of_16() -> svg.Drawing:
    """Chapter 4: the panel's first picture."""
    return draw_splits(splits(16, gpu="T4", optimizer="adamw"))


def three_strategies() -> svg.Drawing:
    """Chapter 5: the three strategies at the one moment at which the book compares them."""
    runs = [record_chain(5, "everything"), record_chain(5, "minimum"), record_chain(5, checkpoints=[3])]
    return draw_moments([(run.title, run, run.moment("backward", 4)) for run in runs])


def twelve_nodes_in_three_segments() -> svg.Drawing:
    """Chapter 5: the panel's first picture."""
    return record_chain(12, segments=3).draw()


def with_and_without_checkpointing() -> svg.Drawing:
    """Chapter 5: polyglot-ko-1.3b at batch 16 on a T4, without and with checkpointing."""
    return MemoryTable(
        predict_memory(batch_size=16, gradient_checkpointing=on, gpu="T4") for on in (False, True)
    ).chart()


def cache_panel_at_first() -> svg.Drawing:
    """Chapter 11: the panel's first picture."""
    return draw_cache("meta-llama/Llama-3.1-8B", "RTX 4090", 16384)


def grpo_panel_at_first() -> svg.Drawing:
    """Chapter 12: the panel's first picture."""
    gpu = card("RTX 4090")
    return draw_blocks(Grpo("Qwen/Qwen3-0.6B").floor(gpu.memory_bytes), gpu.capacity_bytes)


def zero_panel_at_first() -> svg.Drawing:
    """Chapter 6: the panel's first picture."""
    setting = {"batch_size": 1, "sequence_length": 4096, "gradient_checkpointing": True}
    return draw_step(rank_step("meta-llama/Llama-3.1-70B", 64, exact=False, **setting))


def lora_batch_16_on_a_t4() -> svg.Drawing:
    """Chapter 8: the panel's first picture."""
    return draw_report(predict_memory(batch_size=16, peft="lora", gpu="T4"))


def program_on_a_t4() -> svg.Drawing:
    """README: an unchanged Trainer, one command, the verdict."""
    command = ["examples/train.py", "--fp16", "True", "--per_device_train_batch_size", "16"]
    report = run(command[0], command[1:], gpu="T4")
    report.tried = [one.row() for one in advice(["--gpu", "T4"], command, told=print)]
    return draw_run(report, ["virtual-gpu", "run", "--gpu", "T4", *command])


FIGURES: dict[str, Callable[[], svg.Drawing]] = {
    "01_one_tenth": one_tenth,
    "02_type_range": quantization_by_type_range,
    "02_outlier_and_blocks": quantization_of_an_outlier,
    "02_quantiles": quantization_by_quantiles,
    "02_blocks_of_64": quantization_in_blocks,
    "03_batch_4_on_a_t4": batch_4_on_a_t4,
    "03_batch_16_on_a_t4": batch_16_on_a_t4,
    "04_splits_of_16": splits_of_16,
    "05_three_strategies": three_strategies,
    "05_three_segments": twelve_nodes_in_three_segments,
    "05_with_and_without": with_and_without_checkpointing,
    "06_zero_panel": zero_panel_at_first,
    "08_lora_batch_16_on_a_t4": lora_batch_16_on_a_t4,
    "09_program_on_a_t4": program_on_a_t4,
    "11_cache_panel": cache_panel_at_first,
    "12_grpo_panel": grpo_panel_at_first,
}


def main() -> None:
    """Write every figure to image/."""
    folder = Path(__file__).resolve().parent.parent / "image"
    folder.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(draw().svg() + "\n", encoding="utf-8")
        print(f"image/{name}.svg")


if __name__ == "__main__":
    main()
