"""The configurations that come with the package, as data."""

from __future__ import annotations

import functools
import json
from importlib.resources import files


@functools.cache
def architectures() -> dict[str, dict]:
    """The bundled architectures: hub id → {"config", "dtype", "source", "published_parameters"}, some with a "note"."""
    return json.loads(files("virtual_gpu.models").joinpath("architectures.json").read_text(encoding="utf-8"))
