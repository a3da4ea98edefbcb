"""Lightning-AI/litgpt: what finetuning printed as "Memory used" (max_memory_allocated over the run, in 1e9 bytes).

Two tables: config_hub/finetune/README.md (one yaml a row; its settings of September 2024 are
data/litgpt_config_hub.json, Apache-2.0) and tutorials/resource-tables.md (scripts of 2023, their constants below). The
model, the adapters and the chunked loss are those of the package litgpt; the loop of finetune/lora.py is written anew,
without Lightning's Fabric, of which two things are kept: a model in 16 bits returns its logits in fp32
(`HalfPrecision.convert_output`), and every linear layer is quantized (`BitsandbytesPrecision`), the head too.

The longest batch is taken to be as long as the settings allow: 512 tokens, or the longest example that is stated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from virtual_gpu.program.context import cuda

from .recipe import ANY, SIZE, Recipe, Refused, Row, from_source, gpu_of

CONFIG_HUB = json.loads((Path(__file__).parent / "data" / "litgpt_config_hub.json").read_text(encoding="utf-8"))
PACKAGES = ("litgpt==0.4.13",)  # September 2024
NAMES = {  # of resource-tables.md → of litgpt's configurations
    "phi-1.5 1.3 B": "phi-1_5",
    "StableLM Alpha 3 B": "stablelm-base-alpha-3b",
    "Llama 2 7 B": "Llama-2-7b-hf",
    "Falcon 7 B": "falcon-7b",
}
METHODS = {
    "Finetuning with LoRA on 1 GPU": "lora",
    "Finetuning with Adapter on 1 GPU": "adapter",
    "Finetuning with Adapter v2 on 1 GPU": "adapter_v2",
}
SCRIPT_LORA = {"lora_r": 8, "lora_dropout": 0.05, "lora_query": True, "lora_value": True}  # finetune/lora.py of 2023


@dataclass(frozen=True)
class Program:
    """A finetuning: method is "full", "lora", "adapter" or "adapter_v2"; quantize "", "bnb.nf4" or "bnb.nf4-dq".

    longest_first: the first micro-batch holds the longest example, "so potential OOMs happen right away" (get_batch of
    2023), and what follows is shorter; else long ones may follow each other.
    """

    checkpoint: str
    method: str
    batch: int
    length: int
    quantize: str = ""
    longest_first: bool = False
    lora: tuple[tuple[str, Any], ...] = ()


def program_of(row: Row) -> Program:
    """What a row of either table ran. Refused for what is in neither."""
    settings, note = row["settings"], str(row.get("note") or "")
    if settings.get("method") in METHODS:
        if row["model"] not in NAMES:
            raise Refused(f"the model {row['model']!r} is not among those of the tables")
        method = METHODS[settings["method"]]
        given = {**SCRIPT_LORA, "lora_r": settings.get("lora_r") or 8} if method == "lora" else {}
        quantize = "" if settings.get("quantize") in (None, "None") else settings["quantize"]
        batch, length, checkpoint = settings["micro_batch"], settings["longest_seq"], NAMES[row["model"]]
    else:
        path = note.partition("config_hub/finetune/")[2].partition(".yaml")[0] + ".yaml"
        known = {name.lower(): entry for name, entry in CONFIG_HUB.items()}
        if path.lower() not in known:
            raise Refused(f"no yaml of the config hub is named: {note!r}")
        entry = known[path.lower()]
        given = {name: value for name, value in entry.items() if name.startswith("lora_")}
        method, quantize = "lora" if given else "full", entry.get("quantize", "")
        batch = settings.get("micro_batch", entry["micro_batch_size"])
        length, checkpoint = settings.get("max_seq_length", entry["max_seq_length"]), entry["checkpoint"]
    if quantize not in ("", "bnb.nf4", "bnb.nf4-dq"):
        raise Refused(f"quantize={quantize!r} is not simulated")
    first = settings.get("method") in METHODS
    return Program(checkpoint, method, int(batch), int(length), quantize, first, tuple(sorted(given.items())))


def predict(row: Row) -> int:
    """Bytes: the most that was allocated in the run."""
    return _run(program_of(row), gpu_of(row).spec.name)


@cache
def _run(program: Program, card: str) -> int:
    """Validation, an optimizer step that makes the states, and two accumulated micro-batches after it."""
    from bitsandbytes.optim import PagedAdamW
    from litgpt.utils import chunked_cross_entropy

    with cuda(card):
        model = _model(program)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        paged = bool(program.quantize) and program.method == "lora"
        optimizer = PagedAdamW(trained, lr=2e-4) if paged else torch.optim.AdamW(trained, lr=2e-4)
        chunks = {} if program.method == "full" else {"lm_head_chunk_size": 128}
        ids = torch.ones(program.batch, program.length, dtype=torch.int64)
        model.eval()
        with torch.no_grad():
            logits = model(ids.cuda()).float()
            chunked_cross_entropy(logits[..., :-1, :], ids.cuda()[..., 1:], chunk_size=0)
            del logits
        model.train()
        for micro_batch in range(1 if program.longest_first else 4):
            input_ids, targets = ids.cuda(), ids.cuda()
            logits = _in_fp32(model(input_ids, **chunks))
            if chunks:
                logits[-1] = logits[-1][..., :-1, :]
            else:
                logits = logits[..., :-1, :]
            loss = chunked_cross_entropy(logits, targets[..., 1:])
            (loss / 4).backward()
            if micro_batch in (0, 3):
                optimizer.step()
                optimizer.zero_grad()
        return torch.cuda.max_memory_allocated()


def _in_fp32(logits: Any) -> Any:
    return [chunk.float() for chunk in logits] if isinstance(logits, list) else logits.float()


def _model(program: Program) -> nn.Module:
    """The model in bfloat16 on the card, with what is trained, and its other linear layers quantized."""
    import importlib

    name = {"full": "model"}.get(program.method, program.method)
    module = importlib.import_module(f"litgpt.{name}")
    options = {option: value for option, value in program.lora}
    try:
        config = module.Config.from_name(program.checkpoint, **options)
    except ValueError as error:
        raise Refused(f"litgpt 0.4.13: {error}") from error
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = module.GPT(config)
    finally:
        torch.set_default_dtype(before)
    mark = {"lora": "mark_only_lora_as_trainable"}.get(program.method, "mark_only_adapter_v2_as_trainable")
    if program.method != "full":
        getattr(module, mark if hasattr(module, mark) else "mark_only_adapter_as_trainable")(model)
    if program.quantize:
        _quantize(model, double=program.quantize.endswith("-dq"))
    for part in model.modules():
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    value = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    tensors[key] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    model.max_seq_length = program.length
    model.cos, model.sin = model.rope_cache(device=torch.device("cuda"))
    return model


def _quantize(model: nn.Module, *, double: bool) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Linear4bit(child, double))


class Linear4bit(nn.Module):
    """bitsandbytes 0.42's layer (the version that litgpt asks for), quantized from fp16 as Lightning does.

    Packed weight; for each 64 weights an absmax, in fp32, or (double) in 8 bits with an fp32 absmax for each 256 of
    those, their code and an offset; the code of 16.
    """

    def __init__(self, linear: nn.Linear, double: bool):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        blocks = -(-linear.weight.numel() // 64)
        sizes = [((linear.weight.numel() + 1) // 2, torch.uint8), (16, torch.float32)]
        nested = [(blocks, torch.uint8), (-(-blocks // 256), torch.float32), (256, torch.float32), (1, torch.float32)]
        for n, (size, dtype) in enumerate(sizes + (nested if double else [(blocks, torch.float32)])):
            self.register_buffer("weight" if n == 0 else f"state_{n}", torch.empty(size, dtype=dtype, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in_features) → (…, out_features)."""
        return _MatMul4Bit.apply(x, self.weight, self.bias, (self.out_features, self.in_features))


