"""What GRPO's completions take while the model that is trained generates them, as TRL's GRPOTrainer has it.

TRL 1.16 without vLLM, `_generate_single_turn`: transformers' `generate` of all completions of a generation at once,
with its cache of keys and values. Checkpointing is off. Under mixed precision fp32 weights are computed with in 16
bits, copies and all; a model with adapters generates without autocast, whose wrapper is peft's. Every completion gets
as long as it may.

With vLLM (`Setting.vllm`) nothing is generated here. What the model does then is to hand its weights over before each
generation: TRL's own `VLLMGeneration.sync_weights`, which merges adapters into the weights and takes them out again.
Before an engine wakes it gives the allocator's cache back to the driver.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..cards import CATALOG, GPUSpec
from ..counting.gpu import VirtualGPU
from ..errors import NoSuchLayer
from ..models.attention import REPEATED, kv_repeated
from ..models.build import build_on_gpu
from ..models.configs import cached_by_model, checkpoint_dtype, load_config, running
from ..models.depth import from_shallow
from ..trace.edits import with_phase
from ..trace.tokens import first_tokens, with_tokens
from ..trace.trace import Trace
from ..turns import in_turn, refuse_in_a_block
from .run import forward_under
from .setting import ASLEEP, AWAKE, Setting

GENERATION = "generation"  # the phase


def with_generation(trace: Trace, setting: Setting, spec: GPUSpec, full: bool = False) -> Trace:
    """The trace of a training of GRPO's with the generation of the completions that its second step learns from.

    Few tokens of shallow models are run, where the rest is proven to go on so, otherwise (or with `full=True`) all.
    """
    second = [place for place, name in enumerate(trace.names) if name == "scoring"][1]
    same = replace(
        setting, batch_size=setting.rollout, gradient_accumulation_steps=1, gradient_checkpointing=False,
        offload_checkpoints=False, optimizer="adamw", fp32_embedding_state=False, beta=0.0, iterations=1,
    )  # fmt: skip
    if setting.vllm:
        same = replace(same.short(1), vllm=AWAKE)
    generation = _generation(same, spec.compute_capability, spec.multiprocessors, full)
    return with_phase(trace, second, GENERATION, generation, emptied=setting.vllm == ASLEEP)


@cached_by_model
def _generation(setting: Setting, capability: tuple[int, int], multiprocessors: int, full: bool) -> Trace:
    """The trace of a generation alone: phases "token" and "end". The prompts are read with the first token."""
    config, completion = load_config(setting.model_id), setting.completion_length
    spec = replace(CATALOG["T4"], compute_capability=capability, multiprocessors=multiprocessors)
    if setting.vllm:
        found = None if full else _by_depth(setting, config, spec, 0)
        return found or _generated(setting, config, spec, 0)
    if not full:
        few = first_tokens(completion)
        trace = _by_depth(setting, config, spec, few) or _generated(setting, config, spec, few)
        if (found := with_tokens(trace, completion)) is not None:
            return found
    return _generated(setting, config, spec, completion)


def _by_depth(setting: Setting, config: Any, spec: GPUSpec, tokens: int) -> Trace | None:
    def run(shallow: Any) -> tuple[Trace, dict[str, int]]:
        return _generated(setting, shallow, spec, tokens), {}

    try:
        like = GENERATION, setting.short(1), tokens, spec.compute_capability
        found = from_shallow(config, run, like, length=setting.sequence_length, names=setting.module_names)
    except NoSuchLayer:  # an adapter's target that only the full depth has
        return None
    return None if found is None else found[0]


@in_turn
def _generated(setting: Setting, config: Any, spec: GPUSpec, tokens: int) -> Trace:
    """Every operation of the first tokens of a generation; with vLLM of what comes before it."""
    refuse_in_a_block()
    gpu = VirtualGPU(spec, limited=False)
    with gpu.interrupts_wait(), running(setting.model_id):
        return _run(gpu, setting, config, tokens)


def _run(gpu: VirtualGPU, setting: Setting, config: Any, tokens: int) -> Trace:
    of, (dtype, autocast) = setting.completions, setting.dtypes
    dtype = checkpoint_dtype(setting.model_id, config) if dtype == "auto" else dtype
    model = build_on_gpu(config, dtype, setting.attention, setting.peft, gpu, **setting.adapters).train()
    with gpu:
        torch.ones(1, 1) @ torch.ones(1, 1)  # the step before has left this thread its workspace
    gpu.answers.padded, gpu.answers.tokens = setting.padded, tokens
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad])
    if setting.vllm:
        with gpu.record(model, optimizer) as record, gpu, record.phase("sync"):
            hand_over(model)
        return record.recorder.trace()
    repeated = kv_repeated() if setting.attention == REPEATED else nullcontext()
    as_trained = _as_trained(gpu, model, setting, autocast)
    with gpu.record(model, optimizer) as record, gpu, repeated, as_trained, torch.no_grad():
        watch = _Tokens(record.recorder, tokens)
        ids, mask = (torch.ones(of.rows, of.prompt, dtype=torch.int64) for _ in range(2))
        how = {"generation_config": _configuration(of.completion), "streamer": watch}
        made = model.generate(input_ids=ids, attention_mask=mask, **how)
        del made, ids, mask
        watch.close()
    return record.recorder.trace()


def hand_over(
    model: nn.Module, fsdp_version: int | None = None, given: Callable[[torch.Tensor], None] = lambda weight: None
) -> None:
    """All weights to an engine that copies them into its own, as TRL hands them over in one process.

    fsdp_version: of what splits the model, whose parameters are gathered one after another. given: told of each weight.
    """
    from trl.distributed import DistributedBackend
    from trl.generation.vllm_generation import VLLMGeneration

    plugin = None if fsdp_version is None else SimpleNamespace(fsdp_version=fsdp_version)
    state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=plugin)
    one = SimpleNamespace(state=state, device=next(model.parameters()).device)
    pushing = VLLMGeneration.__new__(VLLMGeneration)
    vars(pushing).update(
        model=model, accelerator=one, mode="colocate", enable_sleep_mode=False, llm=_Takes(given),
        _dist=DistributedBackend(one),
    )  # fmt: skip
    pushing.sync_weights()


class _Takes:
    """An engine that takes what it is given, whatever its parts are called."""

    def __init__(self, told: Callable[[torch.Tensor], None]):
        self._told = told

    def __getattr__(self, name: str) -> _Takes:
        return self

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        """`load_weights`, or a call without: nothing is kept, vLLM copies it into weights that it has."""
        for _, weight in weights:
            self._told(weight)


class _Tokens:
    """A phase for each token, and one for what follows the last: what `generate` calls a streamer."""

    def __init__(self, recorder: Any, tokens: int):
        self._recorder, self._left = recorder, tokens
        recorder.enter("token")  # the first, with all that comes before it

    def put(self, value: torch.Tensor) -> None:
        """First the prompts, then each token."""
        if value.dim() > 1:
            return
        self._left -= 1
        self._recorder.leave()
        self._recorder.enter("token" if self._left else "end")

    def end(self) -> None:
        """After the last token."""

    def close(self) -> None:
        """After all of it."""
        self._recorder.leave()


def _configuration(completion: int) -> Any:
    """What GRPOTrainer makes of a GRPOConfig's defaults; which tokens are special changes no byte."""
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=completion, do_sample=True, pad_token_id=0, bos_token_id=1, eos_token_id=[0], temperature=1.0,
        top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, cache_implementation=None, disable_compile=True,
    )  # fmt: skip


@contextmanager
def _as_trained(gpu: VirtualGPU, model: nn.Module, setting: Setting, autocast: torch.dtype | None) -> Iterator[None]:
    """accelerate's wrapper of the model's forward, which that under adapters does not have."""
    if autocast is None or setting.peft:
        yield
        return
    called = model.forward

    @functools.wraps(called)
    def forward(**inputs: Any) -> Any:
        return forward_under(gpu, autocast, called, **inputs)

    model.forward = forward
    try:
        yield
    finally:
        del model.forward
