"""The chapters' own experiments at the chapters' settings, and what of them is loaded, saved, generated, offloaded."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from .side import ON_CARD, built, counters, error_of, free_bytes, keep_trace, load, measure, path_of, say, settle

NEOX, LLAMA = "EleutherAI/polyglot-ko-1.3b", "meta-llama/Llama-3.2-1B"
QWEN, QWEN3, GPT2 = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "openai-community/gpt2"

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "3: batch 4": {"batch_size": 4},
    "3: batch 8": {"batch_size": 8},
    "3: batch 13": {"batch_size": 13},
    "3: batch 16": {"batch_size": 16},
    "3: mixed fp16, batch 1": {"batch_size": 1, "precision": "mixed_fp16"},
    "3: mixed bf16, batch 4": {"batch_size": 4, "precision": "mixed_bf16"},
    "3: fp32, batch 4": {"batch_size": 4, "precision": "fp32"},
    "3: eager, length 1024": {"batch_size": 4, "sequence_length": 1024, "attention": "eager"},
    "3: length 1024": {"batch_size": 4, "sequence_length": 1024},
    "3: length 2048": {"batch_size": 4, "sequence_length": 2048},
    "3: llama, batch 1, length 2048": {"model_id": LLAMA, "precision": "fp16", "optimizer": "adamw_fused",
                                       "batch_size": 1, "sequence_length": 2048},
    "3: 8 bit AdamW": {"batch_size": 8, "optimizer": "adamw_8bit"},
    "3: adafactor": {"batch_size": 8, "optimizer": "adafactor"},
    "3: sgd": {"batch_size": 8, "optimizer": "sgd"},
    "3: fused": {"batch_size": 8, "optimizer": "adamw_fused"},
    "4: 4 x 4": {"batch_size": 4, "gradient_accumulation_steps": 4},
    "4: 1 x 16": {"batch_size": 1, "gradient_accumulation_steps": 16},
    "4: 4 x 4, holds outputs": {"batch_size": 4, "gradient_accumulation_steps": 4, "holds_outputs": True},
    "5: batch 16 checkpointed": {"batch_size": 16, "gradient_checkpointing": True},
    "5: batch 8 checkpointed": {"batch_size": 8, "gradient_checkpointing": True},
    "5: both levers": {"batch_size": 4, "gradient_accumulation_steps": 4, "gradient_checkpointing": True},
    "8: lora": {"batch_size": 16, "peft": "lora"},
    "8: lora all-linear": {"batch_size": 16, "peft": "lora", "lora_targets": "all-linear", "lora_rank": 16},
    "8: lora checkpointed": {"batch_size": 16, "peft": "lora", "gradient_checkpointing": True},
    "8: qlora": {"batch_size": 16, "peft": "qlora"},
    "8: qlora checkpointed": {"batch_size": 16, "peft": "qlora", "gradient_checkpointing": True},
    "8: llama lora": {"model_id": LLAMA, "batch_size": 4, "peft": "lora", "sequence_length": 1024},
    "8: llama qlora": {"model_id": LLAMA, "batch_size": 4, "peft": "qlora", "sequence_length": 1024},
}  # fmt: skip


def _no_hub(*_: Any) -> None:
    raise OSError("random weights, as without a network")


def experiments(part: int = 0, parts: int = 1) -> None:
    """`gpu_memory_experiment`, on the real card or on a virtual one, at every setting above."""
    from helpers import use_gpu
    from helpers.experiment import gpu_memory_experiment

    gpu = use_gpu("cuda" if ON_CARD else "H100")
    if ON_CARD:
        from helpers import models

        models._load_from_hub = _no_hub
    for number, (name, setting) in enumerate(EXPERIMENTS.items()):
        heavy = setting.get("precision", "").startswith("mixed") or setting.get("precision") == "fp32"
        if (0 if heavy else 1 + number % (parts - 1)) != part:
            continue
        started, said = time.perf_counter(), StringIO()
        row: dict[str, Any] = {"setting": setting}
        try:
            if ON_CARD:
                settle()
                torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=400_000)
            gpu.reset_peak_memory_stats()
            with redirect_stdout(said):
                report = gpu_memory_experiment(**setting, gpu=gpu)
            row["report"] = report.to_dict()
            row["fits"], row["error_text"] = report.fits, report.error
            if ON_CARD:
                row["trace"] = keep_trace(name)
        except Exception as error:
            row["error"] = error_of(error)
        say(name, **row, seconds=round(time.perf_counter() - started, 2), printed=said.getvalue()[-600:])
        report = None
        gc.collect()


# -- chapter 11 -------------------------------------------------------------------------------------------------------


def evaluation() -> None:
    """11.1 and 11.2: evaluation by Trainer, by hand, and what training reserves around it."""
    from transformers import Trainer, TrainingArguments

    folder = mkdtemp()

    def evaluate(samples: int = 40, metric: Any = lambda found: {}, preprocess: Any = None, dtype: str = "float16",
                 **options: Any) -> None:  # fmt: skip
        arguments = TrainingArguments(
            folder, per_device_eval_batch_size=8, report_to="none", disable_tqdm=True, **options
        )
        trainer = Trainer(
            load(QWEN, dtype=dtype), arguments, compute_metrics=metric,
            eval_dataset=[{"input_ids": [1] * 512, "labels": [1] * 512}] * samples,
            preprocess_logits_for_metrics=preprocess,
        )  # fmt: skip
        trainer.evaluate()

    argmax = {"preprocess": lambda logits, labels: logits.argmax(-1)}
    cures: dict[str, dict[str, Any]] = {
        "as it is": {}, "no metric": {"metric": None}, "loss only": {"prediction_loss_only": True},
        "preprocess": argmax, "list": {"eval_do_concat_batches": False},
        "to RAM": {"eval_do_concat_batches": False, "eval_accumulation_steps": 1},
        "accumulate 2": {"eval_accumulation_steps": 2}, "float32": {"dtype": "float32", **argmax},
        "float32, fp16": {"dtype": "float32", "fp16": True, **argmax},
    }  # fmt: skip
    for name, options in cures.items():
        measure(f"evaluate: {name}", partial(evaluate, **options), trace=name in ("as it is", "no metric"))

    def two_batches(batch: int, context: Any = torch.no_grad, backward: bool = False, head: bool = True) -> None:
        model = load(QWEN, dtype="float16", device_map="cuda")
        tokens, losses = torch.ones(batch, 512, dtype=torch.int64).cuda(), []
        with context():
            for _ in range(2):
                if head:
                    losses.append(model(tokens, labels=tokens, use_cache=False).loss)
                else:
                    model.model(tokens, use_cache=False)
                if backward:
                    losses[-1].backward()

    for name, program in {
        "train 4": partial(two_batches, 4, torch.enable_grad, backward=True),
        "train 8": partial(two_batches, 8, torch.enable_grad, backward=True),
        "forgot 4": partial(two_batches, 4, torch.enable_grad),
        "no_grad 4": partial(two_batches, 4),
        "inference 4": partial(two_batches, 4, torch.inference_mode),
        "no_grad 16": partial(two_batches, 16),
        "no_grad 32": partial(two_batches, 32),
        "hidden 64": partial(two_batches, 64, head=False),
    }.items():
        measure(name, program, trace=name in ("train 4", "no_grad 16"))

    def around() -> list[int]:
        model = load(QWEN, dtype="float16", device_map="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        seen = []

        def run(batch: int, length: int, train: bool = True) -> None:
            tokens = torch.ones(batch, length, dtype=torch.int64).cuda()
            with torch.set_grad_enabled(train):
                loss = model(tokens, labels=tokens, use_cache=False).loss
            if train:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append(torch.cuda.memory_reserved())

        for step in ((4, 320), (4, 320), (8, 512, False), (4, 320)):
            run(*step)
        torch.cuda.empty_cache()
        return [*seen, torch.cuda.memory_reserved()]

    measure("reserved around an evaluation", around, trace=True)


def generation() -> None:
    """11.3 to 11.5: generation, KV caches and their kinds, prompts in chunks, beams, a sliding window."""
    from transformers import DynamicCache, StaticCache

    from helpers.chapters.c11_outside.cache import cache_bytes

    def generate(name: str, batch: int = 4, prompt: int = 256, new: int = 2, look: Any = cache_bytes, **options: Any):
        model = load(name, dtype="float16", device_map="cuda")
        tokens = torch.ones(batch, prompt, dtype=torch.int64).cuda()
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0,
                    "return_dict_in_generate": True}  # fmt: skip
        torch.cuda.reset_peak_memory_stats()
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings | options)
        return look(out.past_key_values)

    for name in (NEOX, LLAMA, QWEN):
        measure(f"generate {name}", partial(generate, name), trace=True)
    long = partial(generate, LLAMA, 8, 4096)
    measure("long prompts", long, trace=True)
    measure("long prompts in chunks", partial(long, prefill_chunk_size=512))
    for kind in (None, "static", "offloaded", "quantized"):
        more = {"cache_implementation": kind} if kind else {}
        measure(f"16384 tokens, {kind}", partial(generate, LLAMA, 1, 16384, **more), trace=kind == "static")
    measure("64 new tokens", partial(generate, LLAMA, 4, 256, 64), trace=True)
    measure("64 new tokens, static", partial(generate, LLAMA, 4, 256, 64, cache_implementation="static"))
    measure("beams", partial(generate, LLAMA, 8, 2048, 1, num_beams=4))
    measure("generate 8 x 2048", partial(generate, LLAMA, 8, 2048, 1))

    def one_more_token(make: Any) -> int:
        model = load(LLAMA, dtype="float16", device_map="cuda")
        cache, tokens = make(model.config), torch.ones(1, 16384, dtype=torch.int64).cuda()
        with torch.no_grad():
            model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            model(tokens[:, :1], past_key_values=cache, use_cache=True)
        return torch.cuda.max_memory_allocated() - before

    measure("one more token, dynamic", lambda: one_more_token(lambda c: DynamicCache(config=c)), trace=True)
    static = partial(StaticCache, max_cache_len=16400)
    measure("one more token, static", lambda: one_more_token(static), trace=True)

    def read_prompt(**options: Any) -> int:
        model = load(LLAMA, dtype="float16", device_map="cuda")
        with torch.no_grad():
            out = model(torch.ones(8, 2048, dtype=torch.int64).cuda(), use_cache=True, **options)
        return cache_bytes(out.past_key_values)

    measure("model(x)", read_prompt, trace=True)
    measure("model(x, logits_to_keep=1)", partial(read_prompt, logits_to_keep=1))

    def sliding() -> list[int]:
        model = load("google/gemma-3-1b-pt", dtype="float16", device_map="cuda")
        tokens, sizes = torch.ones(1, 8192, dtype=torch.int64).cuda(), []
        with torch.no_grad():
            out = model(tokens, use_cache=True, logits_to_keep=1)
            sizes.append(cache_bytes(out.past_key_values))
            model(tokens[:, :1], past_key_values=out.past_key_values, use_cache=True)
        return [*sizes, cache_bytes(out.past_key_values)]

    measure("sliding window", sliding, trace=True)


def loading() -> None:
    """11.6 to 11.9: keeping weights, saving, resuming, ways of loading, states on the CPU."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from helpers.chapters.c11_outside.resume import extra_of, saved, small_gpt, train_two_steps

    torch.zeros(1).cuda()
    ways_to_keep: dict[str, Callable[[Any], Any]] = {
        "state_dict()": lambda model: model.state_dict(),
        "deepcopy": lambda model: copy.deepcopy(model.state_dict()),
        "v.cpu()": lambda model: {key: value.cpu() for key, value in model.state_dict().items()},
    }
    for name, take in ways_to_keep.items():
        measure(f"keep: {name}", extra_of(take))
    path = Path(mkdtemp()) / "checkpoint.pt"
    measure("train and save", saved(path), trace=True)

    def resume(read: bool = True, delete: bool = False, **options: Any) -> None:
        model = small_gpt().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if read:
            checkpoint = torch.load(path, **options)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        if delete:
            del checkpoint
        train_two_steps(model, optimizer)

    for name, program in {
        "scratch": partial(resume, read=False), "resume": resume, "resume, del": partial(resume, delete=True),
        "resume, cpu": partial(resume, map_location="cpu"), "resume, cuda": partial(resume, map_location="cuda"),
        "resume, cpu, mmap": partial(resume, map_location="cpu", mmap=True),
    }.items():  # fmt: skip
        measure(name, program, trace=name.startswith("resume"))
    on_gpu = {"device_map": "cuda"}
    folder = path_of(NEOX)
    way = AutoModelForCausalLM.from_pretrained
    ways = {
        "fp16, .cuda()": lambda: way(folder, dtype="float16").cuda(),
        "fp32, half": lambda: way(folder, dtype="float32").half().cuda(),
        "fp32 on GPU": lambda: way(folder, dtype="float32", **on_gpu).half(),
        "fp16 on GPU": lambda: way(folder, dtype="float16", **on_gpu),
        "auto dtype on GPU": lambda: way(folder, dtype="auto", **on_gpu),
        "bf16 on GPU (files fp16)": lambda: way(folder, dtype="bfloat16", **on_gpu),
        "auto map": lambda: way(folder, dtype="float16", device_map="auto"),
        "low_cpu_mem": lambda: way(folder, dtype="float16", low_cpu_mem_usage=True).cuda(),
        "4 bit": lambda: way(folder, **on_gpu, quantization_config=BitsAndBytesConfig(load_in_4bit=True)),
        "8 bit": lambda: way(folder, **on_gpu, quantization_config=BitsAndBytesConfig(load_in_8bit=True)),
        "gpt2 on GPU (tied)": lambda: way(path_of(GPT2), dtype="float16", **on_gpu),
        "llama on GPU (tied)": lambda: way(path_of(LLAMA), dtype="bfloat16", **on_gpu),
    }
    for name, program in ways.items():

        def held(program: Any = program) -> list[int]:
            model = program()
            return [
                torch.cuda.memory_allocated(),
                torch.cuda.memory_reserved(),
                sum(p.numel() for p in model.parameters()),
            ]

        measure(f"load: {name}", held, trace=True)

    def one_step(context: Any = nullcontext, **checkpointing: Any) -> list[Any]:
        model = load(NEOX, dtype="float16", device_map="cuda").train()
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable(**checkpointing)
        tokens, before = torch.ones(2, 512, dtype=torch.int64).cuda(), torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with context():
            loss = model(tokens, labels=tokens, use_cache=False).loss
        held = torch.cuda.memory_allocated() - before
        started = time.perf_counter()
        loss.backward()
        torch.cuda.synchronize()
        return [held, torch.cuda.max_memory_allocated(), time.perf_counter() - started]

    from torch.autograd.graph import save_on_cpu

    for name, program in {
        "step: keep": one_step, "step: save_on_cpu": partial(one_step, save_on_cpu),
        "step: pinned": partial(one_step, partial(save_on_cpu, pin_memory=True)),
        "step: offload": partial(one_step, offload=True),
    }.items():  # fmt: skip
        measure(name, program, trace=True)
    if ON_CARD:
        pinned_memory()


