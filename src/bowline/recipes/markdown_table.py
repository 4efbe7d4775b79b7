"""Writes the recipes as the Markdown table in `docs/recipes.md`, so that the page cannot differ from the data."""

from __future__ import annotations

from collections.abc import Iterable

from bowline.recipes.catalogue import RECIPES
from bowline.recipes.distribution import Scale
from bowline.recipes.recipe import Recipe, Role

__all__ = ["table"]

BODY = (
    Role.QUERY,
    Role.KEY,
    Role.VALUE,
    Role.ATTENTION_OUT,
    Role.FEED_FORWARD_IN,
    Role.FEED_FORWARD_OUT,
)
NONE = Scale()


def table(recipes: Iterable[Recipe] = RECIPES.values()) -> str:
    """The table, with a line for each recipe: both ends, their multipliers, the layers, the rest, the source."""
    lines = [
        "| recipe | table | head, untied | embeddings times | tied logits times | layers | beside them | source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_line, recipes)])


def _line(recipe: Recipe) -> str:
    cells = [
        f"`{recipe.name}`: {recipe.title}",
        str(recipe.of(Role.INPUT_EMBEDDING)) + (", padding row 0" if recipe.zero_padding else ""),
        str(recipe.of(Role.HEAD)) if False in recipe.ties else "always tied",
        "" if recipe.embed_scale == NONE else str(recipe.embed_scale),
        "" if recipe.logit_scale == NONE else str(recipe.logit_scale),
        _layers(recipe),
        _beside(recipe),
        recipe.source,
    ]
    return f"| {' | '.join(cells)} |"


def _layers(recipe: Recipe) -> str:
    usual = str(recipe.of(Role.LINEAR))
    others: dict[str, list[str]] = {}
    for role in (*BODY, Role.RECURRENT):
        if str(recipe.of(role)) != usual:
            others.setdefault(str(recipe.of(role)), []).append(role)
    return "; ".join([usual, *(f"{', '.join(roles)} {how}" for how, roles in others.items())])


def _beside(recipe: Recipe) -> str:
    return "; ".join(
        f"{role} {recipe.roles[role]}"
        for role in (Role.POSITIONS, Role.RELATIVE_BIAS, Role.BIAS, Role.HEAD_BIAS, Role.RECURRENT_BIAS)
        if role in recipe.roles
    )
