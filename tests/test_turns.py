"""Threads take turns: what they get is what one thread gets, and nothing of the process is left changed."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from virtual_gpu.step.predict import predict_memory

SETTINGS = [
    {
        "batch_size": n,
        "sequence_length": 32,
        "model_id": "gpt2",
        "precision": precision,
        "gradient_checkpointing": on,
    }
    for n, precision, on in ((1, "fp16", False), (2, "fp16", True), (1, "mixed_fp16", True), (2, "mixed_fp16", False))
]


def predict(settings):
    report = predict_memory(gpu="T4", **settings)
    return report.peak_bytes, report.reserved_bytes, report.parameters_bytes


def test_four_threads_get_what_one_gets():
    alone = [predict(settings) for settings in SETTINGS]
    before = torch.get_default_dtype(), sys.stdout
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(predict, SETTINGS)) == alone
    assert (torch.get_default_dtype(), sys.stdout) == before
