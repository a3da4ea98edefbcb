"""The configurations that come with the package, as data."""

from __future__ import annotations

import functools
import json
from importlib.resources import files


@functools.cache
def architectures() -> dict[str, dict]:
    """The bundled architectures: hub id → {"config", "dtype", "source", "published_parameters"}, some with a "note"."""
    return _data("architectures.json")


@functools.cache
def variants() -> dict[str, dict]:
    """Models of the same architecture, trained for instructions or of another size: hub id → as `architectures`."""
    said, found = _data("variants.json"), {}
    for name, variant in said["models"].items():
        entry = architectures()[variant["of"]]
        config = {**entry["config"], **variant.get("changes", {})}
        dtype = variant.get("dtype", entry["dtype"])
        found[name] = {"config": config, "dtype": dtype, "source": said["source"]}
    return found


def _data(name: str) -> dict[str, dict]:
    return json.loads(files("virtual_gpu.models").joinpath(name).read_text(encoding="utf-8"))
