"""What a program asks: the memory of a training setting, said in the words of transformers and peft or in ours."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from .errors import WrongValue
from .language import tr
from .report import MemoryReport
from .step.predict import predict_memory
from .step.setting import Setting

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig, PretrainedConfig, TrainingArguments

    from .cards import GPUSpec
    from .real import GPU


def predict(
    model: str | PathLike | PretrainedConfig,
    training_args: TrainingArguments | None = None,
    peft_config: LoraConfig | None = None,
    *,
    quantization_config: BitsAndBytesConfig | None = None,
    gpu: str | GPUSpec | GPU = "T4",
    **settings: Any,
) -> MemoryReport:
    """What training `model` takes on `gpu`: a report of bytes, with `fits`, `peak_bytes`, `reserved_bytes`, `at_peak`.

    model: a known name, a hub id, a folder, or a transformers configuration (a model brings its own). training_args and
    peft_config: as the Trainer takes them (`Setting.from_training_arguments` says what is read). gpu: a card's name or
    size ("RTX 4090", "24GiB, 8.6"), or a GPU. settings: `Setting`'s fields, such as sequence_length, which no
    TrainingArguments say; they go before the arguments.

    WrongValue, UnknownName, BadConfiguration or NotSupported where it cannot be predicted; a setting that does not fit
    is no error.
    """
    if training_args is None:
        if peft_config is not None or quantization_config is not None:
            raise WrongValue(
                tr(
                    ko="peft_config와 quantization_config는 training_args와 함께 쓴다. 없으면 peft='lora'를 쓴다.",
                    en="peft_config and quantization_config go with training_args; without, say peft='lora'.",
                )
            )
        setting = Setting(**{"batch_size": 1} | settings, model_id=model)
    else:
        setting = Setting.from_training_arguments(
            training_args, peft_config, model, quantization_config=quantization_config, **settings
        )
    return predict_memory(setting, gpu=gpu)
