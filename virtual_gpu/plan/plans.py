"""What the planner speaks of: a request, the recipes it allows, a plan, and how plans are ranked."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..cards import GPUSpec, Range, card
from ..drawing.labels import category_label, html_table
from ..errors import NotSupported, WrongValue
from ..host.machines import machine
from ..language import tr
from ..models import offloaded
from ..models.adapters import LORA_RANK
from ..models.attention import REPEAT_KV
from ..models.build import build_model
from ..models.configs import cached_by_model, load_config, model_name
from ..models.depth import text_config, with_depth
from ..models.fused_head import SINCE, can_fuse_head, has_fused_head, require_fused_head
from ..optional import require
from ..room import FITS, Room, room_on
from ..rules.active import ActiveRules
from ..shards.nccl import of_groups
from ..step.optimizers import optimizer_named
from ..step.setting import (
    OBJECTIVES,
    Setting,
    check_size,
    checkpointing_label,
    fused_head_label,
    reference_label,
    rest_label,
)
from ..units import boolean, choose, human_bytes, positive_int
from ..writing import write
from .files import files_of
from .host import host_need, states_beyond
from .ranking import PREFERENCES, criteria, key
from .tensors import degrees_of, tensor_label, why_not

METHODS = ("full", "lora", "qlora")  # from what changes training least
PRECISIONS = ("mixed_fp16", "mixed_bf16", "bf16", "fp32")
MARGIN = 0.0  # what is unknown is a range already (`room`): this is what the reader wants free on top
MOST_GPUS = 1024
# What a model's own code, peft or bitsandbytes raise where they do not go together. Other recipes may well do.
CANNOT_RUN = (ValueError, RuntimeError, TypeError, AttributeError, NotImplementedError)


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
    objective: str = "sft"  # or "dpo": a sample is a pair of sequences, and the loss TRL's DPOTrainer's
    tensor_parallel: int | None = None  # GPUs that compute each layer together; None: the planner chooses

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
        if self.gpus == 1:
            return room_on(self.spec)
        # All ranks are one group, over which a model is loaded; tensor parallelism has two more, along its mesh.
        nccl = of_groups((self.gpus, *((self.groups, self.gpus // self.groups) if self.groups < self.gpus else ())))
        return room_on(self.spec, Range(nccl.low, nccl.high))

    @property
    def limit_bytes(self) -> int:
        """The most that may be reserved and fits whatever the unknowns are, with the margin free."""
        return int(self.room.sure_bytes / (1 + self.margin))

    @property
    def repeats_kv(self) -> bool:
        """Whether the model has grouped heads that the card's kernels do not take (see `models.attention`)."""
        capability = self.spec.compute_capability
        if capability >= (8, 0) or ActiveRules(capability).applies("efficient_gqa"):
            return False
        config = text_config(load_config(self.model))
        try:
            return getattr(config, "num_key_value_heads", None) not in (
                None,
                getattr(config, "num_attention_heads", None),
            )
        except RuntimeError:  # transformers: the layers differ in them, so some have groups (Gemma 4)
            return True

    @property
    def caution(self) -> str:
        """What every plan takes for granted of the program; empty where there is nothing."""
        if not self.repeats_kv:
            return ""
        return tr(
            ko="그룹 쿼리(GQA) 모델이고 GPU가 암페어보다 옛것이다. transformers 4.54부터의 sdpa는 패딩이 없는 배치에서 "
            "길이 × 길이 행렬을 만드는 math 커널로 간다. 계획은 이 한 줄이 있는 것으로 세고, 저장하는 train.py에도 "
            f"적는다: {REPEAT_KV}",
            en="a model with grouped-query heads on a GPU before Ampere: without padding, sdpa of transformers 4.54 "
            "and later goes to the math kernel, which makes matrices of length × length. The plans count on this "
            f"line, which is in the train.py that they save: {REPEAT_KV}",
        )

    @property
    def can_fuse_head(self) -> bool:
        """Whether the loss may come from tiles of the logits: TRL is there, and knows how the model makes them.

        DPO's always does (`recipes_of`): it is not for the search to try.
        """
        return not self.pairs and has_fused_head() and _can_fuse(self.model)

    @property
    def pairs(self) -> bool:
        """Whether a sample is a pair of sequences."""
        return self.objective == "dpo"

    @property
    def sequences(self) -> int:
        """How many sequences a sample has."""
        return 2 if self.pairs else 1

    @property
    def groups(self) -> int:
        """How many take samples of their own: GPUs, or with tensor parallelism groups of them."""
        return self.gpus // (self.tensor_parallel or 1)

    @property
    def per_gpu(self) -> int:
        """Samples of one optimizer step that each GPU takes, or with tensor parallelism each group of them."""
        return self.batch // self.groups

    def of(self, recipe: Recipe) -> Request:
        """The request of that recipe's plans: with its tensor parallelism, which says what room and samples are."""
        same = recipe.tensor_parallel == (self.tensor_parallel or 1)
        return self if same else replace(self, tensor_parallel=recipe.tensor_parallel)

    def allows(self, recipe: Recipe) -> bool:
        """Whether the tensor parallelism is what was asked for, and all who take samples take as many."""
        asked = self.tensor_parallel in (None, recipe.tensor_parallel)
        return asked and self.batch % self.of(recipe).groups == 0

    @property
    def title(self) -> str:
        """One line that names it."""
        gpus = f"{self.gpu} × {self.gpus}" if self.gpus > 1 else self.gpu
        model = Path(self.model).name
        dpo, ko, en = ("DPO · ", "쌍", " pairs") if self.pairs else ("", "", "")
        return tr(
            ko=f"{model} · {dpo}{gpus} · 길이 {self.length} · 배치 {self.batch}{ko}",
            en=f"{model} · {dpo}{gpus} · length {self.length} · batch {self.batch}{en}",
        )


