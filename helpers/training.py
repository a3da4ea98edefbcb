"""The book's training function: the step of the instrument, and the lines that the book prints."""

from __future__ import annotations

from typing import Any

import torch

from virtual_gpu.counting.mode import on_virtual_gpu
from virtual_gpu.language import tr
from virtual_gpu.step.run import TrainingLog, train
from virtual_gpu.units import book_gb, with_parameters

from .gpu import current_gpu, gpu_utilization_line


def train_model(
    model: torch.nn.Module, dataset: Any, training_args: Any, *, log: TrainingLog | None = None
) -> TrainingLog:
    """`virtual_gpu.step.run.train`, and after the first optimizer step what the book prints there."""
    gpu, parameter = current_gpu(), next(with_parameters(model).parameters(), None)
    here = gpu if parameter is not None and not on_virtual_gpu(parameter) and gpu.owns(parameter) else None
    return train(model, dataset, training_args, log=log, gpu=here, after_first_step=_print_lines)


def _print_lines(log: TrainingLog) -> None:
    print(gpu_utilization_line(log.allocated_bytes))
    print(
        tr(
            ko=f"옵티마이저 상태의 메모리 사용량: {book_gb(log.optimizer_bytes)}\n"
            f"그레이디언트의 메모리 사용량: {book_gb(log.gradients_bytes)}",
            en=f"Optimizer state: {book_gb(log.optimizer_bytes)}\nGradients: {book_gb(log.gradients_bytes)}",
        )
    )
