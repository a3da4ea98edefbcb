"""TrainingArguments, which Trainer, TRL and LLaMA-Factory share: what of them a step's memory depends on.

Names and defaults: those of the transformers that is installed (dataclass fields of TrainingArguments), and names that
older versions had (4.46 to 5.22).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

from ...errors import BadConfiguration, NotSupported, UnknownName, WrongValue
from ...language import tr
from ...models.fused_head import has_fused_head
from ...models.offloaded import reentrant_by_default
from ...step import own_code
from ...step.optimizers import OPTIMIZERS, name_for_trainer, optimizer_named
from ...step.setting import Setting
from .document import read_document
from .keys import EITHER, LESS, MORE, Keys, free, off, place_of

CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")  # its name before and since transformers 5.23
CHECKPOINTING_KWARGS = tuple(f"{name}_kwargs" for name in CHECKPOINTING)
EFFECTS = {
    LESS: ("torch_empty_cache_steps", "auto_find_batch_size"),
    MORE: ("neftune_noise_alpha", "label_smoothing_factor", "use_cache"),
    EITHER: ("torch_compile", "parallelism_config"),
}


@functools.cache
def defaults() -> dict[str, Any]:
    """name → default of each field of the installed TrainingArguments; None where it is made anew each time."""
    from transformers import TrainingArguments

    found = dataclasses.fields(TrainingArguments)
    return {field.name: None if field.default is dataclasses.MISSING else field.default for field in found}


def free_names() -> set[str]:
    """The names of TrainingArguments, new and old, that change nothing of a step's memory."""
    named = {name for names in EFFECTS.values() for name in names}
    return ({*defaults()} | free("TrainingArguments")) - named - {"deepspeed", "fsdp", "fsdp_config"}


def common(keys: Keys, checkpointing: bool = False, own: bool = False) -> dict[str, Any]:
    """The fields of a Setting that every file of this family says alike.

    checkpointing: the tool's default. own: it checkpoints in a way of its own, not as transformers does.
    """
    known = defaults()
    found = {
        "batch_size": keys.whole("per_device_train_batch_size", known["per_device_train_batch_size"]),
        "gradient_accumulation_steps": keys.whole("gradient_accumulation_steps", 1),
        "optimizer": optimizer(keys, "optim", str(getattr(known["optim"], "value", known["optim"]))),
        "fp32_embedding_state": True,
        **optimizer_arguments(keys),
    }
    name = _there(keys, CHECKPOINTING)
    found["gradient_checkpointing"] = keys.flag(name) if name else checkpointing
    if found["gradient_checkpointing"]:
        found |= {"use_reentrant": not own and reentrant_by_default()} | _how_it_checkpoints(keys, own)
    evaluates = keys.get("eval_strategy", keys.get("evaluation_strategy", "no"))
    if str(evaluates).lower() not in ("no", "false"):
        samples = keys.whole("per_device_eval_batch_size", known["per_device_eval_batch_size"])
        if samples > found["batch_size"]:
            keys.note(
                "per_device_eval_batch_size",
                MORE,
                tr(
                    ko=f"평가는 세지 않았다. 배치 {samples}의 로짓은 학습보다 더 들 수 있다",
                    en=f"evaluation is not counted; the logits of {samples} samples may take more than training",
                ),
            )
    return found


def _how_it_checkpoints(keys: Keys, own: bool) -> dict[str, Any]:
    """Whether blocks' inputs go to the CPU (transformers 5.17), and whether it is reentrant, where the file says so.

    A note where only some blocks are checkpointed.
    """
    name = _there(keys, CHECKPOINTING_KWARGS)
    how = _mapping(keys, name)
    if how is None:
        return {}
    if not isinstance(how, dict):
        raise keys.wrong(name, tr(ko="이름과 값의 묶음이어야 한다", en="must be a mapping"))
    offload, every = how.get("offload", False), how.get("every_n_layers", 1)
    if not isinstance(offload, bool):
        raise keys.wrong(f"{name}.offload", tr(ko="true나 false여야 한다", en="must be true or false"))
    if every != 1:
        keys.note(name, MORE, tr(ko="모든 블록을 체크포인팅한 것으로 셌다", en="counted with every block checkpointed"))
    if own and offload:
        keys.note(name, LESS, tr(ko="오프로드는 세지 않았다", en="the offload is not counted"))
    found = {"offload_checkpoints": offload and not own}
    if "use_reentrant" not in how:
        return found
    if not isinstance(how["use_reentrant"], bool):
        raise keys.wrong(f"{name}.use_reentrant", tr(ko="true나 false여야 한다", en="must be true or false"))
    return found | {"use_reentrant": how["use_reentrant"]}


