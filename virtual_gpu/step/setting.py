"""What is trained, and how: the one place where precision, optimizer and method are said."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ..errors import NotSupported, WrongValue
from ..language import tr
from ..models.adapters import LORA_DROPOUT, LORA_RANK, PEFT, check_peft, module_names, names_of_targets
from ..models.attention import ATTENTION
from ..models.configs import DEFAULT_MODEL, model_name
from ..models.depth import text_config
from ..models.fused_head import SINCE, has_fused_head, has_logits_by_row, require_fused_head
from ..models.kept import counts, kept_results
from ..models.offloaded import reentrant_by_default, require_offload
from ..rules.bitsandbytes import OUTLIER
from ..units import boolean, choose, positive_int
from . import own_code
from .completions import Completions
from .optimizers import in_8_bits_of_bitsandbytes, needs_cuda, optimizer_named, takes_args
from .pairs import REFERENCES

MAX_TOKENS = 2**26  # 512 MiB of int64 ids: more is a typing mistake, not an experiment


def check_size(size: int, sequence_length: int) -> None:
    """WrongValue where that many samples of that length are absurdly many."""
    if size * sequence_length > MAX_TOKENS:
        raise WrongValue(
            tr(
                ko=f"샘플 {size:,}개 × 토큰 {sequence_length:,}개는 너무 크다. 곱이 {MAX_TOKENS:,} 이하여야 한다.",
                en=f"{size:,} samples × {sequence_length:,} tokens are too many; at most {MAX_TOKENS:,} in all.",
            )
        )


# name -> (dtype of the weights, dtype that autocast computes in). "auto" is the checkpoint's dtype.
PRECISIONS = {
    "auto": ("auto", None),
    "fp16": (torch.float16, None),
    "bf16": (torch.bfloat16, None),
    "fp32": (torch.float32, None),
    "mixed_fp16": (torch.float32, torch.float16),
    "mixed_bf16": (torch.float32, torch.bfloat16),
}
# 16-bit weights under autocast: as Trainer trains adapters (which peft keeps in fp32), and all weights where they are
# loaded in bf16 and `bf16` is on. In fp16 trained weights are refused by torch's GradScaler.
ADAPTER_PRECISIONS = {
    "autocast_fp16": (torch.float16, torch.float16),
    "autocast_bf16": (torch.bfloat16, torch.bfloat16),
}
# What changes memory and is not simulated: its name in TrainingArguments or LoraConfig.
_ARGUMENTS = ("torch_compile", "use_liger_kernel", "deepspeed", "fsdp", "neftune_noise_alpha", "label_smoothing_factor")
_OF_GRPO = (
    "use_transformers_continuous_batching", "use_transformers_paged", "cast_lm_head_to_fp32",
    "disable_dropout", "cache_implementation", "generation_kwargs", "pad_to_multiple_of", "sync_ref_model",
)  # fmt: skip
_LORA = ("r", "target_modules", "lora_dropout", "modules_to_save")  # what a Setting says of LoraConfig
_FREE = (  # what changes no byte, or is peft's own business
    "lora_alpha", "use_rslora", "init_lora_weights", "fan_in_fan_out", "task_type", "peft_type", "auto_mapping",
    "base_model_name_or_path", "revision", "inference_mode", "peft_version", "alpha_pattern", "runtime_config",
    "megatron_core", "layers_pattern", "qalora_group_size", "loftq_config",
)  # fmt: skip
TRAINED_DTYPES = ("fp32", "bf16")
OBJECTIVES = ("sft", "dpo", "grpo")
ENGINES = AWAKE, ASLEEP = ("colocate", "asleep")  # vLLM beside the training, and without its memory meanwhile
# The second optimizer step is the first with the whole optimizer state from its beginning; nothing new comes after it.
OPTIMIZER_STEPS = 2


@dataclass(frozen=True)
class Setting:
    """What an experiment runs: model, method, precision, optimizer and sizes; WrongValue says what cannot be.

    model_id: a known name, a hub id, a folder or a transformers configuration, of which the name is kept. precision:
    see PRECISIONS and ADAPTER_PRECISIONS. sequence_length: tokens. The lora_ ones count where peft is not None.
    objective: "sft", the loss of all tokens, or "dpo", of pairs of answers: then batch_size counts pairs, each of two
    sequences of that length, and dropout is off, the adapters' and the model's (`step.pairs`). reference: of DPO
    without adapters, the model that stays as it was: a second one like the first ("same"), one in the type that is
    computed in ("half"), or none, its log probabilities "precomputed", as which adapters can have them too.
    "grpo", of completions that the model has generated (`step.completions`): then batch_size counts completions, and
    sequence_length is a prompt with one, of which the last completion_length tokens (0: half) are generated. rollout:
    how many completions are generated at once (0: those of an optimizer step). beta: the weight of the KL term, for
    which there is a reference. iterations: optimizer steps on the same completions. vllm: an engine outside of this
    memory makes them ("colocate"; "asleep": whose memory is given back while the model learns), so that nothing is
    generated here, and the model scores them before it learns.
    """

    batch_size: int
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    model_id: str = DEFAULT_MODEL
    peft: str | None = None
    sequence_length: int = 256
    precision: str = "auto"
    optimizer: str = "adamw"
    attention: str = "sdpa"
    lora_rank: int = LORA_RANK
    lora_targets: str | tuple[str, ...] = "attention"
    holds_outputs: bool = False  # logits and loss stay until the next ones, as in a loop that gives them names
    lora_dropout: float = LORA_DROPOUT
    # QLoRA: the scales of the 4-bit weights in 8 bits; the other weights in fp32 (prepare_model_for_kbit_training).
    double_quantization: bool = True
    rest_in_fp32: bool = True  # of weights in 8 bits too
    fused_lm_head: bool = False  # the loss from tiles of the logits, as TRL's SFTTrainer makes it
    kept_results: tuple[str, ...] = ()  # what checkpointed blocks keep all the same, see `models.kept`
    offload_checkpoints: bool = False  # their inputs wait in the CPU's RAM, see `models.offloaded`
    fp32_embedding_state: bool = False  # with an 8-bit optimizer: as the Trainer has it, see `make_optimizer`
    objective: str = "sft"
    reference: str = "same"
    padded: bool = False  # a micro-batch's sequences differ in length, so that attention has a mask
    optim_args: str = ""  # as TrainingArguments have it, of an optimizer that the Trainer reads it for
    optim_target_modules: str | tuple[str, ...] = ""  # whose weights' states are of low rank (GaLore, APOLLO)
    completion_length: int = 0
    rollout: int = 0
    beta: float = 0.0
    iterations: int = 1
    vllm: str = ""
    logits_by_row: bool = False  # of DPO's whole logits: in the order of TRL 1.6 to 1.13 (`step.pairs`)
    load_in_8bit: bool = False  # LoRA over weights in int8 (LLM.int8)
    modules_to_save: tuple[str, ...] = ()  # of peft: trained whole beside the adapters, a copy of each
    use_reentrant: bool = False  # of checkpointing: PyTorch's older way, the default of axolotl and LLaMA-Factory
    # What adapters and such copies are made before the training: "fp32" by LLaMA-Factory, "bf16" by TRL beside
    # quantized weights; without it they stay as peft makes them, adapters in fp32 and copies as the weights are.
    trained_dtype: str = ""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "batch_size", positive_int(self.batch_size, "batch_size"))
        steps = positive_int(self.gradient_accumulation_steps, "gradient_accumulation_steps")
        put(self, "gradient_accumulation_steps", steps)
        put(self, "sequence_length", positive_int(self.sequence_length, "sequence_length"))
        put(self, "gradient_checkpointing", boolean(self.gradient_checkpointing, "gradient_checkpointing"))
        put(self, "holds_outputs", boolean(self.holds_outputs, "holds_outputs"))
        put(self, "fused_lm_head", boolean(self.fused_lm_head, "fused_lm_head"))
        if self.fused_lm_head:
            require_fused_head()
        put(self, "kept_results", kept_results(self.kept_results))
        put(self, "offload_checkpoints", boolean(self.offload_checkpoints, "offload_checkpoints"))
        for name in ("kept_results", "offload_checkpoints"):
            if getattr(self, name) and not self.gradient_checkpointing:
                raise WrongValue(
                    tr(
                        ko=f"{name}={getattr(self, name)}: gradient_checkpointing=True일 때만 뜻이 있다.",
                        en=f"{name}={getattr(self, name)}: says something only with gradient_checkpointing=True.",
                    )
                )
        if self.offload_checkpoints:
            require_offload()
        reentrant = boolean(self.use_reentrant, "use_reentrant") and self.gradient_checkpointing
        put(self, "use_reentrant", reentrant)
        if reentrant and self.kept_results:
            raise WrongValue(
                tr(
                    ko="use_reentrant=True: kept_results와 함께 쓸 수 없다.",
                    en="use_reentrant=True: not together with kept_results.",
                )
            )
        precisions = [*PRECISIONS, *(name for name in ADAPTER_PRECISIONS if self.peft or "bf16" in name)]
        put(self, "precision", choose(self.precision, precisions, tr(ko="정밀도", en="precision")))
        put(self, "optimizer", optimizer_named(self.optimizer))
        arguments = own_code.arguments_of(self.optimizer, self.optim_args, self.optim_target_modules)
        put(self, "optim_args", arguments[0] if takes_args(self.optimizer) else "")
        put(self, "optim_target_modules", arguments[1])
        put(self, "attention", choose(self.attention, ATTENTION, tr(ko="어텐션", en="attention")))
        put(self, "model_id", model_name(self.model_id))
        if self.peft is not None:
            put(self, "peft", choose(self.peft, PEFT, "peft"))
        rank = positive_int(self.lora_rank, "lora_rank")
        targets = names_of_targets(self.lora_targets)
        dropout = self.lora_dropout
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise WrongValue(
                tr(
                    ko=f"lora_dropout={dropout!r}: 0 이상 1 미만이어야 한다.",
                    en=f"lora_dropout={dropout!r}: from 0 to 1.",
                )
            )
        put(self, "lora_rank", rank if self.peft else LORA_RANK)  # without adapters neither says anything
        put(self, "lora_targets", targets if self.peft else "attention")
        self._check_peft()
        put(self, "padded", boolean(self.padded, "padded"))
        put(self, "objective", choose(self.objective, OBJECTIVES, tr(ko="학습 목표", en="objective")))
        reference = choose(self.reference, REFERENCES, tr(ko="기준 모델", en="reference"))
        half = "half" if self.dtypes[1] and not self.peft else "same"  # without autocast, and of adapters: one type
        put(self, "reference", {"same": "same", "half": half}.get(reference, reference) if self.pairs else "same")
        by_row = boolean(self.logits_by_row, "logits_by_row")
        put(self, "logits_by_row", by_row and self.pairs and not self.fused_lm_head)
        self._check_completions()
        if self.objective != "sft" and self.holds_outputs:
            raise WrongValue(
                tr(
                    ko="holds_outputs=True: objective='sft'일 때만 뜻이 있다.",
                    en="holds_outputs=True: says something only with objective='sft'.",
                )
            )
        put(self, "lora_dropout", 0.0 if self.pairs and self.peft else float(dropout) if self.peft else LORA_DROPOUT)
        scales = self.dtypes[1] == torch.float16
        own = needs_cuda(self.optimizer, self.optim_args)
        own_code.check_way(self.optimizer, self.gradient_accumulation_steps, scales, self.peft, own)
        for name in ("double_quantization", "rest_in_fp32"):
            silent = self.peft != "qlora" and not (self.load_in_8bit and name == "rest_in_fp32")
            put(self, name, boolean(getattr(self, name), name) or silent)
        in_fp32 = boolean(self.fp32_embedding_state, "fp32_embedding_state")
        trains_some = self.peft is None or bool(self.modules_to_save)  # embeddings among them, perhaps
        put(self, "fp32_embedding_state", in_fp32 and trains_some and in_8_bits_of_bitsandbytes(self.optimizer))
        check_size(self.samples * self.rows // self.batch_size, self.sequence_length)

    def _check_peft(self) -> None:
        """Of weights in 8 bits under adapters, and of what is trained whole beside them."""
        put = object.__setattr__
        eight_bits, names = check_peft(self.peft, self.load_in_8bit, self.modules_to_save)
        put(self, "load_in_8bit", eight_bits)
        put(self, "modules_to_save", names)
        made = choose(self.trained_dtype, TRAINED_DTYPES, "trained_dtype") if self.trained_dtype else ""
        # Adapters lie in fp32 anyway.
        put(self, "trained_dtype", made if names or (self.peft and made == "bf16") else "")
        other = made or ((self.peft == "qlora" or self.load_in_8bit) and self.rest_in_fp32)
        if names and self.dtypes == (torch.float16,) * 2 and not other:
            raise WrongValue(
                tr(
                    ko=f"modules_to_save={names}: fp16 가중치째로 학습하는 것은 GradScaler가 거절한다(Attempting to "
                    "unscale FP16 gradients). bf16을 쓰거나 모델을 fp32로 올린다.",
                    en=f"modules_to_save={names}: trained in fp16 as they are, which GradScaler refuses (Attempting to "
                    "unscale FP16 gradients); bf16, or a model in fp32.",
                )
            )

    def short(self, batch_size: int) -> Setting:
        """The same of that batch and of the fewest tokens: what hangs on neither is the same of both."""
        of = self.completions
        rollout = {"completion_length": 1, "rollout": batch_size * of.steps} if of else {}
        return dataclasses.replace(self, batch_size=batch_size, sequence_length=2 if of else 1, **rollout)

    def _check_completions(self) -> None:
        """Of GRPO's own settings; the defaults where there are no completions."""
        put, grpo = object.__setattr__, self.objective == "grpo"
        length = positive_int(_given(self.completion_length, max(self.sequence_length // 2, 1)), "completion_length")
        batch = self.batch_size * self.gradient_accumulation_steps
        rollout = positive_int(_given(self.rollout, batch), "rollout")
        put(self, "iterations", positive_int(self.iterations, "iterations") if grpo else 1)
        put(self, "beta", check_beta(self.beta) if grpo else 0.0)
        put(self, "vllm", choose(self.vllm, ENGINES, "vllm") if self.vllm and grpo else "")
        put(self, "completion_length", length if grpo else 0)
        put(self, "rollout", rollout if grpo else 0)
        if grpo and length >= self.sequence_length:
            raise WrongValue(
                tr(
                    ko=f"completion_length={length}: 프롬프트와 답을 합친 길이 {self.sequence_length}보다 작아야 한다.",
                    en=f"completion_length={length}: less than {self.sequence_length}, a prompt with its completion.",
                )
            )
        if grpo and (rollout < batch or rollout % self.batch_size):
            raise WrongValue(
                tr(
                    ko=f"rollout={rollout}: 배치({self.batch_size})의 배수이고, "
                    f"스텝 하나의 답의 수({batch}) 이상이어야 한다.",
                    en=f"rollout={rollout}: a multiple of the batch of {self.batch_size}, and {batch} at least.",
                )
            )

    @classmethod
    def one(cls, setting: Setting | None, settings: dict[str, Any]) -> Setting:
        """The setting that is given, or the one that these settings make; WrongValue for both at once."""
        if setting is None:
            return cls(**settings)
        if settings or not isinstance(setting, cls):
            raise WrongValue(
                tr(
                    ko=f"Setting 하나이거나 설정의 이름과 값이어야 한다: {setting!r}, {', '.join(settings)}",
                    en=f"A Setting or settings by name, not both: {setting!r}, {', '.join(settings)}",
                )
            )
        return setting

    @classmethod
    def from_training_arguments(
        cls,
        arguments: Any,
        peft_config: Any = None,
        model: Any = DEFAULT_MODEL,
        *,
        quantization_config: Any = None,
        **settings: Any,
    ) -> Setting:
        """What transformers' Trainer runs with these `TrainingArguments`, and peft's `LoraConfig` where one is given.

        quantization_config: `BitsAndBytesConfig` of int8, or for QLoRA (nf4 with double quantization). settings: the
        rest, such as sequence_length, which TrainingArguments do not say, or precision, where weights are loaded
        otherwise than here: in fp32 where fp16 or bf16 is on and all of them are trained, in that type under adapters,
        else as they are stored. NotSupported names an argument that changes memory and is not simulated.
        """
        if not hasattr(arguments, "per_device_train_batch_size"):
            raise WrongValue(
                tr(
                    ko=f"training_args={arguments!r}: transformers의 TrainingArguments여야 한다.",
                    en=f"training_args={arguments!r}: must be transformers' TrainingArguments.",
                )
            )
        _refuse(arguments, dict.fromkeys(_ARGUMENTS))
        computes = "fp16" if arguments.fp16 else "bf16" if arguments.bf16 else None
        mixed = "mixed" if peft_config is None else "autocast"
        checkpointing = getattr(arguments, "activation_checkpointing", None) or getattr(
            arguments, "gradient_checkpointing", False
        )
        found = {
            "batch_size": arguments.per_device_train_batch_size,
            "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
            "gradient_checkpointing": bool(checkpointing),
            "precision": f"{mixed}_{computes}" if computes else "auto",
            "optimizer": optimizer_named(arguments.optim),
            "optim_args": getattr(arguments, "optim_args", None) or "",
            "optim_target_modules": getattr(arguments, "optim_target_modules", None) or "",
            "fp32_embedding_state": True,
        }
        how = getattr(arguments, "activation_checkpointing_kwargs", None) or getattr(
            arguments, "gradient_checkpointing_kwargs", None
        )
        if checkpointing and how:
            if how.get("every_n_layers", 1) != 1:
                raise NotSupported(
                    tr(
                        ko=f"every_n_layers={how['every_n_layers']!r}: 모든 블록을 체크포인팅할 때만 센다.",
                        en=f"every_n_layers={how['every_n_layers']!r}: counted only with every block checkpointed.",
                    )
                )
            found["offload_checkpoints"] = bool(how.get("offload", False))
            found["use_reentrant"] = bool(how.get("use_reentrant", reentrant_by_default()))
        elif checkpointing:
            found["use_reentrant"] = reentrant_by_default()
        if any(kind.__name__ == "SFTConfig" for kind in type(arguments).__mro__):  # TRL's SFTTrainer has such a head
            found["fused_lm_head"] = has_fused_head()
        if any(kind.__name__ == "DPOConfig" for kind in type(arguments).__mro__):
            if not arguments.disable_dropout:
                raise NotSupported(
                    tr(
                        ko="disable_dropout=False: DPO는 드롭아웃을 끈 것만 센다.",
                        en="disable_dropout=False: DPO is counted without dropout alone.",
                    )
                )
            before = "precomputed" if arguments.precompute_ref_log_probs else "same"
            found |= {"objective": "dpo", "reference": before, "fused_lm_head": has_fused_head(), "padded": True}
            _check_logits(arguments)
            found["logits_by_row"] = has_logits_by_row()
        if any(kind.__name__ == "GRPOConfig" for kind in type(arguments).__mro__):
            _refuse(arguments, dict.fromkeys(_OF_GRPO))
            of = {"completion_length": arguments.max_completion_length, "beta": arguments.beta}
            of |= {"iterations": arguments.num_iterations, "fused_lm_head": has_fused_head(), "padded": True}
            _check_generations(arguments)
            if arguments.use_vllm:
                raise NotSupported(
                    tr(
                        ko="use_vllm=True: 엔진은 여기서 세지 않는다. plan_training(…, objective='grpo', "
                        "vllm='colocate')이나 virtual-gpu fit이 센다.",
                        en="use_vllm=True: an engine is counted by plan_training(…, objective='grpo', vllm='colocate') "
                        "and virtual-gpu fit, not here.",
                    )
                )
            rollout = arguments.per_device_train_batch_size * arguments.steps_per_generation
            found |= {"objective": "grpo", "rollout": rollout} | of
        if peft_config is not None:
            found |= _read_lora(peft_config) | {"peft": "lora"}
        if quantization_config is not None:
            found |= _read_quantization(quantization_config, peft_config)
        return cls(**found | settings, model_id=model)

    @property
    def pairs(self) -> bool:
        """Whether a sample is a pair of sequences."""
        return self.objective == "dpo"

    @property
    def completions(self) -> Completions | None:
        """What a step of GRPO is trained on; None without."""
        if self.objective != "grpo":
            return None
        prompt = self.sequence_length - self.completion_length
        how = self.beta, self.iterations, bool(self.vllm)
        return Completions(self.rollout, self.batch_size, prompt, self.completion_length, *how)

    @property
    def rows(self) -> int:
        """The sequences of a micro-batch."""
        return self.batch_size * (2 if self.pairs else 1)

    @property
    def samples(self) -> int:
        """The samples that the optimizer steps of the experiment take."""
        return self.batch_size * self.gradient_accumulation_steps * OPTIMIZER_STEPS

    @property
    def title(self) -> str:
        """One line that names what is run."""
        pairs = ("쌍", " pairs" if self.batch_size > 1 else " pair") if self.pairs else ("", "")
        parts = [
            self.model_id.split("/")[-1],
            tr(ko=f"배치 {self.batch_size}{pairs[0]}", en=f"batch {self.batch_size}{pairs[1]}"),
            tr(ko=f"길이 {self.sequence_length}", en=f"length {self.sequence_length}"),
        ]
        if self.gradient_accumulation_steps > 1:
            parts[1] += f" × {self.gradient_accumulation_steps}"
        if self.gradient_checkpointing:
            parts.append(checkpointing_label(self.kept_results, self.offload_checkpoints, self._keeps_less))
        if self.fused_lm_head:
            parts.append(fused_head_label())
        if self.pairs:
            parts.append("DPO" + (f" ({reference_label(self.reference)})" if self.reference != "same" else ""))
            parts += [tr(ko="로짓을 시퀀스별로", en="logits row by row")] if self.logits_by_row else []
        if self.completions:
            parts.append(grpo_label(self.completion_length, self.beta, self.iterations, bool(self.vllm)))
        defaults = {f.name: f.default for f in fields(self)}
        names = ("peft", "precision", "optimizer", "attention")
        parts += [str(getattr(self, name)) for name in names if getattr(self, name) != defaults[name]]
        parts += [tr(ko="가중치는 8비트", en="weights in 8 bits")] if self.load_in_8bit else []
        parts += [self.optim_args] if self.optim_args else []
        if self.lora_rank != LORA_RANK:
            parts.append(f"rank {self.lora_rank}")
        if self.lora_targets != "attention":
            parts.append(self.lora_targets if isinstance(self.lora_targets, str) else ", ".join(self.lora_targets))
        if self.lora_dropout != LORA_DROPOUT and not self.pairs:
            parts.append(f"dropout {self.lora_dropout:g}")
        if self.modules_to_save:
            parts.append(tr(ko="통째로: ", en="whole: ") + ", ".join(self.modules_to_save))
        if self.trained_dtype:
            parts.append(tr(ko=f"학습하는 것은 {self.trained_dtype}", en=f"trained in {self.trained_dtype}"))
        parts += [tr(ko="패딩 있음", en="padded")] if self.padded else []
        parts += [] if self.double_quantization else [tr(ko="이중 양자화 없이", en="no double quantization")]
        parts += [] if self.rest_in_fp32 or self.dtypes[0] == torch.float32 else [rest_label()]
        parts += [tr(ko="임베딩의 상태는 fp32", en="embeddings' state in fp32")] if self.fp32_embedding_state else []
        return " · ".join(parts)

    @property
    def _keeps_less(self) -> bool:
        """Whether that checkpointing is reentrant makes a difference (see `rules.bitsandbytes.Int8Product`)."""
        return self.use_reentrant and self.load_in_8bit

    @property
    def dtypes(self) -> tuple[torch.dtype | str, torch.dtype | None]:
        """(dtype of the weights, dtype that autocast computes in); "auto" is the checkpoint's dtype."""
        return {**PRECISIONS, **ADAPTER_PRECISIONS}[self.precision]

    @property
    def module_names(self) -> tuple[str, ...]:
        """What the adapters, or else the optimizer, find modules by."""
        if self.peft:
            return module_names(self.lora_targets, self.modules_to_save)
        return module_names(self.optim_target_modules)

    @property
    def adapters(self) -> dict[str, Any]:
        """The settings that only LoRA and QLoRA have; none without adapters."""
        names = ["lora_rank", "lora_targets", "lora_dropout"]
        names += ["double_quantization", "rest_in_fp32"] if self.peft == "qlora" else []
        names += ["load_in_8bit", "rest_in_fp32"] if self.load_in_8bit else []
        names += [name for name in ("modules_to_save", "trained_dtype") if getattr(self, name)]
        return {name: getattr(self, name) for name in names} if self.peft else {}

    def to_dict(self) -> dict[str, Any]:
        """The settings by name; without adapters, without theirs."""
        silent = [] if self.peft == "qlora" else ["double_quantization"]
        silent += [] if self.peft == "qlora" or self.load_in_8bit else ["rest_in_fp32"]
        silent += [] if self.peft else ["lora_rank", "lora_targets", "lora_dropout"]
        silent += [] if self.fp32_embedding_state else ["fp32_embedding_state"]
        silent += [] if self.pairs else ["reference"]
        silent += ["objective"] if self.objective == "sft" else []
        silent += [] if self.completions else ["completion_length", "rollout", "beta", "iterations"]
        few = (
            "padded",
            "optim_args",
            "optim_target_modules",
            "vllm",
            "load_in_8bit",
            "modules_to_save",
            "trained_dtype",
            "use_reentrant",
            "logits_by_row",
        )
        silent += [name for name in few if not getattr(self, name)]
        return {name: value for name, value in asdict(self).items() if name not in silent}

    def check_length(self, config: Any) -> None:
        """WrongValue where the sequence is longer than the model's positions."""
        limit = getattr(text_config(config), "max_position_embeddings", None)
        if limit is not None and self.sequence_length > limit:
            raise WrongValue(
                tr(
                    ko=f"sequence_length={self.sequence_length}: {self.model_id}의 최대 길이는 {limit}이다.",
                    en=f"sequence_length={self.sequence_length}: {self.model_id} goes up to {limit}.",
                )
            )


def _check_logits(arguments: Any) -> None:
    """NotSupported for a DPOConfig whose loss an installed TRL makes from whole logits otherwise than is known."""
    if has_fused_head():
        return
    losses = arguments.loss_type if isinstance(arguments.loss_type, (list, tuple)) else [arguments.loss_type]
    if not has_logits_by_row() or getattr(arguments, "use_weighting", False) or "sft" in losses:
        raise NotSupported(
            tr(
                ko="DPOConfig: 로짓을 통째로 만드는 TRL의 DPO는 1.6부터 1.13까지의 것을, use_weighting과 "
                f"loss_type='sft' 없이 센다. TRL {SINCE}부터는 그런 제한이 없다.",
                en="DPOConfig: of TRLs whose DPO makes whole logits, 1.6 to 1.13 are counted, without use_weighting "
                f"and loss_type='sft'; since TRL {SINCE} there is no such limit.",
            )
        )


def _check_generations(arguments: Any) -> None:
    """NotSupported for a GRPOConfig whose generations and optimizer steps end apart, unless that changes no byte.

    TRL 1.16, trainer/grpo_trainer.py (`generate_every`): then the model that has generated scores the completions too,
    as it does anyway with num_iterations > 1.
    """
    given, steps = arguments.steps_per_generation, arguments.gradient_accumulation_steps
    if given < steps or (given > steps and arguments.num_iterations == 1):
        raise NotSupported(
            tr(
                ko=f"steps_per_generation={given}: TRL의 기본값인 gradient_accumulation_steps({steps})와 같을 때만 "
                "센다. num_iterations가 2 이상이면 더 커도 된다.",
                en=f"steps_per_generation={given}: counted where it is gradient_accumulation_steps ({steps}), TRL's "
                "default; with num_iterations > 1 it may be more.",
            )
        )


def reference_label(reference: str) -> str:
    """Where DPO's reference comes from, in the reader's language."""
    return {
        "same": tr(ko="기준 모델도 카드에", en="reference on the card"),
        "half": tr(ko="기준 모델은 16비트", en="reference in 16 bits"),
        "precomputed": tr(ko="기준 로그 확률은 미리 계산", en="reference precomputed"),
    }[reference]


def grpo_label(completion_length: int, beta: float, iterations: int = 1, vllm: bool = False) -> str:
    """GRPO, how long its completions are, and what else its loss asks for, in the reader's language."""
    more = [tr(ko=f"답 {completion_length}토큰", en=f"completions of {completion_length}")]
    more += [f"beta {beta:g}"] if beta else []
    more += [tr(ko=f"{iterations}번 학습", en=f"{iterations} iterations")] if iterations > 1 else []
    more += ["vLLM"] if vllm else []
    return f"GRPO ({', '.join(more)})"


def _given(value: Any, default: int) -> Any:
    """The value, or the default that 0 stands for."""
    return default if type(value) is int and value == 0 else value


def check_beta(beta: Any) -> float:
    """The weight of GRPO's KL term; WrongValue for what is none."""
    if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 <= beta < float("inf"):
        raise WrongValue(tr(ko=f"beta={beta!r}: 0 이상의 수여야 한다.", en=f"beta={beta!r}: a number, 0 or more."))
    return float(beta)


def checkpointing_label(kept: tuple[str, ...] = (), offload: bool = False, reentrant: bool = False) -> str:
    """Gradient checkpointing, of how many results what is kept, and where it is, in the reader's language."""
    here, away = counts(kept)
    results = f"{here} results" if here > 1 else "1 result"
    how = [tr(ko=f"결과 {here}가지 남김", en=f"keeps {results}")] if here else []
    how += [tr(ko=f"{away}가지 CPU로", en=f"{away} to the CPU")] if away else []
    if offload:
        how.append(tr(ko="오프로드", en="offloaded"))
    if reentrant:
        how.append("use_reentrant")
    return tr(ko="체크포인팅", en="checkpointing" + " " * bool(how)) + (f"({', '.join(how)})" if how else "")


def rest_label() -> str:
    """Weights beside 4-bit ones that stay as they were loaded, in the reader's language."""
    return tr(ko="나머지는 16비트", en="the rest in 16 bits")


def fused_head_label() -> str:
    """The loss from tiles of the logits, in the reader's language."""
    return tr(ko="손실 나누기", en="fused LM head")


def _refuse(given: Any, defaults: dict[str, Any]) -> None:
    """NotSupported for the first of these attributes that says something else than its default."""
    for name, default in defaults.items():
        value = getattr(given, name, default)
        if value and value != default:
            raise NotSupported(
                tr(
                    ko=f"{type(given).__name__}({name}={value!r})는 흉내 내지 않는다.",
                    en=f"{type(given).__name__}({name}={value!r}) is not simulated.",
                )
            )


def _read_lora(config: Any) -> dict[str, Any]:
    """What a LoraConfig says, as a Setting says it."""
    defaults = {
        field.name: field.default_factory() if field.default is dataclasses.MISSING else field.default
        for field in fields(config)
        if field.name not in (*_LORA, *_FREE)
    }
    _refuse(config, defaults)
    targets = config.target_modules
    if targets is None:
        targets = "attention"
    elif isinstance(targets, str):
        if targets != "all-linear":
            raise NotSupported(
                tr(
                    ko=f"target_modules={targets!r}: 정규식은 읽지 않는다. 층 이름의 목록을 쓴다.",
                    en=f"target_modules={targets!r}: regular expressions are not read; use a list of layers' names.",
                )
            )
    else:
        targets = tuple(sorted(targets))
    return {
        "lora_rank": config.r, "lora_targets": targets, "lora_dropout": config.lora_dropout,
        "modules_to_save": tuple(config.modules_to_save or ()),
    }  # fmt: skip


def _read_quantization(config: Any, peft_config: Any) -> dict[str, Any]:
    """What a BitsAndBytesConfig says: LLM.int8 under LoRA or what is called QLoRA; NotSupported for anything else."""
    if getattr(config, "load_in_8bit", False) and config.llm_int8_threshold == OUTLIER and peft_config is not None:
        _refuse(config, dict.fromkeys(("llm_int8_has_fp16_weight", "llm_int8_skip_modules")))
        return {"load_in_8bit": True}
    qlora = (
        getattr(config, "load_in_4bit", False)
        and config.bnb_4bit_quant_type == "nf4"
        and config.bnb_4bit_use_double_quant
        and peft_config is not None
    )
    if not qlora:
        raise NotSupported(
            tr(
                ko="quantization_config: peft_config와 함께 쓰는 load_in_8bit(llm_int8_threshold=6)와 4비트 nf4, 이중 "
                "양자화(QLoRA)만 흉내 낸다.",
                en="quantization_config: only load_in_8bit (llm_int8_threshold=6) and 4-bit nf4 with double "
                "quantization (QLoRA), under adapters, are simulated.",
            )
        )
    return {"peft": "qlora"}
