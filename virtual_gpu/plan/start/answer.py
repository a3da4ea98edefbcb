"""Does a configuration fit as it stands, and if not, which of its lines make it fit: the smallest change that does.

What changes least comes first, as the planner ranks: a smaller micro-batch with more accumulation (the same optimizer
step), then checkpointing (the same result, more work), checkpoints on the CPU (where the file can say it), of DPO the
reference's log probabilities made first, an 8-bit optimizer, weights in bf16, the 8-bit states in pages, adapters,
4-bit weights, and last a shorter length. Every answer was measured on the virtual GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ...cards import GPUSpec, Range, card
from ...changes import CHANGES
from ...errors import NoSuchLayer, NotSupported, WrongValue
from ...language import tr
from ...models.attention import REPEATED
from ...models.configs import load_config, model_name
from ...models.depth import text_config
from ...models.offloaded import SINCE, can_offload
from ...models.pages import pages_label
from ...room import FITS, TOO_MUCH, Room, room_on
from ...shards.layout import CONVENTIONS, Layout
from ...shards.ledger import count_elements
from ...shards.nccl import nccl_bytes
from ...shards.rank_step import rank_step
from ...step.own_code import IN_BACKWARD, steps_in_backward, too_early
from ...step.setting import ASLEEP, Setting
from ...terminal import tell
from ...units import choose, human_bytes, path_of
from ...writing import check_folder, write
from ..by_deepspeed import as_fsdp, deepspeed_step, named, waiting, why_not
from ..candidates import copies_end
from ..engine import BESIDE, Share, why_no_engine, with_graphs
from ..on_a_card import predict_need, states_of
from ..request import can_fuse, how_many, repeats_kv, why_repeats_kv
from . import axolotl, hugging_face, llama_factory, torchtune, trainer, trl
from .document import Document, read_document
from .keys import EITHER, LESS, MORE, Keys, Note, place_of

TOOLS = (torchtune, axolotl, llama_factory, trl, trainer)  # in the order in which a file is looked at
READ = ("sft", "dpo", "grpo")  # objectives of files that are read
SCHEMA = 1  # of `Answer.to_dict`
_IN_FP32 = """for parameter in trainer.model.parameters():
    if parameter.requires_grad:
        parameter.data = parameter.data.float()"""
_STEP = 64  # tokens: a shorter length is a multiple of it


@dataclass(frozen=True)
class Try:
    """A setting, and what it takes of each GPU. reserved: bytes of the caching allocator; paged: of managed memory.

    Where micro-batches are padded to their longest sequence, some of them are of one length, and have no mask.
    with_padding, of_one_length: what either reserves; reserved is the larger. None where there is no such difference,
    or the one alone was too much already. engine: vLLM's beside it, where there is one.
    """

    setting: Setting
    reserved: int
    paged: int = 0
    with_padding: int | None = None
    of_one_length: int | None = None
    engine: Share | None = None

    @property
    def by_padding(self) -> str:
        """Both in a line; empty where there are no two."""
        if None in (self.with_padding, self.of_one_length) or self.with_padding == self.of_one_length:
            return ""
        padded, even = human_bytes(self.with_padding), human_bytes(self.of_one_length)
        return tr(
            ko=f"마이크로 배치에 패딩이 있으면 {padded}, 길이가 모두 같으면 {even}를 예약한다. 큰 쪽으로 판정한다",
            en=f"a padded micro-batch reserves {padded}, one of equal lengths {even}: the larger one is judged",
        )


@dataclass(frozen=True)
class Answer:
    """What a file needs as it stands, and what it needs with some of its lines changed (None where nothing fits)."""

    tool: str
    document: Document = field(repr=False)
    room: Room
    gpus: int
    stage: int
    margin: float
    start: Try
    notes: tuple[Note, ...]
    impossible: str = ""  # why it cannot run as it stands
    proposal: Try | None = None
    lines: dict[str, Any] = field(default_factory=dict)  # key → new value
    waiting: int = 0  # bytes of gradients that lie there whole from one micro-batch to the next
    own_share: int = 0  # of each GPU, bytes, where they are sent with every one
    by: str = ""  # the engine that was run for it, where it was not counted as FSDP2 splits
    in_code: tuple[InCode, ...] = ()

    @property
    def verdict(self) -> str:
        """Of `room`: FITS, TIGHT or TOO_MUCH, of the file as it stands."""
        return self.room.verdict(int(self.start.reserved * (1 + self.margin)))

    @property
    def fits(self) -> bool:
        """Whether the file runs as it stands, whatever the unknowns are."""
        return self.verdict == FITS and not self.impossible

    @property
    def fits_by_code(self) -> bool:
        """Whether it does not fit as it stands, and what is counted does with lines in the program alone."""
        needed = [int(one.reserved * (1 + self.margin)) for one in self.in_code if one.alone]
        return not self.fits and not self.impossible and any(self.room.verdict(one) == FITS for one in needed)

    def changes(self) -> Iterator[str]:
        """`key: old → new` of every line to change."""
        for key, new in self.lines.items():
            place = place_of(key)
            there = place in self.document.spans or self.document.get(place) is not None
            old = self.document.written(self.document.get(place)) if there else tr(ko="(없음)", en="(not there)")
            yield f"{key}: {old} → {self.document.written(new)}"

    def save(self, path: str | Path, force: bool = False) -> Path:
        """Write the file with the changed lines, all else as it is; ExistingFile as for every file that we write."""
        path = path_of(path)
        text = self.document.with_changes({place_of(key): value for key, value in self.lines.items()})
        return write({path.name: text}, path.parent, force)[0]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""

        def tried(one: Try | None) -> dict[str, Any] | None:
            if one is None:
                return None
            needed = self.room.needed(one.reserved)
            return {
                "setting": one.setting.to_dict(),
                "reserved_bytes": one.reserved,
                "reserved_bytes_with_padding": one.with_padding,
                "reserved_bytes_of_one_length": one.of_one_length,
                "paged_bytes": one.paged,
                "engine": None if one.engine is None else asdict(one.engine),
                "card_bytes": [needed.low, needed.high],
            }

        return {
            "schema": SCHEMA,
            "file": str(self.document.path),
            "tool": self.tool,
            "gpus": self.gpus,
            "zero_stage": self.stage,
            "counted_by": self.by or None,
            "waiting_gradients_bytes": self.waiting,
            "verdict": self.verdict,
            "fits": self.fits,
            "cannot_run": self.impossible,
            "as_it_stands": tried(self.start),
            "with_changes": tried(self.proposal),
            "lines": [{"key": key, "old": self.document.get(place_of(key)), "new": new}
                      for key, new in self.lines.items()],
            "fits_by_code": self.fits_by_code,
            "in_code": [{"why": one.why, "code": one.code, "reserved_bytes": one.reserved} for one in self.in_code],
            "not_counted": [{"key": note.key, "value": str(note.value), "effect": note.effect, "why": str(note)}
                            for note in self.notes],
            "room": self.room.to_dict(),
        }  # fmt: skip

    def __str__(self) -> str:
        verdict = {
            "fits": tr(ko="그대로 들어간다", en="fits as it stands"),
            "tight": tr(ko="빠듯하다", en="is tight as it stands"),
            "does not fit": tr(ko="그대로는 들어가지 않는다", en="does not fit as it stands"),
        }[self.verdict]
        verdict = self._unsure() or verdict
        if self.impossible:  # and what its memory adds to that
            verdict = (
                self.impossible
                + {
                    "fits": "",
                    "tight": tr(ko=". 메모리도 빠듯하다", en="; memory is tight too"),
                    "does not fit": tr(ko=". 메모리도 모자란다", en="; and there is not memory enough"),
                }[self.verdict]
            )
        lines = [f"{self.document.path} ({self.tool}): {verdict}"]
        lines += [f"  {self.start.setting.title}{_sharded(self.stage, self.gpus)}"]
        lines += [f"  {self._bound()}{self.room.needs(self.start.reserved)}"]
        lines += [f"  {self._by_its_engine()}"] if self.by else []
        lines += [f"  {self.start.by_padding}"] if self.start.by_padding else []
        lines += [f"  {self._pages(self.start)}"] if self.start.paged else []
        lines += [f"  {self._engine(self.start)}"] if self.start.engine else []
        lines += [f"  {self._gradients()}"] if self.waiting else []
        if self.fits_by_code:
            counted = self._bounds() == MORE
            with_code = tr(
                ko=f"스크립트에 아래의 코드를 적으면, 파일은 그대로 두고도 {'센 것은 ' * counted}들어간다",
                en=f"with the code below in the training's script {'what is counted' if counted else 'it'} fits, and "
                "the file stays as it is",
            )
            lines += [with_code, *self._code()]
        if self.lines:
            other = tr(ko="또는 ", en="or ") if self.fits_by_code else ""
            lines += [other + tr(ko="바꿀 줄:", en="lines to change:"), *(f"  {line}" for line in self.changes())]
            lines += [f"  → {self.room.line(self.proposal.reserved)}"]
            lines += [f"  → {self.proposal.by_padding}"] if self.proposal.by_padding else []
            lines += [f"  → {self._pages(self.proposal)}"] if self.proposal.paged else []
            if self.proposal.setting.offload_checkpoints and not self.start.setting.offload_checkpoints:
                lines.append(
                    "  " + tr(ko=f"offload는 transformers {SINCE}부터 된다", en=f"offload: transformers {SINCE}")
                )
        elif not self.fits and not self.fits_by_code:
            lines.append(
                tr(
                    ko="이 파일의 줄을 바꾸어서는 들어가게 하지 못했다. --from 없이 부르면 다른 GPU와 방법을 찾는다",
                    en="no change of its lines makes room; without --from other GPUs and methods are searched",
                )
            )
        lines += [] if self.fits_by_code else self._code()
        if self.notes:
            lines += [tr(ko="세지 않은 것:", en="not counted:"), *(f"  - {note}" for note in self.notes)]
        return "\n".join(lines)

    __repr__ = __str__

    def _code(self) -> Iterator[str]:
        for one in self.in_code:
            yield f"⚠ {one.why}"
            yield from (f"    {line}" for line in one.code.splitlines())
            yield f"  → {self.room.needs(one.reserved)}"

    def _engine(self, one: Try) -> str:
        taken = human_bytes(int(self.room.memory.high * one.engine.share))
        return tr(
            ko=f"vLLM 엔진의 몫: {one.engine.share:g}, {taken}"
            + (". 학습하는 동안은 돌려준다" if one.setting.vllm == ASLEEP else ""),
            en=f"the share of vLLM's engine: {one.engine.share:g}, {taken}"
            + (", not while the model is trained" if one.setting.vllm == ASLEEP else ""),
        )

    def _by_its_engine(self) -> str:
        return tr(
            ko=f"{self.by}의 엔진을 transformers의 Trainer로 가상 GPU에서 두 스텝 실행해서 쟀다",
            en=f"measured by two steps of {self.by}'s own engine under transformers' Trainer, on a virtual GPU",
        )

    def _gradients(self) -> str:
        whole, own = human_bytes(self.waiting), human_bytes(self.own_share)
        line = "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}"
        return tr(
            ko=f"누적하는 동안 그레이디언트를 통째로 둔다: {whole}. {line}을 적으면(transformers 5.2부터) GPU마다 자기 "
            f"몫 {own}만 두고, 마이크로 배치마다 보낸다",
            en=f"while it accumulates gradients lie there whole: {whole}. With {line} (transformers 5.2 or later) each "
            f"GPU has its share of {own}, and sends with every micro-batch",
        )

    def _pages(self, one: Try) -> str:
        return pages_label(one.paged, self.room.evicted(one.reserved, one.paged))

    def _bound(self) -> str:
        return {LESS: tr(ko="많아야 ", en="at most "), MORE: tr(ko="적어도 ", en="at least ")}.get(self._bounds(), "")

    def _bounds(self) -> str:
        """LESS or MORE where all that is not counted takes so; empty where it is not known."""
        effects = {note.effect for note in self.notes}
        return effects.pop() if len(effects) == 1 and effects <= {LESS, MORE} else ""

    def _unsure(self) -> str:
        """The verdict where what is not counted may turn it; empty where it cannot."""
        if self._bounds() == LESS and self.verdict == TOO_MUCH:
            return tr(
                ko="센 것만으로는 넘치지만, 세지 않은 것이 줄여 주면 들어갈 수도 있다",
                en="does not fit as counted; what is not counted takes less, so that it may",
            )
        if self._bounds() == MORE and self.verdict == FITS:
            left = human_bytes(self.room.sure_bytes - int(self.start.reserved * (1 + self.margin)))
            return tr(
                ko=f"센 것은 들어간다. 세지 않은 것이 {left}보다 더 들면 들어가지 않는다",
                en=f"what is counted fits; it does not where what is not counted takes more than {left}",
            )
        return ""


def _sharded(stage: int, gpus: int) -> str:
    return "" if gpus == 1 else f" · {gpus} × " + (f"ZeRO-{stage}" if stage else "DDP")


def start_from(
    path: str | Path,
    gpu: str = "T4",
    gpus: int = 1,
    *,
    model: str | None = None,
    length: int | None = None,
    peft: str | None = None,
    objective: str | None = None,
    margin: float = 0.0,
    progress: Callable[[Setting, int], None] | None = None,
) -> Answer:
    """What the configuration at `path` needs on `gpus` of that GPU ("2 x T4" says both), and what makes it fit.

    path: of TrainingArguments, TRL, axolotl, LLaMA-Factory or torchtune, JSON or YAML; read as data alone. model,
    length (tokens): where the file says none, or another one is meant. peft: "lora" or "qlora" where TrainingArguments
    are used so. objective: "sft", "dpo" or "grpo" where a file of TRL does not say it (see `start.trl`). margin: share
    of the peak to keep free. progress: called with each setting that was measured, and the bytes that it takes of a
    GPU.
    BadConfiguration for what is no such file, WrongValue for a key's value, NotSupported for what is not simulated.
    """
    gpu, gpus = how_many(gpu, gpus)
    spec = card(gpu).needs_cuda()
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin <= 1:
        raise WrongValue(tr(ko=f"margin={margin!r}: 0에서 1 사이의 수다.", en=f"margin={margin!r}: from 0 to 1."))
    document = read_document(path)
    if why := _why_no_training(document.values):
        raise NotSupported(f"{path}: {why}")
    tool = next((tool for tool in TOOLS if tool.knows(document.values)), None)
    if tool is None:
        names = ", ".join(tool.NAME for tool in TOOLS)
        raise NotSupported(
            tr(ko=f"{path}: 아는 설정 파일이 아니다: {names}.", en=f"{path} is a configuration of none of: {names}.")
        )
    keys = Keys(document)
    # On such a card attention is counted, and told of, as it is without.
    sdpa = _without_flash(document, tool) if spec.compute_capability < (8, 0) else {}
    if objective is not None:
        objective = choose(objective, READ, tr(ko="학습 목표", en="objective"))
    fields, stage = tool.read(keys, spec, gpus, peft, objective)
    if sdpa:
        noted = Keys(document.with_values({place_of(key): value for key, value in sdpa.items()}))
        tool.read(noted, spec, gpus, peft, objective)
        keys.notes = noted.notes
    if objective not in (None, read := fields.get("objective", "sft")):
        raise WrongValue(
            tr(
                ko=f"objective={objective!r}: {path}({tool.NAME})은(는) {read}로 읽힌다.",
                en=f"objective={objective!r}: {path} ({tool.NAME}) is read as {read}.",
            )
        )
    fields |= {"model_id": model} if model is not None else {}
    fields |= {"sequence_length": length} if length is not None else {}
    for name, option in (("model_id", "--model"), ("sequence_length", "--length")):
        if fields.get(name) is None:
            raise WrongValue(tr(ko=f"{path}에는 없다. {option}을 준다.", en=f"{path} does not say it: give {option}."))
    fields["model_id"] = model_name(fields["model_id"])
    engine = fields.pop("engine", None)
    setting = Setting(**fields)
    setting.check_length(load_config(setting.model_id))
    if setting.fused_lm_head and setting.objective == "sft" and not can_fuse(setting.model_id):
        why = tr(ko="이 모델은 로짓을 통째로 둔 것으로 셌다", en="of this model all logits are counted at once")
        keys.note("loss", LESS, why)
        setting = replace(setting, fused_lm_head=False)

    def again(changed: Document) -> Setting:
        """The setting of the file with some of its lines changed, as this one was read."""
        said, _ = tool.read(Keys(changed), spec, gpus, peft, objective)
        said.pop("engine", None)
        said |= {name: value for name, value in (("model_id", model), ("sequence_length", length)) if value is not None}
        said = Setting(**said | {"model_id": setting.model_id})
        return said if said.objective != "sft" else replace(said, fused_lm_head=setting.fused_lm_head)

    if stage == 1 and setting.peft:
        keys.note("deepspeed" if "deepspeed" in document.values else "fsdp", LESS, tr(
            ko="GPU마다 모델을 통째로 둔 것으로 셌다", en="counted as if each GPU held the whole model"))  # fmt: skip
        stage = 0
    named = "optim" if "optim" in document.values else "optimizer"
    if gpus > 1 and steps_in_backward(setting.optimizer):
        raise keys.not_counted(named, too_early())
    if stage and setting.optimizer not in ("adamw", "adamw_fused"):
        keys.note(named, MORE if _holds_more(setting) else LESS, tr(
            ko="나눈 조각의 상태는 AdamW의 것으로 셌다", en="of shards AdamW's states were counted"))  # fmt: skip
    nccl = nccl_bytes(Layout(gpus, 3)) if gpus > 1 else None
    room = room_on(spec, nccl and Range(nccl.low, nccl.high))
    if engine is not None:
        engine, room = _engine_of(keys, setting, spec, **engine), with_graphs(room)
        if not engine.sure_to_start(room.memory) and engine.starts(room.memory):
            keys.note("vllm_gpu_memory_utilization", EITHER, tr(
                ko="vLLM이 시작하지 못할 수도 있다. 여러 로그에서 본 가장 큰 엔진이면 "
                   f"{engine.least(BESIDE.high, room.memory.low):g}이 든다",
                en=f"vLLM may not start: the largest engine in others' logs would take "
                   f"{engine.least(BESIDE.high, room.memory.low):g}"))  # fmt: skip
    once = tool is not torchtune and stage >= 2 and hugging_face.reduces_once(keys)
    told = progress or (lambda setting, needed: None)
    section = hugging_face.deepspeed_section(keys) if stage else None
    if section is not None and (why := why_not(setting, section)):
        keys.note("deepspeed", EITHER, as_fsdp(why))
        section = None
    search = _Search(tool, keys, spec, gpus, stage, room, margin, told, again, sdpa, engine, once, section)
    return search.answer(setting)


def _without_flash(document: Document, tool: Any) -> dict[str, Any]:
    """key → value of the lines that take sdpa in place of FlashAttention; empty where the file has none.

    flash-attn 2.8 (csrc/flash_attn/flash_api.cpp): "FlashAttention only supports Ampere GPUs or newer." FlashAttention
    3 and 4 ask for 8.0 and more (transformers 5.23, modeling_flash_attention_utils.py).
    """
    named = getattr(tool, "FLASH", {})  # torchtune's and TrainingArguments' files do not choose it
    said = {key: str(document.get(place_of(key))).lower() for key in named}
    return {key: named[key] for key, value in said.items() if "flash" in value or value in ("true", "fa2", "fa3")}


def _why_no_training(values: dict[str, Any]) -> str:
    """Why a file is no training's, where it is known what it is; empty otherwise."""
    if "zero_optimization" in values and "deepspeed" not in values:
        return tr(
            ko="DeepSpeed의 파일이다. 학습 설정 파일의 deepspeed에 이 이름을 적고 그 파일을 준다",
            en="this is DeepSpeed's file: name it at `deepspeed` in the training's configuration, and give that",
        )
    if "distributed_type" in values and "mixed_precision" in values:
        return tr(
            ko="accelerate의 파일이다. 학습 설정 파일을 준다(나누는 방법은 그 파일의 fsdp나 deepspeed에서 읽는다)",
            en="this is accelerate's file: give the training's configuration (how it is split is read from fsdp or "
            "deepspeed there)",
        )
    if "merge_method" in values:
        return tr(ko="mergekit의 파일이고, 학습하는 것이 없다", en="this is mergekit's file, and trains nothing")
    return ""


