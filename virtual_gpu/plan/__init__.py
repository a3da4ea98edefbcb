"""Chapter 9, the planner: a model and a GPU in, ranked ways to train that fit out; `python -m helpers.planner`."""

from .plans import MARGIN, METHODS, PRECISIONS, Plan, Recipe, Request
from .search import Change, Plans, cheapest, cheapest_that_fits, plan_training

__all__ = [
    "MARGIN",
    "METHODS",
    "PRECISIONS",
    "Change",
    "Plan",
    "Plans",
    "Recipe",
    "Request",
    "cheapest",
    "cheapest_that_fits",
    "plan_training",
]