class _MatMul4Bit(torch.autograd.Function):
    """The weight in fp16 and its copy in x's type for each product; x stays with the graph until that is gone.

    Source: MatMul4Bit in bitsandbytes/autograd/_functions.py of 0.42 (`ctx.tensors = (A, B)`; later versions keep
    only B).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, int]):
        ctx.shape = shape
        ctx.tensors = (x, packed) if ctx.needs_input_grad[0] else (None, None)
        return nn.functional.linear(x, _dequantized(x, shape), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return grad @ _dequantized(grad, ctx.shape), None, None, None


def _dequantized(like: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.float16).to(like.dtype)


RECIPES = (
    Recipe(
        name="litgpt finetune",
        what="litgpt's finetuning scripts (config hub of September 2024, resource tables of 2023), bf16-true",
        what_ko="litgpt의 미세 조정 스크립트, bf16-true",
        handles=from_source("Lightning-AI/litgpt"),
        predict=predict,
        packages=lambda row: PACKAGES,
        settings={
            **dict.fromkeys(("micro_batch", "max_seq_length", "longest_seq"), SIZE),
            "lora_r": (None, *range(1, 1025)),
            "dtype": ("bf16-true",),
            "optimizer": ("torch.optim.AdamW (yaml)",),
            **dict.fromkeys(("method", "quantize", "gradient_checkpointing", "torch", "trainable_params"), ANY),
        },
    ),
)