@dataclass(frozen=True)
class Recipe:
    """A way to train: everything but the micro-batch. stage: ZeRO's; 0 is one GPU, or DDP.

    fused_lm_head: the loss from tiles of the logits (see `models.fused_head`). kept: what checkpointed blocks keep all
    the same (see `models.kept`). offload: their inputs wait in the CPU's RAM (see `models.offloaded`). rest_in_fp32:
    QLoRA's weights that are not 4-bit, as peft's `prepare_model_for_kbit_training` makes them; else they stay in 16
    bits, as TRL, axolotl, LLaMA-Factory and torchtune leave them. cpu_offload: parameters, gradients and optimizer
    state wait in the CPU's RAM, where the optimizer steps (see `plan.on_cpu`); stage is 3, also of one GPU. reference:
    where DPO's log probabilities of the reference come from, see `Setting`; adapters are switched off for them.
    tensor_parallel: the GPUs that compute each layer together, on the same samples (see `tensors`); what they hold is
    split over the others by FSDP2, in torchtitan's groups (`fsdp_groups`). stage is 3 where they are all.
    """

    method: str
    precision: str
    optimizer: str
    stage: int = 0
    checkpointing: bool = False
    fused_lm_head: bool = False
    kept: tuple[str, ...] = ()
    rest_in_fp32: bool = True
    offload: bool = False
    cpu_offload: bool = False
    reference: str = "same"
    tensor_parallel: int = 1

    @property
    def at_once(self) -> Recipe:
        """The same without computing anything twice."""
        return replace(self, checkpointing=False, fused_lm_head=False, kept=(), offload=False)

    @property
    def change(self) -> tuple[int, bool, bool, bool]:
        """How much it changes training, the first criterion of the ranking: the smaller the less."""
        half = self.precision in ("bf16", "fp16")
        return METHODS.index(self.method), half, self.optimizer != "adamw_fused", not self.rest_in_fp32

    @property
    def caution(self) -> str:
        """What to know before training so; empty where there is nothing."""
        if self.precision != "bf16":
            return ""
        return tr(
            ko="가중치까지 bf16이면 작은 갱신이 반올림되어 사라진다. 손실이 줄어드는지 보고, 확률적 반올림을 쓰는 "
            "옵티마이저나 LoRA도 견주어 본다",
            en="weights in bf16 round small updates away: see that the loss falls, and compare LoRA or an optimizer "
            "with stochastic rounding",
        )

    @property
    def title(self) -> str:
        """One line that names it."""
        parts = [method_label(self.method), self.precision, self.optimizer]
        if self.stage:
            parts.append(f"ZeRO-{self.stage}")
        if self.tensor_parallel > 1:
            parts.append(tensor_label(self.tensor_parallel))
        if self.cpu_offload:
            parts.append(cpu_offload_label())
        if self.checkpointing:
            parts.append(checkpointing_label(self.kept, self.offload))
        if self.fused_lm_head:
            parts.append(fused_head_label())
        if self.reference != "same":
            parts.append(reference_label(self.reference))
        return " · ".join([*parts, *([] if self.rest_in_fp32 else [rest_label()])])


