"""Numbers for those who go on with them: pandas' data frames, where pandas is installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..optional import require

if TYPE_CHECKING:
    import pandas


def frame_of(rows: Iterable[Mapping[str, Any]], first: int = 0) -> pandas.DataFrame:
    """A data frame with a row for each of these, numbered from `first` on; ImportError without pandas."""
    require("pandas")
    import pandas

    frame = pandas.DataFrame(list(rows))
    frame.index += first
    return frame
