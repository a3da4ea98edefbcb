"""What one of N ranks needs for a whole training step: its share of the model, and all that ZeRO does not share.

Activations are each rank's own. FSDP2 besides gathers the group that is being computed, prefetches the next one, and
needs buffers to send from. All of it comes from one run of a rank on the virtual GPU (`fake_rank`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cards import card
from ..drawing.shards import draw_step
from ..language import tr
from ..models.configs import resolve_model_id
from ..models.depth import grows_evenly, shallow_depths, text_config, with_depth
from ..trace.depth import continued
from ..trace.timeline import CATEGORIES, Timeline
from ..units import choose, human_bytes, positive_int
from .fake_rank import RankRun, run_rank
from .layout import CONVENTIONS, Layout
from .ledger import (
    RankMemory,
    closed_form,
    config_of,
    count_elements,
    dealt_elements,
    elements_sent,
    local_shapes,
    padded_elements,
    paper_bytes,
)

REFERENCE = 64  # data-parallel ranks of the run that stands for other numbers of them
PADDING = 0.002


@dataclass
class RankStep:
    """One rank at the peak of a step, in bytes by part; "other" of the virtual GPU counts as communication buffers.

    memory: its share of the model (the first rank's, or at stage 1 that of the rank that holds most). sent: collective
    → elements of parameters and gradients; sent_activations: those of tensor parallelism.
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
    gpu_name: str
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the peak stays below what PyTorch can allocate on the GPU."""
        return self.total <= self.capacity_bytes

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.at_peak.values())

    @property
    def floor(self) -> int:
        """What does not shrink with the number of ranks: activations, gathered parameters, buffers."""
        return sum(self.at_peak[part] for part in ("gathered", "activations", "communication"))

    @property
    def parameters_and_gradients_sent(self) -> int:
        """Bytes that a rank sends in a step for parameters and gradients; an all-reduce counts twice."""
        return _travelled(self.sent) * CONVENTIONS[self.precision].parameters

    @property
    def activations_sent(self) -> int:
        """Bytes that a rank sends in a step for tensor parallelism."""
        return _travelled(self.sent_activations) * CONVENTIONS[self.precision].parameters

    @property
    def what(self) -> str:
        """The setting without the number of GPUs, in one line."""
        parts = [
            self.model.split("/")[-1],
            tr(ko=f"{self.layout.stage}단계", en=f"stage {self.layout.stage}"),
            self.precision,
            tr(ko=f"배치 {self.batch_size}", en=f"batch {self.batch_size}"),
            tr(ko=f"길이 {self.sequence_length}", en=f"length {self.sequence_length}"),
        ]
        if self.layout.tensor_parallel > 1:
            degree = self.layout.tensor_parallel
            parts.insert(2, tr(ko=f"텐서 병렬 {degree}", en=f"tensor parallel {degree}"))
        if self.gradient_checkpointing:
            parts.append(tr(ko="체크포인팅", en="checkpointing"))
        return " · ".join(parts)

    @property
    def title(self) -> str:
        """One line that names what was run."""
        return f"{self.what} · {self.gpu_name} × {self.layout.ranks:,}"

    @property
    def verdict(self) -> str:
        """One line: does it fit, and by how much."""
        total, capacity = human_bytes(self.total), human_bytes(self.capacity_bytes)
        if self.fits:
            return tr(
                ko=f"들어간다. GPU당 최대 {total}, 한도 {capacity}",
                en=f"fits. Peak {total} of {capacity} on each GPU",
            )
        return tr(
            ko=f"메모리 부족. GPU당 {total}가 필요한데 한도는 {capacity}",
            en=f"out of memory. Each GPU needs {total} of {capacity}",
        )

    @property
    def notes(self) -> list[str]:
        """What the paper's formula says of the model's share, and what each GPU sends in a step."""
        paper = paper_bytes(count_elements(self.model) / self.layout.tensor_parallel, self.layout, self.precision)
        model, formula = human_bytes(self.memory.total), human_bytes(paper)
        weights, activations = human_bytes(self.parameters_and_gradients_sent), human_bytes(self.activations_sent)
        lines = [
            tr(
                ko=f"모델의 몫(파라미터, 그레이디언트, 옵티마이저 상태): {model}, 논문의 식으로는 {formula}",
                en=f"The model's share (parameters, gradients, optimizer state): {model}; by the paper: {formula}",
            ),
            tr(
                ko=f"GPU 하나가 한 스텝에 보내는 양: 파라미터와 그레이디언트 {weights}",
                en=f"Each GPU sends in a step: parameters and gradients {weights}",
            ),
        ]
        if self.sent_activations:
            lines[1] += tr(ko=f", 텐서 병렬의 순전파 상태 {activations}", en=f", tensor parallelism {activations}")
        return lines

    def __repr__(self) -> str:
        return f"{self.title}: {self.verdict}"

    def _repr_svg_(self) -> str:
        return draw_step(self).svg()


def rank_step(
    model: str,
    ranks: int,
    stage: int = 3,
    *,
    tensor_parallel: int = 1,
    precision: str = "mixed",
    batch_size: int = 1,
    sequence_length: int = 1024,
    gradient_checkpointing: bool = False,
    gpu: str = "H100",
    exact: bool = True,
    accumulating: bool = False,
) -> RankStep:
    """The peak of a training step (forward and backward, optimizer state present) on one of `ranks` ranks.

    batch_size and sequence_length are one rank's micro-batch (with tensor parallelism: its group's). exact: run at this
    number of ranks. Otherwise a run with 64 data-parallel ranks stands for it, with the shards of `closed_form`, unless
    there are so many ranks that padding adds over 0.2 %. The optimizer step's temporaries are not counted (a fused one
    has none). accumulating: the gradients of earlier micro-batches lie there from the beginning. DDP's
    buckets, which its C++ reducer makes, count as the gradients, from the beginning of the step.
    """
    config, spec = config_of(model), card(gpu).needs_cuda()
    layout = Layout(ranks, stage, tensor_parallel)
    layout.check_model(config)
    precision = choose(precision, CONVENTIONS, tr(ko="정밀도", en="precision"))
    positive_int(batch_size, "batch_size")
    _check_length(model, config, positive_int(sequence_length, "sequence_length"))
    memory = _first_or_fullest(model, layout, precision)
    sharded = stage >= 2
    run_as = layout if sharded else Layout(tensor_parallel, 0, tensor_parallel)
    if sharded and not exact:
        reference = Layout(tensor_parallel * REFERENCE, stage, tensor_parallel)
        ratio = padded_elements(model, layout) / padded_elements(model, reference)
        run_as = reference if ratio < 1 + PADDING else layout
    timeline, messages = _timeline(model, run_as, precision, batch_size, sequence_length, bool(gradient_checkpointing))
    reference = closed_form(model, run_as, precision)
    at_peak, phase = _peak(timeline, memory, reference, sharded, accumulating)
    return RankStep(
        resolve_model_id(model), layout, precision, batch_size, sequence_length, bool(gradient_checkpointing),
        memory, at_peak, phase, elements_sent(model, layout), messages, spec.name, spec.capacity_bytes,
    )  # fmt: skip


def _peak(
    timeline: Timeline, memory: RankMemory, reference: RankMemory, sharded: bool, accumulating: bool
) -> tuple[dict[str, int], str]:
    """The parts at the fullest moment, from the curves of the reference run."""
    best, phase_name = None, ""
    for phase in timeline.phases:
        live = dict(zip(CATEGORIES, phase.live.T.astype(np.float64), strict=True))
        parts = {
            "parameters": np.full(len(phase.live), memory.parameters),
            "gathered": np.maximum(live["parameters"] - reference.parameters, 0),
            "gradients": live["gradients"] * memory.gradients / reference.gradients,
            "optimizer": np.full(len(phase.live), memory.optimizer),
            "activations": live["activations"],
            "communication": live["other"],
        }
        if not sharded:
            parts["gathered"] = np.zeros(len(phase.live))
        if not sharded or accumulating:
            parts["gradients"] = np.full(len(phase.live), memory.gradients)
        total = sum(parts.values())
        moment = int(total.argmax())
        if best is None or total[moment] > sum(best.values()):
            best, phase_name = {part: int(curve[moment]) for part, curve in parts.items()}, phase.name
    return best, phase_name


@functools.lru_cache(maxsize=512)
def _timeline(
    model: str, layout: Layout, precision: str, batch_size: int, sequence_length: int, checkpointing: bool
) -> tuple[Timeline, Counter]:
    config = config_of(model)

    def run(layers: int) -> RankRun:
        return run_rank(
            with_depth(config, layers), layout, CONVENTIONS[precision],
            batch_size=batch_size, sequence_length=sequence_length, checkpointing=checkpointing,
        )  # fmt: skip

    shallow = shallow_depths(config)
    if shallow is not None and grows_evenly(config, *shallow):
        depths, more = shallow
        runs = [run(layers) for layers in depths]
        trace = continued([one.timeline.trace for one in runs], more)
        if trace is not None:
            two, three = (one.sent_activations for one in runs[:2])
            sent = Counter({name: two[name] + more * (three[name] - two[name]) for name in three})
            return trace.timeline(), sent
    one = run(text_config(config).num_hidden_layers)
    return one.timeline, one.sent_activations


def _first_or_fullest(model: str, layout: Layout, precision: str) -> RankMemory:
    if layout.stage != 1:
        return closed_form(model, layout, precision)
    dealt = dealt_elements(local_shapes(model), layout.ranks)
    return closed_form(model, layout, precision, rank=max(range(layout.ranks), key=dealt.__getitem__))


def _travelled(sent: Counter) -> int:
    return sum(number * (2 if name in ("allreduce", "all_reduce") else 1) for name, number in sent.items())


def _check_length(model: str, config: Any, length: int) -> None:
    limit = getattr(text_config(config), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(
            tr(
                ko=f"길이 {length}: {model}의 최대 길이는 {limit}이다.",
                en=f"length {length}: {model} goes up to {limit}.",
            )
        )


def steps_by_ranks(
    model: str,
    ranks: Sequence[int] = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    *,
    sequence_length: int = 4096,
    gradient_checkpointing: bool = True,
    **setting: Any,
) -> list[RankStep]:
    """`rank_step` for growing numbers of GPUs, all from one reference run."""
    setting |= {"sequence_length": sequence_length, "gradient_checkpointing": gradient_checkpointing}
    return [rank_step(model, number, exact=False, **setting) for number in ranks]