@dataclass(frozen=True)
class Plan:
    """A recipe with its micro-batch, and what that takes on each GPU: bytes, FLOPs and seconds of one optimizer step.

    micro_batch: samples that a GPU takes at once, or with tensor parallelism a group of them.
    at_peak: kind → bytes, together needed_bytes: the tensors at their peak and "fragmentation". least_flops: of the
    same method where nothing is computed twice. Both count what all GPUs of a tensor-parallel group compute (norms, a
    tied head) once. sent_bytes: what each GPU sends for parameters and gradients, and for tensor parallelism.
    offloaded_bytes: what it sends to the CPU's RAM, and gets back; pinned_bytes: what a micro-batch of it takes there.
    paged_bytes: optimizer state in managed memory, in none of these (see `models.pages`). states_to_card_bytes and
    states_to_cpu_bytes: with `cpu_offload` parameters that are copied to each GPU, and gradients that come back.
    seconds: a lower bound (None where neither rate is published), never a forecast.
    at_least: only parameters, gradients and optimizer state are known, which alone do not fit. relaxed_flops: of a plan
    that keeps results of blocks (see `keeping`), the fewest that any choice of them could compute, were every byte that
    is kept one more at the peak; 0 where nothing was chosen.
    """

    request: Request
    recipe: Recipe
    micro_batch: int
    accumulation: int
    needed_bytes: int
    at_peak: dict[str, int] = field(hash=False)
    flops: int
    least_flops: int
    sent_bytes: int
    seconds: float | None
    at_least: bool = False
    offloaded_bytes: int = 0
    pinned_bytes: int = 0
    paged_bytes: int = 0
    states_to_card_bytes: int = 0
    states_to_cpu_bytes: int = 0
    relaxed_flops: int = field(default=0, compare=False)

    @property
    def verdict(self) -> str:
        """Of `room`: FITS, TIGHT or TOO_MUCH, with the margin."""
        return self.request.room.verdict(int(self.needed_bytes * (1 + self.request.margin)))

    @property
    def fits(self) -> bool:
        """Whether it fits whatever the unknowns are."""
        return self.verdict == FITS

    @property
    def tensors_bytes(self) -> int:
        """The peak without what the caching allocator loses."""
        return self.needed_bytes - self.at_peak.get("fragmentation", 0)

    @property
    def extra_flops(self) -> int:
        """What checkpointing and a fused head compute a second time, on all GPUs together."""
        return self.flops - self.least_flops

    @property
    def beyond_best(self) -> float | None:
        """The most, as a share of the step's work, that another choice of kept results could save."""
        return max(1 - self.relaxed_flops / self.flops, 0.0) if self.relaxed_flops else None

    @property
    def left_bytes(self) -> int:
        """What stays free below the limit by which it is judged; negative where it does not fit."""
        return self.request.limit_bytes - self.needed_bytes

    @property
    def evicted_bytes(self) -> int:
        """Of the pages, what finds no room on the card beside what is reserved: it comes and goes with every step."""
        return self.request.room.evicted(self.needed_bytes, self.paged_bytes)

    @property
    def to_cpu_bytes(self) -> int:
        """What a step sends to the CPU's RAM: checkpoints, pages that find no room, gradients of what waits there."""
        return self.offloaded_bytes + self.evicted_bytes + self.states_to_cpu_bytes

    @property
    def needed(self) -> str:
        """The peak, as it is printed."""
        return ("≥ " if self.at_least else "") + human_bytes(self.needed_bytes)

    @property
    def key(self) -> tuple:
        """The ranking by the request's preference: the smallest first (see `ranking`)."""
        return key(self)

    @property
    def price(self) -> float | None:
        """The least that a million tokens can cost: all GPUs, for the bound on time; None without a rate or bound.

        By the request's rate, in its currency, or by the card's least known rent, in dollars (`GPUSpec.rent`).
        """
        request = self.request
        if (rate := request.hourly_rate) is None or self.seconds is None:
            return None
        steps = 1e6 / (request.batch * request.sequences * request.length)
        return steps * self.seconds / 3600 * request.gpus * rate

    @property
    def title(self) -> str:
        """One line that names it."""
        parts = [self.recipe.title]
        parts += ["DDP"] if self.request.gpus > 1 and not self.recipe.stage else []
        parts += [] if self.at_least else [f"{self.micro_batch} × {self.accumulation}"]
        return " · ".join(parts)

    def why_after(self, other: Plan) -> str:
        """The first criterion by which the other plan is better."""
        worse = next((i for i, (a, b) in enumerate(zip(self.key, other.key, strict=True)) if a != b), None)
        return "-" if worse is None else criteria(self.request.prefer)[worse]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        numbers = {
            name: getattr(self, name)
            for name in (
                "at_least",
                "micro_batch",
                "accumulation",
                "needed_bytes",
                "left_bytes",
                "at_peak",
                "flops",
                "extra_flops",
            )
        }
        card_bytes = self.request.room.needed(self.needed_bytes)
        more = {"verdict": self.verdict, "card_bytes": [card_bytes.low, card_bytes.high]}
        more |= {"host": host_need(self).to_dict()}
        more |= {"sent_bytes": self.sent_bytes, "offloaded_bytes": self.offloaded_bytes}
        more |= {"paged_bytes": self.paged_bytes, "evicted_bytes": self.evicted_bytes}
        more |= {name: getattr(self, name) for name in ("states_to_card_bytes", "states_to_cpu_bytes")}
        more |= {"lower_bound_seconds": self.seconds, "caution": self.recipe.caution, "beyond_best": self.beyond_best}
        more |= {"lower_bound_price_per_million_tokens": self.price}
        return {**asdict(self.recipe), **numbers, **more}

    def files(self, kind: str | None = None) -> dict[str, str]:
        """name → text of the files that train so, of a kind (see `KINDS`); None is the first that can.

        NotSupported where it cannot say the plan.
        """
        return files_of(self, kind)

    def save(self, folder: str | Path, force: bool = False, kind: str | None = None) -> list[Path]:
        """Write the files of a kind into a folder (made where it is not there) and return their paths.

        ExistingFile where one of them is there already, unless `force`; links are never written through.
        """
        return write(self.files(kind), folder, force)

    def __repr__(self) -> str:
        return f"{self.title}: {self.needed}" + (f" ⚠ {self.recipe.caution}" if self.recipe.caution else "")

    def _repr_html_(self) -> str:
        total, capacity = tr(ko="합", en="total"), tr(ko="카드의 한도", en="capacity")
        heads = [self.title, *map(kind_label, self.at_peak), total, capacity]
        sizes = [*self.at_peak.values(), self.needed_bytes, self.request.spec.capacity_bytes]
        return html_table(heads, [[tr(ko="최대일 때", en="at the peak"), *map(human_bytes, sizes)]])


