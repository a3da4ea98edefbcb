"""Pictures of what ranks hold: ZeRO's stages, one rank at its peak, and memory against the number of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass
