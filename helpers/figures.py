"""The course's drawings as files: `python -m helpers.figures` writes them to image/, named after their chapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from virtual_gpu.drawing import svg
from virtual_gpu.drawing.report import draw_report
from virtual_gpu.drawing.shards import draw_gpus, draw_stages, draw_step
from virtual_gpu.language import tr
from virtual_gpu.models.adapters import add_adapters
from virtual_gpu.plan import plan_training
from virtual_gpu.program.again import advice
from virtual_gpu.program.picture import draw_run
from virtual_gpu.program.runner import run
from virtual_gpu.report import MemoryTable
from virtual_gpu.shards.ledger import shard_ledger
from virtual_gpu.shards.rank_step import rank_step, steps_by_ranks
from virtual_gpu.step.predict import predict_memory
from virtual_gpu.step.splits import splits

from .chapters.c1_numbers.pictures import draw_number
from .chapters.c2_quantization.charts import draw_code_stems
from .chapters.c2_quantization.examples import NINE_NUMBERS, book_numbers, example_tensor
from .chapters.c2_quantization.pictures import draw_codes, draw_mappings
from .chapters.c2_quantization.quantization import quantize
from .chapters.c4_accumulation.accumulation import draw_splits
from .chapters.c5_checkpointing.chain import record_chain, sweep_segments
from .chapters.c5_checkpointing.pictures import draw_moments
from .chapters.c6_distributed.drawings import draw_data_parallel
from .chapters.c6_distributed.ranks import data_parallel
from .chapters.c7_split.drawings import draw_block_splits, draw_matrix_splits, draw_model_splits, draw_pipeline
from .chapters.c7_split.pipeline import SCHEDULES, pipeline
from .chapters.c7_split.tensor import tensor_parallel
from .chapters.c8_lora.fine_tuning import fine_tune, picture_of_update, pretrained_model
from .chapters.c8_lora.runs import Runs
from .ranks.launcher import run_ranks


def batch_4_on_a_t4() -> svg.Drawing:
    """Chapter 3: polyglot-ko-1.3b at batch 4, in fp16 with AdamW, on a T4."""
    return draw_report(predict_memory(batch_size=4, gpu="T4", full=True))


def batch_16_on_a_t4() -> svg.Drawing:
    """Chapter 3: the same at batch 16, which does not fit."""
    return draw_report(predict_memory(batch_size=16, gpu="T4", full=True))


def batches_on_a_t4() -> svg.Drawing:
    """Chapter 3: the book's table as bars, batch 4, 8 and 16."""
    return MemoryTable(predict_memory(batch_size=size, gpu="T4") for size in (4, 8, 16)).chart()


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


def _chain_at(*moments: tuple[str, int], **strategy: Any) -> svg.Drawing:
    """A chain of five nodes at these moments of its run."""
    run = record_chain(5, **strategy)
    return draw_moments([(run.title, run, run.moment(*moment)) for moment in moments])


def keep_everything() -> svg.Drawing:
    """Chapter 5, the book's picture 8: everything is kept, at two moments."""
    return _chain_at(("forward", 5), ("backward", 4), strategy="everything")


def keep_minimum() -> svg.Drawing:
    """Chapter 5, the book's picture 9: only the input is kept."""
    return _chain_at(("forward", 5), ("backward", 4), strategy="minimum")


def checkpoint_at_three() -> svg.Drawing:
    """Chapter 5, the book's picture 10: node three of five is a checkpoint."""
    return _chain_at(("forward", 5), ("backward", 4), checkpoints=[3])


def three_strategies() -> svg.Drawing:
    """Chapter 5: the three strategies at the one moment at which the book compares them."""
    runs = [record_chain(5, "everything"), record_chain(5, "minimum"), record_chain(5, checkpoints=[3])]
    return draw_moments([(run.title, run, run.moment("backward", 4)) for run in runs])


def twelve_nodes_in_three_segments() -> svg.Drawing:
    """Chapter 5: the panel's first picture."""
    return record_chain(12, segments=3).draw()


def segments_of_1024_nodes() -> svg.Drawing:
    """Chapter 5: the number of segments against what is stored."""
    return sweep_segments(1024).draw()


def with_and_without_checkpointing() -> svg.Drawing:
    """Chapter 5: polyglot-ko-1.3b at batch 16 on a T4, without and with checkpointing."""
    return MemoryTable(
        predict_memory(batch_size=16, gradient_checkpointing=on, gpu="T4") for on in (False, True)
    ).chart()


def four_copies() -> svg.Drawing:
    """Chapter 6: four ranks that train together, as they reported."""
    return draw_data_parallel(run_ranks(data_parallel, 4, 1))


def block_on_two_ranks() -> svg.Drawing:
    """Chapter 7: attention and MLP of GPT-NeoX as two ranks split them."""
    return draw_block_splits(run_ranks(tensor_parallel, 2)[0].shapes, heads=4)


