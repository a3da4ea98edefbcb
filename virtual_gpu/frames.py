"""What an exception keeps alive."""

from __future__ import annotations

import traceback


def clear_frames(error: BaseException | None) -> None:
    """Empty the frames that an exception and those before it hold: the local variables there hold tensors."""
    seen, waiting = set(), [error]
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            _ = frame.f_locals  # IPython has read them: until Python 3.12 what was read is kept until it is read again
        waiting += [error.__cause__, error.__context__]