def _mapping(keys: Keys, name: str | None) -> Any:
    """The value at a key; of a text in braces the mapping that it says, as TrainingArguments take it too."""
    how = keys.get(name) if name else None
    if isinstance(how, str) and how.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(how)
    return how


def _there(keys: Keys, names: tuple[str, ...]) -> str | None:
    """The name by which the file says it: of two the newer one, as transformers takes it."""
    return next((name for name in names[::-1] if keys.get(name) is not None), None)


def optimizer(keys: Keys, name: str, default: str) -> str:
    """Our name of the optimizer that a key names; NotSupported names the key where it is not simulated."""
    given = keys.word(name, default)
    try:
        found = optimizer_named(given)
    except (NotSupported, ImportError, UnknownName) as error:
        raise keys.not_counted(name, str(error)) from error
    theirs = {alias: None for aliases in OPTIMIZERS.values() for alias in aliases}
    if given.lower() not in theirs and given.lower() not in (known := sorted(own_code.of_the_trainer())):
        theirs |= dict.fromkeys(known)
        raise keys.wrong(name, ", ".join(theirs))  # our name, which TrainingArguments does not know
    return found


def optimizer_arguments(keys: Keys) -> dict[str, Any]:
    """The fields of a Setting that say more of the optimizer. axolotl takes optim_args as a mapping too."""
    args, targets = keys.get("optim_args", ""), keys.get("optim_target_modules", "")
    if isinstance(args, dict):
        args = ",".join(f"{name}={value}" for name, value in args.items())
    try:
        args, targets = own_code.arguments_of("", args, targets)[0], targets
    except WrongValue as error:
        raise keys.wrong("optim_args", str(error)) from error
    return {"optim_args": args, "optim_target_modules": targets}


def autocast(keys: Keys, bf16: bool = False) -> str | None:
    """The type that autocast computes in, "bf16" or "fp16"; None without it. bf16: the tool's default without fp16."""
    fp16 = keys.flag("fp16")
    on = keys.flag("bf16", bf16 and not fp16)
    if on and fp16:
        raise keys.wrong("fp16", tr(ko="bf16과 함께 켤 수 없다", en="not together with bf16"))
    return "bf16" if on else "fp16" if fp16 else None


def fsdp_section(keys: Keys, by_config: bool = False) -> dict[str, Any] | None:
    """What `fsdp_config` says, without the prefix "fsdp_"; None where FSDP is off.

    Without `fsdp` that section says nothing (transformers 5.23, training_args.py, `_process_fsdp_args`): its JSON of
    old has one always. by_config: the section alone turns it on (axolotl, core/builders/base.py). A text is the path of
    a JSON file, beside the configuration or in the working folder.
    """
    fsdp, more = keys.get("fsdp"), keys.get("fsdp_config", {})
    if off(fsdp) and not (by_config and more):
        return None
    if isinstance(more, str):
        there = beside(keys, more)
        if there is None:
            raise keys.wrong("fsdp_config", tr(ko="읽을 파일이 없다", en="there is no such file to read"))
        more = read_document(there).values
    return {name.removeprefix("fsdp_"): value for name, value in more.items()} if isinstance(more, dict) else {}


def beside(keys: Keys, name: str) -> Path | None:
    """The JSON file of that name: beside the configuration, or as it is named from the working folder."""
    folder = keys.document.path.parent
    places = (folder / name, Path(name), folder / name.split("/")[-1])
    return next((path for path in places if path.suffix == ".json" and path.is_file()), None)


def checkpoints_by_fsdp(keys: Keys, by_config: bool = False) -> bool:
    """Whether FSDP checkpoints the blocks that it splits (accelerate 1.15, accelerator.py)."""
    section = fsdp_section(keys, by_config) or {}
    return str(section.get("activation_checkpointing", False)).lower() == "true"