def kind_label(kind: str) -> str:
    """A kind of memory in the reader's language."""
    return {
        "gathered": tr(ko="모아 둔 파라미터", en="gathered parameters"),
        "fragmentation": tr(ko="단편화", en="fragmentation"),
    }.get(kind) or category_label(kind)


def method_label(method: str) -> str:
    """The method in the reader's language."""
    return {"full": tr(ko="전체 미세 조정", en="full fine-tuning"), "lora": "LoRA", "qlora": "QLoRA"}[method]


def cpu_offload_label() -> str:
    """FSDP2's `CPUOffloadPolicy` in the reader's language."""
    return tr(ko="CPU 오프로드", en="CPU offload")


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
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin <= 1:
        raise WrongValue(tr(ko=f"margin={margin!r}: 0에서 1 사이의 수다.", en=f"margin={margin!r}: from 0 to 1."))
    if tensor_parallel is not None:
        tensor_parallel = positive_int(tensor_parallel, tr(ko="텐서 병렬 크기", en="tensor-parallel degree"))
    if set(methods) & {"lora", "qlora"}:
        require("peft", *(["bitsandbytes"] if "qlora" in methods else []))
    model = model_name(model)
    config = load_config(model)
    if objective == "dpo":
        _check_head(model)
    check = Setting(
        1, model_id=model, sequence_length=length, peft="lora", lora_rank=lora_rank, lora_targets=lora_targets
    )
    check.check_length(config)
    ordered = tuple(method for method in METHODS if method in methods)
    made = Request(
        model, spec.name, gpus, check.sequence_length, batch, ordered, precision, optimizer, float(margin),
        check.lora_rank, check.lora_targets, None if host is None else machine(host).name,
        prefer, None if price_per_hour is None else float(price_per_hour), boolean(selective, "selective"),
        boolean(cpu_offload, "cpu_offload"), objective, tensor_parallel,
    )  # fmt: skip
    _check_split(made)
    return made