def _rss() -> dict[str, int]:
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("VmRSS", "RssAnon", "VmHWM", "RssShmem", "VmLck", "VmPin")):
            key, value = line.split(":")
            found[key] = int(value.split()[0]) * 1024
    return found


def pinned_memory() -> None:
    """What pinning takes of the RAM, by size; the host's caching allocator's own counters."""
    stats = getattr(torch.cuda.memory, "host_memory_stats", lambda: {})
    for size in (1, 3, 63, 64, 65, 127, 129):
        before = _rss()
        pinned = torch.empty(size * 2**20, dtype=torch.uint8).pin_memory()
        after = _rss()
        found = stats()
        say(f"pinned {size} MiB", before=before, after=after,
            host={key: value for key, value in found.items() if "current" in key or "num" in key})  # fmt: skip
        del pinned
        torch._C._host_emptyCache() if hasattr(torch._C, "_host_emptyCache") else None


# -- chapter 12 -------------------------------------------------------------------------------------------------------


def two_models() -> None:
    """DPO, SFT and GRPO by TRL's trainers, at the chapter's sizes."""
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from helpers.chapters.c12_two_models.made import QUIET, pairs, texts, tokenizer

    folder = mkdtemp()
    billion = path_of(LLAMA)

    def sft(batch: int, peft_config: Any = None, **options: Any) -> None:
        arguments = SFTConfig(folder, per_device_train_batch_size=batch, max_steps=2, fp16=True, **QUIET, **options)
        data = {"train_dataset": texts(512), "processing_class": tokenizer()}
        SFTTrainer(billion, arguments, peft_config=peft_config, **data).train()

    def dpo(batch: int, peft_config: Any = None, **options: Any) -> None:
        arguments = DPOConfig(folder, per_device_train_batch_size=batch, max_steps=2, fp16=True, **QUIET, **options)
        data = {"train_dataset": pairs(256, 256), "processing_class": tokenizer()}
        DPOTrainer(billion, args=arguments, peft_config=peft_config, **data).train()

    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    for name, program in {
        "SFT 4": partial(sft, 4), "SFT 8": partial(sft, 8), "DPO 4": partial(dpo, 4),
        "DPO 4, precomputed": partial(dpo, 4, precompute_ref_log_probs=True),
        "DPO 4, lora": partial(dpo, 4, lora),
    }.items():  # fmt: skip
        measure(name, program, trace=True)

    def whole_logits(batch: int, length: int = 512) -> None:
        model = load(LLAMA, dtype="float16", device_map="cuda")
        ids = torch.ones(2 * batch, length, dtype=torch.int64).cuda()
        logits = model(ids, use_cache=False).logits[:, :-1].float()
        logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        logps.sum().backward()

    for batch in (1, 2, 4):
        measure(f"{batch} pairs", partial(whole_logits, batch))


