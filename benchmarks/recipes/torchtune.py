"""pytorch/torchtune, README.md: full fine-tuning of Llama 3.1 70B on eight A100s, its state in the CPU's RAM.

One rank of them, written anew after torchtune 0.4.0 (recipes/full_finetune_distributed.py with
configs/llama3_1/70B_full.yaml): bf16 throughout, every block under a checkpoint, FSDP2 with `CPUOffloadPolicy` over
blocks, embedding and head, logits in eight pieces of the text, each with a loss of its own in fp32. The model is
transformers'. The README states batch 2, 2,048 packed tokens and `torch.compile`; left out here are the compiler (the
peak is in the head) and the mask of packed texts (16 MiB). torchtune's own modules on the virtual card have with the
mask 9.09 GiB at three layers, compiled or not, and 9.71 at thirteen, 13.90 at eighty if it goes on so. Nothing is
fitted. The optimizer steps on the CPU and takes nothing of the card: it is not run.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import load_config
from virtual_gpu.program import ranks
from virtual_gpu.program.context import cuda
from virtual_gpu.step.run import enable_checkpointing

from .recipe import SIZE, Recipe, Refused, Row, from_source

MODELS = {"Llama 3.1 70B (torchtune)": "meta-llama/Llama-3.1-70B"}
CARDS = {"NVIDIA A100": "A100-80GB"}  # the table does not say which; nothing here is near 40 GB
PIECES = 8  # of the logits: CEWithChunkedOutputLoss


def predict(row: Row) -> int:
    """Bytes of tensors at most."""
    settings, card = row["settings"], CARDS.get(row["gpu"])
    if card is None:
        raise Refused(f"the card {row['gpu']!r} is not the one that these were measured on")
    import transformers.modeling_utils  # noqa: F401  before there is a CUDA GPU: it looks for what it could use with one

    with cuda(card, gpus=settings["world_size"]) as gpu:
        ranks.install(gpu.patches, gpu, gpu.watch)
        dist.init_process_group("cuda:nccl,cpu:gloo")
        model = shared(InPieces(build_model(load_config(MODELS[row["model"]]), torch.bfloat16)))
        for _ in range(2):
            step(model, settings["batch"], settings["seq"])
        return torch.cuda.max_memory_allocated()


class InPieces(nn.Module):
    """The model, whose logits come in pieces of the text: each goes through the head for itself."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.body, self.head, self.whole = model.model, model.lm_head, [model]
        config = model.config
        width = config.hidden_size // config.num_attention_heads
        # torchtune has the cosines and sines of every place there is, in fp32
        self.register_buffer("turns", torch.empty(config.max_position_embeddings, width // 2, 2, device="meta"))

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """ids (B, T) → logits (B, T / PIECES, V) of each piece."""
        hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state
        return [self.head(piece) for piece in hidden.chunk(PIECES, dim=1)]


def shared(model: InPieces) -> InPieces:
    """The model split over all ranks, on the CPU."""
    settings = {"mesh": init_device_mesh("cuda", (dist.get_world_size(),)), "reshard_after_forward": True}
    settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)  # on the card it is the same
    for part in (model.body.embed_tokens, *model.body.layers, model.head, model):
        fully_shard(part, **settings)
    model.to_empty(device="cpu")
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.empty_like(buffer, device="cuda")
    enable_checkpointing(model.whole[0])
    return model.train()


def step(model: InPieces, batch: int, length: int) -> None:
    """Forward and backward; what was added up goes."""
    ids = torch.zeros((batch, length), dtype=torch.int64).cuda()
    labels = torch.hstack((ids[:, 1:], torch.full((batch, 1), -100).cuda()))
    logits = model(ids)
    total = (labels != -100).sum()
    loss = 0.0
    for piece, wanted in zip(logits, labels.chunk(PIECES, dim=1), strict=True):
        flat = piece.reshape(-1, piece.size(-1)).float()
        loss += F.cross_entropy(flat, wanted.reshape(-1), ignore_index=-100, reduction="sum")
        del flat
    del logits, piece
    (loss / total).backward()
    for parameter in model.parameters():
        parameter.grad = None


def is_here(row: Row) -> bool:
    """Whether a row is of the model and the way that are put together here."""
    return from_source("pytorch/torchtune")(row) and row["model"] in MODELS and row["settings"]["method"] == "full"


RECIPES = (
    Recipe(
        name="torchtune",
        what="Llama 3.1 70B by FSDP2 on 8 A100s, parameters, gradients and optimizer state on the CPU",
        what_ko="FSDP2로 A100 8장, 학습 상태는 CPU에",
        handles=is_here,
        predict=predict,
        settings={
            **dict.fromkeys(("world_size", "batch", "seq"), SIZE),
            "method": ("full",),
            "dtype": ("bfloat16",),
            "cpu_offload": (True,),
            "checkpointing": ("every block",),
            "loss": ("in 8 pieces",),
            "packed": (True,),
            "compile": (True,),  # run without, as said above
        },
    ),
)
