"""Two programs that run out of memory late, for the cases: one in training, one in evaluation."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from tempfile import TemporaryDirectory
from typing import Any

import torch

import virtual_gpu
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.language import tr
from virtual_gpu.models.build import build_on_gpu
from virtual_gpu.units import choose, human_bytes, positive_int

from ...rows import LeftRows

# The lengths of the batches, each padded to its longest sample. One of them is long.
_LENGTHS = (152, 96, 208, 120, 264, 88, 176, 136, 312, 104, 944, 160)
_BATCH, _EVALUATED, _LENGTH = 32, 128, 512


def _config() -> Any:
    from transformers import GPT2Config

    return GPT2Config(n_layer=2)  # its width and vocabulary: what happens here happens at its ends


def train_on_lengths(total: str = "loss", max_length: int = 1024) -> LeftRows:
    """One epoch of a GPT-2 of two layers on a virtual T4; what was held after each step, and at most within it.

    total: what is added up over the steps, the "loss" itself or its "item()". max_length: where samples are cut.
    """
    total = choose(total, ("loss", "item"), "total")
    max_length = positive_int(max_length, "max_length")
    gpu = VirtualGPU(CATALOG["T4"])
    model = build_on_gpu(_config(), torch.float32, "sdpa", None, gpu)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    sum_of_losses, rows = 0.0, []
    for step, length in enumerate(_LENGTHS, start=1):
        gpu.reset_peak_memory_stats()
        try:
            with gpu:
                tokens = torch.zeros(_BATCH, min(length, max_length), dtype=torch.int64)
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                loss.backward()
        except torch.OutOfMemoryError as error:
            rows.append([str(step), "OOM", str(error).split(". ")[1]])
            break
        optimizer.step()
        optimizer.zero_grad()
        sum_of_losses = sum_of_losses + (loss if total == "loss" else loss.detach())
        rows.append([str(step), f"{gpu.memory_allocated():,} B", human_bytes(gpu.max_memory_allocated())])
    heads = (tr(ko="스텝", en="step"), tr(ko="스텝 뒤", en="after it"), tr(ko="스텝 안의 최대", en="peak in it"))
    return LeftRows(heads, rows)


def goes_through(max_length: int) -> bool:
    """Whether `train_on_lengths` comes to its end with this max_length."""
    return len(train_on_lengths("item", max_length)) == len(_LENGTHS)


def evaluate_with_trainer(batch_size: int = 8, keep: str = "logits") -> LeftRows:
    """transformers' own `Trainer.evaluate` of 128 samples of 512 tokens on a virtual T4: how far it came, and its peak.

    keep: what the Trainer collects for the metric: the "logits", their "argmax" (`preprocess_logits_for_metrics`), or
    "nothing" (`prediction_loss_only`). batch_size: `per_device_eval_batch_size`, from 2.
    """
    from transformers import GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

    keep = choose(keep, ("logits", "argmax", "nothing"), "keep")
    batch_size = max(2, positive_int(batch_size, "batch_size"))
    samples = [{"input_ids": [1] * _LENGTH, "labels": [1] * _LENGTH}] * _EVALUATED
    done, message = [], ""
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()), virtual_gpu.cuda("T4"):
        model = GPT2LMHeadModel(_config())
        model.loss_type = "ForCausalLM"  # what transformers takes anyway, with a warning
        model.register_forward_hook(lambda *_: done.append(1))
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                per_device_eval_batch_size=batch_size,
                prediction_loss_only=keep == "nothing",
                report_to="none",
                disable_tqdm=True,
            ),
            eval_dataset=samples,
            compute_metrics=lambda found: {},
            preprocess_logits_for_metrics=(lambda logits, labels: logits.argmax(-1)) if keep == "argmax" else None,
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.evaluate()
        except torch.OutOfMemoryError as error:
            message = str(error).split(". ")[1]
        peak = torch.cuda.max_memory_allocated()
    heads = (tr(ko="평가한 배치", en="batches"), tr(ko="최대", en="peak"), tr(ko="결과", en="result"))
    result = f"OOM: {message}" if message else tr(ko="끝까지 갔다", en="came to its end")
    return LeftRows(heads, [[f"{len(done)} / {-(-_EVALUATED // batch_size)}", human_bytes(peak), result]])
