"""Times that the chapters or the planner speak of: medians, on the card alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from .side import ON_CARD, built, counters, error_of, say, settle


def median_seconds(call: Callable[[], Any], repeats: int = 10, warm: int = 3) -> list[float]:
    """[median, least, most] seconds by CUDA's events."""
    for _ in range(warm):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return [statistics.median(times), min(times), max(times)]


def timed(name: str, call: Callable[[], Any], **more: Any) -> None:
    torch.cuda.reset_peak_memory_stats()
    repeats = more.pop("repeats", 10)
    try:
        say(name, seconds=median_seconds(call, repeats), **counters(), **more)
    except Exception as error:
        say(name, error=error_of(error))


def _twice(name: str, call: Callable[[], Any], **more: Any) -> None:
    """What of `timed` a virtual card has an answer to: the second call is as all later ones."""
    torch.cuda.reset_peak_memory_stats()
    call()
    call()
    say(name, **counters(), **more)


def rates() -> None:
    """Products by type, bandwidths on the card and to it, launches."""
    for size in (4096, 8192, 16384):
        for dtype, tf32 in (("float32", False), ("float32", True), ("float16", False), ("bfloat16", False)):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            x = torch.randn(size, size, device="cuda").to(getattr(torch, dtype))
            timed(f"mm {size} {dtype}{' tf32' if tf32 else ''}", lambda x=x: x @ x, flops=2 * size**3, repeats=5)
            del x
    torch.backends.cuda.matmul.allow_tf32 = False
    nbytes = 2**30
    host, pinned = torch.empty(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8).pin_memory()
    host.fill_(1)
    pinned.fill_(1)
    there, other = torch.empty(nbytes, dtype=torch.uint8, device="cuda"), torch.empty_like(host, device="cuda")
    for name, source in (("pageable", host), ("pinned", pinned)):
        timed(f"H2D {name}", lambda source=source: there.copy_(source, non_blocking=True), bytes=nbytes, repeats=5)
        timed(f"D2H {name}", lambda source=source: source.copy_(there, non_blocking=True), bytes=nbytes, repeats=5)
    timed("D2D", lambda: other.copy_(there), bytes=2 * nbytes)
    timed("fill", lambda: there.fill_(0), bytes=nbytes)
    started = time.perf_counter()
    pages = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    say("pinning 1 GiB", wall=time.perf_counter() - started)
    del pages
    started = time.perf_counter()
    for _ in range(1000):
        there[:1].fill_(0)
    torch.cuda.synchronize()
    say("1000 launches", wall=time.perf_counter() - started)


def _batch(model: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(100, 20_000, (batch, length), device="cuda")
    return {"input_ids": ids, "labels": ids}


def _step(model: Any, optimizer: Any, batch: dict[str, Any], autocast: Any = None, parts: int = 1) -> None:
    for _ in range(parts):
        with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = model(**batch, use_cache=False).loss
        (loss / parts).backward()
    optimizer.step()
    optimizer.zero_grad()


def steps() -> None:
    """Training steps of polyglot-ko-1.3b: by batch, type, checkpointing, optimizer, attention, accumulation."""
    name = "EleutherAI/polyglot-ko-1.3b"
    from transformers.utils import logging

    logging.set_verbosity_error()

    def run(label: str, dtype: torch.dtype, batch: int, length: int = 256, checkpointing: bool = False,
            optimizer: Any = None, attention: str = "sdpa", autocast: Any = None, parts: int = 1) -> None:  # fmt: skip
        settle()
        try:
            model = built(name, dtype, attention).train()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            made = (optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True)))(model.parameters())
            data = _batch(model, batch, length)
            if ON_CARD:
                timed(label, lambda: _step(model, made, data, autocast, parts), repeats=6, batch=batch, length=length)
            else:
                _twice(label, lambda: _step(model, made, data, autocast, parts), batch=batch, length=length)
        except Exception as error:
            say(label, error=error_of(error))

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for batch in (1, 8, 16):
        run(f"bf16 batch {batch}", bf16, batch)
    run("bf16 batch 16 checkpointed", bf16, 16, checkpointing=True)
    run("bf16 4 x 4 accumulated", bf16, 4, parts=4)
    run("bf16 batch 4 length 1024", bf16, 4, 1024)
    run("bf16 batch 4 length 1024 checkpointed", bf16, 4, 1024, checkpointing=True)
    run("bf16 batch 4 length 1024 eager", bf16, 4, 1024, attention="eager")
    run("fp16 batch 16", fp16, 16)
    run("mixed bf16 batch 8", fp32, 8, autocast=bf16)
    run("fp32 batch 8", fp32, 8)
    torch.backends.cuda.matmul.allow_tf32 = True
    run("tf32 batch 8", fp32, 8)
    torch.backends.cuda.matmul.allow_tf32 = False
    run("bf16 batch 8 foreach", bf16, 8, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-6, foreach=True))

    def eight(p: Any) -> Any:
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(p, lr=1e-6)

    run("bf16 batch 8 adamw 8 bit", bf16, 8, optimizer=eight)


def adapters() -> None:
    """LoRA beside QLoRA and LLM.int8(); layers alone."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    from .side import load

    name = "EleutherAI/polyglot-ko-1.3b"
    ways = {
        "lora": {},
        "qlora": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
        "qlora double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
                         "bnb_4bit_compute_dtype": torch.bfloat16},
        "int8": {"load_in_8bit": True},
    }  # fmt: skip
    for label, how in ways.items():
        settle()
        try:
            options = {"quantization_config": BitsAndBytesConfig(**how)} if how else {}
            model = load(name, dtype=torch.bfloat16, device_map={"": 0}, **options)
            say(f"{label} loaded", **counters())
            if how:
                model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")).train()
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=True)
            data = _batch(model, 8, 256)
            step = partial(_step, model, optimizer, data, torch.bfloat16)
            timed(f"{label} batch 8", step, repeats=6) if ON_CARD else _twice(f"{label} batch 8", step)
            del step, model, optimizer
        except Exception as error:
            say(label, error=error_of(error))
    q = torch.randn(4, 32, 2048, 64, device="cuda", dtype=torch.bfloat16)
    for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):

        def attend(backend: str = backend) -> None:
            with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
                F.scaled_dot_product_attention(q, q, q, is_causal=True)

        timed(f"sdpa {backend}", attend)
