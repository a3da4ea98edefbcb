"""Chapter 9, the planner: a model and a GPU in, ranked ways to train that fit out; `python -m helpers.planner`."""

from .alternatives import Change, anything_that_fits, cheapest
from .plans import Plan
from .recipes import METHODS, Recipe
from .request import MARGIN, PRECISIONS, Request
from .search import Plans, plan_training

__all__ = [
    "MARGIN",
    "METHODS",
    "PRECISIONS",
    "Change",
    "Plan",
    "Plans",
    "Recipe",
    "Request",
    "anything_that_fits",
    "cheapest",
    "plan_training",
]
