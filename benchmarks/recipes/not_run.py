"""Sources whose programs are not run here, each with the reason: their rows stay in the table."""

from __future__ import annotations

from . import torchtitan, torchtune, torchtune_levers
from .recipe import Recipe, Refused, Row, from_source

WHY = {
    "pytorch/torchtune": "the rows do not state all of batch, lengths, rank and checkpointing",
    "pytorch/torchtitan": "torchtitan of another time, whose model and FSDP2 are not put together here",
    "rasbt/pytorch-memory-optim": "the vision transformer is torchvision's, which is not installed",
    "huggingface/notebooks": "the rows do not say which of the notebook's settings they are (transformers of 2022)",
    "huggingface.co/datasets/optimum-benchmark": "an AMD card: its libraries' workspaces are not known",
    "cranberrii/ftcourse": "the libraries' versions are not stated",
}


def predict(row: Row) -> int:
    """Raises Refused with the source's reason."""
    raise Refused(WHY[row["source"]])


def handles(row: Row) -> bool:
    """Whether a row is of such a source, and not of a program that is here after all."""
    return from_source(*WHY)(row) and not any(one.is_here(row) for one in (torchtitan, torchtune, torchtune_levers))


RECIPES = (Recipe(name="not run", what="sources without a program here", handles=handles, predict=predict),)