def _check_split(request: Request) -> None:
    """WrongValue where the tensor parallelism that is asked for cannot be, and for a batch that does not divide."""
    degree = request.tensor_parallel or 1
    if degree > 1 and (why := _why_not_split(request) or why_not(request.model, request.gpus, degree)):
        raise WrongValue(f"tensor_parallel={degree}: {why}")
    batch, groups, gpus = request.batch, request.groups, request.gpus
    if batch % groups == 0 or any(map(request.allows, recipes_of(request))):
        return
    nearest = f"{max(batch // groups, 1) * groups}, {(batch // groups + 1) * groups}"
    if degree > 1:
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


def _why_not_split(request: Request) -> str:
    """Why nothing of the request is tried with tensor parallelism, whatever the degree; empty where something is."""
    if "full" not in request.methods or request.pairs:
        return tr(
            ko="텐서 병렬은 SFT의 전체 미세 조정에서만 센다(DPO, LoRA, QLoRA는 세지 않는다)",
            en="tensor parallelism is counted of SFT's full fine-tuning alone, not of DPO, LoRA or QLoRA",
        )
    if _in_fp16(request) or request.optimizer not in (None, "adamw_fused"):
        return tr(
            ko="텐서 병렬은 bf16이나 fp32에서 AdamW(adamw_fused)만 센다",
            en="tensor parallelism is counted in bf16 or fp32, with AdamW (adamw_fused)",
        )
    return ""


def _check_head(model: str) -> None:
    """DPOTrainer's log probabilities come from TRL's head: ImportError without, NotSupported where it has none."""
    require_fused_head()
    if not _can_fuse(model):
        raise NotSupported(
            tr(
                ko=f"objective='dpo': TRL의 함수(손실 나누기)가 {model}의 로짓을 만들지 못한다. 'sft'는 된다.",
                en=f"objective='dpo': TRL's head does not make the logits of {model}. objective='sft' can be planned.",
            )
        )