def shards(keys: Keys, gpus: int, by_config: bool = False) -> int:
    """ZeRO's stage by the sections deepspeed, fsdp and fsdp_config; 0 where nothing is sharded.

    deepspeed: a mapping, or a JSON file beside the configuration or in the working folder; of one that is not there its
    name is read ("ds_z3_config.json"). fsdp: full_shard is stage 3, shard_grad_op stage 2. by_config: see
    `fsdp_section`.
    """
    stage = _deepspeed(keys)
    fsdp, more = keys.get("fsdp"), fsdp_section(keys, by_config)
    if more is not None:
        words = " ".join(map(str, fsdp)) if isinstance(fsdp, list) else str(fsdp)
        strategy = f"{words} {more.get('sharding_strategy', '')}".lower()
        whole = more.get("reshard_after_forward", True)
        stage = 2 if "shard_grad_op" in strategy or str(whole).lower() == "false" else 3
        stage = 0 if "no_shard" in strategy else stage
        named = "fsdp" if fsdp else "fsdp_config"
        if "hybrid" in strategy:
            keys.note(named, MORE, tr(ko="노드마다 통째로 둔다", en="every node holds all of it"))
        if "offload" in words or more.get("offload_params"):
            why = tr(
                ko="CPU로 내리는 것은 세지 않았다(fit --model … --cpu-offload가 센다)",
                en="offload to the CPU is not counted here (fit --model … --cpu-offload does)",
            )
            keys.note(named, LESS, why)
        if str(more.get("version", 2)) == "1":  # of the first accelerate has autocast
            why = tr(ko="FSDP1을 FSDP2로 보고 셌다", en="FSDP 1 is counted as FSDP2")
            keys.note("fsdp_config", EITHER, why)
    if stage and gpus == 1:
        name = "deepspeed" if keys.get("deepspeed") else "fsdp" if fsdp else "fsdp_config"
        keys.note(name, EITHER, tr(ko="GPU 하나에서는 나눌 것이 없다", en="on one GPU nothing is sharded"))
    return stage if gpus > 1 else 0


def by_tiles(keys: Keys, name: str) -> bool:
    """Whether a loss that a kernel of its own makes from tiles of the logits is counted so; a note how."""
    if not has_fused_head():
        why = tr(ko="로짓을 통째로 둔 것으로 셌다", en="counted with all logits at once")
        keys.note(name, LESS, why)
        return False
    why = tr(
        ko="로짓을 조각내는 TRL의 손실로 셌다. 제 조각은 그보다 조금 더 들거나 덜 든다",
        en="counted as TRL's loss from tiles of the logits; its own take somewhat more or less",
    )
    keys.note(name, EITHER, why)
    return True


def in_8_bits(keys: Keys, adapters: bool, stage: int, name: str = "load_in_8bit") -> bool:
    """Whether weights are loaded in int8, which bitsandbytes does not split over GPUs. adapters: the file has them."""
    if not keys.flag(name):
        return False
    if not adapters:
        raise keys.wrong(name, tr(ko="LoRA와 함께 쓴다", en="goes with LoRA"))
    if stage > 1:
        raise keys.not_counted(name, tr(ko=f"8비트 가중치와 ZeRO-{stage}", en=f"weights in 8 bits under ZeRO-{stage}"))
    return True


def reduces_once(keys: Keys) -> bool:
    """Whether gradients are split with a step's last micro-batch alone, and lie there whole until then.

    So accelerate's `no_sync` has it of what FSDP2 splits, by which the Trainer accumulates unless accelerator_config
    says `sync_each_batch` (transformers 5.2 and later, trainer.py, which before that does not ask; accelerate 1.15,
    accelerator.py). DeepSpeed does not.
    """
    if keys.get("deepspeed"):
        return False
    config = keys.get("accelerator_config", {})
    how = config.get("gradient_accumulation_kwargs") if isinstance(config, dict) else None
    return not (isinstance(how, dict) and how.get("sync_each_batch") is True)


def sends_each_batch(keys: Keys) -> dict[str, Any]:
    """key → value of the line after which `reduces_once` is no more; empty where the file has it in another file."""
    config = keys.get("accelerator_config", {})
    if not isinstance(config, dict) or not isinstance(how := config.get("gradient_accumulation_kwargs") or {}, dict):
        return {}
    how = {**how, "sync_each_batch": True}
    name, inner = "accelerator_config", "accelerator_config.gradient_accumulation_kwargs"
    ways = {f"{inner}.sync_each_batch": True, inner: how, name: {**config, "gradient_accumulation_kwargs": how}}
    for key, value in ways.items():  # the innermost that has a place of its own in the file
        with contextlib.suppress(NotSupported):
            keys.document.with_changes({place_of(key): value})
            return {key: value}
    return {}


