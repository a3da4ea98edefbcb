"""What is to be trained on what, with every value checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..cards import GPUSpec, Range, card
from ..errors import NotSupported, WrongValue
from ..host.machines import machine
from ..language import tr
from ..models.adapters import LORA_RANK, check_saved
from ..models.attention import REPEAT_KV
from ..models.build import build_model
from ..models.configs import cached_by_model, load_config, model_name
from ..models.depth import text_config, with_depth
from ..models.fused_head import can_fuse_head, has_fused_head, require_fused_head
from ..optional import require
from ..room import Room, room_on
from ..rules.active import ActiveRules
from ..shards.nccl import of_groups
from ..step.completions import GENERATIONS
from ..step.optimizers import optimizer_named, takes_args
from ..step.own_code import arguments_of
from ..step.setting import OBJECTIVES, Setting, check_size, grpo_label
from ..units import boolean, choose, positive_int
from .candidates import (
    recipes_of,
    why_no_way,
    why_not_by_engine,
    why_not_by_experts,
    why_not_copies,
    why_not_in_parts,
    why_not_in_stages,
    why_not_split,
    why_not_spread,
)
from .engine import ASLEEP, AWAKE, MODES, with_engine, with_graphs
from .ranking import PREFERENCES
from .recipes import METHODS
from .tensors import why_not, why_whole_texts

if TYPE_CHECKING:
    from .recipes import Recipe

PRECISIONS = ("mixed_fp16", "mixed_bf16", "bf16", "fp32")
MARGIN = 0.0  # what is unknown is a range already (`room`): this is what the reader wants free on top
MOST_GPUS = 16_384
# Architectures whose linear attention has flash-linear-attention's kernels in transformers 5.23, where that is
# installed (their modeling files' use_kernel_func_from_hub_with_fallback).
WITH_FLA = ("bailing_hybrid", "glm5_next", "kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_next", "qwen4_exp")
MESH = (
    "tensor_parallel",
    "context_parallel",
    "replicas",
    "pipeline_parallel",
    "expert_parallel",
)  # what a recipe says of how its GPUs share the work


@dataclass(frozen=True)
class Request:
    """What is to be trained on what. margin: the share of the peak that must stay free beside all that is unknown."""

    model: str
    gpu: str
    gpus: int
    length: int
    batch: int
    methods: tuple[str, ...]
    precision: str | None
    optimizer: str | None
    margin: float
    lora_rank: int
    lora_targets: str | tuple[str, ...]
    host: str | None = None  # the machine whose RAM has to hold the loading
    prefer: str = "fidelity"  # what the ranking goes by: one of PREFERENCES
    price_per_hour: float | None = None  # of one GPU, in the reader's currency; None: the least rent that was found
    selective: bool = False  # what is left of the memory keeps results that checkpointing would compute again
    cpu_offload: bool = False  # parameters, gradients and optimizer state may wait in the CPU's RAM
    # "dpo": a sample is a pair of sequences, and the loss TRL's DPOTrainer's. "grpo": it is a completion that the model
    # has generated, and the loss TRL's GRPOTrainer's.
    objective: str = "sft"
    tensor_parallel: int | None = None  # GPUs that compute each layer together; None: the planner chooses
    optim_args: str = ""  # of the optimizer, as TrainingArguments take it: "rank=128"
    optim_target_modules: str | tuple[str, ...] = ""  # whose states are of low rank (GaLore, APOLLO)
    sequence_parallel: bool = True  # with tensor parallelism they share the tokens too, where they can
    context_parallel: int | None = None  # GPUs that share each text; None: the planner chooses
    replicas: int | None = None  # copies of the model, each split over a part of the GPUs; None: the planner chooses
    # True: also with the layers spread over the GPUs of one process. "only": so alone, as a plan's request has it.
    device_map: bool | str = False
    completion_length: int = 0  # of GRPO: the tokens of `length` that are generated
    generations: int = 0  # of GRPO: completions of each prompt
    beta: float = 0.0  # of GRPO: the weight of the KL term, for which there is a reference
    iterations: int = 1  # of GRPO: optimizer steps on the same completions
    # Of GRPO: an engine on the same card makes the completions ("colocate"), awake while the model is trained or not.
    # "asleep": only so, as a plan's request has it.
    vllm: str = ""
    pipeline_parallel: int | None = None  # stages, each with a part of the layers, on GPUs of its own
    expert_parallel: int | None = None  # GPUs that have the experts of a layer between them
    modules_to_save: tuple[str, ...] = ()  # of adapters: what is trained whole beside them

    @property
    def spec(self) -> GPUSpec:
        """The GPU's published facts."""
        return card(self.gpu)

    @property
    def hourly_rate(self) -> float | None:
        """What an hour of one GPU costs: as the reader says, or the least rent that was found; None where none was."""
        if self.price_per_hour is not None:
            return self.price_per_hour
        return self.spec.rent.low if self.spec.rent else None

    @property
    def room(self) -> Room:
        """What each GPU has for the allocator, and what lies outside it."""
        room = self._room_for_training
        beside = {AWAKE: with_engine, ASLEEP: with_graphs}.get(self.vllm)
        return room if beside is None else beside(room)

    @property
    def _room_for_training(self) -> Room:
        if self.gpus == 1 or self.spread:
            return room_on(self.spec)
        # All ranks are one group, over which a model is loaded; of a mesh with more dimensions each is one more.
        copies, tensors = self.replicas or 1, self.tensor_parallel or 1
        mesh = (copies, self.gpus // (copies * tensors), tensors) if copies * tensors > 1 else ()
        stages = self.pipeline_parallel or 1
        # With its neighbours a stage has a group of two each, beside that of all stages (`_batch_p2p`, schedules.py).
        mesh = (stages, self.gpus // stages, *(2,) * min(2, stages - 1)) if stages > 1 else mesh
        experts = self.expert_parallel or 1
        mesh = (experts, self.gpus // experts) if experts > 1 else mesh
        nccl = of_groups((self.gpus, *mesh, self.context_parallel or 1))
        return room_on(self.spec, Range(nccl.low, nccl.high))

    @property
    def limit_bytes(self) -> int:
        """The most that may be reserved and fits whatever the unknowns are, with the margin free."""
        return int(self.room.sure_bytes / (1 + self.margin))

    @property
    def repeats_kv(self) -> bool:
        """Whether the plans count on the line that repeats grouped heads."""
        return repeats_kv(self.model, self.spec.compute_capability)

    @property
    def caution(self) -> str:
        """What every plan takes for granted of the program; empty where there is nothing."""
        return " ".join(filter(None, (self._caution_of_experts, self._caution_of_heads, self._caution_of_kernels)))

    @property
    def _caution_of_experts(self) -> str:
        if (self.expert_parallel or 1) == 1:
            return ""
        return tr(
            ko="토큰이 전문가마다 고르게 간다고 보고 셌다. 한쪽으로 몰리면 그 GPU는 받은 만큼 더 쓴다.",
            en="Counted as if each expert had equally many tokens; a GPU to which more come takes more.",
        )

    @property
    def _caution_of_heads(self) -> str:
        if not self.repeats_kv:
            return ""
        counted = tr(
            ko=f"계획은 이 한 줄이 있는 것으로 세고, 저장하는 train.py에도 적는다: {REPEAT_KV}",
            en=f"The plans count on this line, which is in the train.py that they save: {REPEAT_KV}",
        )
        return f"{why_repeats_kv()} {counted}"

    @property
    def _caution_of_kernels(self) -> str:
        if not text_config(load_config(self.model)).model_type.startswith(WITH_FLA):
            return ""
        return tr(
            ko="선형 어텐션 층을 transformers의 PyTorch 구현으로 셌다. flash-linear-attention과 causal-conv1d를 "
            "설치하면 다른 커널이 돌고, 순전파 상태도 다르다.",
            en="Layers with linear attention are counted as transformers' PyTorch code runs them; where "
            "flash-linear-attention and causal-conv1d are installed other kernels do, which keep other activations.",
        )

    @property
    def can_fuse_head(self) -> bool:
        """Whether the loss may come from tiles of the logits: TRL is there, and knows how the model makes them.

        DPO's and GRPO's always does (`recipes_of`): it is not for the search to try.
        """
        return self.objective == "sft" and has_fused_head() and can_fuse(self.model)

    @property
    def pairs(self) -> bool:
        """Whether a sample is a pair of sequences."""
        return self.objective == "dpo"

    @property
    def grpo(self) -> bool:
        """Whether a sample is a completion that the model has generated."""
        return self.objective == "grpo"

    @property
    def sequences(self) -> int:
        """How many sequences a sample has."""
        return 2 if self.pairs else 1

    @property
    def spread(self) -> bool:
        """Whether the layers are spread over the GPUs, so that each sample goes through all of them."""
        return self.device_map == "only"

    @property
    def groups(self) -> int:
        """How many take samples of their own: GPUs, or groups of them that share a layer, a text or a pipeline."""
        shared = (self.tensor_parallel or 1) * (self.context_parallel or 1) * (self.pipeline_parallel or 1)
        return 1 if self.spread else self.gpus // shared

    @property
    def per_gpu(self) -> int:
        """Samples of one optimizer step that each GPU takes, or each group of them (`groups`)."""
        return self.batch // self.groups

    def of(self, recipe: Recipe) -> Request:
        """The request of that recipe's plans: with its mesh of GPUs, which says what room and samples are."""
        mesh = {name: getattr(recipe, name) for name in MESH}
        same = self.spread == recipe.spread and all((getattr(self, name) or 1) == n for name, n in mesh.items())
        same &= self.vllm == recipe.vllm
        device_map = "only" if recipe.spread else bool(self.device_map)
        return self if same else replace(self, device_map=device_map, vllm=recipe.vllm, **mesh)

    def allows(self, recipe: Recipe) -> bool:
        """Whether the mesh of GPUs is what was asked for, and all who take samples take as many."""
        asked = all(getattr(self, name) in (None, getattr(recipe, name)) for name in MESH)
        asked &= recipe.spread or not self.spread
        return asked and self.batch % self.of(recipe).groups == 0

    @property
    def title(self) -> str:
        """One line that names it."""
        gpus = f"{self.gpu} × {self.gpus}" if self.gpus > 1 else self.gpu
        model = Path(self.model).name
        dpo, ko, en = ("DPO · ", "쌍", " pairs") if self.pairs else ("", "", "")
        if self.grpo:
            dpo = f"{grpo_label(self.completion_length, self.beta, self.iterations, bool(self.vllm))} · "
            ko, en = "(답의 수)", " completions"
        return tr(
            ko=f"{model} · {dpo}{gpus} · 길이 {self.length} · 배치 {self.batch}{ko}",
            en=f"{model} · {dpo}{gpus} · length {self.length} · batch {self.batch}{en}",
        )


def make_request(
    model: Any,
    gpu: str = "T4",
    gpus: int = 1,
    *,
    length: int = 512,
    batch: int = 16,
    methods: tuple[str, ...] = METHODS,
    precision: str | None = None,
    optimizer: str | None = None,
    margin: float = MARGIN,
    lora_rank: int = LORA_RANK,
    lora_targets: str | tuple[str, ...] = "attention",
    host: str | None = None,
    prefer: str = "fidelity",
    price_per_hour: float | None = None,
    selective: bool = False,
    cpu_offload: bool = False,
    objective: str = "sft",
    tensor_parallel: int | None = None,
    optim_args: str = "",
    optim_target_modules: str | tuple[str, ...] = "",
    sequence_parallel: bool = True,
    context_parallel: int | None = None,
    replicas: int | None = None,
    pipeline_parallel: int | None = None,
    expert_parallel: int | None = None,
    device_map: bool | str = False,
    completion_length: int | None = None,
    generations: int | None = None,
    beta: float | None = None,
    iterations: int | None = None,
    vllm: str | None = None,
    modules_to_save: Sequence[str] = (),
) -> Request:
    """The request with every value checked; WrongValue in the reader's language."""
    gpu, gpus = how_many(gpu, gpus)
    spec = card(gpu).needs_cuda()
    prefer = choose(prefer, PREFERENCES, tr(ko="기준", en="preference"))
    objective = choose(objective, OBJECTIVES, tr(ko="학습 목표", en="objective"))
    if prefer == "speed" and None in (spec.bandwidth_bytes_per_s, spec.fp16_tflops):
        raise WrongValue(
            tr(
                ko=f"prefer='speed': {spec.name}의 대역폭이나 연산 속도가 공개되어 있지 않아 시간의 하한을 셀 수 없다. "
                "fidelity나 margin을 쓴다.",
                en=f"prefer='speed': {spec.name} has no published bandwidth or rate, so there is no bound on time. "
                "Use fidelity or margin.",
            )
        )
    _check_price(price_per_hour)
    batch = positive_int(batch, tr(ko="배치", en="batch"))
    check_size(batch * (2 if objective == "dpo" else 1), 1)
    if not isinstance(methods, (str, list, tuple)):
        choices = ", ".join(METHODS)
        raise WrongValue(tr(ko=f"methods={methods!r}: {choices}의 목록이다.", en=f"methods={methods!r}: of {choices}."))
    methods = (methods,) if isinstance(methods, str) else tuple(methods)
    methods = tuple(choose(method, METHODS, tr(ko="방법", en="method")) for method in methods)
    if not methods:
        choices = ", ".join(METHODS)
        raise WrongValue(tr(ko=f"방법을 하나 이상 고른다: {choices}", en=f"Allow at least one method of: {choices}"))
    if precision is not None:
        precision = choose(precision, PRECISIONS, tr(ko="정밀도", en="precision"))
        if "bf16" in precision and not spec.has_bf16:
            raise WrongValue(
                tr(
                    ko=f"precision={precision!r}: {spec.name}에는 bf16 연산 장치가 없다. mixed_fp16이나 fp32를 쓴다.",
                    en=f"precision={precision!r}: {spec.name} has no bf16 units. Use mixed_fp16 or fp32.",
                )
            )
    if optimizer is not None:
        optimizer = optimizer_named(optimizer)
    targets = optim_target_modules
    optim_args, optim_target_modules = arguments_of(optimizer or "", optim_args, targets)
    for name, value, is_read in (
        ("optim_args", optim_args, optimizer and takes_args(optimizer)),
        ("optim_target_modules", targets, optim_target_modules),
    ):
        if value and not is_read:
            raise WrongValue(
                tr(
                    ko=f"{name}={value!r}: 옵티마이저({optimizer or '없음'})가 이 값을 받지 않는다. 이 값을 받는 "
                    "optimizer와 함께 준다.",
                    en=f"{name}={value!r}: the optimizer {optimizer or '(none)'} does not read it.",
                )
            )
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin <= 1:
        raise WrongValue(tr(ko=f"margin={margin!r}: 0에서 1 사이의 수다.", en=f"margin={margin!r}: from 0 to 1."))
    if tensor_parallel is not None:
        tensor_parallel = positive_int(tensor_parallel, tr(ko="텐서 병렬 크기", en="tensor-parallel degree"))
    if context_parallel is not None:
        context_parallel = positive_int(context_parallel, tr(ko="컨텍스트 병렬 크기", en="context-parallel degree"))
    if replicas is not None:
        replicas = positive_int(replicas, tr(ko="모델의 벌 수", en="number of copies"))
    if pipeline_parallel is not None:
        pipeline_parallel = positive_int(pipeline_parallel, tr(ko="스테이지 수", en="number of stages"))
    if expert_parallel is not None:
        expert_parallel = positive_int(expert_parallel, tr(ko="전문가 병렬 크기", en="expert-parallel degree"))
    if set(methods) & {"lora", "qlora"}:
        require("peft", *(["bitsandbytes"] if "qlora" in methods else []))
    model = model_name(model)
    config = load_config(model)
    if objective != "sft":
        _check_head(model, objective)
    own = {"completion_length": completion_length, "beta": beta, "iterations": iterations}
    generations = _check_grpo(objective, batch, own | {"generations": generations, "vllm": vllm or None})
    vllm = choose(vllm, MODES, "vllm") if vllm else ""
    check = Setting(
        1, model_id=model, sequence_length=length, peft="lora", lora_rank=lora_rank, lora_targets=lora_targets,
        objective=objective, modules_to_save=modules_to_save,
        **{name: value for name, value in own.items() if value is not None},
    )  # fmt: skip
    check.check_length(config)
    ordered = tuple(method for method in METHODS if method in methods)
    made = Request(
        model, spec.name, gpus, check.sequence_length, batch, ordered, precision, optimizer, float(margin),
        check.lora_rank, check.lora_targets, None if host is None else machine(host).name,
        prefer, None if price_per_hour is None else float(price_per_hour), boolean(selective, "selective"),
        boolean(cpu_offload, "cpu_offload"), objective, tensor_parallel, optim_args, optim_target_modules,
        boolean(sequence_parallel, "sequence_parallel"), context_parallel, replicas,
        device_map if device_map == "only" else boolean(device_map, "device_map"), check.completion_length,
        generations, check.beta, check.iterations, vllm, pipeline_parallel, expert_parallel,
        check.modules_to_save if {*methods} - {"full"} else (),
    )  # fmt: skip
    if made.modules_to_save:  # a name that no module has is told of before anything is measured
        check_saved(build_model(config, torch.bfloat16), made.modules_to_save)
    if vllm and (why := why_not_by_engine(made)):
        raise NotSupported(f"vllm={vllm!r}: {why}")
    if why := why_no_way(made):
        raise NotSupported(f"optimizer={optimizer!r}: {why}")
    _check_split(made)
    return made


def _check_grpo(objective: str, batch: int, given: dict[str, Any]) -> int:
    """GRPO's completions of a prompt, 0 of another objective.

    WrongValue for GRPO's arguments of another objective, and for a batch in which a prompt's completions part.
    """
    unsaid = {one.name: one.default for one in fields(Request)}  # as a request of another objective has them
    for name, value in given.items():
        if objective != "grpo" and value not in (None, unsaid[name]):
            raise WrongValue(
                tr(
                    ko=f"{name}={value!r}: objective='grpo'일 때만 뜻이 있다.",
                    en=f"{name}={value!r}: says something only with objective='grpo'.",
                )
            )
    if objective != "grpo":
        return 0
    each = positive_int(GENERATIONS if given["generations"] is None else given["generations"], "generations")
    if each < 2 or batch % each:
        nearest = _multiples(batch, each)
        raise WrongValue(
            tr(
                ko=f"generations={each}: 프롬프트 하나에 답이 2개 이상이어야 한다.",
                en=f"generations={each}: 2 completions of a prompt at least.",
            )
            if each < 2
            else tr(
                ko=f"배치 {batch}: 프롬프트마다 답이 {each}개(generations)이므로 그 배수로 한다: {nearest}",
                en=f"A batch of {batch} completions: {each} of each prompt (generations), so a multiple: {nearest}",
            )
        )
    return each


def _check_split(request: Request) -> None:
    """WrongValue where the mesh of GPUs that is asked for cannot be, and for a batch that does not divide."""
    degree, copies, texts = request.tensor_parallel or 1, request.replicas or 1, request.context_parallel or 1
    if texts > 1:
        why = why_not_in_parts(request) or why_whole_texts(request.model, request.gpus, request.length, texts)
        if why:
            raise WrongValue(f"context_parallel={texts}: {why}")
    if request.device_map and (why := why_not_spread(request)):
        raise WrongValue(f"device_map=True: {why}")
    if copies > 1 and (why := why_not_copies(request)):
        raise WrongValue(f"replicas={copies}: {why}")
    if (stages := request.pipeline_parallel or 1) > 1 and (why := why_not_in_stages(request)):
        raise WrongValue(f"pipeline_parallel={stages}: {why}")
    if (experts := request.expert_parallel or 1) > 1 and (why := why_not_by_experts(request)):
        raise WrongValue(f"expert_parallel={experts}: {why}")
    if degree > 1 and (why := why_not_split(request) or why_not(request.model, request.gpus, degree)):
        raise WrongValue(f"tensor_parallel={degree}: {why}")
    batch, groups, gpus = request.batch, request.groups, request.gpus
    if batch % groups == 0 or any(map(request.allows, recipes_of(request))):
        return
    nearest = _multiples(batch, groups)
    if (degree := degree * texts * stages) > 1:
        raise WrongValue(
            tr(
                ko=f"배치 {batch}을(를) GPU {degree}개짜리 묶음 {groups}개에 똑같이 나눌 수 없다. "
                f"{groups}의 배수로 한다: {nearest}",
                en=f"A batch of {batch} does not divide among {groups} groups of {degree} GPUs. "
                f"Use a multiple of {groups}: {nearest}",
            )
        )
    raise WrongValue(
        tr(
            ko=f"배치 {batch}을(를) GPU {gpus}개에 똑같이 나눌 수 없다. GPU 수의 배수로 한다: {nearest}",
            en=f"A batch of {batch} does not divide among {gpus} GPUs. Use a multiple: {nearest}",
        )
    )


def _multiples(batch: int, of: int) -> str:
    """The multiples on both sides of the batch, or the first alone where it is smaller."""
    below = batch // of * of
    return f"{below}, {below + of}" if below else f"{of}"


def _check_head(model: str, objective: str) -> None:
    """TRL's log probabilities come from its head: ImportError without, NotSupported where it has none."""
    require_fused_head()
    if not can_fuse(model):
        raise NotSupported(
            tr(
                ko=f"objective={objective!r}: TRL의 함수(손실 나누기)가 {model}의 로짓을 만들지 못한다. 'sft'는 된다.",
                en=f"objective={objective!r}: TRL's head does not make the logits of {model}. objective='sft' can be "
                "planned.",
            )
        )


def repeats_kv(model: str, capability: tuple[int, int]) -> bool:
    """Whether the model has grouped heads that such a card's kernels do not take (see `models.attention`)."""
    if capability >= (8, 0) or ActiveRules(capability).applies("efficient_gqa"):
        return False
    config = text_config(load_config(model))
    try:
        return getattr(config, "num_key_value_heads", None) not in (None, getattr(config, "num_attention_heads", None))
    except RuntimeError:  # transformers: the layers differ in them, so some have groups (Gemma 4)
        return True


def why_repeats_kv() -> str:
    """Why grouped heads are repeated there."""
    return tr(
        ko="그룹 쿼리(GQA) 모델이고 GPU가 암페어보다 옛것이다. transformers 4.54부터의 sdpa는 패딩이 없는 배치에서 "
        "길이 × 길이 행렬을 만드는 math 커널로 간다.",
        en="a model with grouped-query heads on a GPU before Ampere: without padding, sdpa of transformers 4.54 "
        "and later goes to the math kernel, which makes matrices of length × length.",
    )


@cached_by_model
def can_fuse(model: str) -> bool:
    """Whether TRL's head makes this model's logits (see `models.fused_head`)."""
    config = load_config(model)
    return not getattr(config, "is_encoder_decoder", False) and can_fuse_head(
        build_model(with_depth(config, 2), torch.float16)
    )


def how_many(gpu: Any, gpus: Any) -> tuple[Any, int]:
    """The card and the number of GPUs, of which "2 x T4" says both."""
    gpus = positive_int(gpus, tr(ko="GPU 수", en="number of GPUs"))
    found = re.fullmatch(r"\s*(\d+)\s*[x×*]\s*(\D.*)", gpu) if isinstance(gpu, str) else None
    if found is None:
        return gpu, gpus
    said = positive_int(int(found[1]), tr(ko="GPU 수", en="number of GPUs"))
    if gpus not in (1, said):
        raise WrongValue(
            tr(
                ko=f"gpu={gpu!r}와 gpus={gpus}가 서로 다른 수를 말한다. 한쪽만 적는다.",
                en=f"gpu={gpu!r} and gpus={gpus} name different numbers: give one of them.",
            )
        )
    return found[2], said


def _check_price(price: Any) -> None:
    wrong = isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 <= price < float("inf")
    if price is not None and wrong:
        raise WrongValue(
            tr(
                ko=f"price_per_hour={price!r}: GPU 하나를 한 시간 빌리는 값으로, 0 이상의 수다.",
                en=f"price_per_hour={price!r}: what one GPU costs an hour, 0 or more.",
            )
        )
