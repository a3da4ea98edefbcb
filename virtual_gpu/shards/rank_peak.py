"""What a step of one of N ranks took: its share of the model at the peak, what it sent, and what all that needs."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from dataclasses import dataclass, field

from ..drawing.shards import draw_step
from ..language import tr
from ..step.setting import checkpointing_label
from ..trace.trace import Trace
from ..trace.twice import Twice
from ..units import MiB, human_bytes
from .adapters import Adapters
from .generated import Generated
from .layout import CONVENTIONS, Layout
from .ledger import RankMemory, count_elements, paper_bytes
from .mesh import context_label, mesh_labels, tensor_label
from .nccl import Range
from .second_model import Pairs


@dataclass
class RankStep:
    """One rank at the peak of a step, in bytes by part; "other" of the virtual GPU counts as communication buffers.

    memory: its share of the model (the first rank's, or at stage 1 that of the rank that holds most). sent: collective
    → elements of parameters and gradients; sent_activations: those of tensor or context parallelism, in bytes
    sent_activation_bytes. nccl: what NCCL's buffers take outside PyTorch's allocator. trace: the step's, optimizer
    state and buckets in it. unlimited_bytes: the most that the caching allocator reserves without a limit, with a pool
    for each of FSDP2's streams. offloaded_bytes: what goes to the CPU's RAM in this micro-batch, and comes back;
    pinned_bytes: what it takes there. pairs: of DPO; where a moment before the training or its first micro-batch takes
    more than the steps after it, peak and trace are that moment's. generated: of GRPO; handing_over is the trace of
    what comes before a generation, with the states in it, and sent_once_bytes what is sent for that and for the scores.
    twice: what checkpointed blocks compute a second time, and flops_twice its FLOPs by name, where that was watched.
    """

    model: str
    layout: Layout
    precision: str
    batch_size: int
    sequence_length: int
    gradient_checkpointing: bool
    memory: RankMemory
    at_peak: dict[str, int]
    phase: str
    sent: Counter
    sent_activations: Counter
    sent_activation_bytes: Counter
    gpu_name: str
    capacity_bytes: int
    nccl: Range
    unlimited_bytes: int
    trace: Trace = field(repr=False)
    adapters: Adapters | None = None  # with them `sent` counts bytes
    offloaded_bytes: int = 0
    pinned_bytes: int = 0
    pairs: Pairs | None = None
    generated: Generated | None = None
    handing_over: Trace | None = field(default=None, repr=False)
    sent_once_bytes: int = 0
    twice: Twice | None = field(default=None, repr=False)
    flops_twice: Counter = field(default_factory=Counter)

    @property
    def room_bytes(self) -> int:
        """What is left for PyTorch's allocator beside NCCL's buffers, as large as they likely are."""
        return self.capacity_bytes - self.nccl.likely

    @functools.cached_property
    def reserved_bytes(self) -> int:
        """The most that is reserved: without a limit or, where that is too much, in the room that the GPU has.

        There what is cached may be given back in time.
        """
        if self.unlimited_bytes > self.room_bytes:
            with contextlib.suppress(MemoryError):
                return self.trace.reserved_peak(self.room_bytes)
        return self.unlimited_bytes

    @functools.cached_property
    def card_bytes(self) -> int:
        """The least capacity in which the caching allocator gets through, to 1/128 of the peak; NCCL's comes on top."""
        return capacity_of(self.trace, self.unlimited_bytes)

    @functools.cached_property
    def rollout_bytes(self) -> int:
        """What is reserved while an engine is handed the weights, where what lies in the cache was given back before.

        Of what the steps before it leave between blocks that are in use this has no trace.
        """
        return 0 if self.handing_over is None else self.handing_over.reserved_peak()

    @property
    def fits(self) -> bool:
        """Whether the caching allocator finds room for the step beside NCCL's buffers, by their published values."""
        return self.reserved_bytes <= self.room_bytes

    @property
    def total(self) -> int:
        """Bytes of the tensors at the peak."""
        return sum(self.at_peak.values())

    @property
    def floor(self) -> int:
        """What does not shrink with the number of ranks: activations, gathered parameters, buffers."""
        return sum(self.at_peak[part] for part in ("gathered", "activations", "communication"))

    @property
    def parameters_and_gradients_sent(self) -> int:
        """Bytes of a step's collectives for parameters and gradients, each whole; an all-reduce counts twice."""
        return _travelled(self.sent) * (1 if self.adapters else CONVENTIONS[self.precision].parameters)

    @property
    def sent_to_copies(self) -> int:
        """Of these, what is added up with the other copies of the model."""
        own = Counter(allreduce=self.sent["allreduce"]) if self.layout.replicas > 1 else Counter()
        return _travelled(own) * CONVENTIONS[self.precision].parameters

    @property
    def activations_sent(self) -> int:
        """Bytes that a rank sends in a step for tensor or context parallelism."""
        return _travelled(self.sent_activation_bytes)

    @property
    def what(self) -> str:
        """The setting without the number of GPUs, in one line."""
        parts = [
            self.model.split("/")[-1],
            tr(ko=f"{self.layout.stage}단계", en=f"stage {self.layout.stage}"),
            self.adapters.title if self.adapters else self.precision,
            tr(ko=f"배치 {self.batch_size}", en=f"batch {self.batch_size}"),
            tr(ko=f"길이 {self.sequence_length}", en=f"length {self.sequence_length}"),
        ]
        if self.pairs or self.generated:
            parts.append((self.pairs or self.generated).title)
        parts[2:2] = mesh_labels(self.layout)
        if self.gradient_checkpointing:
            parts.append(checkpointing_label(offload=self.offloaded_bytes > 0))
        return " · ".join(parts)

    @property
    def title(self) -> str:
        """One line that names what was run."""
        return f"{self.what} · {self.gpu_name} × {self.layout.ranks:,}"

    @property
    def verdict(self) -> str:
        """One line: does it fit, and by how much."""
        tensors, capacity = human_bytes(self.total), human_bytes(self.capacity_bytes)
        needed = human_bytes(self.reserved_bytes + self.nccl.likely)
        if self.fits:
            return tr(
                ko=f"들어간다. GPU당 최대 {tensors}, 할당자와 NCCL까지 {needed}, 한도 {capacity}",
                en=f"fits. Peak {tensors} on each GPU, {needed} with the allocator's cache and NCCL, of {capacity}",
            )
        return tr(
            ko=f"메모리 부족. GPU당 {tensors}, 할당자와 NCCL까지 {needed}가 필요한데 한도는 {capacity}",
            en=f"out of memory. Each GPU needs {tensors}, {needed} with the allocator's cache and NCCL, of {capacity}",
        )

    @property
    def notes(self) -> list[str]:
        """What the paper's formula says of the model's share, and what each GPU sends in a step."""
        paper = paper_bytes(count_elements(self.model) / self.layout.tensor_parallel, self.layout, self.precision)
        model, formula = human_bytes(self.memory.total), human_bytes(paper)
        weights, activations = human_bytes(self.parameters_and_gradients_sent), human_bytes(self.activations_sent)
        by_paper = tr(ko=f", 논문의 식으로는 {formula}", en=f"; by the paper: {formula}") if not self.adapters else ""
        lines = [
            tr(
                ko=f"모델 상태(파라미터, 그레이디언트, 옵티마이저 상태): {model}{by_paper}",
                en=f"The model's share (parameters, gradients, optimizer state): {model}{by_paper}",
            ),
            tr(
                ko=f"GPU 하나가 한 스텝에 보내는 양: 파라미터와 그레이디언트 {weights}",
                en=f"Each GPU sends in a step: parameters and gradients {weights}",
            ),
        ]
        if self.nccl.high:
            low, likely, high = map(human_bytes, self.nccl)
            lines.append(
                tr(
                    ko=f"NCCL의 버퍼(PyTorch 할당자 밖): {low}에서 {high}, 아마 {likely}",
                    en=f"NCCL's buffers, outside PyTorch's allocator: {low} to {high}, likely {likely}",
                )
            )
        if self.sent_activations:
            how = context_label() if self.layout.context_parallel > 1 else tensor_label()
            lines[1] += tr(ko=f", {how}의 순전파 상태 {activations}", en=f", {how}ism {activations}")
        return lines

    def __repr__(self) -> str:
        return f"{self.title}: {self.verdict}"

    def _repr_svg_(self) -> str:
        return draw_step(self).svg()


def _travelled(sent: Counter) -> int:
    return sum(number * (2 if name in ("allreduce", "all_reduce") else 1) for name, number in sent.items())


def capacity_of(trace: Trace, reserved: int | None = None) -> int:
    """The least capacity in which the caching allocator gets through, to 1/128 of the peak."""
    return trace.smallest_capacity(max(trace.timeline().peak_bytes // 128, 2 * MiB), reserved=reserved)
