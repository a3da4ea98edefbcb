"""What TRL's trainers ask for, made here, offline: a tokenizer, and data of known lengths."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

from virtual_gpu.units import positive_int

MODEL = "Qwen/Qwen3-0.6B"
# For any trainer's arguments: nothing is logged, drawn or saved.
QUIET = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
_WORD = "단어"


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    """A tokenizer of few words, of which each is one token; transformers' warnings are off from here on.

    They say that it is not the model's own, of which nothing follows for the memory.
    """
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers.logging.set_verbosity_error()
    words = {"<unk>": 0, _WORD: 1, "<eos>": 2, "<pad>": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def _text(tokens: int) -> str:
    return " ".join([_WORD] * positive_int(tokens, "tokens"))


def _dataset(columns: dict[str, list[str]]) -> Any:
    import datasets

    datasets.disable_progress_bars()
    # What TRL asks before it draws a bar; here and not once, because a program's environment goes with its run.
    os.environ.setdefault("TQDM_DISABLE", "1")
    return datasets.Dataset.from_dict(columns)


def texts(tokens: int, size: int = 16) -> Any:
    """`size` texts of that many tokens, the end of the text among them: for SFTTrainer."""
    return _dataset({"text": [f"{_text(tokens - 1)} <eos>"] * positive_int(size, "size")})


def pairs(prompt: int, answer: int, size: int = 16) -> Any:
    """`size` prompts with a chosen and a rejected answer, of that many tokens: for DPOTrainer."""
    answers = [f" {_text(answer - 1)} <eos>"] * positive_int(size, "size")
    return _dataset({"prompt": [_text(prompt)] * size, "chosen": answers, "rejected": answers})


def prompts(tokens: int, size: int = 16) -> Any:
    """`size` prompts of that many tokens: for GRPOTrainer."""
    return _dataset({"prompt": [_text(tokens)] * positive_int(size, "size")})


def length_of(completions: list[str], **columns: Any) -> list[float]:
    """A reward function: the longer, the better."""
    return [float(len(text)) for text in completions]
