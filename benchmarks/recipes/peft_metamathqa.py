"""huggingface/peft, method_comparison/MetaMathQA: Llama-3.2-3B with 70 methods on one L40S, the memory log of `run.py`.

What a run prints is the most that was reserved over 5,000 steps, the mean of what was reserved at the end of each, and
the mean of what was allocated at the end of the first 250. What is not stated is how long the batches are. One number
is fitted, the longest (on LoRA, rank 32, July 2026, its most reserved); one is read off the source, the mean of tokens
in a sample (its JSON: 4,198,051 "train total tokens" in 20,000 samples, of every run). Between the two a log-normal
distribution is taken for the lengths: from it follow the padded batches of a bucket of 80 samples, sorted from long to
short as `BucketIterator` yields them.

The methods' settings are data/peft_metamathqa.json (the folder `experiments` of commits f650b08a, a9994269 and
5d602fdb, Apache-2.0): adapter_config and, where there is one, training_params.
"""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch

from virtual_gpu.models.configs import load_config
from virtual_gpu.program.context import cuda

from .loading import loaded
from .recipe import ANY, Recipe, Refused, Row, from_source, gpu_of

LONGEST = 696  # tokens: fitted on LoRA rank 32, July 2026, max_memory_reserved
MEAN = 4_198_051 / 20_000  # tokens of a sample, as the source states them
SAMPLES, BATCH, BUCKET = 20_000, 4, 20  # 5,000 steps; samples of a batch, batches of a bucket
FITTED_ON = "peft/2026-07/lora--llama-3.2-3B-rank32/max_memory_reserved"
METHODS = json.loads((Path(__file__).parent / "data" / "peft_metamathqa.json").read_text(encoding="utf-8"))
# vintage → the first release of peft after it (the runs are of the main branch of that time).
PEFT = {"2025-06": "0.16.0", "2026-01": "0.18.1", "2026-07": "0.20.0"}
# Methods whose adapters' shapes, or the making of them, come from the values of the weights, which are not here.
BY_VALUES = {
    "ADAMSS": "the shapes of AdaMSS's adapters come from clustering the weights' values",
    "FROD": "FRoD's adapters are made on the CPU from a decomposition of the weights' values",
    "SHIRA": "SHiRA's indices are those of the ones in a mask of the weight's size, whose values are not kept",
}
METRICS = {"max_memory_reserved": "most", "memory_allocated": "allocated", "memory_reserved": "mean"}
VINTAGES = {"4.52.4": "2025-06", "4.57.1": "2026-01", "5.13.1": "2026-07"}  # where only transformers is named
OPTIMIZERS = {
    "lora-fa": "create_lorafa_optimizer",
    "lora+": "create_loraplus_optimizer",
    "riemannian": "create_riemannian_optimizer",
}
DEFAULTS = {
    "optimizer_type": "AdamW",
    "optimizer_kwargs": {"lr": 1e-4, "weight_decay": 0.1},
    "autocast_adapter_dtype": True,
    "use_gc": False,
}


def batch_lengths(longest: float = LONGEST, mean: float = MEAN) -> list[int]:
    """Tokens of the padded batches of a bucket, from its longest to its shortest.

    Log-normal with that mean, of which `longest` is the last of SAMPLES quantiles.
    """
    last = NormalDist().inv_cdf(1 - 1 / SAMPLES)
    sigma = last - sqrt(last**2 - 2 * log(longest / mean))
    middle = log(mean) - sigma**2 / 2
    count = BATCH * BUCKET
    samples = [exp(middle + sigma * NormalDist().inv_cdf(1 - (n + 0.5) / count)) for n in range(count)]
    return [round(length) for length in samples[::BATCH]]


def predict(row: Row) -> int:
    """Bytes of a run in one of its three metrics."""
    settings, metric, vintage = row["settings"], str(row["metric"]), vintage_of(row)
    if metric.startswith("difference of memory_allocated averages") and "r64 minus r32" in row["model"]:
        ranks = (f"lora--llama-3.2-3B-rank{rank}" for rank in (64, 32))
        high, low = (_run(method, vintage, gpu_of(row).spec.name)["allocated"] for method in ranks)
        return high - low
    method = str(settings.get("method"))
    if method not in METHODS:
        raise Refused(f"the method {method!r} is not among the source's experiments")
    if METHODS[method][0].get("peft_type") in BY_VALUES:
        raise Refused(BY_VALUES[METHODS[method][0]["peft_type"]])
    found = _run(method, vintage, gpu_of(row).spec.name)
    for start, name in METRICS.items():
        if metric.startswith(start):
            return found[name]
    raise Refused(f"the metric {metric!r} is not one of run.py")


def vintage_of(row: Row) -> str:
    """Year and month of a run. Refused where the row does not tell."""
    vintage = row["settings"].get("vintage") or VINTAGES.get(str(row["settings"].get("transformers")))
    if vintage not in PEFT:
        raise Refused(f"no release of peft is known for the vintage {vintage!r}")
    return vintage