@cached_by_model
def _can_fuse(model: str) -> bool:
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


def recipes_of(request: Request) -> list[Recipe]:
    """Every recipe that the request allows, without checkpointing."""
    bf16 = request.spec.has_bf16
    mixed = request.precision or ("mixed_bf16" if bf16 else "mixed_fp16")
    found = []
    for method in request.methods:
        precisions, optimizers = [mixed], [request.optimizer or "adamw_fused"]
        if method == "full":
            precisions += ["bf16"] if bf16 and request.precision is None and not request.pairs else []
            optimizers += [] if request.optimizer else ["adamw_8bit"]
        found += [Recipe(method, precision, optimizer) for precision in precisions for optimizer in optimizers]
        if method == "qlora" and mixed != "fp32":
            found.append(Recipe(method, mixed, optimizers[0], rest_in_fp32=False))
    if request.pairs:  # DPOTrainer's head is fused whatever is asked, and what is beside 4-bit weights stays in 16 bits
        found = [r for r in found if r.method != "qlora" or not r.rest_in_fp32 or mixed == "fp32"]
        found = [replace(r, fused_lm_head=True) for r in found]
        found += [replace(r, reference="precomputed") for r in found if r.method == "full"]
    shards = [r for r in found if r.method == "full" and r.optimizer == "adamw_fused" and "fp16" not in r.precision]
    on_cpu = request.cpu_offload and not request.pairs
    offloaded = [replace(recipe, stage=3, cpu_offload=True) for recipe in shards] if on_cpu else []
    offloaded = [recipe for recipe in offloaded if not states_beyond(request, recipe)]
    if request.gpus > 1:
        found += [replace(recipe, stage=stage) for stage in (2, 3) for recipe in shards]
        adapters = [r for r in found if r.method != "full" and r.optimizer == "adamw_fused" and "mixed" in r.precision]
        if not request.pairs:
            adapters = [r for r in adapters if r.rest_in_fp32]  # of shards the rest is never upcast (`shards.adapters`)
        found += [replace(recipe, stage=3) for recipe in adapters]
    for degree in _degrees(request):
        stages = (2, 3) if degree < request.gpus else (3,)  # of one rank nothing is split
        found += [replace(recipe, stage=stage, tensor_parallel=degree) for stage in stages for recipe in shards]
    return [recipe for recipe in found + offloaded if request.allows(recipe)]


def _degrees(request: Request) -> tuple[int, ...]:
    """The degrees of tensor parallelism that may be tried: of a batch of some samples more, none unless asked for."""
    uneven = request.tensor_parallel is None and request.batch > request.gpus and request.batch % request.gpus
    if request.gpus == 1 or uneven or _why_not_split(request):
        return ()
    return degrees_of(request.model, request.gpus)


