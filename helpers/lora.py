"""Chapter 7: a small model with two tasks, training with adapters, and the search for the largest model that fits."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .experiment import PRECISIONS, Setting, model_bytes, predict_memory
from .gpu_catalog import CATALOG
from .language import tr
from .lora_pictures import draw_runs, draw_singular_values, draw_update
from .models import add_adapters, architectures, build_model, count_parameters, linear_layers, load_config
from .report import html_table
from .small_model import CAPITALS
from .units import choose, human_bytes

# ---- the tasks and the small model ----------------------------------------------------------------------------------


def _topic(word: str) -> str:
    """The word with its topic particle: 은 after a final consonant, else 는."""
    return word + ("은" if (ord(word[-1]) - 0xAC00) % 28 else "는")


COUNT = 32
_PAIRS = list(CAPITALS.items())[:COUNT]
# task → [(what the reader asks with, what the model answers)], made from the same 32 countries and capitals.
TASKS = {
    "capital": [(f"{country}의 수도는 ", f"{capital}이다.") for country, capital in _PAIRS],
    "country": [(f"{_topic(capital)} ", f"{country}의 수도이다.") for country, capital in _PAIRS],
    "short": [(f"{country}의 수도는 ", f"{capital}.") for country, capital in _PAIRS],
}
FRANCE, PARIS = "프랑스의 수도는 ", "파리는 "  # what the chapter asks with
_END, _PAD = "\n", "<pad>"
_CHARACTERS = [_PAD, _END, *sorted({*"".join(start + end for task in TASKS.values() for start, end in task)})]
LINEARS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")  # of a GPT-NeoX block


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
    from .four_bit import quantize_linears

    model = copy.deepcopy(model).float()
    quantize_linears(model, torch.float64, _CPU)
    model.to("cpu").requires_grad_(False)  # bitsandbytes quantizes while it moves a layer
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.double()
    model.is_loaded_in_4bit = True
    return model


class _CPU:
    is_virtual = False


# ---- training -------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One fine-tuning: the loss of every step, and what was known of the new and the old task along the way.

    history: (step, answers known of the new task, of the old one), each of 32.
    """

    name: str
    model: nn.Module = field(repr=False)
    trainable: int
    losses: list[float] = field(default_factory=list, repr=False)
    history: list[tuple[int, int, int]] = field(default_factory=list, repr=False)

    @property
    def learned(self) -> int:
        """Answers known of the new task at the end."""
        return self.history[-1][1]

    @property
    def kept(self) -> int:
        """Answers still known of the old task at the end."""
        return self.history[-1][2]


class Runs(list):
    """Runs as a table; `chart()` draws their losses and what they forgot."""

    def chart(self) -> Any:
        """Loss by step, and answers known of both tasks by step."""
        return draw_runs(self, COUNT)

    def _repr_html_(self) -> str:
        heads = [
            tr(ko="방법", en="method"),
            tr(ko="학습하는 파라미터", en="trainable parameters"),
            tr(ko="마지막 loss", en="last loss"),
            tr(ko=f"새 과제({COUNT}개 중)", en=f"new task (of {COUNT})"),
            tr(ko=f"옛 과제({COUNT}개 중)", en=f"old task (of {COUNT})"),
        ]
        rows = [
            [run.name, f"{run.trainable:,}", f"{run.losses[-1]:.2f}", str(run.learned), str(run.kept)] for run in self
        ]
        return html_table(heads, rows)

    def __repr__(self) -> str:
        return "\n".join(f"{run.name}: {run.trainable:,}, {run.learned}, {run.kept}" for run in self)


def fine_tune(
    model: nn.Module, name: str = "", task: str = "country", *, lr: float = 1e-2, steps: int = 120, old: str = "capital"
) -> Run:
    """Train the parameters that want a gradient on all 32 sentences of a task (AdamW, one batch, one-cycle rate)."""
    trainable = count_parameters(model, trainable_only=True)
    if not trainable:
        raise ValueError(tr(ko="학습할 파라미터가 하나도 없다.", en="The model has no trainable parameter."))
    run = Run(name, model, trainable)

    def look(step: int) -> None:
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
    old = dict(before.named_modules())
    return {
        name: (module.weight - old[name].weight).detach()
        for name, module in after.named_modules()
        if isinstance(module, nn.Linear) and name.split(".")[-1] in LINEARS
    }


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


# ---- merging and loading --------------------------------------------------------------------------------------------


