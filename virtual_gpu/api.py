"""What a program asks: the memory of a training setting, said in the words of transformers and peft or in ours."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from .errors import WrongValue
from .language import tr
from .report import MemoryReport
from .step import budget as budgets
from .step.predict import predict_memory
from .step.setting import Setting

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig, PretrainedConfig, TrainingArguments

    from .cards import GPUSpec
    from .real import GPU
    from .step.budget import Budget


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
    return predict_memory(_setting(model, training_args, peft_config, quantization_config, settings), gpu=gpu)


def activation_budget(
    model: str | PathLike | PretrainedConfig,
    training_args: TrainingArguments | None = None,
    peft_config: LoraConfig | None = None,
    *,
    quantization_config: BitsAndBytesConfig | None = None,
    gpu: str | GPUSpec | GPU = "T4",
    moves: bool = True,
    measured: int = 4,
    **settings: Any,
) -> Budget:
    """What checkpointed blocks could keep, recompute or send to the CPU: the whole curve of peak over extra work.

    The setting as `predict` takes it; checkpointing is on whatever it says. The answer's `points` each have the choice
    (`kept`, as `Setting.kept_results` takes it), bytes of the peak, FLOPs computed twice, bytes to the CPU and the
    least that another choice with that peak could take. moves: a result may wait in the CPU's RAM, where that takes
    less by the card's published rates than to compute it again. measured: so many points are run, evenly along the
    curve with both ends, so that the prediction's distance is known. Errors as of `predict`; NotSupported for DPO.
    """
    setting = _setting(model, training_args, peft_config, quantization_config, settings)
    return budgets.activation_budget(setting, gpu, moves, measured)


def _setting(
    model: Any, training_args: Any, peft_config: Any, quantization_config: Any, settings: dict[str, Any]
) -> Setting:
    if training_args is None:
        if peft_config is not None or quantization_config is not None:
            raise WrongValue(
                tr(
                    ko="peft_config와 quantization_config는 training_args와 함께 쓴다. 없으면 peft='lora'를 쓴다.",
                    en="peft_config and quantization_config go with training_args; without, say peft='lora'.",
                )
            )
        return Setting(**{"batch_size": 1} | settings, model_id=model)
    return Setting.from_training_arguments(
        training_args, peft_config, model, quantization_config=quantization_config, **settings
    )
