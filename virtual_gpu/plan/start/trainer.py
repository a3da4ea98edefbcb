"""A file of transformers' `TrainingArguments`, as `to_json_string` writes it or a reader's own JSON or YAML.

transformers 5.23, training_args.py. It says neither the model nor the length, nor whether adapters are trained. Under
autocast all weights lie in fp32, those under adapters in 16 bits (`Setting.from_training_arguments`).
"""

from __future__ import annotations

from typing import Any

from ...cards import GPUSpec
from ...step.setting import Setting
from . import hugging_face
from .keys import Keys

NAME = "TrainingArguments"
METHODS: tuple[str, ...] = ()  # among which the file itself chooses


def knows(values: dict[str, Any]) -> bool:
    """Whether a file with these keys is one."""
    return bool({*values} & {*hugging_face.defaults()} - {"seed", "output_dir"})


def read(
    keys: Keys, spec: GPUSpec, gpus: int, peft: str | None, objective: str | None = None
) -> tuple[dict[str, Any], int]:
    """(fields of a Setting, ZeRO's stage). peft: what the caller says is trained."""
    computes = hugging_face.autocast(keys)
    found = hugging_face.common(keys) | {"peft": peft, "padded": True}  # by a collator that the file does not say
    found["precision"] = f"{'autocast' if peft else 'mixed'}_{computes}" if computes else "auto"
    found["fused_lm_head"] = keys.flag("use_liger_kernel") and hugging_face.by_tiles(keys, "use_liger_kernel")
    found["gradient_checkpointing"] |= hugging_face.checkpoints_by_fsdp(keys)
    stage = hugging_face.shards(keys, gpus)
    keys.rest(hugging_face.EFFECTS, hugging_face.free_names())
    return found, stage


def write(keys: Keys, old: Setting, new: Setting) -> dict[str, Any]:
    """key → value of each line that makes the one setting the other."""
    return hugging_face.changed(keys, old, new)