def merge(model: nn.Module) -> None:
    """Add each adapter to its weight, in place. RuntimeError where that is done already, rather than peft's silence."""
    if _merged(model):
        raise RuntimeError(
            tr(
                ko="어댑터가 이미 합쳐져 있다. 한 번 더 합치면 BA가 두 번 더해진다. unmerge(model)로 먼저 떼어 낸다.",
                en="The adapter is merged already; once more would add BA twice. unmerge(model) takes it out.",
            )
        )
    model.merge_adapter()


def unmerge(model: nn.Module) -> None:
    """Take the adapters out of the weights again; RuntimeError where they are not in them."""
    if not _merged(model):
        raise RuntimeError(
            tr(
                ko="합쳐진 어댑터가 없다. merge(model)로 합친 모델에만 쓴다.",
                en="No adapter is merged; merge(model) comes first.",
            )
        )
    model.unmerge_adapter()


def _merged(model: nn.Module) -> bool:
    layers = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    if not layers:
        raise RuntimeError(tr(ko="이 모델에는 LoRA 어댑터가 없다.", en="This model has no LoRA adapter."))
    return any(layer.merged_adapters for layer in layers)


def load_adapter(model: nn.Module, folder: str | Path, name: str) -> None:
    """Load a saved adapter beside those that a peft model has, under a name, and use it.

    FileNotFoundError where the folder holds none; ValueError where its shapes are those of another base model, before
    anything of it is loaded. (A base of the same shapes cannot be told from the right one.)
    """
    from safetensors import safe_open

    folder = Path(folder)
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(
            tr(
                ko=f"{folder}에 어댑터(adapter_model.safetensors)가 없다. save_pretrained로 저장한 폴더를 준다.",
                en=f"{folder} holds no adapter (adapter_model.safetensors); give a folder made by save_pretrained.",
            )
        )
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    layers = dict(model.get_base_model().named_modules())
    with safe_open(file, "pt") as saved:
        for key in list(saved.keys()):
            module, _, matrix = key.removeprefix("base_model.model.").rpartition(".lora_")
            if not module or matrix[0] not in "AB":
                continue
            layer, shape = layers.get(module), tuple(saved.get_slice(key).get_shape())
            here = getattr(layer, "in_features" if matrix[0] == "A" else "out_features", None)
            if here != shape[matrix[0] == "A"]:
                base = config.get("base_model_name_or_path")
                base = f" ({base})" if base else ""
                there = tr(ko="그런 층이 없다", en="has no such layer") if here is None else str(here)
                raise ValueError(
                    tr(
                        ko=f"이 어댑터는 다른 모델{base}의 것이다. {module}: 어댑터는 {shape[matrix[0] == 'A']}, "
                        f"이 모델은 {there}. 어댑터를 학습한 모델을 불러온 뒤 다시 한다.",
                        en=f"This adapter belongs to another model{base}. {module}: {shape[matrix[0] == 'A']} in the"
                        f" adapter, this model: {there}. Load the model that it was trained on.",
                    )
                )
    model.load_adapter(str(folder), adapter_name=name)
    model.set_adapter(name)


# ---- counting -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def trainable_parameters(
    model_id: str, peft: str | None = "lora", lora_rank: int = 8, lora_targets: str | tuple[str, ...] = "attention"
) -> tuple[int, int]:
    """(trainable, all) parameters of an architecture with adapters, counted on tensors without memory."""
    setting = Setting(1, model_id=model_id, peft=peft, lora_rank=lora_rank, lora_targets=lora_targets)
    model = build_model(load_config(setting.model_id), torch.float16)
    if peft is not None:
        model = add_adapters(model, **{name.removeprefix("lora_"): v for name, v in setting.adapters.items()})
    return count_parameters(model, trainable_only=True), count_parameters(model)


class StorageTable(list):
    """Rows (kind, parameters, bytes) of what a model's parameters are stored in."""

    def _repr_html_(self) -> str:
        heads = [
            tr(ko="무엇", en="what"),
            tr(ko="자료형", en="dtype"),
            tr(ko="파라미터", en="parameters"),
            tr(ko="바이트", en="bytes"),
            tr(ko="파라미터당", en="each"),
        ]
        return html_table(
            heads,
            [[kind, dtype, f"{n:,}", human_bytes(size), f"{size / n:.4f}"] for kind, dtype, n, size in self],
        )

    def __repr__(self) -> str:
        return "\n".join(f"{kind} ({dtype}): {n:,}, {size:,} B" for kind, dtype, n, size in self)


