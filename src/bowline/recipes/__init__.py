"""Initialisation recipes as data, and the first loss that follows from each, without torch.

A recipe is several numbers that belong together: the distribution of each role, and what the model multiplies looked-up
embeddings and logits by. Tied, the table's std is at once the embeddings' and the head's, so that one number has to
serve both ends, and a multiplier makes up the difference.
"""

from __future__ import annotations

from bowline.recipes.architecture import Architecture
from bowline.recipes.catalogue import RECIPES, usual
from bowline.recipes.distribution import Distribution, Scale, constant, normal, truncated, uniform
from bowline.recipes.expected import InitialLoss, expected_loss
from bowline.recipes.recipe import Recipe, Role

__all__ = [
    "RECIPES",
    "Architecture",
    "Distribution",
    "InitialLoss",
    "Recipe",
    "Role",
    "Scale",
    "constant",
    "expected_loss",
    "normal",
    "truncated",
    "uniform",
    "usual",
]
