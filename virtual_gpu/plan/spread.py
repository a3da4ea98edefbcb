"""Layers spread over the cards of one process (`device_map`): what each card takes, and how many layers it gets.

transformers loads the model and accelerate sends the activations from card to card, as they do in a program; the loop
is the core's. What a card takes grows by the same with each of its layers: it follows from two shallow runs, one with
two layers on each card and one with four, where the traces prove it (`trace.depth`); else all layers are run. The
layers are dealt so that the fullest card has least. Where layers of several kinds take turns, or there are few, all are
run, dealt evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import NotSupported
from ..language import tr
from ..models.adapters import add_adapters, prepare_quantized
from ..models.configs import cached_by_model, load_config, running
from ..models.depth import names_layers, turns_of, with_depth
from ..models.spread import load_spread, ready_to_spread
from ..step.predict import Need, like_any, of_trace, training_arguments
from ..step.run import train
from ..step.setting import Setting
from ..trace.depth import TURNS, continuation
from ..trace.recorder import TimelineRecorder
from ..trace.trace import Trace
from ..turns import in_turn, refuse_in_a_block
from .on_a_card import ProgramCard

FEW = 2  # layers on each card, of which one is the first there and one the last


@dataclass(frozen=True)
class SpreadNeed:
    """What each card takes. layers: of each. sent: bytes of a micro-batch that come to the card that gets most."""

    layers: tuple[int, ...]
    cards: tuple[Need, ...]
    sent: int

    @property
    def fullest(self) -> Need:
        """Of the card that needs most."""
        return max(self.cards, key=lambda need: need.card)


@cached_by_model
def spread_need(setting: Setting, gpus: int, compute_capability: tuple[int, int]) -> SpreadNeed:
    """What the experiment takes of each of the cards. NotSupported where its layers cannot be dealt to them."""
    config = load_config(setting.model_id)
    setting.check_length(config)
    turns = turns_of(config)
    layers = config.get_text_config().num_hidden_layers
    if layers < FEW * gpus:
        raise NotSupported(
            tr(
                ko=f"device_map: 층 {layers}개를 GPU {gpus}개에 {FEW}개 이상씩 나눌 수 없다.",
                en=f"device_map: {layers} layers are not {FEW} and more for each of {gpus} GPUs.",
            )
        )
    shallow = turns is not None and turns.turn == 1 and not turns.before and layers > gpus * (FEW + TURNS)
    shallow = shallow and not names_layers(setting.module_names)
    if shallow:
        short, long = (_run(setting, config, (of_each,) * gpus, compute_capability) for of_each in (FEW, FEW + TURNS))
        dealt = _dealt(short.traces, long.traces, layers)
        traces = [
            _deepened(one, other, number - FEW)
            for one, other, number in zip(short.traces, long.traces, dealt, strict=True)
        ]
        if all(trace is not None for trace in traces):
            sent = (
                one + (other - one) * (number - FEW) // TURNS
                for one, other, number in zip(short.sent, long.sent, dealt, strict=True)
            )
            return SpreadNeed(dealt, _needs(traces), max(sent))
    else:
        dealt = tuple(layers // gpus + (card < layers % gpus) for card in range(gpus))
    whole = _run(setting, config, dealt, compute_capability)
    return SpreadNeed(dealt, _needs(whole.traces), max(whole.sent))


def _needs(traces: Sequence[Trace]) -> tuple[Need, ...]:
    return tuple(of_trace(Need(0, 0, {}, {}), trace) for trace in traces)


def _deepened(short: Trace, long: Trace, more: int) -> Trace | None:
    """A card's trace with so many layers more than in the short one; None where it is not proven."""
    if not more:
        return short
    found = continuation(short, long, more)
    return None if found is None else found.of(found.like)


def _dealt(short: Sequence[Trace], long: Sequence[Trace], layers: int) -> tuple[int, ...]:
    """How many layers each card gets, so that the tensors' peak of the fullest card is least."""
    least = [trace.peak_bytes for trace in short]
    a_layer = [(other.peak_bytes - one) / TURNS for one, other in zip(least, long, strict=True)]
    dealt = [FEW] * len(least)
    for _ in range(layers - sum(dealt)):
        then = [one + (number + 1 - FEW) * more for one, number, more in zip(least, dealt, a_layer, strict=True)]
        dealt[then.index(min(then))] += 1
    return tuple(dealt)


@dataclass(frozen=True)
class _Run:
    """Of each card its trace, and the bytes of a micro-batch that come to it from the others."""

    traces: list[Trace]
    sent: list[int]


@in_turn
def _run(setting: Setting, config: Any, layers: Sequence[int], compute_capability: tuple[int, int]) -> _Run:
    """The setting's two steps with so many layers on each card."""
    from ..program.context import cuda  # brings all of a program's card

    refuse_in_a_block()
    shallow = with_depth(config, sum(layers))
    dtype, autocast = setting.dtypes
    ready_to_spread()
    with ExitStack() as stack:
        gpu = stack.enter_context(cuda(like_any(compute_capability), limited=False, visible_gpus=len(layers)))
        stack.enter_context(running(setting.model_id))
        model = load_spread(shallow, layers, dtype, four_bits=setting.peft == "qlora")
        if setting.peft == "qlora" and setting.rest_in_fp32:
            prepare_quantized(model)
        if setting.peft is not None:
            model = add_adapters(
                model, setting.lora_rank, setting.lora_targets, lora_dropout=setting.lora_dropout,
                modules_to_save=setting.modules_to_save,
            )  # fmt: skip
        cards = _Cards(gpu)
        cards.place(model)
        sample = dict.fromkeys(("input_ids", "labels"), torch.zeros(setting.sequence_length, dtype=torch.int64))
        before = [*gpu.several.crossed_bytes]
        log = train(model, [sample] * setting.samples, training_arguments(setting, autocast), gpu=cards)
        sent = (after - earlier for earlier, after in zip(before, gpu.several.crossed_bytes, strict=True))
        return _Run(cards.traces, [nbytes // log.micro_steps for nbytes in sent])


class _Cards(ProgramCard):
    """The cards of one process, each with a trace of its own."""

    traces: list[Trace]

    def place(self, thing: Any) -> Any:
        """Put a batch on the first card; of a model, which lies where it lies, say what its weights are."""
        if not isinstance(thing, torch.nn.Module):
            return super().place(thing)
        from ..program.quantized import state_tensors

        self.gpu.label(thing.parameters(), "parameters")
        for part in thing.modules():
            self.gpu.label(state_tensors(part), "parameters")
        return thing

    @contextmanager
    def record(self, model: torch.nn.Module, optimizer: Any) -> Iterator[Any]:
        """As `ProgramCard.record`, of every card."""
        with ExitStack() as stack:
            record = stack.enter_context(super().record(model, optimizer))
            own, recorders = self.gpu.meter, []
            for meter in self.gpu.meters:
                recorder = record.recorder if meter is own else TimelineRecorder(meter.live_blocks())
                recorders.append(recorder)
                if meter is not own:
                    meter.recorder = recorder
                    record.beside.append(recorder)
                    stack.callback(setattr, meter, "recorder", None)
            yield record
            record.label_training()
            self.traces = [recorder.trace() for recorder in recorders]
