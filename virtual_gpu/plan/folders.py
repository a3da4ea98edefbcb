"""A model that is given as a configuration: the folder that it is written to."""

from __future__ import annotations

import tempfile
from typing import Any

from ..language import tr
from ..models.configs import load_config, resolve_model_id

_folders: dict[str, tempfile.TemporaryDirectory] = {}


def model_folder(model: Any) -> str:
    """A name as it is; a transformers configuration as the folder that it is written to until Python ends."""
    if isinstance(model, str):
        model = resolve_model_id(model)
        load_config(model)  # raises for an unknown one
        return model
    if not hasattr(model, "to_json_string") or not hasattr(model, "num_hidden_layers"):
        raise ValueError(
            tr(
                ko=f"model={model!r}: 모델의 이름이나 언어 모델의 transformers 설정(config)이어야 한다.",
                en=f"model={model!r}: must be a model's name or a transformers configuration of a language model.",
            )
        )
    text = model.to_json_string(use_diff=False)
    if text not in _folders:
        _folders[text] = tempfile.TemporaryDirectory(prefix=f"{model.model_type}-")
        model.save_pretrained(_folders[text].name)
    return _folders[text].name


def is_written(model: str) -> bool:
    """Whether this is the folder of a configuration that was given, which is gone when Python ends."""
    return any(model == folder.name for folder in _folders.values())
