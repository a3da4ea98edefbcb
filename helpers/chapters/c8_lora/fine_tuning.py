"""Chapter 8: a small model, its tasks, and what fine-tuning learns, forgets and adds to the weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from virtual_gpu.language import tr
from virtual_gpu.models.adapters import linear_layers
from virtual_gpu.models.build import build_model, count_parameters
from virtual_gpu.units import choose

from ...small_model import CAPITALS
from ...watched import telling
from .pictures import draw_singular_values, draw_update
from .runs import COUNT, Run


def _topic(word: str) -> str:
    """The word with its topic particle: 은 after a final consonant, else 는."""
    return word + ("은" if (ord(word[-1]) - 0xAC00) % 28 else "는")


# Sentences of one length, nearly: little of a batch is padding, and a training is a second shorter.
_PAIRS = [pair for pair in CAPITALS.items() if len("".join(pair)) <= 8][:COUNT]
# task → [(what the reader asks with, what the model answers)], made from the same 32 countries and capitals.
TASKS = {
    "capital": [(f"{country}의 수도는 ", f"{capital}이다.") for country, capital in _PAIRS],
    "country": [(f"{_topic(capital)} ", f"{country}의 수도이다.") for country, capital in _PAIRS],
    "short": [(f"{country}의 수도는 ", f"{capital}.") for country, capital in _PAIRS],
}
FRANCE, PARIS = "프랑스의 수도는 ", "파리는 "  # what the chapter asks with
_END, _PAD = "\n", "<pad>"
_CHARACTERS = [_PAD, _END, *sorted({*"".join(start + end for task in TASKS.values() for start, end in task)})]


@functools.cache
def small_tokenizer() -> Any:
    """One token a character of the tasks; a line break begins and ends a sentence."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(_CHARACTERS)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD, bos_token=_END, eos_token=_END)


@functools.cache
def _lesson(task: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(32, length) tokens; which of them are text; which of them belong to the answer (with the line's end)."""
    sentences = TASKS[choose(task, TASKS, tr(ko="과제", en="task"))]
    number = {character: i for i, character in enumerate(_CHARACTERS)}
    rows = [[number[c] for c in _END + start + end + _END] for start, end in sentences]
    length = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    first = torch.tensor([[1 + len(start)] for start, _ in sentences])
    text = tokens > 0
    return tokens, text, text & (torch.arange(length) >= first)


def _task_loss(model: nn.Module, task: str, *, whole: bool = False) -> torch.Tensor:
    tokens, text, answer = _lesson(task)
    learned = (text if whole else answer)[:, 1:]
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits[learned], tokens[:, 1:][learned])


def one_thread(function: Callable) -> Callable:
    """Run on one thread: faster for matrices as small as these."""

    @functools.wraps(function)
    def run(*arguments: Any, **settings: Any) -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*arguments, **settings)
        finally:
            torch.set_num_threads(threads)

    return run


@one_thread
@torch.no_grad()
def known(model: nn.Module, task: str) -> int:
    """How many of the task's 32 answers the model would complete without a mistake."""
    tokens, _, answer = _lesson(task)
    right = (model(input_ids=tokens[:, :-1], use_cache=False).logits.argmax(-1) == tokens[:, 1:]) | ~answer[:, 1:]
    return int(right.all(1).sum())


@one_thread
@torch.no_grad()
def complete(model: nn.Module, start: str, most: int = 16) -> str:
    """`start` with the likeliest continuation, up to the end of the line."""
    tokenizer = small_tokenizer()
    ids = tokenizer(_END + start, return_tensors="pt").input_ids
    for _ in range(most):
        following = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        if int(following) == tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, following], 1)
    return tokenizer.decode(ids[0, 1:])