def left_out(request: Request) -> list[tuple[str, str]]:
    """(what, why) of what is not tried at all."""
    rows = []
    if request.pairs:
        rows += _why_not_with_pairs(request)
    if "full" in request.methods:
        rows.append(
            (
                tr(ko="전체 미세 조정 · 순수 fp16", en="full fine-tuning · pure fp16"),
                tr(
                    ko="제대로 배우지 못한다(3장): foreach는 ε가 0이 되어 무너지고, fused도 분산이 0으로 저장된다",
                    en="it does not learn well: foreach's epsilon becomes 0, and fused stores a variance of 0",
                ),
            )
        )
    if not request.spec.has_bf16:
        rows.append(("bf16", tr(ko=f"{request.gpu}에는 bf16 연산 장치가 없다", en=f"{request.gpu} has no bf16 units")))
    if request.selective and not request.pairs and (request.prefer == "margin" or request.gpus > 1):
        what = tr(ko="남는 메모리에 결과를 남기는 것", en="results kept in what is left")
        why = (
            tr(ko="prefer='margin'은 남는 메모리를 쓰지 않는다", en="prefer='margin' spends no memory that is left")
            if request.prefer == "margin"
            else tr(ko="ZeRO로 나누는 계획에서는 찾지 않는다", en="not tried where ZeRO splits")
        )
        rows.append((what, why))
    if request.cpu_offload and not request.pairs:
        rows += [(f"{name} · {cpu_offload_label()}", why) for name, why in _why_not_on_cpu(request)]
    if "full" in request.methods and request.optimizer is None:
        what = tr(ko="페이지 옵티마이저", en="paged optimizers")
        rows.append((what, tr(ko="optimizer='paged_adamw_8bit'이면 센다", en="with optimizer='paged_adamw_8bit'")))
    if not offloaded.can_offload():
        what = tr(ko="체크포인트를 CPU로", en="checkpoints on the CPU")
        since = offloaded.SINCE
        rows.append((what, tr(ko=f"transformers {since}부터 센다", en=f"needs transformers {since}")))
    elif request.gpus > 1 and not offloaded.can_offload(3):
        what = tr(ko="ZeRO-2, 3 · 체크포인트를 CPU로", en="ZeRO-2, 3 · checkpoints on the CPU")
        rows.append((what, tr(ko="accelerate 1.15부터 센다", en="needs accelerate 1.15")))
    if not has_fused_head():
        rows.append((fused_head_label(), tr(ko=f"TRL {SINCE}부터 센다: pip install trl", en=f"needs TRL {SINCE}")))
    if request.gpus > 1:
        rows += _why_not_together(request)
        for method in request.methods:
            rows.append((f"{method_label(method)} · ZeRO-1", _why_not_stage_1(method)))
        if request.optimizer not in (None, "adamw_fused"):
            rows.append(
                (
                    f"ZeRO-2, 3 · {request.optimizer}",
                    tr(
                        ko="나누어 가진 조각의 옵티마이저 상태는 AdamW(adamw_fused)만 센다",
                        en="of split parameters only the states of AdamW (adamw_fused) are counted",
                    ),
                )
            )
        for method in [m for m in request.methods if m != "full"]:
            rows.append(
                (
                    f"{method_label(method)} · ZeRO-2",
                    tr(
                        ko="모은 가중치를 통째로 둔 채 자기 조각도 가져 DDP보다 더 든다",
                        en="all weights stay gathered beside the own shard: more than DDP takes",
                    ),
                )
            )
        if "full" in request.methods and not request.spec.has_bf16 and request.precision != "fp32":
            rows.append(
                (
                    tr(ko="전체 미세 조정 · ZeRO-2, 3", en="full fine-tuning · ZeRO-2, 3"),
                    tr(ko="ZeRO 계산은 bf16으로만 실행해 보았다", en="the ledger was run in bf16 alone"),
                )
            )
    return rows


def _why_not_together(request: Request) -> list[tuple[str, str]]:
    """(what, why) of what is not tried with tensor parallelism, or without it; of full fine-tuning alone."""
    if "full" not in request.methods or request.tensor_parallel == 1:
        return []
    full, rows = method_label("full"), []
    if why := _why_not_split(request) or ("" if _degrees(request) else why_not(request.model, request.gpus, 2)):
        return [(f"{full} · {tensor_label()}", why)]
    for method in (method for method in request.methods if method != "full"):
        why = tr(ko="전체 미세 조정만 센다", en="only full fine-tuning is counted")
        rows.append((f"{method_label(method)} · {tensor_label()}", why))
    for what, why in (
        (
            "ZeRO-1",
            tr(
                ko="PyTorch의 ZeroRedundancyOptimizer는 텐서 병렬의 파라미터(DTensor)를 받지 못한다",
                en="PyTorch's ZeroRedundancyOptimizer does not take its parameters (DTensor)",
            ),
        ),
        (
            fused_head_label(),
            tr(
                ko="TRL의 함수는 나눈 출력층의 가중치를 다시 모으므로, 로짓을 통째로 둘 때보다 더 든다",
                en="TRL's head gathers the weights of the cut head: more than whole logits take",
            ),
        ),
        *([(cpu_offload_label(), tr(ko="함께 실행해 보지 않았다", en="not run together"))] * request.cpu_offload),
    ):
        rows.append((f"{tensor_label()} · {what}", why))
    if request.tensor_parallel is None and request.batch % request.gpus:
        why = tr(
            ko=f"배치 {request.batch}을(를) GPU {request.gpus}개에 똑같이 나눌 수 없다",
            en=f"a batch of {request.batch} does not divide among {request.gpus} GPUs",
        )
        rows.append((tr(ko="텐서 병렬 없이", en="without tensor parallelism"), why))
    return rows


