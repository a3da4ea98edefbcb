"""A vLLM engine that TRL's online trainers (GRPO, RLOO) use: what it takes of their card, and no kernel of it.

In the trainer's process (`vllm_mode="colocate"`) its share of the card is one block, from its start on, and with
`vllm_enable_sleep_mode` while it is awake; a card has somewhat less in it, and graphs beside it (see `plan.engine`).
A server has a card of its own. Completions are as long as they may be, the log probabilities that come with them 0.

Sources: TRL 1.16, trl/generation/vllm_generation.py, for all that it asks of an engine. vLLM 0.10 to 0.33,
vllm/v1/worker/gpu_worker.py and utils.py: the share is of all memory, and so much has to be free at the start;
vllm/device_allocator/cumem.py: no expandable segments with sleep mode.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ..language import tr
from ..units import GiB
from .imports import Imports
from .patches import Patches
from .watch import Watch

_TOKEN = 1  # that completions consist of
# Of the process, for an engine in it: the next program would be taken for one of several ranks.
_SET_BY_TRL = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def install(patches: Patches, imports: Imports, watch: Watch) -> None:
    """Let TRL find an engine, whether the package is installed or not."""

    def engine(*args: Any, **settings: Any) -> Engine:
        watch.note(
            tr(
                ko="vLLM: 엔진은 실행하지 않았다. 카드에서 잡는 몫을 블록 하나로 두고, 답은 가장 긴 것으로 두었다",
                en="vLLM: no engine is run; its share of the card is one block, and completions are of the most tokens",
            )
        )
        return Engine(watch, *args, **settings)

    def server(**settings: Any) -> Server:
        watch.note(
            tr(
                ko="vLLM 서버: 부르지 않았다. 답은 가장 긴 것으로 두었고, 가중치를 보내는 데 드는 것은 세지 않았다",
                en="vLLM's server: not called; completions are of the most tokens, and what sending the weights "
                "takes is not counted",
            )
        )
        return Server()

    def trl(module: ModuleType) -> None:
        before = {name: os.environ.get(name) for name in _SET_BY_TRL}
        patches.later(lambda: _set_back(before))
        found = {"is_vllm_available": lambda *_, **__: True, "LLM": engine, "VLLMClient": server}
        patches.set_all(module, found | dict.fromkeys(("SamplingParams", "StructuredOutputsParams"), SimpleNamespace))

    imports.after("trl.generation.vllm_generation", trl)


def _set_back(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class Engine:
    """`vllm.LLM`, as far as TRL asks it. ValueError as vLLM has it where the share is not free."""

    def __init__(
        self,
        watch: Watch,
        model: str,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        enable_sleep_mode: bool = False,
        **settings: Any,
    ):
        self._watch, self._block = watch, None
        free, total = torch.cuda.mem_get_info()
        self._share = int(total * gpu_memory_utilization)
        if enable_sleep_mode and watch.gpu.expandable_segments:
            raise AssertionError("Expandable segments are not compatible with memory pool.")
        if free < self._share:
            raise ValueError(
                f"Free memory on device ({free / GiB:.2f}/{total / GiB:.2f} GiB) on startup is less than desired GPU "
                f"memory utilization ({gpu_memory_utilization}, {self._share / GiB:.2f} GiB). Decrease GPU memory "
                "utilization or reduce GPU memory used by other processes."
            )
        loads = SimpleNamespace(load_weights=_taken)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=loads))
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=max_model_len or _longest(model)),
            model_executor=SimpleNamespace(driver_worker=worker),
        )
        self._take()

    def _take(self) -> None:
        if self._block is None:
            self._block = torch.empty(self._share, dtype=torch.uint8, device="cuda")
            self._watch.claim([self._block], "engine")

    def sleep(self, level: int = 1) -> None:
        """Give the memory back to the driver."""
        self._block = None
        torch.cuda.empty_cache()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take it again: all of it with the first of its parts."""
        self._take()

    def reset_prefix_cache(self) -> None:
        """Nothing that it held is in the block."""

    def generate(self, prompts: Sequence[Any], sampling_params: Any, **settings: Any) -> list[Any]:
        """`sampling_params.n` completions of each prompt."""
        return [self._answers(prompt["prompt_token_ids"], sampling_params) for prompt in prompts]

    def _answers(self, ids: list[int], wanted: Any) -> Any:
        longest = self.llm_engine.model_config.max_model_len
        if len(ids) > longest:
            raise ValueError(f"The prompt (length {len(ids)}) is longer than the maximum model length of {longest}.")
        length = min(wanted.max_tokens, longest - len(ids))
        one = SimpleNamespace(token_ids=[_TOKEN] * length, text="", logprobs=[_LOGPROB] * length)
        return SimpleNamespace(prompt_token_ids=ids, outputs=[one] * wanted.n)


_LOGPROB = {_TOKEN: SimpleNamespace(logprob=0.0, rank=1)}


class Server:
    """TRL's `VLLMClient`, of a server that has other GPUs."""

    def init_communicator(self, device: Any = None) -> None:
        """No NCCL group is made: its buffers are not counted."""

    def get_server_info(self) -> dict[str, Any]:
        """As a server is that was started by `trl vllm-serve`."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: Any, weights: Any) -> None:
        """Every weight that is sent, one at a time."""
        for _ in weights:
            pass

    def reset_prefix_cache(self) -> None:
        """There is none."""

    def generate(self, prompts: list[list[int]], n: int = 1, max_tokens: int = 16, **settings: Any) -> dict[str, Any]:
        """n completions of each prompt."""
        rows = len(prompts) * n
        ids, scores = [_TOKEN] * max_tokens, [[0.0]] * max_tokens
        tokens = [[_TOKEN]] * max_tokens
        return {
            "prompt_ids": prompts, "completion_ids": [ids] * rows, "logprobs": [scores] * rows,
            "logprob_token_ids": [tokens] * rows,
        }  # fmt: skip


def _taken(weights: Any) -> None:
    """Copied into weights that the engine has."""


def _longest(model: str) -> int:
    """The longest text that a model takes, as vLLM has it where no length is given."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).get_text_config().max_position_embeddings
