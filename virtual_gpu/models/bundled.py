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
    said, found = _data("variants.json"), {**architectures()}
    for name, variant in said["models"].items():
        base = found[variant["of"]]  # an architecture, or a variant that came before
        config = {**base["config"], **variant.get("changes", {})}
        found[name] = {"config": config, "dtype": variant.get("dtype", base["dtype"]), "source": said["source"]}
    return {name: found[name] for name in said["models"]}


def _data(name: str) -> dict[str, dict]:
    return json.loads(files("virtual_gpu.models").joinpath(name).read_text(encoding="utf-8"))