def _why_not_with_pairs(request: Request) -> list[tuple[str, str]]:
    """(what, why) of what is not tried of DPO."""
    once = tr(ko="DPO에서는 아직 세지 않는다", en="not counted of DPO")
    rows = []
    if "full" in request.methods and request.spec.has_bf16 and request.precision is None:
        # Of weights from N(0, 0.02) in bf16, AdamW's first step of 1e-6 moves 2 in 100 (measured), of 5e-5 57.
        why = tr(
            ko="DPO의 작은 학습률(1e-6)로는 갱신이 거의 다 반올림되어 사라진다",
            en="of steps as small as DPO's (1e-6) bf16 rounds nearly all away",
        )
        rows.append((tr(ko="전체 미세 조정 · 순수 bf16", en="full fine-tuning · pure bf16"), why))
    if request.selective:
        rows.append((tr(ko="남는 메모리에 결과를 남기는 것", en="results kept in what is left"), once))
    if request.cpu_offload:
        rows.append((cpu_offload_label(), once))
    return rows


def _in_fp16(request: Request) -> bool:
    """Whether what is trained of the weights is computed in fp16 alone."""
    return "fp16" in (request.precision or ("bf16" if request.spec.has_bf16 else "fp16"))


def _why_not_on_cpu(request: Request) -> list[tuple[str, str]]:
    """(what, why) of what is not tried with its states in the CPU's RAM."""
    rows, full = [], method_label("full")
    if "full" in request.methods and _in_fp16(request):
        rows.append((full, tr(ko="bf16과 fp32로만 실행해 보았다", en="run in bf16 and in fp32 alone")))
    if "full" in request.methods and request.optimizer not in (None, "adamw_fused"):
        why = tr(ko="AdamW(adamw_fused)만 센다", en="only AdamW (adamw_fused) is counted")
        rows.append((f"{full} · {request.optimizer}", why))
    for recipe in recipes_of(replace(request, host=None)):
        if recipe.cpu_offload and (missing := states_beyond(request, recipe)):
            lack = human_bytes(missing)
            why = tr(ko=f"{request.host}의 RAM이 {lack} 모자란다", en=f"{request.host} lacks {lack} of RAM")
            rows.append((f"{full} · {recipe.precision}", why))
    for method in (method for method in request.methods if method != "full"):
        why = tr(
            ko="전체 미세 조정만 센다. 어댑터라면 옮길 것이 얼린 가중치뿐이다",
            en="only full fine-tuning is counted: with adapters it is the frozen weights that there are to move",
        )
        rows.append((method_label(method), why))
    return rows


def _why_not_stage_1(method: str) -> str:
    """Stage 1 sends 3 numbers a parameter once a step (PyTorch's), FSDP2's stage 2 as planned 2 every micro-batch."""
    if method != "full":
        return tr(
            ko="나누는 것이 어댑터의 옵티마이저 상태뿐이라 DDP와 거의 같다",
            en="only the adapters' optimizer state is split: nearly what DDP takes",
        )
    return tr(
        ko="ZeRO-2(FSDP2)보다 메모리를 더 쓴다. 통신은 누적이 없을 때만 ZeRO-2가 더 적다",
        en="needs more memory than ZeRO-2 (FSDP2), which sends less only where nothing is accumulated",
    )
