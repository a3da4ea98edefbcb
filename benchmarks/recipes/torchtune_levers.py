"""pytorch/torchtune, README.md: what one lever on top of the other leaves of Llama 3.2 3B's memory on an A100.

torchtune's own recipes and configurations of 0.4.0, the release nearest to the table (November 2024: main of that day
offloaded otherwise, and torchao was an earlier one), with what a row states. Not its own: the weights (what the model
was made with), and the texts (packs of one token, in texts of 170; what a pack takes does not hang on them). AdamW is
taken as the fused one, which the table does not say: the other's step alone has another 5.98 GiB, more than the table's
rows with checkpointing. Three steps, of which the last counts. Nothing is fitted.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from virtual_gpu.program import ranks
from virtual_gpu.program.context import cuda

from .compiled import compiler_on, refuse_eager
from .recipe import SIZE, Recipe, Refused, Row, from_source

TORCHTUNE = ("torchtune==0.4.0", "torchao==0.7.0")
MODELS = {"Llama-3.2-3B (torchtune)": "llama3_2/3B"}
CARDS = {"NVIDIA A100": "A100-80GB"}  # the table does not say which, and 60 GiB fit
RECIPES_OF = {
    "full": ("full_finetune_single_device", "FullFinetuneRecipeSingleDevice"),
    **dict.fromkeys(("lora", "qlora"), ("lora_finetune_single_device", "LoRAFinetuneRecipeSingleDevice")),
}
LOSSES = {"whole": "torch.nn.CrossEntropyLoss", "in 8 pieces": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
# The page that the table's row leads to has this name for torchao's alone; bitsandbytes' has the same peak, to 2 MiB.
OPTIMIZERS = {
    "AdamW": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 2e-5},
    "8-bit AdamW": {"_component_": "torchao.prototype.low_bit_optim.AdamW8bit", "lr": 2e-5},
}
STEPS, TEXT = 3, 170  # tokens of a text in a pack; what the mask takes does not hang on it


class Packs:
    """A dataset of packs, as torchtune's `PackedDataset` has them."""

    def __init__(self, tokenizer: Any, packed: bool, length: int):
        del tokenizer, packed
        lengths = [TEXT] * (length // TEXT) + [length % TEXT] * bool(length % TEXT)
        tokens = torch.zeros(length, dtype=torch.int64)
        places = torch.cat([torch.arange(one) for one in lengths])
        self.one = {"tokens": tokens, "labels": tokens, "input_pos": places, "seq_lens": torch.tensor(lengths)}

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.one


def tokenizer() -> None:
    """No tokenizer: packs are of tokens."""


class Log:
    """A logger of torchtune's: what its recipe says of each step's peak."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def log_config(self, config: Any) -> None:
        pass

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        self.steps.append(payload)
        gc.collect()  # what the first step's compiling left in cycles is gone at no moment that can be told

    def close(self) -> None:
        pass


def predict(row: Row) -> int:
    """Active bytes at a step's peak: of the tensors, and of what another stream has not let go of."""
    settings, card = row["settings"], CARDS.get(row["gpu"])
    if card is None:
        raise Refused(f"the card {row['gpu']!r} is not the one that these were measured on")
    if settings["method"] == "qlora" and settings["compile"]:
        raise Refused("torchao's 4-bit tensors do not compile with PyTorch 2.13")
    torch._dynamo.reset()  # every row was measured in a process of its own: what torchtune logs once breaks a graph
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchtune"]:
        del sys.modules[name]
    with compiler_on(), tempfile.TemporaryDirectory() as folder, cuda(card) as gpu:
        ranks.install(gpu.patches, gpu, gpu.watch)  # NCCL is there: torchtune asks for it before it trains in bf16
        module = _recipe_file(RECIPES_OF[settings["method"]][0])
        from torchtune.modules import TransformerDecoder

        with mock.patch.object(TransformerDecoder, "load_state_dict", lambda model, state, strict=True: ([], [])):
            recipe = _recipe(module, settings, folder, MODELS[row["model"]])
        recipe.train()
        refuse_eager(gpu.watch.notes)
        return round(recipe._metric_logger.steps[-1]["peak_memory_active"] * 2**30)  # it begins anew with every step


def _recipe_file(name: str) -> ModuleType:
    """A recipe of torchtune's: pip installs them as files beside the package, not to be imported by name."""
    path = Path(sysconfig.get_path("purelib"), "recipes", f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _recipe(module: ModuleType, settings: Row, folder: str, model: str) -> Any:
    """torchtune's recipe, set up."""
    from omegaconf import OmegaConf

    method = settings["method"]
    own = OmegaConf.load(Path(module.__file__).parent / "configs" / f"{model}_{method}_single_device.yaml")
    for name in ("dataset", "tokenizer", "optimizer", "metric_logger"):  # replaced whole
        del own[name]
    config = OmegaConf.merge(
        own,
        {
            "dataset": {"_component_": f"{__name__}.Packs", "packed": True, "length": settings["seq"]},
            "tokenizer": {"_component_": f"{__name__}.tokenizer"},
            "optimizer": OPTIMIZERS[settings["optimizer"]],
            "metric_logger": {"_component_": f"{__name__}.Log"},
            "loss": {"_component_": LOSSES[settings["loss"]]},
            "batch_size": settings["batch"],
            "gradient_accumulation_steps": 1,
            "max_steps_per_epoch": STEPS,
            "epochs": 1,
            "compile": settings["compile"],
            "enable_activation_checkpointing": settings["checkpointing"] == "every block",
            "enable_activation_offloading": settings["activation_offloading"],
            "optimizer_in_bwd": settings["optimizer_in_backward"],
            "log_every_n_steps": 1,
            "log_peak_memory_stats": True,
            "output_dir": folder,
        },
    )

    class Its(getattr(module, RECIPES_OF[method][1])):
        def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {"model": {}}

        def save_checkpoint(self, epoch: int) -> None:
            pass

    recipe = Its(cfg=config)
    recipe.setup(cfg=config)
    return recipe


def is_here(row: Row) -> bool:
    """Whether a row states all that torchtune's recipe takes."""
    stated = "activation_offloading" in row["settings"]  # of the table's first row the texts' lengths are not
    return stated and from_source("pytorch/torchtune")(row) and row["model"] in MODELS


RECIPES = (
    Recipe(
        name="torchtune levers",
        what="torchtune's own recipes of Llama 3.2 3B, compiled and not, one lever on top of the other",
        what_ko="torchtune의 레시피에 방법을 하나씩 더하기",
        handles=is_here,
        predict=predict,
        packages=lambda row: TORCHTUNE,
        settings={
            **dict.fromkeys(("batch", "seq"), SIZE),
            "dtype": ("bfloat16",),
            "packed": (True,),
            "method": tuple(RECIPES_OF),
            "compile": (False, True),
            "loss": tuple(LOSSES),
            "checkpointing": ("none", "every block"),
            "optimizer": tuple(OPTIMIZERS),
            "optimizer_in_backward": (False, True),
            "activation_offloading": (False, True),
        },
    ),
)