def deepspeed_section(keys: Keys) -> Any:
    """What the file gives DeepSpeed: a mapping, or the one in its JSON file; None where there is neither."""
    section = keys.get("deepspeed")
    if isinstance(section, str):
        there = beside(keys, section)
        section = None if there is None else read_document(there).values
    return section or None


def _deepspeed(keys: Keys) -> int:
    named = keys.get("deepspeed")
    if not named:
        return 0
    section = deepspeed_section(keys)
    if section is None and isinstance(named, str):
        stage = re.search(r"z(?:ero)?[_-]?([0-3])", named.lower())
        if stage is None:
            raise keys.wrong("deepspeed", tr(ko="읽을 파일이 없다", en="there is no such file to read"))
        why = tr(
            ko=f"파일이 없어 이름에서 ZeRO-{stage[1]}로 읽고, FSDP2가 나누는 것으로 셌다",
            en=f"not there: by its name ZeRO-{stage[1]}, counted as FSDP2 splits",
        )
        keys.note("deepspeed", LESS if "offload" in named.lower() else EITHER, why)
        return int(stage[1])
    zero = section.get("zero_optimization", {}) if isinstance(section, dict) else None
    stage = zero.get("stage", 0) if isinstance(zero, dict) else None
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        given = f"{keys.document.path}: deepspeed: zero_optimization: stage={stage!r:.60}"
        raise BadConfiguration(tr(ko=f"{given}: 0에서 3까지의 정수여야 한다.", en=f"{given}: must be 0, 1, 2 or 3."))
    if any(isinstance(part := zero.get(name), dict) and part.get("device", "none") != "none"
           for name in ("offload_optimizer", "offload_param")):  # fmt: skip
        keys.note("deepspeed", LESS, tr(ko="CPU로 내리는 것은 세지 않았다", en="offload to the CPU is not counted"))
    return stage


def _offloads(keys: Keys, name: str) -> dict[str, Any]:
    """The line that sends checkpoints to the CPU, in the spelling of the file's own switch."""
    name = _there(keys, CHECKPOINTING_KWARGS) or name
    how = _mapping(keys, name)
    if not how or isinstance(keys.get(name), str):
        return {name: {"use_reentrant": False} | (how or {}) | {"offload": True}}
    return {} if how.get("offload") is True else {f"{name}.offload": True}


def _reentrant(keys: Keys, name: str) -> dict[str, Any]:
    """The line that makes checkpointing reentrant."""
    name = _there(keys, CHECKPOINTING_KWARGS) or name
    how = _mapping(keys, name)
    if not how or isinstance(keys.get(name), str):
        return {name: (how or {}) | {"use_reentrant": True}}
    return {f"{name}.use_reentrant": True}


def _known(names: tuple[str, ...]) -> str:
    """The older name while the installed transformers takes it: before 5.23 there is no other, and until 6 both go.

    transformers 5.23, training_args.py: "Deprecated alias of `activation_checkpointing`, will be removed in v6".
    """
    return next((name for name in names if name in defaults()), names[-1])


def changed(keys: Keys, old: Setting, new: Setting, **names: str) -> dict[str, Any]:
    """key → value of what TrainingArguments call alike wherever they are. names: a field of Setting → its key here."""
    named = {
        "batch_size": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
    } | names
    found = {key: getattr(new, name) for name, key in named.items() if getattr(new, name) != getattr(old, name)}
    switch = _there(keys, CHECKPOINTING)
    if new.gradient_checkpointing and not old.gradient_checkpointing:
        found[switch or _known(CHECKPOINTING)] = True
    if new.offload_checkpoints and not old.offload_checkpoints:
        found |= _offloads(keys, f"{switch or _known(CHECKPOINTING)}_kwargs")
    if new.use_reentrant and not old.use_reentrant:
        found |= _reentrant(keys, f"{switch or _known(CHECKPOINTING)}_kwargs")
    if new.optimizer != old.optimizer:
        found["optim"] = name_for_trainer(new.optimizer)
    return found | _amp(keys, old.precision, new.precision)


def _amp(keys: Keys, old: str, new: str) -> dict[str, Any]:
    """key → value of the lines that compute in the type of another precision; TRL takes bf16 unless it is false."""
    if ("fp16" in new and "bf16" in old) or ("bf16" in new and "fp16" in old):
        return {"bf16": "bf16" in new, "fp16": "fp16" in new}
    if "16" not in old or "16" in new:
        return {}
    found = {} if off(keys.document.get(("fp16",))) else {"fp16": False}
    return found | ({} if keys.document.get(("bf16",)) is False else {"bf16": False})