def _engine_of(keys: Keys, setting: Setting, spec: GPUSpec, share: float, longest: int | None) -> Share:
    """The engine of a file; NotSupported where what it holds is not counted."""
    if why := why_no_engine(setting.model_id, spec, setting.rollout):
        raise keys.not_counted("use_vllm", why)
    longest = longest or text_config(load_config(setting.model_id)).max_position_embeddings
    return Share(setting.model_id, share, longest)


def _holds_more(setting: Setting) -> bool:
    """Whether the optimizer's states take more than AdamW's, as which shards are counted."""
    own, adamw = (states_of(one)["optimizer"] for one in (setting, replace(setting, optimizer="adamw_fused")))
    return own > adamw


class InCode(NamedTuple):
    """What no line of the file says: lines of the program, what they are for, and the bytes that are reserved then.

    alone: whether those are of the file as it stands, with these lines and nothing else changed.
    """

    why: str
    code: str
    reserved: int
    alone: bool = False


class _Need(NamedTuple):
    """Bytes that a training takes of a card, while completions are made, and of managed memory."""

    card: int
    rollout: int
    paged: int


@dataclass
class _Search:
    tool: Any
    keys: Keys
    spec: GPUSpec
    gpus: int
    stage: int
    room: Room
    margin: float
    progress: Callable[[Setting, int], None]
    again: Callable[[Document], Setting]  # what a file with other lines says
    sdpa: dict[str, Any]  # key → value of the lines that take sdpa where the file has FlashAttention and the card not
    engine: Share | None = None
    reduces_once: bool = False
    section: dict[str, Any] | None = None  # DeepSpeed's, where its engine is run
    over: float = 1.0  # what the engine took of the file as it stands, to what FSDP2 would

    def answer(self, setting: Setting) -> Answer:
        impossible = tr(ko=". ", en="; ").join(self._why_not(setting))
        start, by = self.measured(setting, as_it_is=True), ""
        if self.section is not None:
            start, by = self._by_engine(start)
        found = Answer(
            self.tool.NAME, self.keys.document, self.room, self.gpus, self.stage, self.margin, start,
            tuple(self.keys.notes), impossible, waiting=(waits := self._waiting(setting)),
            own_share=self._share(setting) if waits else 0, by=by,
        )  # fmt: skip
        found = replace(found, in_code=tuple(self._repeating(start)))
        if found.fits:
            return found
        # Which sends with every micro-batch, and trains the same; of adapters whole gradients are few.
        each = hugging_face.sends_each_batch(self.keys) if self.reduces_once and not setting.peft else {}
        for one, more in product(self.candidates(setting), [{}, each] if each else [{}]):
            if more and one.peft:
                continue
            search = replace(self, reduces_once=self.reduces_once and not more)
            try:
                tried = search.largest(setting, one)
            except (NotSupported, NoSuchLayer):  # which the file does not ask for
                continue
            if tried is not None and by:
                tried, ran = self._by_engine(tried)
                tried = tried if ran and self.has_room(tried.reserved) else None
            if tried is not None:
                more = more if tried.setting.gradient_accumulation_steps > 1 else {}
                lines = self.tool.write(self.keys, setting, tried.setting) | self._lines_of(tried.engine)
                found = replace(found, in_code=(*found.in_code, *self._in_fp16(tried.setting)))
                return replace(found, proposal=tried, lines=lines | more | self.sdpa)
        return replace(found, in_code=(*found.in_code, *self._in_fp16(setting)))

    def _repeating(self, start: Try) -> Iterator[InCode]:
        """Grouped heads repeated, where that takes less; a tool of its own attention may repeat them itself."""
        setting, as_it_is = start.setting, start.reserved
        if (
            setting.attention != "sdpa"
            or self.section is not None
            or not repeats_kv(setting.model_id, self.spec.compute_capability)
        ):
            return
        half = "bf16" in setting.precision and not self.stage and (setting.peft or setting.precision == "mixed_bf16")
        if half:  # which goes to that kernel anyway: before Ampere the other one has no bf16
            setting = replace(setting, precision=setting.precision.replace("bf16", "fp16"))
            as_it_is = self.measured(setting, as_it_is=True).reserved
        with_line = self.measured(replace(setting, attention=REPEATED), as_it_is=True).reserved
        if with_line < 0.99 * as_it_is:
            how = tr(
                ko="위의 크기는 그 커널로 센 것이다. 모델을 실행하기 전에 학습 스크립트에 이 두 줄을 적으면 피한다",
                en="What stands above is counted so. These two lines in the training's script, before the model runs, "
                "avoid it",
            ) + (tr(ko="(fp16일 때)", en=" (in fp16)") if half else "")
            yield InCode(f"{why_repeats_kv()} {how}", CHANGES["repeat_kv"].loop, with_line, alone=not half)

    def _in_fp16(self, setting: Setting) -> Iterator[InCode]:
        """Adapters in fp32 again, with which fp16's scaler goes on; no line of a file says that."""
        if self.tool is not trl or self.stage or self.spec.has_bf16 or setting.trained_dtype != "bf16":
            return
        own = replace(setting, precision="autocast_fp16", trained_dtype="fp32")
        why = tr(
            ko="fp16(fp32보다 빠르고 덜 든다)으로 학습하려면 TRL의 스크립트를 직접 쓴다. fp16: true, dtype: "
            "float16으로 하고, Trainer를 만든 뒤에 이 줄들을 적는다",
            en="in fp16, which is faster than fp32 and takes less, by a script of one's own with TRL's trainer: fp16: "
            "true, dtype: float16 and, after the trainer is made, these lines",
        )
        yield InCode(why, _IN_FP32, self.measured(own, as_it_is=True).reserved)

    def _waiting(self, setting: Setting) -> int:
        """Bytes of all gradients in the type that FSDP2 reduces them in, where they wait whole; adapters' are few.

        Not where each GPU's share, in the type of its weights, is as much.
        """
        whole = 2 * count_elements(setting.model_id)
        waits = self.reduces_once and setting.gradient_accumulation_steps > 1 and not setting.peft
        return whole if waits and whole > self._share(setting) else 0

    def _share(self, setting: Setting) -> int:
        """Bytes of the gradients that each GPU keeps of those that are sent with every micro-batch."""
        weights = CONVENTIONS[_convention(setting)].fp32_shards.dtype.itemsize
        return weights * count_elements(setting.model_id) // self.gpus

    def _why_not(self, setting: Setting) -> Iterator[str]:
        """Why the file cannot run as it stands, whatever memory there is."""
        name = self.spec.name
        if "bf16" in setting.precision and not self.spec.has_bf16:
            yield tr(ko=f"{name}에는 bf16 연산 장치가 없다", en=f"{name} has no bf16 units")
        if self._stops(setting):
            yield tr(
                ko="양자화한 모델의 어댑터를 TRL이 bf16으로 만드는데, fp16의 GradScaler는 bf16 그레이디언트를 "
                "받지 않아 첫 갱신에서 멈춘다",
                en="TRL makes the adapters of a quantized model bf16, whose gradients fp16's GradScaler does "
                "not take: it stops at the first update",
            )
        if self.sdpa:
            yield tr(
                ko=f"플래시 어텐션(flash-attn)은 암페어부터 돈다. {name}에서는 오류로 끝난다",
                en=f"flash attention (flash-attn) runs on Ampere and later; on {name} it ends with an error",
            )
        if why := self._why_no_start():
            yield why

    def _why_no_start(self) -> str:
        """Why the file's engine does not start; empty where it does, or there is none."""
        if self.engine is None or self.engine.starts(self.room.memory):
            return ""
        least, longest = self.engine.least(0, self.room.memory.high), self.engine.longest
        return tr(
            ko=f"vLLM이 시작하지 못한다. 가중치와 {longest:,}토큰(vllm_max_model_length)짜리 글 하나의 KV 캐시에 몫이 "
            f"{least:g}은 있어야 한다",
            en=f"vLLM cannot start: weights and the KV cache of one text of {longest:,} tokens "
            f"(vllm_max_model_length) take a share of {least:g} at least",
        )

    def _lines_of(self, engine: Share | None) -> dict[str, Any]:
        """key → value of each line that makes the file's engine this one."""
        if engine is None or engine == self.engine:
            return {}
        found = {} if engine.share == self.engine.share else {"vllm_gpu_memory_utilization": engine.share}
        return found | ({} if engine.longest == self.engine.longest else {"vllm_max_model_length": engine.longest})

    def measured(self, setting: Setting, as_it_is: bool = False) -> Try:
        """What a setting takes; where its micro-batches may be padded or not, the larger of the two.

        as_it_is: both, also where the one that is likely larger is too much already, and with the file's own engine;
        else with the first of an engine's ways that has room.
        """
        if not setting.padded or (setting.rows == 1 and not self.pads_one):
            needs = {None: self._need(replace(setting, padded=False))}
            return self._tried(replace(setting, padded=False), needs, as_it_is)
        # Of these `rank_step` has padded ones alone, on bf16's cards the larger.
        if self.stage and setting.objective != "sft":
            return self._tried(setting, {None: self._need(setting)}, as_it_is)
        # Before Ampere grouped heads without a mask go to the kernel that makes matrices of length × length.
        first = self.spec.compute_capability >= (8, 0)
        needs = {}
        for padded in (first, not first):
            needs[padded] = self._need(replace(setting, padded=padded))
            if not as_it_is and not self.has_room(self._tried(setting, needs, as_it_is).reserved):
                break
        return self._tried(setting, needs, as_it_is)

    def _by_engine(self, counted: Try) -> tuple[Try, str]:
        """What was counted, by DeepSpeed's engine, and its name; as it was, and "", where that does not come through.

        Of micro-batches with padding and without, those that were counted to take more. From then on what is counted is
        held to be as much too low as this one was: what then fits is run by the engine, too, before it is proposed.
        """
        padded = counted.with_padding is not None and counted.with_padding == counted.reserved
        tell(waiting())
        try:
            step = deepspeed_step(replace(counted.setting, padded=padded), self.section, self.spec, self.gpus)
        except NotSupported as error:
            self.keys.note("deepspeed", EITHER, as_fsdp(str(error)))
            return counted, ""
        self.over = max(self.over, step.card * self.over / counted.reserved)
        self.progress(counted.setting, step.card)
        return replace(counted, reserved=step.card, with_padding=None, of_one_length=None), named()

    def _tried(self, setting: Setting, needs: dict[bool | None, _Need], as_it_is: bool) -> Try:
        """The setting with the most of these needs, by whether a mask is there."""
        most = max(needs.values())
        limit = int(self.room.sure_bytes / (1 + self.margin))
        engines: list[Share | None] = [self.engine]
        if self.engine is not None and not as_it_is:
            able = self.engine.able(setting.sequence_length, self.room.memory)
            engines = [*able.others(most.card, most.rollout, self.room.memory, limit)]
        ways = [(self._with(most, engine), engine) for engine in engines]
        reserved, engine = next((way for way in ways if self.has_room(way[0])), ways[0])
        sizes = {padded: self._with(need, engine) for padded, need in needs.items()}
        return Try(setting, reserved, most.paged, sizes.get(True), sizes.get(False), engine)

    def _with(self, need: _Need, engine: Share | None) -> int:
        return need.card if engine is None else engine.reserved(need.card, need.rollout, self.room.memory)

    def _need(self, setting: Setting) -> _Need:
        if self.stage:
            of_deepspeed = bool(self.keys.document.get(("deepspeed",)))
            if of_deepspeed and copies_end(setting.model_id, setting.modules_to_save):
                why = tr(ko="임베딩과 한 텐서인 출력층의 사본", en="a copy of a head that is the embedding")
                raise self.keys.not_counted("deepspeed", why)
            step = rank_step(
                setting.model_id, self.gpus, self.stage, precision=_convention(setting),
                batch_size=setting.batch_size, sequence_length=setting.sequence_length,
                gradient_checkpointing=setting.gradient_checkpointing, gpu=self.spec.name, exact=False,
                accumulating=setting.gradient_accumulation_steps > 1, whole_gradients=self.reduces_once,
                peft=setting.peft, lora_rank=setting.lora_rank,
                lora_targets=setting.lora_targets, modules_to_save=setting.modules_to_save,
                repeat_kv=setting.attention == REPEATED,
                trained_dtype=setting.trained_dtype,
                offload_checkpoints=setting.offload_checkpoints,
                padded=setting.padded, objective=setting.objective, reference=setting.reference,
                fused_lm_head=setting.fused_lm_head and setting.objective == "sft",  # of others it is theirs
                fp32_shards=not of_deepspeed,  # whose own weights are in 16 bits
                as_accelerate=self.tool is not torchtune and not of_deepspeed,
                completion_length=setting.completion_length, rollout=setting.rollout, beta=setting.beta,
                iterations=setting.iterations,
            )  # fmt: skip
            found = _Need(int(self.over * step.card_bytes), step.rollout_bytes if setting.vllm == ASLEEP else 0, 0)
        else:
            need = predict_need(setting, self.spec.compute_capability, self.gpus > 1)
            found = _Need(need.card, need.rollout, need.paged)
        self.progress(setting, found.card)
        return found

    @property
    def pads_one(self) -> bool:
        """Whether a micro-batch of one sample is padded too, to a multiple of some tokens."""
        return getattr(self.tool, "PADS_ONE", False) or isinstance(self.keys.document.get(("pad_to_multiple_of",)), int)

    def has_room(self, reserved: int) -> bool:
        return self.room.verdict(int(reserved * (1 + self.margin))) == FITS

    def candidates(self, start: Setting) -> Iterator[Setting]:
        """Settings with the micro-batch and length of the file, what changes training least first."""
        methods = ["full", "lora", "qlora"]
        offered = [m for m in methods[methods.index(start.peft or "full") :] if m in self.tool.METHODS]
        offered = [m for m in offered if m != "qlora" or not start.vllm]  # which was not run
        for method in dict.fromkeys([start.peft or "full", *offered]):
            for more in self._with_references(start, self._variants(start, method)):
                for how, vllm in product(self._checkpoints(start), self._engines(start)):
                    names = {**how, "vllm": vllm}
                    try:
                        yield self._running(start, replace(start, **more, **names))
                    except WrongValue:  # not a line of this file
                        continue
        yield from self._shortest(start)

    def _engines(self, start: Setting) -> tuple[str, ...]:
        """As the file has its engine, and asleep while the model is trained, which changes no training."""
        return (start.vllm, *((ASLEEP,) if start.vllm not in ("", ASLEEP) else ()))

    def _with_references(self, start: Setting, variants: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Each, and for DPO of all weights again with the reference's log probabilities made first, where TRL can."""
        for more in variants:
            yield more
            trains_all = not more.get("peft", start.peft)
            if start.pairs and trains_all and start.reference != "precomputed" and self.tool is trl:
                yield {**more, "reference": "precomputed"}

    def _checkpoints(self, start: Setting) -> list[dict[str, bool]]:
        """Fields of a Setting: as the file checkpoints, switched on, reentrant where that keeps less, on the CPU."""
        offload, reentrant = start.offload_checkpoints, start.use_reentrant
        found = [(start.gradient_checkpointing, offload, reentrant), (True, offload, reentrant)]
        # LLaMA-Factory, axolotl and torchtune have ways of their own, which were not run.
        theirs = self.tool in (trl, trainer)
        if theirs and start.load_in_8bit and not offload:  # whose inputs stay otherwise, see `rules.bitsandbytes`
            found.append((True, False, True))
        if theirs and not self.stage and can_offload():
            found.append((True, True, False))
        names = "gradient_checkpointing", "offload_checkpoints", "use_reentrant"
        return [dict(zip(names, values, strict=True)) for values in dict.fromkeys(found)]

    def _variants(self, start: Setting, method: str) -> Iterator[dict[str, Any]]:
        """Fields of a Setting that go together: precision and optimizer of a method."""
        precision = start.precision
        if "bf16" in precision and not self.spec.has_bf16:
            precision = precision.replace("bf16", "fp16")
        if method != (start.peft or "full"):
            half = "fp16" if "fp16" in precision or not self.spec.has_bf16 else "bf16"
            defaults = {"lora_targets": "all-linear"} if start.peft is None and self.tool is not trl else {}
            yield {"peft": method, "precision": f"autocast_{half}", "load_in_8bit": False, **defaults}
            return
        yield {"precision": precision}
        if method == "full" and not self.stage:
            if torchtune.may_step_in_backward(self.keys, start) and self.tool is torchtune and self.gpus == 1:
                yield {"precision": precision, **self._optimizer(IN_BACKWARD)}  # the same training
            if start.optimizer in ("adamw", "adamw_fused"):
                yield {"precision": precision, **self._optimizer("adamw_8bit")}
            if precision == "mixed_bf16":
                yield from ({"precision": half, **self._optimizer(name)} for half in (self._pure(),) if half
                            for name in dict.fromkeys([start.optimizer, "adamw_8bit"]))  # fmt: skip
            if start.optimizer in ("adamw", "adamw_fused", "adamw_8bit"):
                halves = [half for half in (self._pure(),) if half and precision == "mixed_bf16"]
                yield from ({"precision": one, **self._optimizer("paged_adamw_8bit")} for one in (precision, *halves))

    def _optimizer(self, name: str) -> dict[str, Any]:
        """Fields of a Setting: all but torchtune's loop is the Trainer's."""
        return {"optimizer": name, "fp32_embedding_state": self.tool is not torchtune}

    def _pure(self) -> str:
        return {llama_factory: "bf16", trl: "autocast_bf16"}.get(self.tool, "")

    def _shortest(self, start: Setting) -> Iterator[Setting]:
        """The least that the file's own method takes, at ever shorter lengths."""
        length = start.sequence_length
        precision = next(self._variants(start, start.peft or "full"))["precision"]
        while (length := length // 2 // _STEP * _STEP) >= _STEP:
            try:
                one = replace(start, sequence_length=length, precision=precision, **self._checkpoints(start)[-1])
                if not any("len" in key for key in self.tool.write(self.keys, start, one)):
                    return  # the file does not say the length
                one = self._running(start, one)
            except WrongValue:  # of a prompt and its completion
                return
            yield one

    def _stops(self, setting: Setting) -> bool:
        """Whether the first update ends it: fp16's scaler takes no gradients in bf16 (`rules.unscale`).

        DeepSpeed scales the loss itself.
        """
        scaled = setting.precision in ("mixed_fp16", "autocast_fp16") and not self.keys.document.get(("deepspeed",))
        return scaled and setting.trained_dtype == "bf16"

    def _running(self, start: Setting, one: Setting) -> Setting:
        """The candidate as its tool reads it; where that stops at the first update, in bf16, or in fp32 without AMP.

        In fp16 without AMP it would run, and lose the small gradients that the scaler is there for.
        """
        read = self._as_read(self.tool.write(self.keys, start, one))
        if not self._stops(read):
            return read
        precision = read.precision.replace("fp16", "bf16") if self.spec.has_bf16 else "fp32"
        return self._as_read(self.tool.write(self.keys, start, replace(one, precision=precision)))

    def _as_read(self, lines: dict[str, Any]) -> Setting:
        """What the file says with these lines: of a method that it had not, its own keys and its tool's defaults."""
        return self.again(self.keys.document.with_values({place_of(key): value for key, value in lines.items()}))

    def largest(self, start: Setting, one: Setting) -> Try | None:
        """The candidate with the largest micro-batch that fits, the samples of an optimizer step as in the file."""
        samples = start.batch_size * start.gradient_accumulation_steps
        ways = [size for size in range(1, start.batch_size + 1) if samples % size == 0]
        ways = [samples] if steps_in_backward(one.optimizer) else ways
        if not self.stage and sum(states_of(one.short(1)).values()) > self.room.sure_bytes:
            return None
        best, low, high = None, 0, len(ways)
        place = 0  # where one sample does not fit, nothing does
        while low < high:
            tried = self.measured(
                replace(one, batch_size=ways[place], gradient_accumulation_steps=samples // ways[place])
            )
            if self.has_room(tried.reserved):
                best, low = tried, place + 1
            else:
                high = place
            if best is None and place == 0:
                return None
            place = (low + high) // 2
        return best


def _convention(setting: Setting) -> str:
    """As `rank_step` calls a precision; NotSupported for one that shards were never run in."""
    precision = setting.precision
    # Of weights that are trained under autocast FSDP2 has fp32 ones (accelerate's fsdp2_prepare_model), DeepSpeed too.
    known = {"mixed_bf16": "mixed", "bf16": "mixed" if setting.peft else "bf16", "autocast_bf16": "mixed"}
    if precision not in known:
        raise NotSupported(
            tr(
                ko=f"precision={precision!r}: 나눈 학습은 bf16으로만 세어 보았다.",
                en=f"precision={precision!r}: sharded training was counted in bf16 alone.",
            )
        )
    return known[precision]


def check_copy(path: str | Path, force: bool) -> None:
    """ExistingFile where the changed copy could not be written, before anything is measured."""
    path = path_of(path)
    if not path.name or path.name in (".", ".."):
        raise WrongValue(tr(ko=f"--save {str(path)!r}: 파일의 이름이어야 한다.", en=f"--save {str(path)!r}: a file."))
    check_folder(path.parent, [path.name], force)
