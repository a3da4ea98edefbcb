"""A plan as files that train so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import trainer

if TYPE_CHECKING:
    from ..plans import Plan

NAMES = trainer.NAMES  # all that a plan may write


def files_of(plan: Plan) -> dict[str, str]:
    """name → text of the files."""
    return trainer.files(plan)