@functools.cache
def _pretrained(width: int) -> nn.Module:
    from transformers import GPTNeoXConfig

    config = GPTNeoXConfig(
        vocab_size=len(_CHARACTERS),
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=32,
        rotary_pct=0.5,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(config, torch.float64, device="cpu")
        _train(model, "capital", 100, 5e-3, whole=True)
    return model


def pretrained_model(width: int = 64) -> nn.Module:
    """A GPT-NeoX of 2 layers, polyglot-ko's family, that knows the 32 capitals (at width 64): a fresh copy, in fp64.

    In fp64 the order in which a CPU adds shows in no digit that is printed.
    """
    return copy.deepcopy(_pretrained(width))


def quantized_model(model: nn.Module) -> nn.Module:
    """A copy of the small model on bitsandbytes' 4-bit weights (NF4, double quantization), frozen; products in fp64."""
    from virtual_gpu.models.quantized import quantize_linears

    model = copy.deepcopy(model).float()
    quantize_linears(model, torch.float64, _CPU)
    model.to("cpu").requires_grad_(False)  # bitsandbytes quantizes while it moves a layer
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.double()
    model.is_loaded_in_4bit = True
    return model


def dequantized_model(model: nn.Module) -> nn.Module:
    """A copy of the small model with the weights that `quantized_model` computes with, in ordinary layers (fp64)."""
    plain = copy.deepcopy(model)
    for layer in linear_layers(plain).values():
        layer.weight.data = nf4(layer.weight.detach())
    return plain


def nf4(weight: torch.Tensor) -> torch.Tensor:
    """The weight (fp64) as bitsandbytes would read it back from NF4 with double quantization."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    codes, state = quantize_4bit(weight.float(), quant_type="nf4", compress_statistics=True)
    return dequantize_4bit(codes, state).double()


class _CPU:
    is_virtual = False


# ---- training -------------------------------------------------------------------------------------------------------


def fine_tune(
    model: nn.Module, name: str = "", task: str = "country", *, lr: float = 1e-2, steps: int = 100, old: str = "capital"
) -> Run:
    """Train the parameters that want a gradient on all 32 sentences of a task (AdamW, one batch, one-cycle rate)."""
    trainable = count_parameters(model, trainable_only=True)
    if not trainable:
        raise ValueError(tr(ko="학습할 파라미터가 하나도 없다.", en="The model has no trainable parameter."))
    run = Run(name, model, trainable, lr)

    with telling() as told:

        def look(step: int) -> None:
            told(f"{name} {step}/{steps}".strip())
            run.history.append((step, known(model, task), known(model, old)))

        look(0)
        _train(model, task, steps, lr, run, look)
    return run


@one_thread
def _train(
    model: nn.Module, task: str, steps: int, lr: float, run: Run | None = None, look: Any = None, whole: bool = False
) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.2)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = _task_loss(model, task, whole=whole)
        loss.backward()
        optimizer.step()
        schedule.step()
        if run is not None:
            run.losses.append(loss.item())
            if step % 10 == 0 or step == steps:
                look(step)


# ---- updates --------------------------------------------------------------------------------------------------------


def updates(before: nn.Module, after: nn.Module) -> dict[str, torch.Tensor]:
    """name → what fine-tuning added to each linear layer's weight (out, in)."""
    old = linear_layers(before)
    return {name: (layer.weight - old[name].weight).detach() for name, layer in linear_layers(after).items()}


@one_thread
def share_of_singular_values(update: torch.Tensor) -> Any:
    """The share of an update's squared singular values that the first k hold, beside a random matrix of its shape."""
    random = torch.randn(update.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = tr(ko="미세 조정의 변화량", en="fine-tuning's update"), tr(ko="무작위 행렬", en="a random matrix")
    values = map(torch.linalg.svdvals, (update.double(), random))
    return draw_singular_values(dict(zip(labels, values, strict=True)))


@one_thread
def with_rank(before: nn.Module, after: nn.Module, rank: int) -> nn.Module:
    """The model `after`, whose linear layers keep only the best approximation of their update by a matrix of a rank."""
    model = copy.deepcopy(after)
    old, new = dict(before.named_modules()), dict(model.named_modules())
    for name, update in updates(before, after).items():
        u, s, v = torch.linalg.svd(update, full_matrices=False)
        new[name].weight.data = old[name].weight.detach() + u[:, :rank] * s[:rank] @ v[:rank]
    return model


def picture_of_update(layer: nn.Module, size: int = 12) -> Any:
    """W + BA from a peft layer's own numbers (the first `size` rows and columns)."""
    weight = layer.get_base_layer().weight
    a, b = (getattr(layer, f"lora_{name}")[layer.active_adapters[0]].weight for name in "AB")
    scale = layer.scaling[layer.active_adapters[0]]
    return draw_update(*(m.detach().float() for m in (weight[:size, :size], b[:size] * scale, a[:, :size])))
