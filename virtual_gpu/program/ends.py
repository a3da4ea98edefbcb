"""Where a run ends: after so many optimizer steps, or with `through_evaluation` where the program then ends itself."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader

from ..language import tr
from .imports import Imports
from .patches import Patches
from .report import error_line, line_of
from .watch import BACKWARD, Watch


class EndOfRun(BaseException):
    """Ends the program after its last step; not an Exception, so that programs do not catch it."""


def install(patches: Patches, imports: Imports, watch: Watch, steps: int, *, through_evaluation: bool = False) -> None:
    """End the program after `steps` optimizer steps.

    through_evaluation: let it go on, with data loaders that give no more batches to training and `steps` to
    evaluation, so that loops over data end by themselves; a loop over something else ends after twice as many steps.
    """

    def stepped() -> None:
        if watch.steps >= steps * (1 + through_evaluation):
            raise EndOfRun

    watch.stepped = stepped
    imports.after("transformers.trainer", lambda module: _will_evaluate(patches, watch, module))
    if through_evaluation:
        iterate = DataLoader.__iter__
        training: WeakSet[DataLoader] = WeakSet()
        cut = tr(
            ko=f"평가에는 배치 {steps}개까지만 주었다. 모든 표본의 답이 있어야 하는 프로그램은 여기서 실패한다: "
            "평가할 표본 수를 프로그램의 인자로 줄이거나 --steps를 늘린다",
            en=f"evaluation was given {steps} batches at most. A program that needs an answer for every sample fails "
            "here: let it evaluate fewer samples, by an argument of its own, or give more --steps",
        )

        empty = tr(
            ko=f"스텝 {steps}번 뒤의 에폭은 배치를 받지 못했다. 배치 수로 나누는 프로그램은 여기서 실패한다: "
            "--steps를 늘린다",
            en=f"after {steps} steps an epoch had no batches. A program that divides by how many there were fails "
            "here: give more --steps",
        )

        def __iter__(loader: DataLoader) -> Iterator[Any]:
            for count, batch in enumerate(iterate(loader)):
                if watch.steps >= steps and loader in training:
                    if not count:
                        watch.unfed = len(watch.events)
                        watch.note(empty)
                    return
                if watch.steps >= steps and count >= steps:
                    watch.note(cut)
                    return
                spans = len(watch.spans)
                yield batch
                if any(phase == BACKWARD for phase, _ in watch.spans[spans:]):
                    training.add(loader)

        patches.set(DataLoader, "__iter__", __iter__)


def ended_unfed(watch: Watch, error: BaseException | None) -> bool:
    """Whether the program failed on an epoch without batches, before it used the card again; noted if so."""
    if not isinstance(error, Exception) or watch.unfed != len(watch.events):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = f"{line_of(last.filename, last.lineno or 0)}, {error_line(error)}"
    watch.note(
        tr(
            ko=f"프로그램은 그 에폭에서 끝났고({said}), 그 뒤에 하는 일은 실행하지 않았다",
            en=f"the program ended in that epoch ({said}): what it does after it was not run",
        )
    )
    return True


def _will_evaluate(patches: Patches, watch: Watch, module: ModuleType) -> None:
    """Remember of a Trainer that it evaluates while it trains: what a run sees that ends before may be less."""
    train = module.Trainer.train

    @functools.wraps(train)
    def asked(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        # transformers before 4.41 has the older name
        when = getattr(trainer.args, "eval_strategy", None) or getattr(trainer.args, "evaluation_strategy", "no")
        watch.will_evaluate |= when != "no"
        return train(trainer, *args, **kwargs)

    patches.set(module.Trainer, "train", asked)