def storage_table(model: nn.Module) -> StorageTable:
    """What a model's parameters are stored in: 4-bit layers with statistics, embeddings, head, norms, adapters."""
    four_bit = tr(ko="4비트 선형층", en="4-bit linear layers")
    head = model.get_output_embeddings()
    rows: dict[tuple[str, str], list[int]] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        for part, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            count, size = parameter.numel(), parameter.nbytes
            if parameter.dtype == torch.uint8:
                kind, count = four_bit, count * 2
                size = model_bytes(module) - (0 if module.bias is None else module.bias.nbytes)
            elif "lora_" in name:
                kind = tr(ko="어댑터", en="adapters")
            elif isinstance(module, nn.Embedding):
                kind = tr(ko="임베딩", en="embeddings")
            elif module is head:
                kind = tr(ko="출력층", en="output head")
            elif part == "weight" and isinstance(module, nn.Linear):
                kind = tr(ko="선형층", en="linear layers")
            else:
                kind = tr(ko="정규화와 편향", en="norms and biases")
            row = rows.setdefault((kind, str(parameter.dtype).removeprefix("torch.")), [0, 0])
            row[0] += count
            row[1] += size
    return StorageTable((*key, *row) for key, row in rows.items())


# ---- the largest model that fits ------------------------------------------------------------------------------------


@functools.cache
def _parameters(model_id: str) -> tuple[int, int]:
    """(all parameters, those that QLoRA keeps in 4 bits)."""
    model = build_model(load_config(model_id), torch.float16)
    return count_parameters(model), sum(layer.weight.numel() for layer in linear_layers(model).values())


@functools.lru_cache(maxsize=512)
def _needed(setting: Setting, capability: tuple[int, int]) -> int:
    """Bytes that a setting needs; GPUs of one compute capability run the same kernels."""
    name = next(name for name, spec in CATALOG.items() if spec.compute_capability == capability)
    return predict_memory(setting, gpu=name).needed_bytes


def largest_model(gpu: str, peft: str | None = None, **settings: Any) -> tuple[str, int, int] | None:
    """(hub id, parameters, bytes needed) of the largest bundled model that trains on a GPU; None where none does.

    From the largest down. A model whose weights alone (with gradients and AdamW's state, if all of them are trained)
    exceed the GPU is passed over without a run.
    """
    spec = CATALOG[choose(gpu, CATALOG, "GPU")]
    for name in sorted(architectures(), key=_parameters, reverse=True):
        setting = Setting(**{"batch_size": 1, **settings, "model_id": name, "peft": peft})
        if _held_bytes(setting) > spec.capacity_bytes:
            continue
        needed = _needed(setting, spec.compute_capability)
        if needed <= spec.capacity_bytes:
            return name, _parameters(name)[0], needed
    return None


def _held_bytes(setting: Setting) -> float:
    """Bytes that are held whatever else is: weights and, where all are trained, gradients and AdamW's state."""
    total, in_four_bits = _parameters(setting.model_id)
    if setting.peft == "qlora":
        return in_four_bits / 2 + 4 * (total - in_four_bits)  # everything else is cast to fp32
    weight = 4 if PRECISIONS[setting.precision][0] == torch.float32 else 2
    if setting.peft:
        return weight * total
    state = {"adamw": 2 * weight, "adamw_fused": 2 * weight, "adamw_8bit": 2}.get(setting.optimizer, 0)
    return (2 * weight + state) * total


class LargestModels:
    """The largest model that trains, for each GPU (rows) under full fine-tuning, LoRA and QLoRA (columns)."""

    METHODS = (None, "lora", "qlora")

    def __init__(self, gpus: tuple[str, ...], **settings: Any):
        self.found = {gpu: [largest_model(gpu, peft, **settings) for peft in self.METHODS] for gpu in gpus}

    def _repr_html_(self) -> str:
        heads = ["GPU", tr(ko="전체 미세 조정", en="full fine-tuning"), "LoRA", "QLoRA"]
        return html_table(heads, [[gpu, *map(self._cell, row)] for gpu, row in self.found.items()])

    def __repr__(self) -> str:
        return "\n".join(f"{gpu}: {', '.join(map(self._cell, row))}" for gpu, row in self.found.items())

    @staticmethod
    def _cell(found: tuple[str, int, int] | None) -> str:
        if found is None:
            return "-"
        name, parameters, needed = found
        return f"{name.split('/')[-1]} ({parameters / 1e9:.2f}B, {human_bytes(needed)})"