def policy() -> None:
    """GRPO: the phases of its steps."""
    from trl import GRPOConfig, GRPOTrainer

    from helpers.chapters.c12_two_models.made import QUIET, length_of, prompts, tokenizer
    from helpers.chapters.c12_two_models.phases import phases_of

    folder = mkdtemp()

    def grpo(completion: int = 16, batch: int = 8, rollout: Any = None, prompt: int = 256, **options: Any) -> list:
        arguments = GRPOConfig(
            folder, per_device_train_batch_size=batch, num_generations=8, gradient_accumulation_steps=8 // batch,
            max_completion_length=completion, max_steps=2, fp16=True, **QUIET, **options,
        )  # fmt: skip
        data = {"train_dataset": prompts(prompt), "processing_class": tokenizer()}
        trainer = GRPOTrainer(path_of(QWEN3), length_of, args=arguments, rollout_func=rollout, **data)
        found: list[Any] = []
        with phases_of(trainer, found):
            trainer.train()
        return [[one.name, one.start, one.peak, one.end, one.reserved] for one in found]

    def given(prompts: Any, trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": [[1] * 512] * len(prompts), "logprobs": None}

    longer = partial(grpo, completion=512, rollout=given)
    for name, program in {
        "GRPO 512": longer, "GRPO 512, batch 2": partial(longer, batch=2), "GRPO 512, beta": partial(longer, beta=0.04),
        "GRPO 512, no checkpoints": partial(longer, gradient_checkpointing=False), "GRPO 16": grpo,
    }.items():  # fmt: skip
        measure(name, program, trace=name != "GRPO 16")


# -- chapter 6: one rank ----------------------------------------------------------------------------------------------


def sharded() -> None:
    """FSDP2, DDP and ZeRO-1 of one rank over NCCL: what the group, its buffers and the steps take."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from .card import _group

    torch.zeros(1, device="cuda")

    def outside(name: str, call: Callable[[], Any] | None = None) -> None:
        found: dict[str, Any] = {}
        try:
            if call is not None:
                call()
                torch.cuda.synchronize()
        except Exception as error:
            found["error"] = error_of(error)
        free, total = free_bytes()
        say(name, outside=total - free - torch.cuda.memory_reserved(), **counters(), **found)

    outside("before the group")
    outside("group", _group)
    outside("first all_reduce", lambda: dist.all_reduce(torch.ones(1, device="cuda")))
    outside(
        "all_gather 64 MiB",
        lambda: dist.all_gather_into_tensor(torch.ones(2**24, device="cuda"), torch.ones(2**24, device="cuda")),
    )
    outside("a second group", lambda: dist.all_reduce(torch.ones(1, device="cuda"), group=dist.new_group([0])))

    def train(model: Any, steps: int = 2) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        for _ in range(steps):
            ids = torch.ones(2, 512, dtype=torch.int64, device="cuda")
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def fsdp(policy: Any = None, reshard: bool = True) -> list[int]:
        model = built(LLAMA, torch.float32).train()
        held = torch.cuda.memory_allocated()
        more = {"mp_policy": policy} if policy else {}
        for layer in model.model.layers:
            fully_shard(layer, reshard_after_forward=reshard, **more)
        fully_shard(model, **more)
        after = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train(model)
        return [held, after, torch.cuda.memory_allocated()]

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    measure("FSDP2, fp32", fsdp, trace=True)
    measure("FSDP2, bf16", partial(fsdp, mixed), trace=True)
    measure("FSDP2, bf16, not resharded", partial(fsdp, mixed, False), trace=True)

    def ddp(**how: Any) -> list[int]:
        model = built(LLAMA, torch.bfloat16).train()
        held = torch.cuda.memory_allocated()
        wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0], **how)
        after = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train(wrapped)
        return [held, after, torch.cuda.memory_allocated()]

    measure("DDP", ddp, trace=True)
    measure("DDP, bucket view", partial(ddp, gradient_as_bucket_view=True), trace=True)
    outside("at the end")
    outside("group destroyed", dist.destroy_process_group)
