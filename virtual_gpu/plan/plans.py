"""A recipe with its micro-batch, and what that takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..drawing.labels import category_label, html_table
from ..language import tr
from ..room import FITS
from ..units import human_bytes
from ..writing import write
from .engine import Engine
from .files import files_of
from .host import host_need
from .ranking import criteria, key
from .recipes import Recipe
from .request import Request


@dataclass(frozen=True)
class Plan:
    """A recipe with its micro-batch, and what that takes on each GPU: bytes, FLOPs and seconds of one optimizer step.

    micro_batch: samples that a GPU takes at once, or with tensor parallelism a group of them.
    at_peak: kind → bytes, together needed_bytes: the tensors at their peak and "fragmentation". least_flops: of the
    same method where nothing is computed twice. Both count what all GPUs of a tensor-parallel group compute (norms, a
    tied head) once. sent_bytes: what each GPU sends for parameters and gradients, and for tensor parallelism.
    between_nodes_bytes: of this what leaves a node, of all its GPUs together. offloaded_bytes: what each sends to the
    CPU's RAM, and gets back; pinned_bytes: what a micro-batch of it takes there. paged_bytes: optimizer state in
    managed memory, in none of these (see `models.pages`). states_to_card_bytes and states_to_cpu_bytes: with
    `cpu_offload` parameters that are copied to each GPU, and gradients that come back.
    generation_bytes, training_bytes: of GRPO the tensors' peaks while completions are generated, and in all the rest;
    neither flops nor least_flops have the generation in them.
    seconds: a lower bound (None where neither rate is published), never a forecast.
    at_least: only parameters, gradients and optimizer state are known, which alone do not fit. beyond_best: of a plan
    that keeps results of blocks (see `keeping`), the most, as a share of the step's work, that another choice of them
    could save. layers: of each GPU, where they are spread over them; sent_bytes is then the most that comes to one.
    engine: that of vLLM, where it is on the card.
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
    between_nodes_bytes: int = 0
    generation_bytes: int = 0
    training_bytes: int = 0
    beyond_best: float | None = field(default=None, compare=False)
    layers: tuple[int, ...] = ()
    engine: Engine | None = None

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
        parts += ["DDP"] if self.request.gpus > 1 and not (self.recipe.stage or self.recipe.spread) else []
        dealt = " + ".join(map(str, self.layers))
        parts += [tr(ko=f"층 {dealt}", en=f"layers {dealt}")] if dealt else []
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
        more |= {"sent_bytes": self.sent_bytes, "between_nodes_bytes": self.between_nodes_bytes}
        more |= {"offloaded_bytes": self.offloaded_bytes}
        more |= {"paged_bytes": self.paged_bytes, "evicted_bytes": self.evicted_bytes}
        more |= {name: getattr(self, name) for name in ("states_to_card_bytes", "states_to_cpu_bytes")}
        more |= {name: getattr(self, name) for name in ("generation_bytes", "training_bytes")}
        more |= {"lower_bound_seconds": self.seconds, "caution": self.recipe.caution, "beyond_best": self.beyond_best}
        more |= {"lower_bound_price_per_million_tokens": self.price}
        engine = None if self.engine is None else self.engine.to_dict(self.request, self.fits)
        return {**asdict(self.recipe), **numbers, **more, "layers": list(self.layers), "engine": engine}

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
        "engine": tr(ko="vLLM 엔진", en="vLLM engine"),
    }.get(kind) or category_label(kind)
