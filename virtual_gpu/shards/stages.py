"""Pipeline parallelism: a model cut between its layers, each part on GPUs of its own, micro-batches going through them.

A part is the model itself with fewer layers: the first has the embedding, the last the norm and the head, and each is
given what the one before it has computed. PyTorch's `torch.distributed.pipelining` runs them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..language import tr
from ..models.depth import text_config
from .fake_rank import blocks_of, body_of, norm_of

# Of which the parts, one after another, give the whole model's logits (tests/test_stages.py), where all layers are of
# one type (else a part's first layer gets the mask of the model's first) and nothing is dropped of the embeddings.
FAMILIES = frozenset({"gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"})


def why_no_stages(config: Any, stages: int) -> str:
    """Why a model of this configuration is not cut into so many parts; empty where it is."""
    text = text_config(config)
    if text.model_type not in FAMILIES:
        names = ", ".join(sorted(FAMILIES))
        return tr(
            ko=f"{text.model_type}의 층을 나누는 것은 확인하지 않았다({names}만 나눈다)",
            en=f"the layers of {text.model_type} were not cut ({names} are)",
        )
    if getattr(text, "tie_word_embeddings", False):
        return tr(
            ko="임베딩과 출력층이 한 텐서여서 첫 스테이지와 마지막 스테이지가 나누어 가질 수 없다",
            en="embedding and head are one tensor, which the first and the last stage cannot share",
        )
    kinds, dropped = {*(getattr(text, "layer_types", None) or ())}, getattr(text, "hidden_dropout", 0)
    if len(kinds) > 1 or dropped:
        what = f"hidden_dropout={dropped:g}" if dropped else f"layer_types: {', '.join(sorted(kinds))}"
        return tr(
            ko=f"{what}: 뒤의 스테이지가 모델의 첫 층처럼 계산한다",
            en=f"{what}: later stages would compute as the model's first layers do",
        )
    layers = text.num_hidden_layers
    if layers % stages:
        return tr(
            ko=f"층 {layers}개를 스테이지 {stages}개에 똑같이 나눌 수 없다",
            en=f"{layers} layers are not equal parts of {stages} stages",
        )
    return ""


class Part(torch.nn.Module):
    """A causal language model as a part of a deeper one: tokens or hidden states in, hidden states or logits out.

    What another part does is taken out of it: the embedding where it is not the first, norm and head where not the
    last. Its layers are the caller's matter (`keep_layers`).
    """

    def __init__(self, model: torch.nn.Module, first: bool, last: bool):
        super().__init__()
        self.model, self.first, self.last = model, first, last
        body = body_of(model)
        if not first:
            body.set_input_embeddings(None)
        if not last:
            norm = norm_of(model)
            setattr(body, next(name for name, part in body.named_children() if part is norm), torch.nn.Identity())
            model.set_output_embeddings(None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the last part, hidden states of the others."""
        given = {"input_ids": x} if self.first else {"inputs_embeds": x}
        hidden = body_of(self.model)(**given, use_cache=False).last_hidden_state
        return self.model.get_output_embeddings()(hidden) if self.last else hidden

    def groups(self) -> list[Any]:
        """What FSDP2 gathers together; what is left falls to the part itself."""
        first = [self.model.get_input_embeddings()] if self.first else []
        last = [[norm_of(self.model), self.model.get_output_embeddings()]] if self.last else []
        return [*first, *blocks_of(self.model), *last]


def keep_layers(model: torch.nn.Module, layers: range) -> None:
    """Take all other layers out of a model."""
    blocks = blocks_of(model)
    del blocks[layers.stop :], blocks[: layers.start]
