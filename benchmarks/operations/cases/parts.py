"""Checkpoints, copies between host and card, and small models of transformers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .run import BF16, FP16, FP32, Run, real, whole


def checkpoints() -> Iterator[tuple]:
    from torch.utils.checkpoint import checkpoint

    def block(dtype: torch.dtype, dropout: float) -> nn.Sequential:
        return nn.Sequential(
            nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Dropout(dropout), nn.Linear(2048, 512)
        ).to("cuda", dtype)

    def checkpointed(
        dtype: torch.dtype, reentrant: bool, autocast: torch.dtype | None, dropout: float, **kwargs: Any
    ) -> Run:
        blocks = nn.ModuleList(block(dtype, dropout) for _ in range(3))

        def function(x: torch.Tensor) -> torch.Tensor:
            for one in blocks:
                x = checkpoint(one, x, use_reentrant=reentrant, **kwargs)
            return x

        return Run(
            function, real(8, 256, 512, dtype=dtype, grad=True), parameters=blocks.parameters(), autocast=autocast
        )

    for reentrant, dropout in itertools.product((True, False), (0.0, 0.1)):
        for label, dtype, autocast in (("fp32", FP32, None), ("bf16", BF16, None), ("autocast", FP32, BF16)):
            end = f"{'reentrant' if reentrant else 'not reentrant'} {label} {dropout}"
            yield end, checkpointed, dtype, reentrant, autocast, dropout
            yield (
                f"{end} no rng",
                functools.partial(checkpointed, dtype, reentrant, autocast, dropout, preserve_rng_state=False),
            )

    def plain(dtype: torch.dtype, autocast: torch.dtype | None) -> Run:
        one = block(dtype, 0.1)
        return Run(one, real(8, 256, 512, dtype=dtype, grad=True), parameters=one.parameters(), autocast=autocast)

    for label, dtype, autocast in (("fp32", FP32, None), ("bf16", BF16, None), ("autocast", FP32, BF16)):
        yield f"without {label}", plain, dtype, autocast

    def saved_on_cpu(pin: bool) -> Run:
        one = block(FP32, 0.0)
        context = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=pin)
        return Run(one, real(8, 256, 512, grad=True), parameters=one.parameters(), context=context)

    for pin in (False, True):
        yield f"save_on_cpu {pin}", saved_on_cpu, pin


def copies() -> Iterator[tuple]:
    def up(shape: tuple[int, ...], pinned: bool, dtype: torch.dtype | None, **kwargs: Any) -> Run:
        x = torch.ones(*shape)
        x = x.pin_memory() if pinned else x
        return Run(lambda: x.to("cuda", dtype, **kwargs), backward=False)

    def down(shape: tuple[int, ...], function: Callable) -> Run:
        x = real(*shape)
        return Run(lambda: function(x), backward=False)

    for shape in ((1000,), (1024, 1024), (4096, 4097)):
        for pinned, dtype, wait in itertools.product((False, True), (None, BF16, FP16, torch.int64), (False, True)):
            yield f"up {shape} {pinned} {dtype} {wait}", functools.partial(up, shape, pinned, dtype, non_blocking=wait)
        for name, function in (
            ("cpu", lambda x: x.cpu()),
            ("half cpu", lambda x: x.to("cpu", BF16)),
            ("transposed cpu", lambda x: x.t().cpu()),
            ("async", lambda x: x.to("cpu", non_blocking=True)),
            ("item", lambda x: x.flatten()[0].item()),
            ("copy_ to cpu", lambda x: torch.empty(x.shape).copy_(x)),
            ("copy_ half", lambda x: torch.empty(x.shape, dtype=BF16).copy_(x)),
            ("copy_ strided", lambda x: torch.empty(*x.shape, 2)[..., 0].copy_(x)),
            ("from strided", lambda x: x.copy_(torch.empty(*x.shape, 2)[..., 0])),
            ("from half", lambda x: x.copy_(torch.empty(x.shape, dtype=BF16))),
            ("strided to cpu", lambda x: x[::2].cpu()),
            ("same", lambda x: x.to("cuda")),
            ("copy", lambda x: x.to("cuda", copy=True)),
            ("from float64", lambda x: x.copy_(torch.empty(x.shape, dtype=torch.float64))),
            ("tensor", lambda x: torch.tensor(3.0, device="cuda")),
            ("as_tensor", lambda x: torch.as_tensor([1, 2, 3], device="cuda")),
            ("list", lambda x: x.flatten()[:5].tolist()),
            ("deepcopy", lambda x: x.clone()),
            ("bool", lambda x: bool((x.sum() == x.sum()).item())),
            ("print", lambda x: str(x.flatten()[0])),
        ):
            yield f"{name} {shape}", down, shape, function

    def modules(function: Callable) -> Run:
        return Run(
            lambda: function(nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))), backward=False
        )

    for name, function in (
        ("cuda", lambda m: m.cuda()),
        ("half cuda", lambda m: m.half().cuda()),
        ("cuda half", lambda m: m.cuda().half()),
        ("to both", lambda m: m.to("cuda", BF16)),
        ("to and back", lambda m: m.cuda().cpu()),
        ("load", lambda m: m.cuda().load_state_dict(m.state_dict())),
        ("on cuda", lambda m: nn.Linear(512, 512, device="cuda")),
    ):
        yield f"module {name}", modules, function


def model_parts() -> Iterator[tuple]:
    """Small models of transformers, as programs run them."""

    def model(kind: str, dtype: torch.dtype, autocast: torch.dtype | None, attention: str, mask: bool) -> Run:
        import transformers

        sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 5000}
        own = {"llama": {"intermediate_size": 688, "num_key_value_heads": 2}, "gpt2": {}}
        sizes |= own.get(kind, {"intermediate_size": 1024})
        config = transformers.AutoConfig.for_model(kind, **sizes, attn_implementation=attention)
        automatic = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
        made = automatic.from_config(config, dtype=dtype).cuda().train()
        ids = whole(5000, 4, 128)
        extra = {"attention_mask": torch.ones(4, 128, dtype=torch.int64).cuda()} if mask else {}
        return Run(
            lambda: made(input_ids=ids, labels=ids, **extra).loss, parameters=made.parameters(), autocast=autocast
        )

    for kind, attention, mask in itertools.product(
        ("gpt2", "llama", "bert", "gpt_neox"), ("sdpa", "eager"), (True, False)
    ):
        for label, dtype, autocast in (("fp32", FP32, None), ("bf16", BF16, None), ("autocast", FP32, BF16)):
            yield f"{kind} {attention} {mask} {label}", model, kind, dtype, autocast, attention, mask