@cache
def _run(method: str, vintage: str, card: str) -> dict[str, int]:
    """Bytes in each metric: steps of run.py on the virtual card, after some of which the cache is emptied, as there.

    A bucket begins with its longest batch and an emptied cache, after the shortest batch of the one before. Since
    November 2025 the cache is emptied after every tenth step: the first of ten takes what it needs, the second what
    lies badly beside what the first left, the others are shorter. Before, it was emptied after every step.
    """
    lengths = batch_lengths()
    with cuda(card):
        run = _Run(method, vintage)
        run.step(lengths[-1])
        if vintage < "2025-11":
            mean = run.step(round(sum(lengths) / len(lengths)), emptied=True)
            found = {"allocated": mean[0], "mean": mean[1]}
        else:
            tens = [(run.step(ten[0], emptied=True), run.step(ten[1])) for ten in (lengths[:10], lengths[10:])]
            found = {"mean": round(sum(first[1] + 9 * second[1] for first, second in tens) / 20)}
            (high, _), (low, _) = (first for first, _ in tens)  # what is allocated in the end is linear in the length
            share = (sum(lengths) / len(lengths) - lengths[10]) / (lengths[0] - lengths[10])
            found["allocated"] = round(low + share * (high - low))
        run.step(lengths[-1], emptied=vintage < "2025-11")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run.step(LONGEST)
        return found | {"most": max(run.loaded, torch.cuda.max_memory_reserved())}


class _Run:
    """run.py's model, optimizer and training step."""

    def __init__(self, method: str, vintage: str):
        adapter, *given = METHODS[method]
        self.parameters = DEFAULTS | (given[0] if given else {})
        self.model = loaded(load_config(self.parameters.get("model_id", "meta-llama/Llama-3.2-3B")), torch.bfloat16)
        self.kind = adapter.get("peft_type", "")
        if adapter:
            from peft import get_peft_model

            dtype = self.parameters["autocast_adapter_dtype"]
            self.model = get_peft_model(self.model, peft_config(adapter), autocast_adapter_dtype=dtype)
        self.optimizer = self._optimizer()
        if adapter and vintage >= "2026-07":  # the loss of the base model on Wikipedia, before training (since 14 July)
            with self.model.disable_adapter():
                pass
        self.model.train()
        self.steps, self.outputs = 0, None
        self.loaded = torch.cuda.max_memory_reserved()

    def _optimizer(self) -> Any:
        from peft import optimizers

        kind, given = self.parameters["optimizer_type"], self.parameters["optimizer_kwargs"]
        if kind not in OPTIMIZERS:
            return getattr(torch.optim, kind)(self.model.parameters(), **given)
        create, inner = getattr(optimizers, OPTIMIZERS[kind], None), {"optimizer_cls": torch.optim.AdamW}
        if create is None:
            raise Refused(f"the installed peft does not have the optimizer {kind!r}")
        return create(self.model, **(inner if kind != "lora-fa" else {}), **given)

    def step(self, length: int, *, emptied: bool = False) -> tuple[int, int]:
        """A training step with a padded batch of that length; (allocated, reserved) bytes at its end.

        Its outputs stay until the next forward is done. emptied: the cache is, before.
        """
        if emptied:
            torch.cuda.empty_cache()
        self.steps += 1
        ids = torch.ones(BATCH, length, dtype=torch.int64)
        mask = torch.ones_like(ids)
        mask[1:, -3:] = 0  # the shorter samples of a batch
        batch = {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}
        batch["labels"] = batch["input_ids"].clone()
        items = batch["attention_mask"].sum().item()
        self.batch = batch  # a name of the loop: it stays as the outputs do
        self.optimizer.zero_grad()
        self.outputs = self.model(**batch, num_items_in_batch=items)
        self.outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.kind in ("ADALORA", "ADAMSS"):
            self.model.base_model.update_and_allocate(self.steps)
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def peft_config(given: dict[str, Any]) -> Any:
    """The PeftConfig of a method. Refused where the installed peft has no such method or not such a setting."""
    from peft import PeftConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as KINDS

    kind = given["peft_type"]
    if kind not in {str(getattr(known, "value", known)) for known in KINDS}:
        raise Refused(f"the installed peft does not have {kind}")
    known = {field.name for field in fields(KINDS[kind])}
    unknown = [name for name, value in given.items() if name not in known and value not in (False, [], {})]
    if unknown:
        raise Refused(f"the installed peft's {kind} does not have {', '.join(unknown)}")
    return PeftConfig.from_peft_type(**{name: value for name, value in given.items() if name in known})


def packages(row: Row) -> tuple[str, ...]:
    """The libraries of the run's time."""
    try:
        vintage = vintage_of(row)
    except Refused:  # as the prediction will say
        return ()
    library = next(version for version, known in VINTAGES.items() if known == vintage)
    return f"transformers=={row['settings'].get('transformers', library)}", f"peft=={PEFT[vintage]}"


RECIPES = (
    Recipe(
        name="peft MetaMathQA",
        what="method_comparison/MetaMathQA/run.py, Llama-3.2-3B, bf16 with fp32 adapters, batch 4",
        what_ko="PEFT의 방법 비교, Llama-3.2-3B, bf16과 fp32 어댑터, 배치 4",
        handles=from_source("huggingface/peft", kinds=("measurement", "derived")),
        predict=predict,
        fitted=f"the longest batch, {LONGEST} tokens, on LoRA rank 32",
        fitted_ko=f"LoRA rank 32에서 가장 긴 배치의 {LONGEST}토큰",
        fitted_on=frozenset((FITTED_ON,)),
        packages=packages,
        settings={
            "batch": (BATCH,),
            "max_seq": (768,),
            "dtype": ("bfloat16",),
            "adapter_dtype": ("float32 (autocast_adapter)",),
            "optimizer": ("AdamW",),
            "attention": ("sdpa default",),
            **dict.fromkeys(("gradient_checkpointing", "compile"), (False,)),
            **dict.fromkeys(("method", "vintage", "torch", "transformers", "num_trainable_params"), ANY),
        },
    ),
)