def pipeline_timeline() -> svg.Drawing:
    """Chapter 7: four schedules on four ranks, as recorded."""
    return draw_pipeline({schedule: run_ranks(pipeline, 4, schedule) for schedule in SCHEDULES})


def zero_stages() -> svg.Drawing:
    """Chapter 6: the ZeRO paper's figure 1, from sharded modules."""
    return draw_stages(
        [
            shard_ledger("ZeRO-7.5B", 64, stage, gradient_as_bucket_view=True) for stage in range(4)
        ]  # as the paper counts
    )


def zero_gpus() -> svg.Drawing:
    """Chapter 6: memory of a GPU against the number of GPUs, down to the floor."""
    return draw_gpus(steps_by_ranks("meta-llama/Llama-3.1-70B"))


def zero_panel_at_first() -> svg.Drawing:
    """Chapter 6: the panel's first picture."""
    setting = {"batch_size": 1, "sequence_length": 4096, "gradient_checkpointing": True}
    return draw_step(rank_step("meta-llama/Llama-3.1-70B", 64, exact=False, **setting))


def _small_lora(rank: int) -> torch.nn.Module:
    torch.manual_seed(1)
    return add_adapters(pretrained_model(), rank, "all-linear", lora_alpha=2 * rank, lora_dropout=0.0)


def lora_update() -> svg.Drawing:
    """Chapter 8: W + BA, a piece of a trained layer."""
    run = fine_tune(_small_lora(4))
    return picture_of_update(run.model.get_submodule("base_model.model.gpt_neox.layers.0.attention.dense"))


def full_lora_qlora_on_a_t4() -> svg.Drawing:
    """Chapter 8: where the memory goes at batch 16."""
    return MemoryTable(predict_memory(batch_size=16, peft=peft, gpu="T4") for peft in (None, "lora", "qlora")).chart()


def lora_batch_16_on_a_t4() -> svg.Drawing:
    """Chapter 8: the panel's first picture."""
    return draw_report(predict_memory(batch_size=16, peft="lora", gpu="T4"))


def loss_and_forgetting() -> svg.Drawing:
    """Chapter 8: the small model learns a second task, in full and with LoRA, and forgets the first."""
    runs = Runs([fine_tune(pretrained_model(), tr(ko="전체", en="full"), lr=2e-3)])
    runs += [fine_tune(_small_lora(rank), f"LoRA r={rank}") for rank in (1, 4, 16)]
    return runs.chart()


def plans_on_a_t4() -> svg.Drawing:
    """Chapter 9: the plans for polyglot-ko-5.8b on a T4, the panel's first picture."""
    return plan_training("EleutherAI/polyglot-ko-5.8b", "T4").chart()


def program_on_a_t4() -> svg.Drawing:
    """README: an unchanged Trainer, one command, the verdict."""
    command = ["examples/train.py", "--per_device_train_batch_size", "16"]
    report = run(command[0], command[1:], gpu="T4")
    report.tried = [one.row() for one in advice(["--gpu", "T4"], command)]
    return draw_run(report, ["virtual-gpu", "run", "--gpu", "T4", *command])


FIGURES: dict[str, Callable[[], svg.Drawing]] = {
    "01_one_tenth": one_tenth,
    "02_type_range": quantization_by_type_range,
    "02_outlier_and_blocks": quantization_of_an_outlier,
    "02_quantiles": quantization_by_quantiles,
    "02_blocks_of_64": quantization_in_blocks,
    "03_batch_4_on_a_t4": batch_4_on_a_t4,
    "03_batch_16_on_a_t4": batch_16_on_a_t4,
    "03_batches_on_a_t4": batches_on_a_t4,
    "04_splits_of_16": splits_of_16,
    "05_keep_everything": keep_everything,
    "05_keep_minimum": keep_minimum,
    "05_checkpoint_at_three": checkpoint_at_three,
    "05_three_strategies": three_strategies,
    "05_three_segments": twelve_nodes_in_three_segments,
    "05_segments": segments_of_1024_nodes,
    "05_with_and_without": with_and_without_checkpointing,
    "06_data_parallel": four_copies,
    "06_zero_stages": zero_stages,
    "06_zero_gpus": zero_gpus,
    "06_zero_panel": zero_panel_at_first,
    "07_model_splits": draw_model_splits,
    "07_matrix_splits": draw_matrix_splits,
    "07_block_splits": block_on_two_ranks,
    "07_pipeline": pipeline_timeline,
    "08_w_plus_ba": lora_update,
    "08_full_lora_qlora_on_a_t4": full_lora_qlora_on_a_t4,
    "08_lora_batch_16_on_a_t4": lora_batch_16_on_a_t4,
    "08_loss_and_forgetting": loss_and_forgetting,
    "09_plans_on_a_t4": plans_on_a_t4,
    "09_program_on_a_t4": program_on_a_t4,
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
